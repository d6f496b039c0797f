"""Plots: the pictures that the commands draw, with matplotlib and without torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from accounting import PrivacyReport
from accounting.report import up
from privpart.cli.pages import drawing

# Only for annotations: a budget's picture must not import torch.
if TYPE_CHECKING:
    from torch import Tensor

    from attacks import LeakageReport
    from attacks.defences import DefencePoint

VERDICTS: dict[str, str] = {
    "recovered": "#a3140f",
    "partial": "#c24e00",
    "no gain": "#0072b2",
    "ambiguous": "#aa4c83",
    "attack failed": "#5b6470",
    "nothing sent": "#8a6a00",
    "void": "#1b1f24",
}
"""Colour of each verdict on images, the most severe first."""
# An image of noise tells a reader nothing.
_HIDDEN = ("noise",)
# Width of an image, in inches.
_CELL = 1.12
_AWAY = 2.6
"""Where results without noise stand beside a budget: at so many times the largest epsilon."""
_APART = 0.02
"""Share of the axis by which each further arm is moved to the right."""
_Interval = tuple[float, float, float, float]
"""Place, value, and the ends of its interval."""


def draw_accuracy(
    rows: Sequence[Mapping[str, Any]], budgets: Sequence[PrivacyReport], path: Path
) -> None:
    """Draw the demo's accuracies against noise, whose ticks name its cost."""
    epsilon = {b.noise_multiplier: f"ε = {up(b.epsilon)}" for b in budgets}
    levels = sorted({row["noise_multiplier"] for row in rows} - {0.0})
    named = []
    for row in rows:
        part = f"{row['part']} ({row['trained'] / row['numbers']:.0%} train)"
        named.append((part, "", {**row, "mean_accuracy": row["mean"]}))
    label = f"noise multiplier, and its cost per user at δ = {budgets[0].delta:g}"
    figure = _sweep_figure(named, "noise_multiplier", label)
    (axes,) = figure.axes
    axes.set_xticks(levels, [f"{z:g}\n{epsilon.get(z, '')}" for z in levels])
    axes.set_ylim(0, 100)
    drawing.save(figure, path)


def sweep_figures(
    rows: Sequence[Mapping[str, Any]], axes: Sequence[str], noise_axes: Sequence[str]
) -> dict[str, Figure]:
    """Return accuracy against "noise" and against "epsilon", over the rows of a sweep's table.

    An axis of mechanisms sets the dashes, all other axes together the colours. Training without
    noise is a level.
    """
    other = [axis for axis in axes if axis not in noise_axes]
    dashed = next((axis for axis in other if "mechanism" in axis), None)
    parts = [axis for axis in other if axis != dashed]
    named = [
        (", ".join(str(row[axis]) for axis in parts), row[dashed] if dashed else "", row)
        for row in rows
        if _mean_of(row) is not None
    ]
    deltas = {row["delta"] for row in rows if row["epsilon"] is not None}
    at = f" at δ = {drawing.short(deltas.pop() or 0)}" if len(deltas) == 1 else ""
    return {
        "noise": _sweep_figure(named, "noise_multiplier", "noise multiplier"),
        "epsilon": _sweep_figure(named, "epsilon", f"ε{at}"),
    }


def _mean_of(row: Mapping[str, Any]) -> float | None:
    mean: float | None = row["mean_accuracy"]
    return row.get("mean_metric") if mean is None else mean


def _sweep_figure(
    named: Sequence[tuple[str, str, Mapping[str, Any]]], column: str, label: str
) -> Figure:
    figure, panel = drawing.panel()
    any_metric = any(row.get("mean_metric") is not None for _, _, row in named)
    factor = 1 if any_metric else 100
    lines: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    free: dict[str, tuple[float, float]] = {}
    for part, mechanism, row in named:
        result = factor * (_mean_of(row) or 0.0), factor * (row["standard_deviation"] or 0.0)
        if x := row[column]:
            lines.setdefault((part, mechanism), []).append((x, *result))
        else:
            free.setdefault(part, result)
    styles = drawing.Styles()
    for number, (names, line) in enumerate(lines.items()):
        noises, means, deviations = zip(*line, strict=True)
        # Lone points at one noise stand beside each other.
        moved = 1.0 if len(line) > 1 else (1 + _APART) ** number
        drawing.band(panel, [moved * z for z in noises], means, deviations, styles.of(*names))
    if lines:
        drawing.log_axis(panel.xaxis, label)
    for part, level in free.items():
        name = f"{part}, no noise" if part else "no noise"
        drawing.no_noise(panel, *level, label=name, color=styles.colour(part))
    drawing.legend(panel)
    panel.set_ylabel("metric" if any_metric else "test accuracy (%)")
    drawing.title(panel, "simulation with seeded noise: not private")
    return figure


