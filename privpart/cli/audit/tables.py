"""Audit tables: a leakage report and a sweep of defences as text, and warnings on them."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import typer

from accounting.report import up
from attacks import DefencePoint, LeakageReport, TextReport
from attacks.audit import NO_ATTACK
from attacks.report import LeakageRow, TextRow
from privpart.cli.options import Format
from privpart.cli.output import as_csv, print_table
from privpart.cli.pages.page import Table, table_of

REPORT = "report.json"
_VERDICTS = (
    "Verdicts: 'ambiguous' is not 'safe' (another image matches the update, so the update alone "
    "does not determine the image; a prior may), and 'attack failed' says nothing about privacy."
)
_NOTHING_SENT = (
    "'nothing sent': the update of this view is zero in this round, at these weights; a later "
    "round may send something."
)
_VOID = "'void': nothing was attacked, and nothing follows about privacy."
_OF_IMAGES = {
    "no gain": "'no gain': the picture itself came back, but an image that needs no attack is as "
    "close.",
    "nothing sent": _NOTHING_SENT,
    "void": _VOID,
}
_OF_TEXT = {
    "recovered": "'recovered': nine tokens in ten of a sentence came back in order, and a guess "
    "without the update does not do that.",
    "partial": "'partial': tokens came back that a guess without the update does not have.",
    "no gain": "'no gain': the sentence came back, but a guess without the update is as close.",
    "ambiguous": "'ambiguous' is not 'safe': another text matches the update.",
    "attack failed": "'attack failed' says nothing about privacy.",
    "nothing sent": _NOTHING_SENT,
    "void": _VOID,
}
# Residual that float32 leaves; above it the update is not quite the images'.
_ROUNDING = 1e-6
_SWEPT = ("clip", "noise_multiplier", "epsilon", "delta", "verdict", "exact")

AnyReport = LeakageReport | TextReport
AnyRows = Sequence[LeakageRow] | Sequence[TextRow]
Values = Mapping[str, Any]
"""A row as JSON types, or what one attack found on its view."""
Columns = Mapping[str, Callable[[Values], str]]
"""Heading -> cell of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the terminal and the page say of a report.

    Attributes:
        tables: of guesses, views and attacks.
        notes: what must be known to read the tables.
        warnings: about conclusions that the scores do not allow.
        csv: a line per view and adversary; lists, and what each attack found, are in the JSON.
    """

    tables: list[Table]
    notes: list[str]
    warnings: list[str]
    csv: str


def summary(report: AnyReport) -> Summary:
    """Return what is said of a report."""
    return _of_text(report) if isinstance(report, TextReport) else _of_images(report)


def publish(report: AnyReport, text: Summary, form: Format, files: Sequence[Path]) -> None:
    """Print a report that these files hold."""
    if form is Format.JSON:
        typer.echo(as_json(report), nl=False)
    elif form is Format.CSV:
        typer.echo(text.csv, nl=False)
    else:
        for table in text.tables:
            print_table(table.title, table.header, [[str(c) for c in row] for row in table.rows])
        _print_notes(text.notes)
    for warning in text.warnings:
        typer.echo(f"privpart: warning: {warning}", err=True)
    typer.echo(f"privpart: written: {', '.join(map(str, files))}", err=True)


def as_json(report: AnyReport) -> str:
    """Return the content of a report's file."""
    return json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"


def defences_csv(points: Sequence[DefencePoint]) -> str:
    """Return a line per clip and noise multiplier, with medians over the examples."""
    score = "rouge" if points[0].of_text else "psnr"
    rows = []
    for point in points:
        values = point.to_dict() | {
            f"{score}_median": median(point.scores),
            "baseline_median": median(point.baselines),
            f"{score}_max": max(point.scores),
        }
        names = (*_SWEPT, f"{score}_median", "baseline_median", f"{score}_max")
        rows.append({name: values[name] for name in names if name in values})
    return as_csv(rows)


