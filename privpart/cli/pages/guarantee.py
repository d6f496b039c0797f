"""Guarantee on a page: its figures, its pictures, and its assumptions in three layers.

Every figure is of a ``PrivacyReport``, written by the rules of its text form. The curves are upper
bounds at every point that is drawn, between two computed ones, too.

The layers are those of NIST SP 800-226: at the top what epsilon means and for whom, in the middle
whether the algorithm does what its proof says, at the bottom whom one trusts with the data.
"""

import math

from matplotlib.figure import Figure

from accounting import gaussian
from accounting.report import Assumption, PrivacyReport, claims, up
from privpart.cli.pages import drawing
from privpart.cli.pages.page import (
    Badged,
    Block,
    Facts,
    Picture,
    Pictures,
    Points,
    Prose,
    Section,
    Tone,
    table_of,
)

BADGES: dict[str, tuple[Tone, str]] = {
    "violated": ("bad", "violated"),
    "asserted": ("caution", "not checked"),
    "vouched": ("plain", "vouched for"),
    "enforced": ("good", "enforced"),
    "verified": ("good", "verified"),
}
"""Tone and words of the status of an assumption."""
TOP, MIDDLE, BOTTOM = (
    "Top: epsilon and the unit of privacy",
    "Middle: the algorithm and its program",
    "Bottom: trust, access and the data",
)
LAYERS = {
    "delta": TOP,
    "participation": TOP,
    "data": TOP,
    "poisson-sampling": TOP,
    "balls-in-bins": TOP,
    "sampling": TOP,
    "hidden-sample": TOP,
    "public-constants": TOP,
    "clipping": MIDDLE,
    "divisor": MIDDLE,
    "noise": MIDDLE,
    "release": MIDDLE,
    "gradients": MIDDLE,
    "choices": MIDDLE,
    "floating-point": MIDDLE,
    "draw-seed": MIDDLE,
    "loop": BOTTOM,
}
"""Layer of each assumption by its code; another code is of the middle."""
_FIRST = ("epsilon", "delta", "unit", "mechanism", "mu", "advantage")
"""Figures that a reader looks for first."""
_CURVE = 240
_CHANCE = "guessing"


def key_figures(report: PrivacyReport) -> Facts:
    """Return the figures that a reader looks for first."""
    figures = report.figures()
    return Facts(tuple((name, figures[name].value) for name in _FIRST), large=True)


def statement_of(report: PrivacyReport) -> Prose:
    """Return the claim in plain English, as ``PrivacyReport.statement`` begins."""
    return Prose((*claims(report), *(f"Warning: {text}" for text in report.warnings)))


def guarantee_section(report: PrivacyReport, *, lead: str = "") -> Section:
    """Return the two curves of a guarantee, and its points in numbers."""
    rates = table_of(
        "The most that any test of whether somebody took part can reach",
        ("false alarms", "detected, at most"),
        [(f"{100 * fpr:g} %", f"{up(100 * tpr)} %") for fpr, tpr in report.tpr_at_fpr],
    )
    pictures = Pictures(
        (
            Picture(
                epsilon_curve(report),
                f"Epsilon against delta: {up(report.epsilon)} at {report.delta:g}.",
                "Epsilon for every delta: a guarantee has many pairs, of which a report names one.",
            ),
            Picture(
                attack_curve(report),
                "The greatest true-positive rate against the false-positive rate.",
                f"Whoever tests whether one {report.unit} took part, with all that was released "
                "and any computing power, stays in the shaded area.",
            ),
        )
    )
    return Section("Guarantee", (pictures, rates), lead)