def scores_figure(scores: NDArray[np.float64], present: NDArray[np.bool_], mu: float) -> Figure:
    """Draw histograms of canaries' scores beside what the accountant's mu allows at most.

    Scores, (m,), are in standard deviations of the noise; ``present``, (m,), says who took part.
    """
    figure, axes = drawing.panel(6.4, 3.6)
    low, high = float(scores.min()), float(scores.max())
    # Equal scores, as of a single canary, still need bins of some width.
    bins = np.linspace(low, high if high > low else low + 1, 41).tolist()
    at = np.linspace(min(low, -3.0), max(high, mu + 3.0), 300)
    for chosen, name, colour, dash, centre in (
        (~present, "absent", drawing.SERIES[0], drawing.DASHES[0], 0.0),
        (present, "took part", drawing.SERIES[1], drawing.DASHES[1], mu),
    ):
        if not chosen.any():
            continue
        axes.hist(scores[chosen], bins, density=True, color=colour, alpha=0.45, label=name)
        curve = np.exp(-((at - centre) ** 2) / 2) / np.sqrt(2 * np.pi)
        axes.plot(at, curve, color=colour, linewidth=1.2, linestyle=dash)
    drawing.target(axes, mu, f"accountant: mu {up(mu)}", vertical=True)
    axes.set_xlabel("score of a canary, in standard deviations of the noise")
    axes.set_ylabel("density")
    drawing.legend(axes)
    return figure


def learning_curve(
    names: Sequence[str], evaluations: Sequence[tuple[int, Mapping[str, float]]], error: float
) -> Figure:
    """Draw noised metrics against rounds; ``error`` is the standard deviation of their noise."""
    figure, axes = drawing.panel(6.4, 3.6)
    rounds = [number + 1 for number, _ in evaluations]
    styles = drawing.Styles()
    for name in names:
        values = [row[name] for _, row in evaluations]
        drawing.band(axes, rounds, values, [2 * error] * len(values), styles.of(name))
    axes.set_xlabel("rounds")
    axes.set_ylabel("noised mean over users")
    drawing.legend(axes, minimum=1)
    return figure


def draw_frontier(rows: Sequence[Mapping[str, Any]], title: str, out: Path) -> None:
    """Write ``accuracy-epsilon.png`` and ``accuracy-bytes.png`` of a study; bands are intervals.

    The rows are those of its frontier, see ``privpart.study.frontier``.
    """
    mechanisms = list(dict.fromkeys(r["mechanism"] for r in rows if r["epsilon"] is not None))
    title += "\nsimulation with seeded noise: not private"
    if mechanisms:
        figure, cells = drawing.panels(len(mechanisms), 5.6, 3.2, rows=2)
        for number, mechanism in enumerate(mechanisms):
            below = cells[number + len(mechanisms)]
            _draw_budgets(cells[number], below, rows, mechanism)
        drawing.legend(cells[0])
        cells[0].set_ylabel("metric on test examples")
        cells[len(mechanisms)].set_ylabel("difference to the first arm, by seed")
        figure.suptitle(title, fontsize=9)
        drawing.save(figure, out / "accuracy-epsilon.png")
    figure, axes = drawing.panel(6.4, 3.9)
    styles = drawing.Styles()
    for mechanism, level in dict.fromkeys((r["mechanism"], r["level"]) for r in rows):
        group = [r for r in rows if (r["mechanism"], r["level"]) == (mechanism, level)]
        epsilon = group[0]["epsilon"]
        name = "no noise" if epsilon is None else f"{mechanism}, ε = {up(epsilon)}"
        points = [_interval(r["bytes_up"], r) for r in group]
        drawing.band(axes, *_columns(points), styles.of(name))
    drawing.log_axis(axes.xaxis, "bytes that a client sends in a round")
    axes.set_ylabel("metric on test examples")
    drawing.title(axes, title)
    drawing.legend(axes)
    drawing.save(figure, out / "accuracy-bytes.png")