def show_defences(points: Sequence[DefencePoint]) -> None:
    """Print a sweep over clips and noises to standard output."""
    of_text, delta = points[0].of_text, points[0].delta
    what, digits = ("ROUGE-L over {} sentences", 2) if of_text else ("PSNR in dB over {} images", 1)
    columns: Mapping[str, Callable[[DefencePoint], str]] = {
        "clip": lambda p: "none" if p.clip is None else f"{p.clip:g}",
        "noise multiplier": lambda p: f"{p.noise_multiplier:g}",
        "epsilon": lambda p: "infinite" if p.epsilon is None else up(p.epsilon, 4),
        **({"exact": lambda p: f"{p.exact}"} if of_text else {}),
        "median": lambda p: f"{median(p.scores):.{digits}f}",
        "max": lambda p: f"{max(p.scores):.{digits}f}",
        "no attack": lambda p: f"{median(p.baselines):.{digits}f}",
        "verdict": lambda p: p.verdict,
    }
    title = f"{what.format(len(points[0].scores))}, best of each over the attacks"
    print_table(title, list(columns), [[cell(p) for cell in columns.values()] for p in points])
    floor = "What the attacks read falls" if of_text else "PSNR falls"
    note = (
        f"Epsilon is the accountant's, at delta {delta:g}, for one noised release; it is not "
        f"computed from any score. {floor} to the floor long before epsilon means anything."
    )
    _print_notes([note, _VERDICTS.replace("image", "text") if of_text else _VERDICTS])


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        typer.echo(fill(note, 100, subsequent_indent="  "))


# What images and text share


def _table(title: str, report: AnyReport, rows: Iterator[Values], columns: Columns) -> Table:
    """Return a table of rows whose first columns are the view and, with noise, the adversary."""
    shown: dict[str, Callable[[Values], str]] = {"view": lambda row: str(row["view"])}
    if report.bound is not None:
        shown["adversary"] = lambda row: str(row["adversary"])
    shown.update(columns)
    return table_of(title, list(shown), [[cell(row) for cell in shown.values()] for row in rows])


def _views(report: AnyReport) -> Iterator[Values]:
    return (row.to_dict() for row in report.rows)


def _attacks(report: AnyReport) -> Iterator[Values]:
    """Yield what each attack found on each view itself, which led to the view's verdict."""
    for row in _views(report):
        for name, scores in row["by_attack"].items():
            yield row | scores | {"attack": name}


def _number(name: str, form: str) -> Callable[[Values], str]:
    """Return the cell of a number; it is empty where nothing was attacked."""
    return lambda row: "" if row[name] is None else f"{row[name]:{form}}"


def _residual(score: str, without: str) -> Callable[[Values], str]:
    number = _number("match_median", ".0e")
    return lambda row: "" if row[score] is None else number(row) or without


def _sent(row: Values) -> str:
    return f"{row['visible']:,} ({row['share']:{'.0%' if row['share'] > 0.1 else '.1%'}})"


def _verdict(row: Values) -> str:
    return str(row["verdict"])


def _verdicts(row: Values) -> str:
    return ", ".join(f"{n} {verdict}" for verdict, n in row["verdicts"].items() if n)


def _csv(report: AnyReport, examples: str) -> str:
    """Return a line per row, with each of its values that is one value."""
    # Lists, and what each attack found, are in the JSON.
    size = {examples: len(report.truth)}
    rows = (row.items() for row in _views(report))
    return as_csv([size | {k: v for k, v in row if not isinstance(v, list | dict)} for row in rows])


def _threat(report: AnyReport, examples: str) -> str:
    """Return what the attacker sees and knows, but for the labels."""
    threat = report.threat
    sent = "gradient" if threat["update"] == "gradient" else "change of the weights"
    noise = f", noise multiplier {threat['noise_multiplier']:g}" if report.bound else ""
    clip = "no clip" if threat["clip"] is None else f"clip {threat['clip']:g}"
    return (
        f"The attacker sees the {sent} of {threat['batch']} {examples} in {threat['mode']} mode, "
        f"{clip}{noise}, and knows every weight; labels are {threat['labels']}"
    )


def _epsilon(report: AnyReport) -> str:
    return "infinite" if report.bound is None else up(report.bound.epsilon(report.delta), 4)


def _closing(report: AnyReport, meanings: Mapping[str, str]) -> list[str]:
    """Return the accountant's line of a noised release, and what the verdicts given mean."""
    verdicts = {row.verdict for row in report.rows}
    accountant = (
        f"Accountant: epsilon {_epsilon(report)} at delta {report.delta:g} for one noised release. "
        "It is not computed from any score above."
    )
    notes = [] if report.bound is None else [accountant]
    return notes + [meaning for verdict, meaning in meanings.items() if verdict in verdicts]


def _void(report: AnyReport, examples: str) -> str:
    return (
        f"the audit is void: the given {examples} do not explain the update (residual "
        f"{report.explanation.residual:.2g}). Likely wrong: {'; '.join(report.explanation.causes)}."
    )