def epsilon_curve(report: PrivacyReport) -> Figure:
    """Draw epsilon against delta, rounded up, with the pair of the report."""
    figure, axes = drawing.panel(4.4, 3.1)
    middle = math.log10(report.delta)
    low, high = middle - 4, max(middle, min(middle + 4, -1.0))
    deltas = [10 ** (low + (high - low) * i / _CURVE) for i in range(_CURVE + 1)]
    curve = [report.guarantee.epsilon(delta) for delta in deltas]
    # epsilon falls with delta, so the left end of each step bounds the whole of it
    axes.plot(deltas, curve, color=drawing.SERIES[0], drawstyle="steps-post")
    amplified = report.sampling is not None
    label = f"ε = {up(report.epsilon)}"
    if amplified:
        axes.annotate(
            "if it is known who takes part", (deltas[_CURVE // 3], curve[_CURVE // 3]), (6, 6),
            textcoords="offset points", fontsize=7.5, color=drawing.SERIES[0],
        )  # fmt: skip
        label += ", who takes part is secret"
    axes.plot([report.delta], [report.epsilon], "o", color=drawing.SERIES[1], markersize=6)
    axes.annotate(
        label, (report.delta, report.epsilon), (8, 6), textcoords="offset points",
        color=drawing.SERIES[1], weight="bold",
    )  # fmt: skip
    axes.set_ylim(0, 1.1 * max(*curve, report.epsilon))
    axes.set_xlim(deltas[0], deltas[-1])
    drawing.log_axis(axes.xaxis, "δ")
    axes.set_ylabel("ε, at most")
    return figure


def attack_curve(report: PrivacyReport) -> Figure:
    """Draw the greatest true-positive rate against the false-positive rate, rounded up."""
    figure, axes = drawing.panel(4.4, 3.1)
    # dense at the left, where it is steep
    rates = [(i / _CURVE) ** 2 for i in range(1, _CURVE)]
    most = [min(1.0, gaussian.true_positive_rate(report.mu, rate)) for rate in rates]
    xs, ys = [0.0, *(100 * r for r in rates), 100.0], [0.0, *(100 * t for t in most), 100.0]
    # the rate rises, so the right end of each step bounds the whole of it
    axes.fill_between(xs, ys, color=drawing.SERIES[0], alpha=0.13, step="pre", linewidth=0)
    axes.plot(xs, ys, color=drawing.SERIES[0], drawstyle="steps-pre")
    axes.plot([0, 100], [0, 100], color=drawing.FAINT, linestyle=drawing.DASHES[1], linewidth=1)
    axes.annotate(
        _CHANCE, (62, 62), (0, -11), textcoords="offset points", fontsize=8, color=drawing.FAINT
    )
    axes.set(xlim=(0, 100), ylim=(0, 100))
    axes.set_xlabel("false alarms (%)")
    axes.set_ylabel("detected, at most (%)")
    return figure


def assumptions_section(
    report: PrivacyReport,
    *,
    below: tuple[Block, ...] = (),
    utility: str = "",
) -> Section:
    """Return the assumptions by layer and status, and what each layer asks that nothing here says.

    Args:
        report: whose assumptions.
        below: blocks about who holds what, for the lowest layer.
        utility: a sentence on what the noise costs; "" if nothing was measured.
    """
    by_layer: dict[str, list[Assumption]] = {TOP: [], MIDDLE: [], BOTTOM: []}
    for assumption in report.assumptions:
        by_layer[LAYERS.get(assumption.code, MIDDLE)].append(assumption)
    open_questions = {
        TOP: (
            f"Unit: one {report.unit}. A person who is several {report.unit}s is covered as a "
            "group, at a higher epsilon.",
        ),
        MIDDLE: (
            f"Utility: {utility or 'not measured here.'}",
            "Bias: not measured here. Noise and clipping can cost small groups more accuracy.",
            "Side channels, such as time, memory and traffic: not covered.",
        ),
        BOTTOM: (
            f"Trust model: {report.trust_model}.",
            "Access to the raw data, and how they were collected: nothing here says. Ask the "
            "curator.",
        ),
    }
    blocks: list[Block] = []
    for layer, assumptions in by_layer.items():
        # what is violated or not checked first: a reader may stop early
        ordered = sorted(assumptions, key=lambda a: list(BADGES).index(a.status))
        blocks.append(Badged(layer, tuple(map(badged, ordered))))
        blocks.append(Points(open_questions[layer]))
    return Section(
        "What it rests on",
        (*blocks, *below),
        "In the layers of NIST SP 800-226. 'Enforced' and 'verified' are said only of what was "
        "checked when this report was written.",
    )


def badged(assumption: Assumption) -> tuple[Tone, str, str, str, tuple[str, ...]]:
    """Return an assumption as an item of a list with badges."""
    tone, word = BADGES[assumption.status]
    below = [f"Evidence: {assumption.evidence}."] if assumption.evidence else []
    false = "It is false" if assumption.status == "violated" else "If it is false"
    below.append(f"{false}: {assumption.consequence}.")
    return tone, word, assumption.code, f"{assumption.text}.", tuple(below)


def coverage_section(report: PrivacyReport) -> Section:
    """Return what the guarantee covers, and what it does not."""
    return Section(
        "What it covers",
        (Points(report.covered, "Covered"), Points(report.not_covered, "Not covered")),
    )


def mechanism_facts(report: PrivacyReport) -> Facts:
    """Return the mechanism and how its cost was computed."""
    rows = [(name, figure.text) for name, figure in report.figures().items()]
    return Facts(
        (
            *((name, text) for name, text in rows if name not in _FIRST),
            ("fingerprint", report.mechanism_fingerprint[:12]),
            ("accounting", f"{report.formula}, privpart {report.version}"),
        )
    )