def _draw_budgets(
    above: Axes, below: Axes, rows: Sequence[Mapping[str, Any]], mechanism: str
) -> None:
    """Draw the arms of one mechanism against epsilon, and their paired differences to the first.

    Results without noise stand beside the largest epsilon.
    """
    levels = sorted({float(r["epsilon"]) for r in rows if r["mechanism"] == mechanism})
    edge = _AWAY * levels[-1]
    apart = (edge / levels[0]) ** _APART
    styles = drawing.Styles()
    for number, arm in enumerate(dict.fromkeys(r["arm"] for r in rows)):
        style = styles.of(arm)
        alone = style | {"linestyle": ""}
        noisy = [r for r in rows if (r["arm"], r["mechanism"]) == (arm, mechanism)]
        silent = [r for r in rows if r["arm"] == arm and r["epsilon"] is None]
        # Arms at one epsilon stand beside each other.
        moved = apart**number
        if noisy:
            shift = moved if len(noisy) == 1 else 1.0
            points = [_interval(shift * r["epsilon"], r) for r in noisy]
            drawing.band(above, *_columns(points), style)
        for row in silent:
            drawing.band(above, *_columns([_interval(edge * moved, row)]), alone)
        for row in (r for r in (*noisy, *silent) if r["difference_low"] is not None):
            ends = row["difference"], row["difference_low"], row["difference_high"]
            drawing.band(below, *_columns([(moved * (row["epsilon"] or edge), *ends)]), alone)
    below.axhline(0, color=drawing.FAINT, linewidth=0.8)
    ticks = {level: up(level) for level in levels}
    if any(r["epsilon"] is None for r in rows):
        ticks[edge] = "no noise"
    # The panel above shares the axis.
    below.set_xscale("log")
    below.set_xticks(list(ticks), list(ticks.values()))
    below.minorticks_off()
    below.set_xlabel("epsilon, log scale")
    drawing.title(above, mechanism)


def _columns(points: Sequence[_Interval]) -> tuple[Any, Any, Any]:
    """Return places, values and the two rows of errors of results with intervals."""
    xs, values, lows, highs = np.array(points, dtype=float).T
    return xs, values, (values - lows, highs - values)


def _interval(x: float, row: Mapping[str, Any]) -> _Interval:
    """Return a result at ``x`` with its interval, which a single training does not have."""
    metric = row["metric"]
    low, high = (metric if row[end] is None else row[end] for end in ("low", "high"))
    return x, metric, low, high


def draw_reconstructions(
    reports: Sequence["LeakageReport"], path: Path, *, images: int = 6
) -> None:
    """Draw a row per image: the truth, the baselines, and the best reconstruction of each view.

    Each image has its PSNR below it; the frame of a reconstruction shows its verdict as a colour.
    The reports, at least one, are on the same images; their views are drawn side by side.
    """
    first = reports[0]
    count = min(images, len(first.truth))
    guesses = [name for name in first.baseline_images if name not in _HIDDEN]
    rows = [row for report in reports for row in report.rows]
    noisy = any(row.adversary == "recipient" for row in rows)
    # narrow columns part the truth, the guesses and the reconstructions
    widths = [1.0, 0.12, *[1.0] * len(guesses), 0.12, *[1.0] * len(rows)]
    height = 1.17 * count * _CELL + 1.1
    figure = Figure(figsize=(_CELL * (len(widths) - 0.6), height))
    margins = {"left": 0.01, "right": 0.99, "top": 1 - 0.66 / height, "bottom": 0.42 / height}
    grid = {"width_ratios": widths, "wspace": 0.08, "hspace": 0.17, **margins}
    cells = figure.subplots(count, len(widths), squeeze=False, gridspec_kw=grid)
    for axes in cells[:, [1, 2 + len(guesses)]].flat:
        axes.set_axis_off()
    _heading(cells[0, 0], "truth", "", drawing.INK)
    for column, name in enumerate(guesses, 2):
        below = "oracle" if name in first.oracles else "no attack"
        _heading(cells[0, column], name, below, drawing.FAINT)
        for axes, image, score in zip(
            cells[:, column], first.baseline_images[name], first.baselines[name], strict=False
        ):
            _captioned(axes, image, f"{score:.1f} dB", drawing.FAINT)
    shown = set()
    for column, row in enumerate(rows, 3 + len(guesses)):
        who = f"{row.adversary}, " if noisy else ""
        _heading(cells[0, column], row.view, f"{who}{row.share:.1%} sent", drawing.INK)
        for axes, trial in zip(cells[:, column], row.best, strict=False):
            caption = trial.untried or f"{trial.psnr:.1f} dB"
            _captioned(axes, trial.result.x[trial.index], caption, drawing.INK)
            axes.spines[:].set(visible=True, edgecolor=VERDICTS[trial.verdict], linewidth=2.2)
            shown.add(trial.verdict)
    for axes, image in zip(cells[:, 0], first.truth, strict=False):
        _captioned(axes, image, "", drawing.INK)
    square: Any = {"marker": "s", "linestyle": "", "markersize": 7, "markerfacecolor": "none"}
    handles = [
        Line2D([], [], label=name, markeredgewidth=2, markeredgecolor=colour, **square)
        for name, colour in VERDICTS.items()
        if name in shown
    ]
    place: Any = {"loc": "lower center", "ncols": len(handles), "frameon": False}
    figure.legend(handles=handles, fontsize=7.5, labelcolor=drawing.INK, **place)
    drawing.save(figure, path)


