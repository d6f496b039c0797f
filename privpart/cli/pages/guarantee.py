"""Guarantee on a page: its figures, its pictures, and its assumptions in three layers.

Every figure is of a ``PrivacyReport``, written by the rules of its text form. The curves are upper
bounds at every point that is drawn, between two computed ones, too.

The layers are those of NIST SP 800-226: at the top what epsilon means and for whom, in the middle
whether the algorithm does what its proof says, at the bottom whom one trusts with the data.
"""

import math
from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure

from accounting.checks import ConfigError
from accounting.claims import releases_of, together
from accounting.guarantee import Cost
from accounting.report import Assumption, PrivacyReport, claims, up
from privpart.cli.output import Table
from privpart.cli.pages import drawing
from privpart.cli.pages.page import Badge, Block, Picture, Section

BADGES: dict[str, Badge] = {
    "violated": ("bad", "violated"),
    "wrong": ("bad", "wrong"),
    "asserted": ("caution", "not checked"),
    "vouched": ("plain", "vouched for"),
    "enforced": ("good", "enforced"),
    "verified": ("good", "verified"),
}
"""Tone and words of the status of an assumption, or of a check."""
LAYERS = {
    "Top: epsilon and the unit of privacy": (
        *("delta", "participation", "data", "poisson-sampling", "balls-in-bins", "sampling"),
        *("hidden-sample", "public-constants", "stateless-members", "metrics"),
    ),
    "Middle: the algorithm and its program": (
        *("clipping", "divisor", "noise", "gradients", "choices", "floating-point"),
        *("draw-seed", "selection", "candidates", "score"),
    ),
    "Bottom: trust, access and the data": ("loop",),
}
"""Codes of the assumptions of each layer; another code is of the middle."""
_FIRST = ("epsilon", "delta", "unit", "mechanism", "mu", "advantage")
"""Figures that a reader looks for first."""
_CURVE = 240


def key_figures(report: PrivacyReport) -> Block:
    """Return the figures that a reader looks for first."""
    figures = report.figures()
    return Block("figures", [(name, figures[name].value) for name in _FIRST])


def statement_of(report: PrivacyReport) -> Block:
    """Return the claim in plain English, as ``PrivacyReport.statement`` begins."""
    return Block("prose", [*claims(report), *(f"Warning: {text}" for text in report.warnings)])


def guarantee_section(report: PrivacyReport, *, lead: str = "") -> Section:
    """Return the two curves of a guarantee, and its points in numbers."""
    rates = Table(
        "The most that any test of whether somebody took part can reach",
        ("false alarms", "detected, at most"),
        [(f"{100 * fpr:g} %", f"{up(100 * tpr)} %") for fpr, tpr in report.tpr_at_fpr],
    )
    hidden = bool(report.samplers)
    cost = report.cost
    if report.selection is not None:  # its profile is a table, its own accountant slow
        cost = together(releases_of(cost))
    pictures = curves(cost, report.delta, report.epsilon, unit=report.unit, hidden=hidden)
    return Section("Guarantee", [Block("pictures", pictures), rates], lead)


def curves(cost: Cost, delta: float, epsilon: float, *, unit: str, hidden: bool) -> list[Picture]:
    """Return the two curves of a cost, with the pair that is quoted.

    ``hidden`` says whether it holds while nobody learns who was sampled.
    """
    unaware = " that does not know who was sampled" * hidden
    return [
        Picture(
            epsilon_curve(cost, delta, epsilon, hidden=hidden),
            f"Epsilon against delta: {up(epsilon)} at {delta:g}.",
            "The guarantee at every delta; the dot is the pair quoted above.",
        ),
        Picture(
            attack_curve(cost),
            "The greatest true-positive rate against the false-positive rate.",
            f"No test{unaware} for the participation of one {unit} can be above this curve, "
            "whatever its computing power.",
        ),
    ]


def epsilon_curve(cost: Cost, delta: float, epsilon: float, *, hidden: bool) -> Figure:
    """Draw epsilon against delta, rounded up, with the pair that is quoted."""
    figure, axes = drawing.panel(4.4, 3.1)
    middle = math.log10(delta)
    low, high = middle - 4, max(middle, min(middle + 4, -1.0))
    places = [10 ** (low + (high - low) * i / _CURVE) for i in range(_CURVE + 1)]
    pairs = [(place, e) for place in places if (e := _epsilon(cost, place)) is not None]
    deltas, curve = zip(*pairs, strict=True) if pairs else ((delta,), (epsilon,))
    label = "while who takes part is secret" * hidden
    # epsilon falls with delta, so the left end of each step bounds the whole of it
    axes.plot(deltas, curve, color=drawing.SERIES[0], drawstyle="steps-post", label=label)
    point = delta, epsilon
    style: Any = {"color": drawing.SERIES[1]}
    axes.plot(*point, "o", markersize=6, **style)
    text = f"ε = {up(epsilon)}"
    axes.annotate(text, point, (8, 6), textcoords="offset points", weight="bold", **style)
    axes.set(xlim=(places[0], places[-1]), ylim=(0, 1.1 * max(*curve, epsilon)))
    drawing.log_axis(axes.xaxis, "δ")
    axes.set_ylabel("ε, at most")
    drawing.legend(axes, minimum=1)
    return figure


