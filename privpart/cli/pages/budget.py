"""Pages of a budget: one planned run, and all mechanisms at the same epsilon."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from accounting.report import PrivacyReport, up
from privpart.cli.pages.guarantee import (
    assumptions_section,
    coverage_section,
    guarantee_section,
    key_figures,
    mechanism_facts,
    statement_of,
)
from privpart.cli.pages.page import Badge, Block, Cell, Page, Picture, Section, Table


def budget_page(report: PrivacyReport, figure: Figure | None, limit: float | None) -> Page:
    """Return the page of a planned run.

    Args:
        report: its guarantee.
        figure: epsilon along one axis; None if it cannot be drawn for this plan.
        limit: greatest epsilon that was asked for.
    """
    tone, verdict = _verdict(report, limit)
    shows = f"Epsilon at delta {report.delta:g} around the planned run."
    picture = [] if figure is None else [Picture(figure, shows, "What another choice would cost.")]
    return Page(
        "Privacy budget of a planned run",
        tone,
        verdict,
        [f"For {report.rounds:,} rounds of {report.mechanism}; nothing has been trained yet."],
        [
            Section("At a glance", [key_figures(report), *_by_the_log(report)]),
            Section("Statement", [statement_of(report)]),
            guarantee_section(report),
            Section("Other choices", [Block("pictures", picture)] if picture else []),
            assumptions_section(report),
            coverage_section(report),
            Section("Mechanism and accounting", [mechanism_facts(report)]),
        ],
        f"Written by privpart {report.version}, by the rules of privpart epsilon.",
    )


def _verdict(report: PrivacyReport, limit: float | None) -> Badge:
    if report.realised is not None and report.realised.deviations:
        return "bad", "The log breaks the promise: no guarantee holds"
    if limit is not None and report.epsilon > limit:
        return "bad", f"epsilon {up(report.epsilon)} exceeds the limit of {limit:g}"
    within = "" if limit is None else f", within the limit of {limit:g}"
    return "plain", f"A plan: epsilon {up(report.epsilon)} at delta {report.delta:g}{within}"


def _by_the_log(report: PrivacyReport) -> list[Block]:
    if (realised := report.realised) is None:
        return []
    often = f"{realised.clients:,} {report.unit}s, each in at most {realised.max_participations}"
    cost = f"epsilon {up(realised.epsilon, 5)}, mu {up(realised.mu, 5)}"
    kept = "; ".join(realised.deviations) or "was kept"
    return [Block("facts", [("by the log", often), ("which cost", cost), ("the promise", kept)])]


def front_page(
    rows: Sequence[Mapping[str, Any]], title: str, figure: Figure, warnings: Sequence[str]
) -> Page:
    """Return the page of a comparison of mechanisms, whose rows are those of the table."""
    best = min(rows, key=lambda row: float(row["rmse"]))
    cells: list[tuple[Cell, ...]] = [
        (
            row["mechanism"],
            ("good", "front") if row["front"] else "",
            row["state_vectors"],
            f"{row['draws_per_round']:.2f}",
            up(row["rmse"]),
            f"{row['rmse_ratio']:.3f}",
            up(row["max_error"]),
            ("" if row["sensitivity_exact"] else "≤ ") + up(row["sensitivity_squared"], 5),
            up(row["noise_multiplier"], 5),
        )
        for row in rows
    ]
    header = (
        "mechanism", "", "state", "draws", "rmse", "ratio", "max error", "sens²", "noise mult.",
    )  # fmt: skip
    picture = Picture(
        figure,
        "Error of each mechanism against the state vectors that it keeps.",
        "Filled: no other mechanism has less error with as few state vectors.",
    )
    notes = (
        "Errors are per coordinate, in units of the clip norm.",
        "State: vectors as long as the trained part that the server keeps.",
        f"Ratio: to {best['mechanism']}, the least error shown.",
    )
    return Page(
        "What memory buys: mechanisms at the same epsilon",
        "plain",
        f"Least error: {best['mechanism']}, rmse {up(best['rmse'])}",
        [f"{title}.", *warnings],
        [
            Section("Memory against error", [Block("pictures", [picture])]),
            Section("All of them", [Table(title, header, cells), Block("points", notes)]),
        ],
        "By the rules of privpart mechanisms.",
    )
