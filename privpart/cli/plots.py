"""Plots: the pictures that the commands draw, with matplotlib and without torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from accounting import ConfigError, Participation, PrivacyReport
from accounting import guarantee as guarantee_of
from accounting.mechanisms import MechanismChoice
from privpart.cli.options import Against

if TYPE_CHECKING:  # only for annotations: a budget's picture must not import torch
    from torch import Tensor

    from privpart.cli.demo_tables import Accuracy
    from privpart.experiment.sweep_store import Point

_PART_COLOURS = {"full": "#b3552c", "partial": "#1f6f8b"}
_RESOURCES = {
    "bytes down": "bytes_down",
    "bytes up": "bytes_up",
    "forward FLOPs": "forward_flops",
    "backward FLOPs": "backward_flops",
    "memory": "memory_bytes",
}
_COLOURS = ("#b3552c", "#1f6f8b", "#5b8c5a", "#c9a227", "#7a5195", "#888888")
_POINTS = 25
_AWAY = 2.6
"""Where results without noise stand beside a budget: at so many times the largest epsilon."""
_APART = 0.1
"""Share of its epsilon by which each further arm is moved to the right."""
_AXES = {
    Against.NOISE: "noise multiplier",
    Against.ROUNDS: "rounds",
    Against.PARTICIPATIONS: "participations of one client, at most",
}


def draw_accuracy(
    accuracies: Sequence["Accuracy"], budgets: Sequence[PrivacyReport], path: Path
) -> None:
    """Draw accuracy against noise, with a band of one standard deviation and epsilon below."""
    levels = list(dict.fromkeys(a.noise_multiplier for a in accuracies))
    epsilon = {b.noise_multiplier: f"ε = {b.epsilon:.3g}" for b in budgets}
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for part, colour in _PART_COLOURS.items():
        rows = [a for a in accuracies if a.part == part]
        middle = [100 * a.mean for a in rows]
        spread = [100 * (a.spread or 0.0) for a in rows]
        share = rows[0].trained / rows[0].parameter_count
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


def draw_budget(
    choice: MechanismChoice,
    run: Participation,
    report: PrivacyReport,
    *,
    against: Against,
    path: Path,
) -> None:
    """Draw epsilon along one axis through the run of ``report``; the suffix sets the format."""
    points = _curve(choice, run, report, against)
    here = {
        Against.NOISE: report.noise_multiplier,
        Against.ROUNDS: report.rounds,
        Against.PARTICIPATIONS: report.max_participations,
    }[against]
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True), color="#1f6f8b", marker=".")
    axes.plot([here], [report.epsilon], "o", color="#b3552c")
    axes.annotate(
        f"ε = {report.epsilon:.4g}", (here, report.epsilon), (8, 8), textcoords="offset points"
    )
    if against is not Against.PARTICIPATIONS:
        axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(_AXES[against])
    axes.set_ylabel(f"ε at δ = {report.delta:g}")
    axes.set_title(
        f"{report.mechanism}: {report.rounds} rounds, a {report.unit} in at most "
        f"{report.max_participations}; {report.adjacency} adjacency",
        fontsize=9,
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _write(figure, path)


def _curve(
    choice: MechanismChoice, run: Participation, report: PrivacyReport, against: Against
) -> list[tuple[float, float]]:
    if against is Against.NOISE:
        mechanism = choice.build(run)
        noises = [report.noise_multiplier * 10 ** (i / 12 - 1) for i in range(_POINTS)]
        return [
            (
                z,
                guarantee_of(mechanism, run, noise_multiplier=z, method=report.method).epsilon(
                    report.delta
                ),
            )
            for z in noises
        ]
    if choice.file is not None and against is Against.ROUNDS:
        raise ConfigError(f"plot_against={against}: the mechanism in the file has its own rounds.")
    if choice.fitted:
        raise ConfigError(
            f"plot_against={against}: {choice.name} is fitted to each participation, so one noise "
            "multiplier means different noise along the curve. Plot against noise."
        )
    runs = _runs(run, against)
    return [
        (
            float(r.rounds if against is Against.ROUNDS else r.max_participations),
            guarantee_of(
                choice.build(r), r, noise_multiplier=report.noise_multiplier, method=report.method
            ).epsilon(report.delta),
        )
        for r in runs
    ]


def _runs(run: Participation, against: Against) -> list[Participation]:
    """Return the participations along the curve, the planned one among them."""
    n, k, b = run.rounds, run.max_participations, run.min_separation
    kind = type(run)
    if against is Against.ROUNDS:
        lengths = sorted({max(1, round(n * 10 ** (i / 12 - 1))) for i in range(_POINTS)} | {n})
        return [kind(m, min(k, -(-m // b)), b) for m in lengths]
    most = -(-n // b)
    counts = sorted({max(1, round(most * i / _POINTS)) for i in range(1, _POINTS + 1)} | {1, k})
    return [kind(n, m, b) for m in counts]


def draw_front(rows: Sequence[Mapping[str, Any]], *, title: str, path: Path) -> None:
    """Draw the error of each mechanism against its state vectors, and the front as a line."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    front = [row for row in rows if row["front"]]
    steps = [(row["state_vectors"], row["rmse"]) for row in front]
    widest = max(row["state_vectors"] for row in rows)
    axes.step(
        [x for x, _ in steps] + [widest],
        [y for _, y in steps] + [steps[-1][1]],
        where="post",
        color="#1f6f8b",
    )
    for row in rows:
        colour = "#1f6f8b" if row["front"] else "#b3552c"
        axes.plot(row["state_vectors"], row["rmse"], "o", color=colour, markersize=4)
        axes.annotate(
            row["mechanism"],
            (row["state_vectors"], row["rmse"]),
            (3, 3),
            textcoords="offset points",
            fontsize=6,
            color=colour,
        )
    axes.set_xscale("symlog", linthresh=1)
    axes.set_yscale("log")
    axes.set_xlabel("state vectors, each as long as the trained part")
    axes.set_ylabel("rmse of the prefix sums / clip norm")
    axes.set_title(title, fontsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _write(figure, path)


def draw_costs(rows: Sequence[dict[str, Any]], *, title: str, path: Path) -> None:
    """Draw the costs in ``rows`` as shares of the first row, full training."""
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        places = [group + width * number for group in range(len(_RESOURCES))]
        shares = [100 * row[key] / rows[0][key] for key in _RESOURCES.values()]
        axes.bar(places, shares, width, color=_COLOURS[number % len(_COLOURS)], label=row["part"])
    axes.set_xticks([group + 0.4 - width / 2 for group in range(len(_RESOURCES))], list(_RESOURCES))
    axes.set_ylabel("% of full training")
    axes.set_title(title, fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    _write(figure, path)


def draw_steps(found: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Draw one client's step sizes, a line per way of training and a tick at each averaging."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for name, rounds in found.items():
        sizes = [size for own in rounds for size in own]
        axes.plot(range(len(sizes)), sizes, label=name, marker=".", linewidth=1)
    ends: list[int] = [0]
    for own in next(iter(found.values())):
        ends.append(ends[-1] + len(own))
    axes.set_xticks(ends[:-1], [f"round {r}" for r in range(len(ends) - 1)], fontsize=7)
    axes.set_xlabel("local steps of one client")
    axes.set_ylabel("length of the step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def draw_rows(found: Mapping[str, Sequence["Tensor"]], path: Path) -> None:
    """Draw a row of images per name, each image of shape (C, H, W) in [0, 1]."""
    columns = max(len(images) for images in found.values())
    figure = Figure(figsize=(columns + 1.5, len(found)), layout="constrained")
    cells = figure.subplots(len(found), columns, squeeze=False)
    for line, (name, images) in zip(cells, found.items(), strict=True):
        for cell in line:
            cell.axis("off")
        for cell, image in zip(line, images, strict=False):
            _show(cell, image)
        line[0].text(-0.1, 0.5, name, transform=line[0].transAxes, ha="right", va="center")
    figure.savefig(path, dpi=120)


def draw_grid(images: Sequence["Tensor"], path: Path, columns: int = 8) -> None:
    """Draw images of shape (H, W) or (C, H, W) in [0, 1], ``columns`` per row."""
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(columns, rows + 0.2), layout="constrained")
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for cell in cells:
        cell.axis("off")
    for cell, image in zip(cells, images, strict=False):
        _show(cell, image)
    figure.savefig(path, dpi=120)


def _write(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot={path}: cannot be written: {error}") from None


def _show(cell: Axes, image: "Tensor") -> None:
    plane = image if image.dim() == 2 else image.movedim(0, 2).squeeze(2)
    cell.imshow(plane.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def draw_sweep(
    points: Sequence["Point"], axes: Sequence[str], noise_axes: Sequence[str], out: Path
) -> None:
    """Write ``accuracy-noise.png`` and ``accuracy-epsilon.png``; bands show a deviation."""
    other = [axis for axis in axes if axis not in noise_axes]
    lines: dict[str, list[Point]] = {}
    for point in points:
        name = ", ".join(point.labels.get(axis, "") for axis in other)
        lines.setdefault(name, []).append(point)
    _draw_lines(lines, lambda p: p.noise_multiplier, "noise multiplier", out / "accuracy-noise.png")
    deltas = {point.delta for point in points if point.epsilon is not None}
    at = f" at δ = {deltas.pop():g}" if len(deltas) == 1 else ""
    _draw_lines(lines, lambda p: p.epsilon, f"epsilon{at}, log scale", out / "accuracy-epsilon.png")


def _draw_lines(
    lines: dict[str, list["Point"]], x_of: Callable[["Point"], float | None], label: str, path: Path
) -> None:
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    panel = figure.add_subplot()
    drawn = False
    own = any(p.own_metric for points in lines.values() for p in points)
    factor = 1 if own else 100
    for number, (name, points) in enumerate(lines.items()):
        shown = sorted(
            (x, factor * p.mean, factor * (p.deviation or 0.0))
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
    panel.set_ylabel("metric" if own else "test accuracy (%)")
    panel.set_title("simulation with seeded noise: not private", fontsize=9)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    if drawn:
        panel.legend(frameon=False)
    figure.savefig(path, dpi=150)


def draw_scores(
    scores: NDArray[np.float64], present: NDArray[np.bool_], mu: float, path: Path
) -> None:
    """Draw histograms of canaries' scores beside what the accountant allows at most.

    Args:
        scores: in standard deviations of the noise, (m,).
        present: who took part, (m,).
        mu: the accountant's.
        path: file to write.
    """
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    low, high = float(scores.min()), float(scores.max())
    bins = np.linspace(low, high if high > low else low + 1, 41).tolist()
    at = np.linspace(min(low, -3.0), max(high, mu + 3.0), 300)
    for chosen, name, colour, centre in (
        (~present, "absent", "#1f6f8b", 0.0),
        (present, "took part", "#b3552c", mu),
    ):
        axes.hist(scores[chosen], bins, density=True, color=colour, alpha=0.45, label=name)
        curve = np.exp(-((at - centre) ** 2) / 2) / np.sqrt(2 * np.pi)
        axes.plot(at, curve, color=colour, linewidth=1)
    axes.axvline(mu, color="#2b2b2b", linestyle="--", linewidth=1, label=f"accountant: mu {mu:.3g}")
    axes.set_xlabel("score of a canary, in standard deviations of the noise")
    axes.set_ylabel("density")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def draw_frontier(rows: Sequence[Mapping[str, Any]], title: str, out: Path) -> None:
    """Write ``accuracy-epsilon.png`` and ``accuracy-bytes.png`` of a study; bands are intervals.

    Args:
        rows: of its frontier, see ``privpart.experiment.study.frontier``.
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
        above[0].legend(frameon=False, fontsize=8, loc="lower right")
        figure.suptitle(said, fontsize=9)
        figure.savefig(out / "accuracy-epsilon.png", dpi=150)
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    panel = figure.add_subplot()
    levels = list(dict.fromkeys((r["mechanism"], r["level"]) for r in rows))
    for number, (mechanism, level) in enumerate(levels):
        own = [r for r in rows if (r["mechanism"], r["level"]) == (mechanism, level)]
        name = (
            "no noise" if own[0]["epsilon"] is None else f"{mechanism}, ε = {own[0]['epsilon']:.3g}"
        )
        _draw_band(panel, own, lambda r: r["bytes_up"], _COLOURS[number % len(_COLOURS)], name)
    panel.set_xscale("log")
    panel.set_xlabel("bytes that a client sends in a round")
    panel.set_ylabel("metric on test examples")
    panel.set_title(said, fontsize=9)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(out / "accuracy-bytes.png", dpi=150)


def _draw_budgets(panel: Axes, rows: Sequence[Mapping[str, Any]], mechanism: str) -> None:
    """Draw the arms of one mechanism against epsilon, and without noise at the right edge."""
    largest = max(r["epsilon"] for r in rows if r["mechanism"] == mechanism)
    for number, arm in enumerate(dict.fromkeys(r["arm"] for r in rows)):
        colour = _COLOURS[number % len(_COLOURS)]
        own = [r for r in rows if r["arm"] == arm and r["mechanism"] == mechanism]
        _draw_band(panel, own, lambda r: r["epsilon"], colour, arm)
        for row in (r for r in rows if r["arm"] == arm and r["epsilon"] is None):
            away = largest * _AWAY * (1 + _APART * number)
            low, high = row["low"] or row["metric"], row["high"] or row["metric"]
            panel.plot([away, away], [low, high], color=colour)
            panel.plot([away], [row["metric"]], color=colour, marker="s")
    panel.set_xscale("log")
    panel.set_title(mechanism, fontsize=9)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_differences(panel: Axes, rows: Sequence[Mapping[str, Any]], mechanism: str) -> None:
    """Draw each arm's paired difference to the first, with its interval."""
    largest = max(r["epsilon"] for r in rows if r["mechanism"] == mechanism)
    for number, arm in enumerate(dict.fromkeys(r["arm"] for r in rows)):
        own = [r for r in rows if r["arm"] == arm and r["difference_low"] is not None]
        for row in own:
            if row["mechanism"] != mechanism and row["epsilon"] is not None:
                continue
            silent = row["epsilon"] is None
            x = (largest * _AWAY if silent else row["epsilon"]) * (1 + _APART * number)
            ends = [row["difference_low"], row["difference_high"]]
            colour = _COLOURS[number % len(_COLOURS)]
            panel.plot([x, x], ends, color=colour)
            panel.plot([x], [row["difference"]], color=colour, marker="s" if silent else "o")
    panel.axhline(0, color="#444444", linewidth=0.8)
    panel.set_xlabel("epsilon, log scale; squares: no noise")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_band(
    panel: Axes,
    rows: Sequence[Mapping[str, Any]],
    x_of: Callable[[Mapping[str, Any]], float],
    colour: str,
    name: str,
) -> None:
    ordered = sorted(rows, key=x_of)
    xs = [x_of(row) for row in ordered]
    panel.plot(xs, [row["metric"] for row in ordered], color=colour, marker="o", label=name)
    panel.fill_between(
        xs,
        [row["metric"] if row["low"] is None else row["low"] for row in ordered],
        [row["metric"] if row["high"] is None else row["high"] for row in ordered],
        color=colour,
        alpha=0.15,
        linewidth=0,
    )
