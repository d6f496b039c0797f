"""First sheet of a report: what a person who decides about a model must know of it.

It asks two questions that are often taken for one: is the claim supported, and is the guarantee
strong? A claim that is verified to the last bit may promise nothing, at epsilon 200.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal

from accounting.checks import is_large_delta
from accounting.report import AssumptionStatus, PrivacyReport, up
from privpart.cli.pages.guarantee import BADGES
from privpart.cli.pages.page import Badge, Block, Section, Verdict

_TIERS: dict[float, Badge] = {
    1.0: ("good", "Strong"),
    10.0: ("plain", "Reasonable, not strong"),
    math.inf: ("bad", "Weak"),
}
"""By the epsilon up to which each holds: Ponomareva et al. 2023, "How to DP-fy ML", section 5.2."""
_LABELS = {
    "model": "model",
    "purpose": "purpose",
    "organisation": "organisation",
    "controller": "controller of the data",
    "data": "data",
    "people": "people in the data",
    "contact": "contact",
}
"""Names on paper of what a plan's table ``[about]`` states."""
_GLOSSARY = {
    "differential privacy": "a promise about a computation: its results hardly depend on whether "
    "any one person's data were used",
    "epsilon": "how much they may depend on it; 0 is not at all, and each step of 0.7 doubles the "
    "factor by which a result may become more likely",
    "delta": "a chance on top of that factor; must be far below 1 / number of people",
    "enforced": "the program made it so while it ran",
    "verified": "records of the run were checked when this report was written",
    "vouched for": "a person says so; nothing was checked",
    "not checked": "assumed; nobody says so",
}


def strength(
    report: PrivacyReport, question: str = "Is the guarantee strong?", *, holds: bool = True
) -> Verdict:
    """Return how strong a guarantee is, in words that follow from its definition.

    If nothing holds, the answer shows no figure.
    """
    if not holds:
        return Verdict("bad", "Nothing is guaranteed", (), question)
    if is_large_delta(report.delta, report.population):
        lead = "It allows that the data of some people are published as they are."
        return Verdict("bad", f"No: delta {up(report.delta)} is too large", [lead], question)
    tone, tier = next(badge for most, badge in _TIERS.items() if report.epsilon <= most)
    answer = f"{tier}: epsilon {up(report.epsilon)} at delta {up(report.delta)}"
    return Verdict(tone, answer, _meaning(report), question)


def _meaning(report: PrivacyReport) -> Sequence[str]:
    """Return what the guarantee allows, by its definition and by its greatest advantage."""
    person = report.a_unit
    meaning = [
        f"Any conclusion that anybody draws from what was released is at most {_times(report)} as "
        f"likely with the data of {person} as without, plus a chance of {_one_in(report.delta)}.",
        f"Whoever guesses whether {person} took part, at even odds, is right at most "
        f"{up(50 * (1 + report.advantage), 3)} % of the time; 50 % is a coin.",
    ]
    if report.unit == "example":
        meaning.append("One example is protected, not a person of whom there are several.")
    return meaning


def _times(report: PrivacyReport) -> str:
    """Return e^epsilon, rounded up to three digits; above a million, to a power of ten."""
    if report.epsilon > math.log(1e6):
        return f"10^{math.ceil(report.epsilon / math.log(10))} times"
    return f"{float(up(math.exp(report.epsilon) * (1 + 1e-12), 3)):,g} times"


def _one_in(delta: float) -> str:
    """Return a probability in words, rounded up.

    >>> _one_in(1e-5), _one_in(3e-7)
    ('1 in 100,000', '1 in 3,330,000')
    """
    often = 1 / Decimal(up(delta))
    unit = Decimal(10) ** max(0, often.adjusted() - 2)
    whole = int(often / unit) * int(unit)
    return f"1 in {whole:,}" if whole < 10**12 else up(delta)


def subject(about: Mapping[str, str], report: PrivacyReport) -> Section:
    """Return what was trained, for whom and on whose data; what nobody stated is a named blank."""
    facts = [
        (name, about.get(key) or f"not stated; say it as {key} in [about] of the plan")
        for key, name in _LABELS.items()
    ]
    people = "" if report.population is None else f"{report.population:,} {report.unit}s; "
    lasts = "for what was released, without end; anything further released about the same people "
    facts += [
        ("protected", f"{people}each {report.unit} by itself"),
        ("date of this report", f"{datetime.now(UTC):%d %B %Y}"),
        ("the guarantee lasts", f"{lasts}adds to it"),
    ]
    return Section("What, by whom, about whom", [Block("facts", facts)])


def support(report: PrivacyReport) -> Section:
    """Return who stands behind the claim: the program, its records, people, or nobody."""
    names: dict[AssumptionStatus, str] = {
        "enforced": "the program, while it ran",
        "verified": "records that were checked",
        "vouched": "somebody's word",
        "asserted": "nobody: assumed",
        "violated": "nothing: it is false",
    }
    items = []
    for status, who in names.items():
        of_status = [a for a in report.assumptions if a.status == status]
        if not of_status:
            continue
        shown = [f"{a.text}{f' ({a.evidence})' if status == 'vouched' else ''}" for a in of_status]
        shown = [] if status in ("enforced", "verified") else shown
        count = f"{len(of_status)} conditions rest" if len(of_status) > 1 else "One condition rests"
        items.append((*BADGES[status], "", f"{count} on {who}.", shown))
    return Section("Who stands behind it", [Block("badged", items)])


def open_ends(report: PrivacyReport) -> Section:
    """Return what the guarantee does not cover."""
    return Section(
        "What it does not cover", [Block("points", [f"{x}." for x in report.not_covered])]
    )


def glossary() -> Section:
    """Return the words of the first sheet."""
    return Section("Words on this page", [Block("facts", list(_GLOSSARY.items()))])