def _names(rows: AnyRows) -> str:
    """Return the names of the rows' views."""
    return ", ".join(dict.fromkeys(row.view for row in rows))


def _at_worst(shares: Sequence[float | None]) -> str:
    """Return how many inferred values are right at worst; "" where nobody knows."""
    right = [share for share in shares if share is not None]
    return f" ({min(right):.0%} right at worst)" if right else ""


# Images


def _of_images(report: LeakageReport) -> Summary:
    score = "psnr_median"
    columns: Columns = {
        "verdict": _verdict,
        "parameters sent": _sent,
        "median": _number(score, ".1f"),
        "max": _number("psnr_max", ".1f"),
        "gain": _number("gain_median", "+.1f"),
        "ssim": _number("ssim_median", ".2f"),
        "residual": _residual(score, "diverged"),
        "recovered": _recovered,
        "rank": lambda row: f"{median(row['reid_rank']):g}" if row["reid_rank"] else "",
    }
    if report.threat["labels"] != "revealed":
        columns = {**columns, "labels": _labels}
    of_attack: Columns = {
        "attack": lambda row: row["attack"],
        "images": lambda row: str(row["images"]),
        "median": _number(score, ".1f"),
        "max": _number("psnr_max", ".1f"),
        "residual": _residual(score, "diverged"),
        "verdicts": _verdicts,
    }
    title = (
        "Attack: PSNR in dB, best of each image over the attacks; recovered with its 95 % interval"
    )
    tables = [
        _baselines(report),
        _table(title, report, _views(report), columns),
    ]
    if not report.void:
        title = "Attack by attack, on each view itself; each runs on images not yet recovered"
        tables.append(_table(title, report, _attacks(report), of_attack))
    return Summary(
        tables=tables,
        notes=_image_notes(report),
        warnings=_image_warnings(report),
        csv=_csv(report, "images"),
    )


def _baselines(report: LeakageReport) -> Table:
    fair = [name for name in report.baselines if name not in report.oracles]
    title = f"No attack: PSNR in dB over {len(report.truth)} images"
    scores = [report.baselines[name] for name in (*fair, *report.oracles)]
    rows = [
        [name, *(f"{of(score):.1f}" for score in scores)]
        for name, of in (("median", median), ("max", max))
    ]
    return table_of(title, ["", *fair, *(f"oracle: {name}" for name in report.oracles)], rows)


def _recovered(row: Values) -> str:
    low, high = row["recovered_rate_95"]
    share = f"{row['recovered']}/{len(row['psnr'])} ({low:.0%}-{high:.0%})"
    return "" if row["psnr_median"] is None else share


def _labels(row: Values) -> str:
    if row["labels_right"] is None:
        return ""
    return f"{row['labels_right']:.0%}{', doubtful' if row['labels_doubtful'] else ''}"


def _image_notes(report: LeakageReport) -> list[str]:
    notes = [
        f"{_threat(report, 'image(s)')}. Rank is that of the truth among {report.decoys} "
        "decoys, by residual, each with the true label where it is told; 1 identifies the image. "
        "An oracle knows the truth: no verdict is measured against it."
    ]
    if (worst := report.worst_round) is not None:
        rounds = ", ".join(f"{view} x {n}" for view, n in Counter(report.schedule).items())
        best = worst.worst_score["psnr_max"]
        notes.append(
            f"Schedule ({rounds}): a client that takes part in all rounds is exposed by its worst "
            f"round, {worst.view}: {worst.verdict}"
            + (f", up to {best:.1f} dB." if best is not None else ".")
        )
    return [*notes, *_closing(report, _OF_IMAGES), _VERDICTS]


def _image_warnings(report: LeakageReport) -> list[str]:
    """Return warnings about conclusions that the scores do not allow."""
    if report.void:
        return [_void(report, "images")]
    warnings = []
    if report.threat["buffers"] != "not sent":
        of_all = f", and epsilon {_epsilon(report)} is not theirs" if report.bound else ""
        warnings.append(
            f"buffers are sent besides the update: no clip and no noise covers them{of_all}."
        )
    if report.missing:
        warnings.append(
            f"no image besides those attacked: the baseline {', '.join(report.missing)} is "
            "missing, so a background that all images share counts as found in the update."
        )
    if doubtful := [row for row in report.rows if row.labels_doubtful]:
        right = _at_worst([row.labels_right for row in doubtful])
        warnings.append(
            f"labels are doubtful on {_names(doubtful)}{right}: the attacks tried the most likely "
            "ones; where they fail, audit again without --hide-labels before anything is concluded."
        )
    if failed := [row for row in report.rows if row.verdict == "attack failed"]:
        warnings.append(
            f"the attack failed on {_names(failed)}: nothing follows about privacy; try --effort "
            "long."
        )
    server = [row for row in report.rows if row.adversary == "server"]
    strange = max((trial.truth_match for row in server for trial in row.own), default=0.0)
    if strange > _ROUNDING and report.threat["origin"] == "given":
        warnings.append(
            f"the true images leave a residual of {strange:.2g}: the update was rounded, or is not "
            "quite that of these images, weights, mode and loss."
        )
    return warnings


