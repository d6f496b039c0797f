"""Audit tables: a leakage report and a sweep of defences as text, and warnings on them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from accounting.report import up
from attacks import DefencePoint, LeakageReport, LeakageRow, TextDefencePoint, TextReport
from attacks.text.report import TextRow
from privpart.cli.options import Format
from privpart.cli.output import as_csv, plain_console

REPORT = "report.json"
_WIDTH = 120
_LABELS = 20  # width of the column of inferred labels
_VERDICTS = (
    "Verdicts: 'ambiguous' is not 'safe' (another image matches the update, so the update alone "
    "does not determine the image; a prior may), and 'attack failed' says nothing about privacy."
)
_OTHER_VERDICTS = {
    "no gain": "'no gain': the picture itself came back, but an image that needs no attack is as "
    "close.",
    "nothing sent": "'nothing sent': the update of this view is zero in this round, at these "
    "weights; a later round may send something.",
    "void": "'void': nothing was attacked, and nothing follows about privacy.",
}
_ROUNDING = 1e-6  # residual that float32 leaves; above it the update is not quite the images'
_CSV = (
    *("view", "adversary", "verdict", "visible", "share", "psnr_median", "psnr_max"),
    *("baseline_median", "gain_median", "ssim_median", "match_median", "truth_match_max"),
    *("recovered", "labels_right", "labels_doubtful", "attack"),
)  # of a row's values, those that are one value


AnyReport = LeakageReport | TextReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the terminal and the page say of a report.

    Attributes:
        tables: of guesses, views and attacks.
        notes: what must be known to read the tables.
        warnings: about conclusions that the scores do not allow.
        csv: a line per view and adversary; lists, and what each attack found, are in the JSON.
        width: of the terminal's tables.
    """

    tables: list[Table]
    notes: list[str]
    warnings: list[str]
    csv: str
    width: int


def told(report: LeakageReport) -> Told:
    """Return what is said of a report on images."""
    tables = [_baselines(report), _rows(report)]
    return Told(
        tables=tables if report.void else [*tables, _by_attack(report)],
        notes=_notes(report),
        warnings=warnings(report),
        csv=rows_csv(report, "images", _CSV),
        width=_WIDTH if report.labels_revealed else _WIDTH + _LABELS,
    )


def publish(report: AnyReport, told: Told, form: Format, out: Path, beside: str) -> None:
    """Print a report whose files are in ``out``: ``beside`` is the name of its picture or page."""
    if form is Format.JSON:
        typer.echo(as_json(report), nl=False)
    elif form is Format.CSV:
        typer.echo(told.csv, nl=False)
    else:
        console = plain_console(told.width)
        for table in told.tables:
            console.print(table)
        for line in told.notes:
            console.print(fill(line, 100, subsequent_indent="  "))
    for warning in told.warnings:
        typer.echo(f"privpart: warning: {warning}", err=True)
    typer.echo(f"privpart: written: {out / REPORT}, {out / beside}", err=True)


def as_json(report: AnyReport) -> str:
    """Return the content of a report's file."""
    return json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"


def rows_csv(report: AnyReport, examples: str, columns: Sequence[str]) -> str:
    """Return these values of each row, with the number of examples before them."""
    rows = [row.to_dict() for row in report.rows]
    return as_csv([{examples: len(report.truth)} | {k: row[k] for k in columns} for row in rows])


AnyPoints = Sequence[DefencePoint] | Sequence[TextDefencePoint]


def defences_csv(points: AnyPoints) -> str:
    """Return a line per clip and noise multiplier, with medians over the examples."""
    rows = []
    for point in points:
        values = point.to_dict()
        score = "psnr" if isinstance(point, DefencePoint) else "rouge"
        kept = ("clip", "noise_multiplier", "epsilon", "delta", "verdict", "exact")
        found = {k: values[k] for k in kept if k in values}
        found |= {
            f"{score}_median": median(point.scores),
            "baseline_median": median(point.baselines),
            f"{score}_max": max(point.scores),
        }
        rows.append(found)
    return as_csv(rows)


