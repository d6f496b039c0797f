"""Audit tables: a leakage report and a sweep of defences as text, and warnings on them."""

from collections.abc import Sequence
from statistics import median
from textwrap import fill
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from accounting.report import up
from attacks import DefencePoint, LeakageReport, LeakageRow

_WIDTH = 120
_VERDICTS = (
    "Verdicts: 'ambiguous' is not 'safe' (another image matches the update, so the update alone "
    "does not determine the image; a prior may), and 'attack failed' says nothing about privacy."
)
_EXPLAINED = 1e-6  # residual of the true images; above it they do not explain the update


def show(report: LeakageReport) -> None:
    """Print the report to standard output."""
    console = Console(width=_WIDTH, highlight=False)
    console.print(_baselines(report))
    console.print(_rows(report))
    console.print(_by_attack(report))
    for line in _notes(report):
        console.print(fill(line, 100, subsequent_indent="  "))


def show_defences(points: Sequence[DefencePoint]) -> None:
    """Print a sweep over clips and noises to standard output."""
    console = Console(width=_WIDTH, highlight=False)
    images = len(points[0].psnr)
    title = f"PSNR in dB over {images} images, best of each over the attacks"
    columns = ["clip", "noise multiplier", "epsilon", "median", "max", "no attack", "verdict"]
    table = _table(title, columns)
    for point in points:
        table.add_row(
            *("none" if point.clip is None else f"{point.clip:g}", f"{point.noise_multiplier:g}"),
            "infinite" if point.epsilon is None else up(point.epsilon, 4),
            *(f"{median(point.psnr):.1f}", f"{max(point.psnr):.1f}"),
            *(f"{median(point.baselines):.1f}", point.verdict),
        )
    console.print(table)
    for line in (
        f"Epsilon is the accountant's, at delta {points[0].delta:g}, for one noised release; it is "
        "not computed from any score. PSNR falls to the floor long before epsilon means anything.",
        _VERDICTS,
    ):
        console.print(fill(line, 100, subsequent_indent="  "))


def warnings(report: LeakageReport) -> list[str]:
    """Return warnings about conclusions that the scores do not allow."""
    found = []
    failed = [row.view for row in report.rows if row.verdict == "attack failed"]
    if failed:
        found.append(
            f"the attack failed on {', '.join(dict.fromkeys(failed))}: nothing follows about "
            "privacy; try --effort long."
        )
    server = [row for row in report.rows if row.adversary == "server"]
    strange = max((trial.truth_match for row in server for trial in row.own), default=0.0)
    if strange > _EXPLAINED and report.threat["origin"] == "given":
        found.append(
            f"the true images leave a residual of {strange:.2g}: the update is noisy, or not that "
            "of these images, weights, mode and loss."
        )
    return found


def _baselines(report: LeakageReport) -> Table:
    names = list(report.baselines)
    images = len(report.truth)
    loss = median(report.losses)
    title = f"No attack: PSNR in dB over {images} images, on which the loss is {loss:.3g}"
    table = _table(title, ["", *names])
    for name, of in (("median", median), ("max", max)):
        table.add_row(name, *(f"{of(report.baselines[guess]):.1f}" for guess in names))
    return table


def _rows(report: LeakageReport) -> Table:
    noisy = report.bound is not None
    columns = ["view", "adversary"] if noisy else ["view"]
    columns += ["parameters sent", "median", "max", "gain", "ssim", "residual", "recovered", "rank"]
    title = (
        "Attack: PSNR in dB, best of each image over the attacks; recovered with its 95 % interval"
    )
    table = _table(title, [*columns, "verdict"])
    for row in report.rows:
        table.add_row(*_cells(row, noisy))
    return table


def _by_attack(report: LeakageReport) -> Table:
    # a view's verdict is the worst over its attacks; this table shows which attack led to it
    noisy = report.bound is not None
    title = "Attack by attack, on each view itself; each runs on images not yet recovered"
    columns = ["view", *(["adversary"] if noisy else []), "attack", "images", "median", "max"]
    table = _table(title, [*columns, "residual", "verdicts"])
    for row in report.rows:
        for name, found in row.to_dict()["by_attack"].items():
            match = found["match_median"]
            table.add_row(
                *(row.view, *([row.adversary] if noisy else []), name, str(found["images"])),
                *(f"{found['psnr_median']:.1f}", f"{found['psnr_max']:.1f}"),
                "diverged" if match is None else f"{match:.0e}",
                ", ".join(f"{n} {verdict}" for verdict, n in found["verdicts"].items() if n),
            )
    return table


def _cells(row: LeakageRow, noisy: bool) -> list[str]:
    values = row.to_dict()
    low, high = values["recovered_rate_95"]
    match = values["match_median"]
    return [
        row.view,
        *([row.adversary] if noisy else []),
        f"{row.visible:,} ({row.share:.0%})"
        if row.share > 0.1
        else f"{row.visible:,} ({row.share:.1%})",
        f"{values['psnr_median']:.1f}",
        f"{values['psnr_max']:.1f}",
        f"{values['gain_median']:+.1f}",
        f"{values['ssim_median']:.2f}",
        "diverged" if match is None else f"{match:.0e}",
        f"{row.recovered}/{len(row.best)} ({low:.0%}-{high:.0%})",
        f"{median(row.ranks):g}" if row.ranks else "",
        row.verdict,
    ]


def _notes(report: LeakageReport) -> list[str]:
    threat = report.threat
    sent = "gradient" if threat["update"] == "gradient" else "change of the weights"
    noise = f", noise multiplier {threat['noise_multiplier']:g}" if report.bound else ""
    clip = "no clip" if threat["clip"] is None else f"clip {threat['clip']:g}"
    notes = [
        f"The attacker sees the {sent} of {threat['batch']} image(s) in {threat['mode']} mode, "
        f"{clip}{noise}, and knows every weight; labels are {threat['labels']}. Rank is that of "
        f"the truth among {report.decoys} decoys, by residual; 1 identifies the image."
    ]
    if report.schedule is not None:
        worst = report.schedule
        rounds = ", ".join(f"{view} x {count}" for view, count in worst.rounds.items())
        notes.append(
            f"Schedule ({rounds}): a client that takes part in all rounds is exposed by its worst "
            f"round, {worst.worst}: {worst.verdict}, up to {worst.psnr:.1f} dB."
        )
    if report.bound is not None:
        notes.append(
            f"Accountant: epsilon {up(report.bound.epsilon(report.delta), 4)} at delta "
            f"{report.delta:g} for one noised release. It is not computed from any score above."
        )
    return [*notes, _VERDICTS]


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        side: Literal["left", "right"] = "left" if number == 0 else "right"
        table.add_column(column, justify=side, no_wrap=True)
    return table