# Text


def _of_text(report: TextReport) -> Summary:
    columns: Columns = {
        "verdict": _verdict,
        "parameters sent": _sent,
        "exact": _exact,
        "ROUGE-L": _beside_guess("rouge"),
        "token F1": _beside_guess("f1"),
        "tokens of batch": _beside_guess("bag_f1"),
        "residual": _residual("rouge_median", "none"),
    }
    of_attack: Columns = {
        "attack": lambda row: row["attack"],
        "exact": lambda row: f"{row['exact']}/{row['sentences']}",
        "ROUGE-L": _number("rouge_median", ".2f"),
        "token F1": _number("f1_median", ".2f"),
        "tokens of batch": _number("bag_f1_median", ".2f"),
        "residual": _residual("rouge_median", "none"),
        "verdicts": _verdicts,
    }
    title = (
        f"Attack: medians over {len(report.truth)} sentences, each best over the attacks; in "
        "brackets the best guess without the update"
    )
    tables = [_table(title, report, _views(report), columns)]
    if not report.void:
        title = "Attack by attack, on each view itself"
        tables.append(_table(title, report, _attacks(report), of_attack))
    return Summary(
        tables=tables,
        notes=_text_notes(report),
        warnings=_text_warnings(report),
        csv=_csv(report, "sentences"),
    )


def _exact(row: Values) -> str:
    return "" if row["rouge_median"] is None else f"{row['exact']}/{len(row['sentences'])}"


def _beside_guess(name: str) -> Callable[[Values], str]:
    score, guess = _number(f"{name}_median", ".2f"), _number(f"guess_{name}_median", ".2f")
    return lambda row: f"{score(row)} ({guess(row)})" if score(row) else ""


def _text_notes(report: TextReport) -> list[str]:
    threat = report.threat
    lengths = "" if threat["padding"] == "none" else "; lengths are inferred"
    sentences = f"sentence(s) of up to {threat['longest']} tokens"
    notes = [
        f"{_threat(report, sentences)}{lengths}. "
        "'Tokens of batch' is the F1 of the batch's distinct tokens in any order. Guesses are made "
        f"of {report.public} public sentences."
    ]
    worst = report.worst_round
    if worst is not None:
        notes.append(
            "Schedule: a client that takes part in all rounds is exposed by its worst round, "
            f"{worst.view}: {worst.verdict}, {worst.exact} sentences exact."
        )
    return [*notes, *_closing(report, _OF_TEXT)]


def _text_warnings(report: TextReport) -> list[str]:
    """Return warnings about conclusions that the scores do not allow."""
    if report.void:
        return [_void(report, "sentences")]
    warnings = []
    if not report.guesses:
        warnings.append(
            "no sentences besides those attacked: nothing says what a guess without the update "
            "would find; words that all sentences share count as found."
        )
    if doubtful := [row for row in report.rows if row.doubtful]:
        lengths = _at_worst([row.lengths_right for row in doubtful])
        labels = _at_worst([row.labels_right for row in doubtful])
        inferred = (f", lengths{lengths}" if lengths else "") + (
            f", labels{labels}" if labels else ""
        )
        warnings.append(
            f"what was read in {_names(doubtful)} does not explain the update: its tokens may be "
            f"right, but its order{inferred} is a guess."
        )
    failed = [row for row in report.rows if row.verdict == "attack failed"]
    # Noise leaves nothing to read.
    bare = [row for row in failed if row.adversary == "server"]
    unread = [row for row in bare if not row.by_attack.keys() - {NO_ATTACK}]
    if unread:
        warnings.append(
            f"no attack could read {_names(unread)}: none applies there, or too much moved that is "
            "no token. Nothing follows about privacy."
        )
    if tried := [row for row in failed if row not in unread]:
        warnings.append(f"the attack failed on {_names(tried)}: nothing follows about privacy.")
    return warnings