def show_defences(points: AnyPoints) -> None:
    """Print a sweep over clips and noises to standard output."""
    console = plain_console(_WIDTH)
    images = isinstance(points[0], DefencePoint)
    what, digits = ("PSNR in dB over {} images", 1) if images else ("ROUGE-L over {} sentences", 2)
    title = f"{what.format(len(points[0].scores))}, best of each over the attacks"
    exact = [] if images else ["exact"]
    columns = ["clip", "noise multiplier", "epsilon", *exact, "median", "max", "no attack"]
    table = plain_table(title, [*columns, "verdict"])
    for point in points:
        scores = median(point.scores), max(point.scores), median(point.baselines)
        table.add_row(
            *("none" if point.clip is None else f"{point.clip:g}", f"{point.noise_multiplier:g}"),
            "infinite" if point.epsilon is None else up(point.epsilon, 4),
            *([f"{point.exact}"] if isinstance(point, TextDefencePoint) else []),
            *(f"{value:.{digits}f}" for value in scores),
            point.verdict,
        )
    console.print(table)
    floor = "PSNR falls" if images else "What the attacks read falls"
    for line in (
        f"Epsilon is the accountant's, at delta {points[0].delta:g}, for one noised release; it is "
        f"not computed from any score. {floor} to the floor long before epsilon means anything.",
        _VERDICTS if images else _VERDICTS.replace("image", "text"),
    ):
        console.print(fill(line, 100, subsequent_indent="  "))


def warnings(report: LeakageReport) -> list[str]:
    """Return warnings about conclusions that the scores do not allow."""
    if report.void:
        return [void(report, "images")]
    found = []
    if report.threat["buffers"] != "not sent":
        of_all = f", and epsilon {_epsilon(report)} is not theirs" if report.bound else ""
        found.append(
            f"buffers are sent besides the update: no clip and no noise covers them{of_all}."
        )
    if report.missing:
        found.append(
            f"no image besides those attacked: the baseline {', '.join(report.missing)} is "
            "missing, so a background that all images share counts as found in the update."
        )
    doubtful = [row for row in report.rows if row.labels_doubtful]
    if doubtful:
        right = [row.labels_right for row in doubtful if row.labels_right is not None]
        told = f" ({min(right):.0%} right at worst)" if right else ""
        found.append(
            f"labels are doubtful on {named(doubtful)}{told}: the attacks tried the most likely "
            "ones; where they fail, audit again without --hide-labels before anything is concluded."
        )
    failed = [row for row in report.rows if row.verdict == "attack failed"]
    if failed:
        found.append(
            f"the attack failed on {named(failed)}: nothing follows about privacy; try --effort "
            "long."
        )
    server = [row for row in report.rows if row.adversary == "server"]
    strange = max((trial.truth_match for row in server for trial in row.own), default=0.0)
    if strange > _ROUNDING and report.threat["origin"] == "given":
        found.append(
            f"the true images leave a residual of {strange:.2g}: the update was rounded, or is not "
            "quite that of these images, weights, mode and loss."
        )
    return found


def _epsilon(report: AnyReport) -> str:
    return "infinite" if report.bound is None else up(report.bound.epsilon(report.delta), 4)


def void(report: AnyReport, examples: str) -> str:
    """Return why a report is void."""
    explanation = report.explanation
    if explanation is None:
        return "the audit is void."
    return (
        f"the audit is void: the given {examples} do not explain the update (residual "
        f"{explanation.residual:.2g}). Likely wrong: {'; '.join(explanation.causes)}."
    )


def named(rows: Sequence[LeakageRow] | Sequence[TextRow]) -> str:
    """Return the names of the rows' views."""
    return ", ".join(dict.fromkeys(row.view for row in rows))


def parameters_sent(row: LeakageRow | TextRow) -> str:
    """Return how many parameters a view shows, and their share."""
    return f"{row.visible:,} ({row.share:{'.0%' if row.share > 0.1 else '.1%'}})"


def verdict_counts(found: Mapping[str, Any]) -> str:
    """Return how many examples have which verdict."""
    return ", ".join(f"{n} {verdict}" for verdict, n in found["verdicts"].items() if n)


def what_is_seen(report: AnyReport, examples: str) -> str:
    """Return what the attacker sees and knows, but for the labels."""
    threat = report.threat
    sent = "gradient" if threat["update"] == "gradient" else "change of the weights"
    noise = f", noise multiplier {threat['noise_multiplier']:g}" if report.bound else ""
    clip = "no clip" if threat["clip"] is None else f"clip {threat['clip']:g}"
    return (
        f"The attacker sees the {sent} of {threat['batch']} {examples} in {threat['mode']} mode, "
        f"{clip}{noise}, and knows every weight; labels are {threat['labels']}"
    )


def accountants_note(report: AnyReport) -> list[str]:
    """Return what the accountant says of a noised release; [] without noise."""
    if report.bound is None:
        return []
    return [
        f"Accountant: epsilon {_epsilon(report)} at delta {report.delta:g} for one noised release. "
        "It is not computed from any score above."
    ]


