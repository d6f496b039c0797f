"""Audit tables: a leakage report, or the same attack at several levels, as text and warnings."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any, Literal

import typer

from accounting.report import up
from attacks import DefencePoint, LeakageReport, TextReport
from attacks.audit import NO_ATTACK
from attacks.report import VERDICTS, LeakageRow, TextRow, Verdict
from privpart.cli.options import Format
from privpart.cli.output import Table, print_result, print_table

_MEANINGS: Mapping[Verdict, str] = {
    "no gain": "'no gain': the data came back, but a guess that needs no attack is as close.",
    "ambiguous": "'ambiguous' is not 'safe': other data match the update, so the update alone does "
    "not determine them; a prior may.",
    "attack failed": "'attack failed' says nothing about privacy.",
    "nothing sent": "'nothing sent': the update of this view is zero in this round, at these "
    "weights; a later round may send something.",
    "void": "'void': nothing was attacked, and nothing follows about privacy.",
}
_BUFFERS = "buffers are sent besides the update: no clip and no noise covers them"
_FAILED = "the attack failed {}: nothing follows about privacy; try --effort long."
_SWEPT = ("clip", "noise_multiplier", "epsilon", "delta", "verdict", "exact")

AnyReport = LeakageReport | TextReport
AnyRows = Sequence[LeakageRow] | Sequence[TextRow]
Values = Mapping[str, Any]
"""A row as JSON types, or what one attack found on its view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the terminal and the page say of a report.

    Attributes:
        kind: what was attacked.
        verdict: the most severe one.
        document: the content of the report's file.
        tables: of guesses, views and attacks.
        notes: what must be known to read the tables.
        warnings: about conclusions that the scores do not allow.
        rows: a line each of the CSV; lists, and what each attack found, are in the JSON.
    """

    kind: Literal["images", "text"]
    verdict: Verdict
    document: dict[str, Any]
    tables: list[Table]
    notes: list[str]
    warnings: list[str]
    rows: list[dict[str, Any]]

    def as_json(self) -> str:
        """Return the content of the report's file as text."""
        return json.dumps(self.document, indent=2, allow_nan=False) + "\n"

    def publish(self, form: Format, files: Sequence[Path]) -> None:
        """Print a report that these files hold."""
        print_result(form, self.document, self.rows, self._print_text)
        for warning in self.warnings:
            typer.echo(f"privpart: warning: {warning}", err=True)
        typer.echo(f"privpart: written: {', '.join(map(str, files))}", err=True)

    def _print_text(self) -> None:
        for table in self.tables:
            print_table(table)
        for note in self.notes:
            typer.echo(fill(note, 100, subsequent_indent="  "))


def summary(report: AnyReport) -> Summary:
    """Return what is said of a report."""
    views = [row.to_dict() for row in report.rows]
    if isinstance(report, TextReport):
        examples, cells, of_attack, tables = "sentences", _sentence_cells, _text_cells, []
        title = (
            f"Attack: medians over {len(report.truth)} sentences, each best over the attacks; in "
            "brackets the best guess without the update"
        )
    else:
        examples, cells, of_attack = "images", _image_cells, _psnr_cells
        tables = [_baselines(report)]
        title = "Attack: PSNR in dB, best of each image over the attacks, with 95 % intervals"
    tables.append(_table(title, [_about(report, row) | cells(row) for row in views]))
    attacks = [
        _about(report, row) | {"attack": name} | of_attack(scores) | {"verdicts": _verdicts(scores)}
        for row in views
        for name, scores in row["by_attack"].items()
    ]
    if attacks:
        title = "Attack by attack, on each view itself; each runs on what no other has recovered"
        tables.append(_table(title, attacks))
    size = {examples: len(report.truth)}
    return Summary(
        kind="text" if isinstance(report, TextReport) else "images",
        verdict=report.verdict,
        document=report.to_dict(),
        tables=tables,
        notes=_notes(report, examples),
        warnings=_warnings(report, examples),
        rows=[
            size | {k: v for k, v in row.items() if not isinstance(v, list | dict)} for row in views
        ],
    )


