"""The demo's pictures."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accounting import PrivacyReport
from attacks import LeakageReport
from privpart.cli.demo_tables import Accuracy

_COLOURS = {"full": "#b3552c", "partial": "#1f6f8b"}
_INK = "#333333"


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


def leakage(audits: Sequence[LeakageReport], path: Path) -> None:
    """Draw a row per image: the truth, then what each view gave away, with its PSNR."""
    columns = [(row.view, row) for audit in audits for row in audit.rows]
    truth = audits[0].truth
    figure = Figure(
        figsize=(1.25 * (len(columns) + 1), 1.45 * len(truth) + 0.4), layout="constrained"
    )
    grid = figure.subplots(len(truth), len(columns) + 1, squeeze=False)
    for i, line in enumerate(grid):
        best = max(scores[i] for scores in audits[0].baselines.values())
        _image(line[0], truth[i, 0].tolist(), f"baseline {best:.1f} dB")
        for cell, (_, row) in zip(line[1:], columns, strict=True):
            _image(cell, row.reconstructions[i, 0].tolist(), f"{row.psnr[i]:.1f} dB")
    for cell, title in zip(grid[0], ["truth", *(view for view, _ in columns)], strict=True):
        cell.set_title(title, fontsize=8, color=_INK)
    figure.savefig(path, dpi=150)


def _image(axes: Axes, pixels: list[list[float]], caption: str) -> None:
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel(caption, fontsize=7, color=_INK)
    axes.set_xticks([])
    axes.set_yticks([])