def _baselines(report: LeakageReport) -> Table:
    fair = [name for name in report.baselines if name not in report.oracles]
    names = [*fair, *report.oracles]
    images = len(report.truth)
    loss = median(report.losses)
    title = f"No attack: PSNR in dB over {images} images, on which the loss is {loss:.3g}"
    heads = [*fair, *(f"oracle: {name}" for name in report.oracles)]
    table = plain_table(title, ["", *heads])
    for name, of in (("median", median), ("max", max)):
        table.add_row(name, *(f"{of(report.baselines[guess]):.1f}" for guess in names))
    return table


def _rows(report: LeakageReport) -> Table:
    noisy = report.bound is not None
    columns = ["view", "adversary"] if noisy else ["view"]
    columns += ["parameters sent", "median", "max", "gain", "ssim", "residual", "recovered", "rank"]
    columns += [] if report.labels_revealed else ["labels"]
    title = (
        "Attack: PSNR in dB, best of each image over the attacks; recovered with its 95 % interval"
    )
    table = plain_table(title, [*columns, "verdict"])
    for row in report.rows:
        table.add_row(*_cells(row, noisy, report.labels_revealed))
    return table


def _by_attack(report: LeakageReport) -> Table:
    # a view's verdict is the worst over its attacks; this table shows which attack led to it
    noisy = report.bound is not None
    title = "Attack by attack, on each view itself; each runs on images not yet recovered"
    columns = ["view", *(["adversary"] if noisy else []), "attack", "images", "median", "max"]
    table = plain_table(title, [*columns, "residual", "verdicts"])
    for row in report.rows:
        for name, found in row.to_dict()["by_attack"].items():
            match = found["match_median"]
            table.add_row(
                *(row.view, *([row.adversary] if noisy else []), name, str(found["images"])),
                *(f"{found['psnr_median']:.1f}", f"{found['psnr_max']:.1f}"),
                "diverged" if match is None else f"{match:.0e}",
                verdict_counts(found),
            )
    return table


def _cells(row: LeakageRow, noisy: bool, labels_revealed: bool) -> list[str]:
    values = row.to_dict()
    low, high = values["recovered_rate_95"]
    attacked = values["psnr_median"] is not None
    return [
        row.view,
        *([row.adversary] if noisy else []),
        parameters_sent(row),
        *_scores(values),
        f"{row.recovered}/{len(row.best)} ({low:.0%}-{high:.0%})" if attacked else "",
        f"{median(row.ranks):g}" if row.ranks else "",
        *([] if labels_revealed else [_labels(row)]),
        row.verdict,
    ]


def _scores(values: Mapping[str, Any]) -> list[str]:
    if values["psnr_median"] is None:
        return [""] * 5
    match = values["match_median"]
    return [
        f"{values['psnr_median']:.1f}",
        f"{values['psnr_max']:.1f}",
        f"{values['gain_median']:+.1f}",
        f"{values['ssim_median']:.2f}",
        "diverged" if match is None else f"{match:.0e}",
    ]


def _labels(row: LeakageRow) -> str:
    if row.labels_right is None:
        return ""
    return f"{row.labels_right:.0%}{', doubtful' if row.labels_doubtful else ''}"


def _notes(report: LeakageReport) -> list[str]:
    """Return what must be known to read the tables."""
    notes = [
        f"{what_is_seen(report, 'image(s)')}. Rank is that of the truth among {report.decoys} "
        "decoys, by residual, each with the true label where it is told; 1 identifies the image. "
        "An oracle knows the truth: no verdict is measured against it."
    ]
    if report.schedule is not None:
        worst = report.schedule
        rounds = ", ".join(f"{view} x {count}" for view, count in worst.rounds.items())
        notes.append(
            f"Schedule ({rounds}): a client that takes part in all rounds is exposed by its worst "
            f"round, {worst.worst}: {worst.verdict}"
            + (f", up to {worst.psnr:.1f} dB." if worst.psnr is not None else ".")
        )
    notes += accountants_note(report)
    given = {row.verdict for row in report.rows}
    return [*notes, *(line for name, line in _OTHER_VERDICTS.items() if name in given), _VERDICTS]


def plain_table(title: str, columns: list[str]) -> Table:
    """Return an empty table whose first column is on the left and the others on the right."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        side: Literal["left", "right"] = "left" if number == 0 else "right"
        table.add_column(column, justify=side, no_wrap=True)
    return table