def summary_of_levels(points: Sequence[DefencePoint], options: Mapping[str, Any]) -> Summary:
    """Return what is said of the same attack at several clips and noise multipliers."""
    of_text, delta = points[0].of_text, points[0].delta
    score, form = ("rouge", ".2f") if of_text else ("psnr", ".1f")
    what = "ROUGE-L (F1) per sentence" if of_text else "-10 log10 MSE per image, data range 1"
    middle, most, guess = f"{score}_median", f"{score}_max", "baseline_median"
    values = [
        point.to_dict()
        | {middle: median(point.scores), guess: median(point.baselines), most: max(point.scores)}
        for point in points
    ]
    cells = [
        {
            "clip": "none" if p["clip"] is None else f"{p['clip']:g}",
            "noise multiplier": f"{p['noise_multiplier']:g}",
            "epsilon": "infinite" if p["epsilon"] is None else up(p["epsilon"], 4),
            **({"exact": str(p["exact"])} if of_text else {}),
            "median": f"{p[middle]:{form}}",
            "max": f"{p[most]:{form}}",
            "no attack": f"{p[guess]:{form}}",
            "verdict": p["verdict"],
        }
        for p in values
    ]
    warnings = []
    if options["send_buffers"]:
        warnings.append(f"{_BUFFERS}, and no epsilon of the table is theirs.")
    if points[0].missing:
        warnings.append(_missing("examples", points[0].missing))
    if all(point.verdict == "attack failed" for point in points):
        warnings.append(_FAILED.format("at every clip and noise"))
    names = [*_SWEPT, middle, guess, most]
    return Summary(
        kind="text" if of_text else "images",
        verdict=min((point.verdict for point in points), key=VERDICTS.index),
        document={
            "schema": "privpart/text-defences/1" if of_text else "privpart/defences/1",
            "options": options,
            score: f"{what}; no epsilon is computed from it",
            "points": values,
        },
        tables=[_table(f"Best over the attacks, of {len(points[0].scores)}: {what}", cells)],
        notes=[
            f"Epsilon is the accountant's, at delta {delta:g}, for one noised release; it is not "
            "computed from any score. The score falls to the floor long before epsilon means "
            "anything.",
            *_meanings(points),
        ],
        warnings=warnings,
        rows=[{name: point[name] for name in names if name in point} for point in values],
    )


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of rows with equal headings, without empty columns."""
    # Labels that were told, and ranks that were not computed, have no column.
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    return Table(title, names, [[row[name] for name in names] for row in rows])


def _about(report: AnyReport, row: Values) -> dict[str, str]:
    """Return the first cells of a row: its view and, with noise, the adversary."""
    adversary = {} if report.bound is None else {"adversary": row["adversary"]}
    return {"view": row["view"], **adversary}


def _baselines(report: LeakageReport) -> Table:
    fair = [name for name in report.baselines if name not in report.oracles]
    scores = [report.baselines[name] for name in (*fair, *report.oracles)]
    rows = [
        [name, *(f"{of(score):.1f}" for score in scores)]
        for name, of in (("median", median), ("max", max))
    ]
    header = ["", *fair, *(f"oracle: {name}" for name in report.oracles)]
    return Table(f"No attack: PSNR in dB over {len(report.truth)} images", header, rows)


def _number(value: float | None, form: str) -> str:
    """Return a number, or nothing where nothing was attacked."""
    return "" if value is None else f"{value:{form}}"


def _residual(row: Values, score: str) -> str:
    return "" if row[score] is None else _number(row["match_median"], ".0e") or "diverged"


def _sent(row: Values) -> dict[str, str]:
    share = f"{row['share']:{'.0%' if row['share'] > 0.1 else '.1%'}}"
    return {"verdict": row["verdict"], "parameters sent": f"{row['visible']:,} ({share})"}


def _verdicts(row: Values) -> str:
    return ", ".join(f"{n} {verdict}" for verdict, n in row["verdicts"].items() if n)


def _psnr_cells(row: Values) -> dict[str, str]:
    return {
        "median": _number(row["psnr_median"], ".1f"),
        "max": _number(row["psnr_max"], ".1f"),
        "residual": _residual(row, "psnr_median"),
    }


def _image_cells(row: Values) -> dict[str, str]:
    low, high = row["recovered_rate_95"]
    recovered = f"{row['recovered']}/{len(row['psnr'])} ({low:.0%}-{high:.0%})"
    right, doubtful = row["labels_right"], ", doubtful" * row["labels_doubtful"]
    return {
        **_sent(row),
        **_psnr_cells(row),
        "gain": _number(row["gain_median"], "+.1f"),
        "ssim": _number(row["ssim_median"], ".2f"),
        "recovered": "" if row["psnr_median"] is None else recovered,
        "rank": f"{median(row['reid_rank']):g}" if row["reid_rank"] else "",
        "labels": "" if right is None else f"{right:.0%}{doubtful}",
    }


def _text_cells(row: Values) -> dict[str, str]:
    return {
        "exact": f"{row['exact']}/{row['sentences']}",
        "ROUGE-L": _number(row["rouge_median"], ".2f"),
        "token F1": _number(row["f1_median"], ".2f"),
        "tokens of batch": _number(row["bag_f1_median"], ".2f"),
        "residual": _residual(row, "rouge_median"),
    }


def _sentence_cells(row: Values) -> dict[str, str]:
    cells = _text_cells({**row, "sentences": len(row["sentences"])})
    for heading, score in (("ROUGE-L", "rouge"), ("token F1", "f1"), ("tokens of batch", "bag_f1")):
        guess = _number(row[f"guess_{score}_median"], ".2f")
        cells[heading] += f" ({guess})" if guess else ""
    return _sent(row) | (cells if row["rouge_median"] is not None else dict.fromkeys(cells, ""))


def _meanings(rows: "AnyRows | Sequence[DefencePoint]") -> list[str]:
    """Return what the verdicts given mean."""
    verdicts = {row.verdict for row in rows}
    return [meaning for verdict, meaning in _MEANINGS.items() if verdict in verdicts]


def _epsilon(report: AnyReport) -> str:
    return "infinite" if report.bound is None else up(report.bound.epsilon(report.delta), 4)


def _notes(report: AnyReport, examples: str) -> list[str]:
    """Return what the attacker sees and knows, what the accountant says, what verdicts mean."""
    threat = report.threat
    sent = "gradient" if threat["update"] == "gradient" else "change of the weights"
    noise = f", noise multiplier {threat['noise_multiplier']:g}" if report.bound else ""
    clip = "no clip" if threat["clip"] is None else f"clip {threat['clip']:g}"
    done = ", ".join([*threat["transform"], clip]) + noise
    notes = [
        f"The attacker sees the {sent} of {threat['batch']} {examples} in {threat['mode']} mode, "
        f"{done}, and knows every weight; labels are {threat['labels']}.",
        *threat["read"],
    ]
    if threat["transform"] and threat["transform"][-1].startswith("sum:"):
        notes.append(
            f"It sees a sum over clients with {threat['batch']} {examples} each, and knows no part "
            "of it. A row counts the examples of all of them."
        )
    if isinstance(report, TextReport):
        lengths = "" if threat["padding"] == "none" else " Lengths are inferred."
        notes.append(
            f"A sentence has up to {threat['longest']} tokens.{lengths} 'Tokens of batch' is the "
            "F1 of the batch's distinct tokens in any order. Guesses are made of "
            f"{report.public} public sentences."
        )
    else:
        notes.append(
            f"Rank: position of the true image among {report.decoys} decoys by residual; 1 means "
            "it is identified. Oracles use the true image and do not affect verdicts."
        )
    if report.bound is not None:
        notes.append(
            f"Accountant: epsilon {_epsilon(report)} at delta {report.delta:g} for one noised "
            "release. It is not computed from any score above."
        )
    rows: AnyRows = report.rows
    return [*notes, *_meanings(rows)]


def _warnings(report: AnyReport, examples: str) -> list[str]:
    """Return warnings about conclusions that the scores do not allow."""
    if report.void:
        return [
            f"the audit is void: the given {examples} do not explain the update (residual "
            f"{report.explanation.residual:.2g}). Likely wrong: "
            f"{'; '.join(report.explanation.causes)}."
        ]
    warnings = []
    if report.threat.get("buffers", "not sent") != "not sent":
        of_all = f", and epsilon {_epsilon(report)} is not theirs" if report.bound else ""
        warnings.append(f"{_BUFFERS}{of_all}.")
    if report.missing:
        warnings.append(_missing(examples, report.missing))
    return [*warnings, *_doubts(report), *_failures(report.rows)]


def _missing(examples: str, baselines: Sequence[str]) -> str:
    return (
        f"no {examples} besides those attacked: the baseline {', '.join(baselines)} is missing, so "
        "what all of them share counts as found in the update."
    )


def _doubts(report: AnyReport) -> list[str]:
    """Return a warning of views in which what was inferred may be wrong."""
    if isinstance(report, TextReport):
        doubtful: AnyRows = [row for row in report.rows if row.doubtful]
        guesses = "what was read does not explain the update: order, lengths and labels are guesses"
    else:
        doubtful = [row for row in report.rows if row.labels_doubtful]
        guesses = "labels are doubtful; audit again without hide_labels before any conclusion"
    rights = [row.labels_right for row in doubtful if row.labels_right is not None]
    right = f" ({min(rights):.0%} of the labels right at worst)" if rights else ""
    return [f"on {_names(doubtful)}, {guesses}{right}."] if doubtful else []


def _failures(rows: AnyRows) -> list[str]:
    """Return warnings of views of which nothing follows."""
    failed = [row for row in rows if row.verdict == "attack failed"]
    # Noise leaves nothing to read.
    bare = [row for row in failed if row.adversary == "server"]
    unread = [row for row in bare if not row.by_attack.keys() - {NO_ATTACK}]
    warnings = []
    if unread:
        warnings.append(
            f"no attack could read {_names(unread)}: none applies there, or too much moved that is "
            "no token. Nothing follows about privacy."
        )
    for row in rows:
        parts = dict.fromkeys(
            trial.view
            for trial in itertools.chain(*row.trials)
            if (trial.attack, trial.untried) == (NO_ATTACK, None) and trial.view != row.view
        )
        if parts and row.adversary == "server" and row.verdict != "recovered":
            warnings.append(
                f"{row.view} contains {', '.join(parts)}, which no attack could read: its verdict "
                "says nothing about that part."
            )
    if tried := [row for row in failed if row not in unread]:
        warnings.append(_FAILED.format(f"on {_names(tried)}"))
    return warnings


def _names(rows: "AnyRows | Sequence[LeakageRow | TextRow]") -> str:
    """Return the names of the rows' views."""
    return ", ".join(dict.fromkeys(row.view for row in rows))
