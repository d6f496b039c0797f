"""The demo's pictures."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from accounting import PrivacyReport
from privpart.cli.demo_tables import Accuracy

_COLOURS = {"full": "#b3552c", "partial": "#1f6f8b"}


def accuracy(accuracies: Sequence[Accuracy], budgets: Sequence[PrivacyReport], path: Path) -> None:
    """Draw accuracy against noise, with one standard deviation as a band and epsilon beneath."""
    levels = list(dict.fromkeys(a.noise_multiplier for a in accuracies))
    epsilon = {b.noise_multiplier: f"ε = {b.epsilon:.3g}" for b in budgets}
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for part, colour in _COLOURS.items():
        rows = [a for a in accuracies if a.part == part]
        middle = [100 * a.mean for a in rows]
        spread = [100 * (a.spread or 0.0) for a in rows]
        share = rows[0].trained / rows[0].numbers
        label = f"{part}: {share:.0%} of the parameters train"
        axes.plot(range(len(rows)), middle, color=colour, marker="o", label=label)
        axes.fill_between(
            range(len(rows)),
            [m - s for m, s in zip(middle, spread, strict=True)],
            [m + s for m, s in zip(middle, spread, strict=True)],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
    axes.set_xticks(
        range(len(levels)), [f"{z:g}\n{epsilon.get(z, 'no guarantee')}" for z in levels]
    )
    axes.set_xlabel(f"noise multiplier, and its cost per user at δ = {budgets[0].delta:g}")
    axes.set_ylabel("test accuracy (%)")
    axes.set_ylim(0, 100)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=150)
