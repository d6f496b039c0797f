"""A sweep's pictures: accuracy against noise, and against epsilon."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from privpart.experiment.sweep_store import Point

_COLOURS = ("#b3552c", "#1f6f8b", "#5b8c3a", "#7a4f9e", "#c09a1c", "#555555")


def draw(
    points: Sequence[Point], axes: Sequence[str], noise_axes: Sequence[str], out: Path
) -> None:
    """Write ``accuracy-noise.png`` and ``accuracy-epsilon.png``; bands are a deviation wide."""
    other = [axis for axis in axes if axis not in noise_axes]
    lines: dict[str, list[Point]] = {}
    for point in points:
        name = ", ".join(point.labels.get(axis, "") for axis in other)
        lines.setdefault(name, []).append(point)
    _draw(lines, lambda p: p.noise_multiplier, "noise multiplier", out / "accuracy-noise.png")
    deltas = {point.delta for point in points if point.epsilon is not None}
    at = f" at δ = {deltas.pop():g}" if len(deltas) == 1 else ""
    _draw(lines, lambda p: p.epsilon, f"epsilon{at}, log scale", out / "accuracy-epsilon.png")


def _draw(
    lines: dict[str, list[Point]], x_of: Callable[[Point], float | None], label: str, path: Path
) -> None:
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    panel = figure.add_subplot()
    drawn = False
    for number, (name, points) in enumerate(lines.items()):
        shown = sorted(
            (x, 100 * p.mean, 100 * (p.deviation or 0.0))
            for p in points
            if (x := x_of(p)) is not None and p.mean is not None
        )
        if not shown:
            continue
        drawn = True
        xs, middle, spread = zip(*shown, strict=True)
        colour = _COLOURS[number % len(_COLOURS)]
        panel.plot(xs, middle, color=colour, marker="o", label=name or "all")
        panel.fill_between(
            xs,
            [m - s for m, s in zip(middle, spread, strict=True)],
            [m + s for m, s in zip(middle, spread, strict=True)],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
    panel.set_xscale("log" if label.startswith("epsilon") and drawn else "linear")
    panel.set_xlabel(label)
    panel.set_ylabel("test accuracy (%)")
    panel.set_title("simulation with seeded noise: not private", fontsize=9)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    if drawn:
        panel.legend(frameon=False)
    figure.savefig(path, dpi=150)
