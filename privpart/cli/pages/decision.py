"""First sheet of a report: what a person who decides about a model must know of it.

It asks two questions that are often taken for one: is the claim supported, and is the guarantee
strong? A claim that is verified to the last bit may promise nothing, at epsilon 200. Its sentences
are for people who know neither the field nor this package; the annex has the terms.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType

from accounting.checks import is_large_delta
from accounting.report import Assumption, AssumptionStatus, PrivacyReport, up
from privpart.cli.output import Table
from privpart.cli.pages.guarantee import BADGES
from privpart.cli.pages.page import Badge, Block, Page, Picture, Section, Tone, Verdict

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
_STATUSES: tuple[AssumptionStatus, ...] = (
    *("violated", "asserted", "vouched"),
    *("verified", "enforced"),
)
"""The order on paper: what is missing first."""
_RESTS_ON: dict[AssumptionStatus, str] = {
    "violated": "false",
    "asserted": "assumed; nobody checked it and nobody answers for it",
    "vouched": "somebody's word; nothing was checked",
    "verified": "checked in the records of the run when this report was written",
    "enforced": "made so by the program while it ran",
}
_PLAIN = {
    "participation": "nobody takes part more often than planned",
    "clipping": "how much any one contribution can change is limited",
    "divisor": "the result does not show how many took part in a round",
    "noise": "the random noise is secret and was used once",
    "choices": "nobody looked at private data to choose the settings",
    "floating-point": "rounding in the computer gives nobody away",
    "gradients": "each contribution was computed from its own data alone",
    "loop": "the training program publishes nothing but the model",
    "data": "each item of the data is counted as one, however often it is used",
    "delta": "delta is far below 1 / number of people",
    "poisson-sampling": "who takes part in a round was drawn at random, as planned",
    "balls-in-bins": "who takes part in a round was drawn at random, as planned",
    "sampling": "who takes part in a round was drawn at random, as planned",
    "hidden-sample": "nobody learns who was drawn for a round",
    "public-constants": "how people are drawn was fixed before the training",
    "stateless-members": "what one contributes depends on nothing but one's data and the model",
    "metrics": "nobody's data test the model more often than planned",
    "draw-seed": "the estimate of epsilon was not repeated until it was small",
    "selection": "how many models were tried was drawn at random, and stays secret",
    "candidates": "what was tried was listed before anybody saw private data",
    "score": "the best model was chosen by public data, or by figures whose cost is counted",
}
"""Conditions by their code, for people who decide; the annex has them in full."""
_GLOSSARY = {
    "differential privacy": "a promise about a computation: its results hardly depend on whether "
    "any one person's data were used",
    "client": "one participant in the training, usually a person or a device",
    "example": "one item of the data, of which a person may have many",
    "epsilon": "how much a result may depend on one's data; 0 is not at all, and each 0.7 more "
    "doubles the factor",
    "delta": "a chance on top of that factor; must be far below 1 / number of people",
    "noise": "random numbers that are added to hide what any one contributed",
    "simulation": "a training that tries something out; anybody can remove its noise",
    "mu": "what epsilon is computed from; it adds up over releases as its square",
    "canary": "made-up data, planted to measure how well their presence can be told",
    "lower bound": "what an attack has shown; a better attack may show more",
    "update": "what a participant sends: how its data would change the model",
    "view": "the part of an update that an attacker sees",
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
    figures = report.epsilon, report.delta, report.advantage
    return strength_of(*figures, question, unit=report.a_unit)


def strength_of(
    epsilon: float, delta: float, advantage: float, question: str, *, unit: str
) -> Verdict:
    """Return the tier of an epsilon at a delta, and what it allows for a unit, with its article."""
    tone, tier = next(badge for most, badge in _TIERS.items() if epsilon <= most)
    # P(|loss| > t) <= (1 + e^-t) delta / (1 - e^(epsilon - t)) for every t; here epsilon + ln 2.
    rarely = min(1.0, (2 + math.exp(-epsilon)) * delta)
    meaning = [
        f"The data of {unit} make no conclusion more than {_factor(epsilon)} times as likely as it "
        f"would be without them, apart from an added chance of {_one_in(delta)}.",
        f"In odds: no {unit.split()[1]}'s data change the odds of any conclusion by more than a "
        f"factor of {_factor(epsilon + _LN2)}, except with probability {_one_in(rarely)}.",
        f"Whoever guesses whether {unit} took part, at even odds, is right at most "
        f"{up(50 * (1 + advantage), 3)} % of the time; 50 % is a coin.",
    ]
    if unit == "an example":
        meaning.append("One example is protected, not a person of whom there are several.")
    answer = f"{tier}: epsilon {up(epsilon)} at delta {up(delta)}"
    return Verdict(tone, answer, meaning, question)


_LN2 = math.log(2)


def _factor(exponent: float) -> str:
    """Return e^exponent, rounded up to three digits; above a million, to a power of ten."""
    if exponent > math.log(1e6):
        return f"10^{math.ceil(exponent / math.log(10))}"
    return f"{float(up(math.exp(exponent) * (1 + 1e-12), 3)):,g}"


def _one_in(probability: float) -> str:
    """Return a probability in words, rounded up.

    >>> _one_in(1e-5), _one_in(3e-7)
    ('1 in 100,000', '1 in 3,330,000')
    """
    often = 1 / Decimal(up(probability))
    unit = Decimal(10) ** max(0, often.adjusted() - 2)
    whole = int(often / unit) * int(unit)
    return f"1 in {whole:,}" if 1 < whole < 10**12 else up(probability)


def counts(report: PrivacyReport) -> str:
    """Return how many conditions have each status, by the words of their badges."""
    number = Counter(a.status for a in report.assumptions)
    shown = [status for status in _STATUSES if number[status] or status == "asserted"]
    parts = [f"{number[status]} {BADGES[status][1]}" for status in reversed(shown)]
    return f"Of {len(report.assumptions)} conditions: {', '.join(parts)}."


def subject(
    about: Mapping[str, str],
    report: PrivacyReport,
    vouchers: Mapping[str, Mapping[str, str | None]] = MappingProxyType({}),
    trusted: str | None = None,
    together: str = "",
) -> Section:
    """Return what was trained, for whom and on whose data; what nobody stated is a named blank.

    Args:
        about: what a plan's table [about] states.
        report: the guarantee.
        vouchers: who vouched, "by" and "at", by condition.
        trusted: who sees more than what is released, if not every update reaches the server.
        together: what all runs about the same people cost, if there are several.
    """
    facts = [
        (name, about.get(key) or f"not stated: {key}, in [about] of the plan")
        for key, name in _LABELS.items()
    ]
    number = report.population
    people = f"not stated: how many {report.unit}s there are"
    people = people if number is None else f"{number:,} {report.unit}s"
    each = f"{report.a_unit}; who is several {report.unit}s is protected less"
    who = "whoever trains" if report.unit == "example" else "the server"
    sees = f"{who}, every contribution: it must be trusted"
    lasts = "without end, for what was released; whatever else is released about them adds to it"
    if (chosen := report.selection) is not None:
        # Its number of trainings is secret; the average is part of the plan.
        selected = (
            f"the best of several trainings, {chosen['expected']:g} on average, each with one of "
            f"{chosen['candidates']} settings listed before; how many there were stays secret. "
            "Epsilon counts them all and the choice; one alone would have epsilon "
            f"{up(chosen['epsilon_of_one'])}"
        )
        facts.append(("how it was chosen", selected))
    facts += [
        ("how many", people),
        ("protected is", each),
        ("who sees more", trusted or sees),
        *([("all runs about them", together)] if together else []),
        ("vouched for by", _vouched(vouchers)),
        ("the guarantee lasts", lasts),
        ("date of this report", f"{datetime.now(UTC):%d %B %Y}"),
    ]
    return Section("What, by whom, about whom", [Block("facts", facts)])


def _vouched(vouchers: Mapping[str, Mapping[str, str | None]]) -> str:
    names = [
        f"{own['by'] or 'the reader of this report'}, {(own['at'] or 'no date')[:10]}"
        for own in vouchers.values()
    ]
    return "; ".join(dict.fromkeys(names)) or "nobody"


def support(report: PrivacyReport) -> Section:
    """Return what the claim rests on: the program, its records, people, or nothing."""
    items = []
    for status in _STATUSES:
        if of_status := [a for a in report.assumptions if a.status == status]:
            says = f"{'; '.join(map(_in_words, of_status))}."
            items.append((*BADGES[status], "", f"{says[0].upper()}{says[1:]}", ()))
    return Section("What the claim rests on", [Block("badged", items)])


def _in_words(condition: Assumption) -> str:
    return _PLAIN.get(condition.code, condition.text)


def open_ends(report: PrivacyReport) -> Section:
    """Return what the guarantee does not cover."""
    return Section("What it does not cover", [Block("points", report.not_covered)])


def glossary(*words: str, statuses: Sequence[AssumptionStatus] = ()) -> Section:
    """Return what words of the first sheet mean, and the badges of statuses."""
    facts = [(word, _GLOSSARY[word]) for word in words]
    facts += [(BADGES[status][1], _RESTS_ON[status]) for status in statuses]
    return Section("Words on this page", [Block("facts", facts)])


def words_of(report: PrivacyReport) -> Section:
    """Return the glossary of a first sheet on one guarantee."""
    used = {a.status for a in report.assumptions}
    statuses = [status for status in reversed(_STATUSES) if status in used]
    words = ("differential privacy", report.unit, "epsilon", "delta", "noise")
    return glossary(*words, statuses=statuses)


def tables_page(
    title: str,
    parts: Sequence[Table | str],
    *,
    answer: str,
    tone: Tone = "plain",
    pictures: Sequence[Picture] = (),
    words: Sequence[str] = ("epsilon", "delta", "noise", "simulation"),
) -> Page:
    """Return the page of what ``print_all`` prints, below its answer in a few words.

    Sentences stand below the table that they follow; ``words`` are explained at the end.
    """
    blocks = [
        Block("prose", part.strip().split("\n\n")) if isinstance(part, str) else part
        for part in parts
    ]
    return Page(
        title,
        [Verdict(tone, answer)],
        [
            Section("Pictures", [Block("pictures", pictures)] if pictures else []),
            Section("Tables", blocks),
            glossary(*words),
        ],
        "By the rules of privpart.",
    )