def _epsilon(cost: Cost, delta: float) -> float | None:
    """Return a cost's epsilon; None at a delta that its releases alone reach, or its rounding."""
    try:
        # A selection's epsilon takes a tenth of a second, and a curve has hundreds of them.
        return cost.coarse_epsilon(delta)
    except ConfigError:
        return None


def attack_curve(cost: Cost) -> Figure:
    """Draw the greatest true-positive rate against the false-positive rate, rounded up."""
    figure, axes = drawing.panel(4.4, 3.1)
    # dense at the left, where it is steep
    rates = [(i / _CURVE) ** 2 for i in range(1, _CURVE)]
    xs = [0.0, *(100 * rate for rate in rates), 100.0]
    ys = [0.0, *(100 * min(1.0, cost.tpr_at_fpr(rate)) for rate in rates), 100.0]
    # the rate rises, so the right end of each step bounds the whole of it
    axes.fill_between(xs, ys, color=drawing.SERIES[0], alpha=0.13, step="pre", linewidth=0)
    axes.plot(xs, ys, color=drawing.SERIES[0], drawstyle="steps-pre")
    guessing: Any = {"color": drawing.FAINT, "linestyle": drawing.DASHES[1], "linewidth": 1}
    axes.plot([0, 100], [0, 100], label="guessing", **guessing)
    axes.set(xlim=(0, 100), ylim=(0, 100))
    axes.set(xlabel="false alarms (%)", ylabel="detected, at most (%)")
    drawing.legend(axes, minimum=1, loc="lower right")
    return figure


def assumptions_section(report: PrivacyReport) -> Section:
    """Return the assumptions by layer, what the noise costs, and what nothing here says."""
    top, middle, bottom = LAYERS
    open_questions = {
        top: (
            f"Unit: one {report.unit}. A person who is several {report.unit}s is covered as a "
            "group, at a higher epsilon.",
        ),
        middle: (
            "Utility: not measured here.",
            "Bias: not measured here. Noise and clipping can cost small groups more accuracy.",
            "Side channels, such as time, memory and traffic: not covered.",
        ),
        bottom: (
            f"Trust model: {report.trust_model}.",
            "Access to the raw data, and how they were collected: nothing here says. Ask the "
            "curator.",
        ),
    }
    elsewhere = {*LAYERS[top], *LAYERS[bottom]}
    blocks = []
    for layer, codes in LAYERS.items():
        of_layer = [
            a
            for a in report.assumptions
            if a.code in codes or (layer == middle and a.code not in elsewhere)
        ]
        blocks += [badged(of_layer, layer), Block("points", open_questions[layer])]
    return Section(
        "What it rests on",
        blocks,
        "In the layers of NIST SP 800-226. 'Enforced' and 'verified' are said only of what was "
        "checked when this report was written.",
    )


def badged(assumptions: Iterable[Assumption], heading: str = "") -> Block:
    """Return assumptions as a list with badges, what is violated or not checked first."""
    items = []
    # a reader may stop early
    for a in sorted(assumptions, key=lambda a: list(BADGES).index(a.status)):
        evidence = [f"Evidence: {a.evidence}."] if a.evidence else []
        false = "It is false" if a.status == "violated" else "If it is false"
        below = [*evidence, f"{false}: {a.consequence}."]
        items.append((*BADGES[a.status], a.code, f"{a.text}.", below))
    return Block("badged", items, heading)


def coverage_section(report: PrivacyReport) -> Section:
    """Return what the guarantee covers, and what it does not."""
    covered = Block("points", report.covered, "Covered")
    return Section("What it covers", [covered, Block("points", report.not_covered, "Not covered")])


def mechanism_facts(report: PrivacyReport) -> Block:
    """Return the mechanism and how its cost was computed."""
    figures = [(name, f.text) for name, f in report.figures().items() if name not in _FIRST]
    fingerprint = ("fingerprint", report.mechanism_fingerprint[:12])
    accounting = ("accounting", f"{report.formula}, privpart {report.version}")
    return Block("facts", [*figures, fingerprint, accounting])
