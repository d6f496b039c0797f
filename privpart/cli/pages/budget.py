"""Page of a budget: one planned run."""

from collections.abc import Mapping
from types import MappingProxyType

from accounting.report import PrivacyReport, up
from privpart.cli.pages.decision import counts, open_ends, strength, subject, support, words_of
from privpart.cli.pages.guarantee import (
    assumptions_section,
    coverage_section,
    guarantee_section,
    key_figures,
    mechanism_facts,
    statement_of,
)
from privpart.cli.pages.page import Badge, Block, Page, Section, Verdict


def budget_page(
    report: PrivacyReport, limit: float | None, about: Mapping[str, str] = MappingProxyType({})
) -> Page:
    """Return the page of a planned run, and of the greatest epsilon that was asked for.

    ``about`` is what the plan's table [about] states.
    """
    planned = f"For {report.rounds:,} rounds of {report.mechanism}; nothing has been trained yet."
    lead = [planned, counts(report)]
    broken = report.realised is not None and bool(report.realised.deviations)
    return Page(
        "Privacy budget of a planned run",
        [
            Verdict(*_verdict(report, limit), lead, "Is the claim supported?"),
            strength(report, "Would the guarantee be strong?", holds=not broken),
        ],
        [subject(about, report), support(report), open_ends(report), words_of(report)],
        f"Written by privpart {report.version}, by the rules of privpart epsilon.",
        [
            Section("At a glance", [key_figures(report), *_by_the_log(report)]),
            Section("Statement", [statement_of(report)]),
            guarantee_section(report),
            assumptions_section(report),
            coverage_section(report),
            Section("Mechanism and accounting", [mechanism_facts(report)]),
        ],
    )


def _verdict(report: PrivacyReport, limit: float | None) -> Badge:
    if report.realised is not None and report.realised.deviations:
        return "bad", "The log breaks the promise: no guarantee holds"
    if limit is not None and report.epsilon > limit:
        return "bad", f"epsilon {up(report.epsilon)} exceeds the limit of {limit:g}"
    within = "" if limit is None else f", within the limit of {limit:g}"
    figures = f"epsilon {up(report.epsilon)} at delta {report.delta:g}"
    return "plain", f"Not yet, a plan: {figures}{within}"


def _by_the_log(report: PrivacyReport) -> list[Block]:
    if (realised := report.realised) is None:
        return []
    often = f"{realised.clients:,} {report.unit}s, each in at most {realised.max_participations}"
    cost = f"epsilon {up(realised.epsilon, 5)}, mu {up(realised.mu, 5)}"
    promise = "; ".join(realised.deviations) or "was kept"
    return [Block("facts", [("by the log", often), ("which cost", cost), ("the promise", promise)])]