def _captioned(axes: Axes, pixels: "Tensor", caption: str, ink: str) -> None:
    shown = pixels.detach().clamp(0, 1)[:3].movedim(0, 2)
    axes.imshow(shown.tolist(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel(caption, fontsize=7.5, color=ink, labelpad=2.5)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _heading(axes: Axes, title: str, below: str, ink: str) -> None:
    short = title if len(title) <= 18 else title[:17] + "…"
    weight = "bold" if ink == drawing.INK else "normal"
    place: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center"}
    size = 8.5 if len(short) < 13 else 7
    axes.annotate(short, (0.5, 1), (0, 14), fontsize=size, color=ink, weight=weight, **place)
    axes.annotate(below, (0.5, 1), (0, 4.5), fontsize=6.5, color=drawing.FAINT, **place)


def draw_defences(points: Sequence["DefencePoint"], path: Path) -> None:
    """Draw the score against the noise multiplier, with the accountant's epsilon on a second axis.

    The two axes share the noise and nothing else: neither is computed from the other.
    """
    figure, axes = drawing.panel(6.6, 4.0)
    styles = drawing.Styles()
    for clip in dict.fromkeys(point.clip for point in points):
        name = "not clipped" if clip is None else f"clip {clip:g}"
        line = [point for point in points if point.clip == clip]
        noisy = [
            (p.noise_multiplier, median(p.scores), min(p.scores), max(p.scores))
            for p in line
            if p.noise_multiplier > 0
        ]
        if noisy:
            drawing.band(axes, *_columns(noisy), styles.of(name))
        for free in (point for point in line if point.noise_multiplier == 0):
            label, color = f"{name}, no noise", styles.colour(name)
            drawing.no_noise(axes, median(free.scores), label=label, color=color)
    of_text = points[0].of_text
    floor = median(value for point in points for value in point.baselines)
    guess = "best guess without the update" if of_text else "best image that needs no attack"
    drawing.target(axes, floor, guess)
    axes.set_ylabel("ROUGE-L of the best attack" if of_text else "PSNR of the best attack (dB)")
    epsilon = {p.noise_multiplier: p.epsilon for p in points if p.noise_multiplier > 0}
    if epsilon:
        axes.set_xscale("log")
        axes.set_xticks(list(epsilon), [drawing.short(level) for level in epsilon])
        axes.minorticks_off()
        axes.set_xlabel("noise multiplier (noise standard deviation / clip)")
        above = axes.secondary_xaxis("top")
        shown = ["∞" if value is None else up(value) for value in epsilon.values()]
        above.set_xticks(list(epsilon), shown)
        above.minorticks_off()
        above.set_xlabel(f"epsilon at δ = {points[0].delta:g}, by the accountant alone", fontsize=9)
    drawing.legend(axes)
    drawing.save(figure, path)
