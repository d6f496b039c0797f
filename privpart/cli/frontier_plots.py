"""Frontier plots: accuracy and paired differences against epsilon, and accuracy against bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accounting.pages import drawing
from accounting.report import up

_AWAY = 2.6
"""Where results without noise stand beside a budget: at so many times the largest epsilon."""
_APART = 0.02
"""Share of the axis by which each further arm is moved to the right."""


def draw_frontier(rows: Sequence[Mapping[str, Any]], title: str, out: Path) -> None:
    """Write ``accuracy-epsilon.png`` and ``accuracy-bytes.png`` of a study; bands are intervals.

    Args:
        rows: of its frontier, see ``privpart.study.frontier``.
        title: of both figures.
        out: folder to write to.
    """
    mechanisms = list(dict.fromkeys(r["mechanism"] for r in rows if r["epsilon"] is not None))
    said = f"{title}\nsimulation with seeded noise: not private"
    if mechanisms:
        wide = 1.2 + 5.2 * len(mechanisms)
        figure = Figure(figsize=(wide, 6.4), layout="constrained")
        above, below = figure.subplots(
            2, len(mechanisms), sharex="col", sharey="row", squeeze=False
        )
        for number, mechanism in enumerate(mechanisms):
            _draw_budgets(above[number], rows, mechanism)
            _draw_differences(below[number], rows, mechanism)
        above[0].set_ylabel("metric on test examples")
        below[0].set_ylabel("difference to the first arm, by seed")
        above[0].legend(frameon=False, fontsize=8)
        figure.suptitle(said, fontsize=9)
        drawing.save(figure, out / "accuracy-epsilon.png")
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    panel = figure.add_subplot()
    levels = list(dict.fromkeys((r["mechanism"], r["level"]) for r in rows))
    for number, (mechanism, level) in enumerate(levels):
        own = [r for r in rows if (r["mechanism"], r["level"]) == (mechanism, level)]
        name = (
            "no noise" if own[0]["epsilon"] is None else f"{mechanism}, ε = {up(own[0]['epsilon'])}"
        )
        colour = drawing.SERIES[number % len(drawing.SERIES)]
        _draw_band(panel, own, [r["bytes_up"] for r in own], colour, name)
    drawing.log_axis(panel.xaxis, "bytes that a client sends in a round")
    panel.set_ylabel("metric on test examples")
    panel.set_title(said, fontsize=9)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    drawing.save(figure, out / "accuracy-bytes.png")


def _draw_budgets(panel: Axes, rows: Sequence[Mapping[str, Any]], mechanism: str) -> None:
    """Draw the arms of one mechanism against epsilon, and without noise at the right edge."""
    edge = _without_noise_at(rows, mechanism)
    for number, arm in enumerate(dict.fromkeys(r["arm"] for r in rows)):
        colour = drawing.SERIES[number % len(drawing.SERIES)]
        own = [r for r in rows if r["arm"] == arm and r["mechanism"] == mechanism]
        if own:
            moved = _apart(rows, mechanism) ** number if len(own) == 1 else 1.0
            _draw_band(panel, own, [moved * r["epsilon"] for r in own], colour, arm)
        for row in (r for r in rows if r["arm"] == arm and r["epsilon"] is None):
            away = edge * _apart(rows, mechanism) ** number
            low, high = row["low"] or row["metric"], row["high"] or row["metric"]
            panel.plot([away, away], [low, high], color=colour)
            panel.plot([away], [row["metric"]], color=colour, marker="s")
    panel.set_xscale("log")
    panel.set_title(mechanism, fontsize=9)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_differences(panel: Axes, rows: Sequence[Mapping[str, Any]], mechanism: str) -> None:
    """Draw each arm's paired difference to the first, with its interval."""
    edge = _without_noise_at(rows, mechanism)
    for number, arm in enumerate(dict.fromkeys(r["arm"] for r in rows)):
        own = [r for r in rows if r["arm"] == arm and r["difference_low"] is not None]
        for row in own:
            if row["mechanism"] != mechanism and row["epsilon"] is not None:
                continue
            silent = row["epsilon"] is None
            x = (edge if silent else row["epsilon"]) * _apart(rows, mechanism) ** number
            ends = [row["difference_low"], row["difference_high"]]
            colour = drawing.SERIES[number % len(drawing.SERIES)]
            panel.plot([x, x], ends, color=colour)
            panel.plot([x], [row["difference"]], color=colour, marker="s" if silent else "o")
    panel.axhline(0, color="#444444", linewidth=0.8)
    # the last panel of a column: its ticks are those of all
    levels = sorted({r["epsilon"] for r in rows if r["mechanism"] == mechanism})
    ticks = {level: up(level) for level in levels}
    if any(r["epsilon"] is None for r in rows):
        ticks[edge] = "no noise"
    panel.set_xticks(list(ticks), list(ticks.values()))
    panel.minorticks_off()
    panel.set_xlabel("epsilon, log scale")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _without_noise_at(rows: Sequence[Mapping[str, Any]], mechanism: str) -> float:
    """Return where on the axis of epsilon the first arm's result without noise stands."""
    return _AWAY * float(max(r["epsilon"] for r in rows if r["mechanism"] == mechanism))


def _apart(rows: Sequence[Mapping[str, Any]], mechanism: str) -> float:
    """Return the factor between the places of two arms at one epsilon."""
    least = float(min(r["epsilon"] for r in rows if r["mechanism"] == mechanism))
    return float((_without_noise_at(rows, mechanism) / least) ** _APART)


def _draw_band(
    panel: Axes,
    rows: Sequence[Mapping[str, Any]],
    places: Sequence[float],
    colour: str,
    name: str,
) -> None:
    order = sorted(range(len(rows)), key=lambda i: places[i])
    ordered, xs = [rows[i] for i in order], [places[i] for i in order]
    lows = [row["metric"] if row["low"] is None else row["low"] for row in ordered]
    highs = [row["metric"] if row["high"] is None else row["high"] for row in ordered]
    panel.plot(xs, [row["metric"] for row in ordered], color=colour, marker="o", label=name)
    if len(xs) == 1:  # a band would have no width
        panel.vlines(xs, lows, highs, color=colour)
    panel.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
