"""Pictures: reconstructed images beside the true ones, and PSNR against noise."""

from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from accounting.pages import drawing
from accounting.report import up
from attacks.defences import ScoredPoint
from attacks.report import VERDICTS, LeakageReport, LeakageRow, Verdict

COLOURS: dict[Verdict, str] = {
    "recovered": "#a3140f",
    "partial": "#c24e00",
    "no gain": "#0072b2",
    "ambiguous": "#aa4c83",
    "attack failed": "#5b6470",
    "nothing sent": "#8a6a00",
    "void": "#1b1f24",
}
_INK, _FAINT = drawing.INK, drawing.FAINT
_HIDDEN = ("noise",)  # an image of noise tells a reader nothing
_CELL = 1.12  # inches


def grid(reports: Sequence[LeakageReport], path: Path, *, images: int = 6) -> None:
    """Draw a row per image: the truth, the baselines, and the best reconstruction of each view.

    Each image has its PSNR below it; the frame of a reconstruction shows its verdict as a colour.

    Args:
        reports: at least one, all on the same images; their views are drawn side by side.
        path: file to write.
        images: greatest number of rows.
    """
    first = reports[0]
    count = min(images, len(first.truth))
    plain = [name for name in first.baseline_images if name not in _HIDDEN]
    rows = [row for report in reports for row in report.rows]
    columns = 1 + len(plain) + len(rows)
    gaps = [1.0] + [0.12] + [1.0] * len(plain) + [0.12] + [1.0] * len(rows)
    figure = Figure(figsize=(_CELL * (columns + 0.4), 1.17 * count * _CELL + 1.1))
    cells = figure.subplots(
        count,
        columns + 2,
        squeeze=False,
        gridspec_kw={
            **{"width_ratios": gaps, "wspace": 0.08, "hspace": 0.17},
            **{"left": 0.01, "right": 0.99},
            **{"top": 1 - 0.66 / figure.get_figheight(), "bottom": 0.42 / figure.get_figheight()},
        },
    )
    for i, line in enumerate(cells):
        for spacer in (line[1], line[2 + len(plain)]):
            spacer.set_axis_off()
        _image(line[0], first.truth[i], "", _INK)
        for axes, name in zip(line[2:], plain, strict=False):
            score = f"{first.baselines[name][i]:.1f} dB"
            _image(axes, first.baseline_images[name][i], score, _FAINT)
        for axes, row in zip(line[3 + len(plain) :], rows, strict=True):
            trial = row.best[i]
            caption = trial.untried or f"{trial.psnr:.1f} dB"
            _image(axes, trial.reconstruction.x[trial.index], caption, _INK)
            _frame(axes, COLOURS[trial.verdict])
    _headings(cells[0], plain, first.oracles, rows)
    _legend(figure, {trial.verdict for row in rows for trial in row.best[:count]})
    drawing.save(figure, path)


def _image(axes: Axes, pixels: Tensor, caption: str, ink: str) -> None:
    shown = pixels.detach().clamp(0, 1)
    if len(shown) == 1:
        axes.imshow(shown[0].tolist(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    else:
        axes.imshow(shown[:3].permute(1, 2, 0).tolist(), interpolation="nearest")
    axes.set_xlabel(caption, fontsize=7.5, color=ink, labelpad=2.5)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _frame(axes: Axes, colour: str) -> None:
    axes.spines[:].set_visible(True)
    axes.spines[:].set_edgecolor(colour)
    axes.spines[:].set_linewidth(2.2)


def _headings(
    line: Sequence[Axes],
    plain: Sequence[str],
    oracles: Collection[str],
    rows: Sequence[LeakageRow],
) -> None:
    _heading(line[0], "truth", "", _INK)
    for axes, name in zip(line[2:], plain, strict=False):
        _heading(axes, name, "oracle" if name in oracles else "no attack", _FAINT)
    noisy = any(row.adversary == "recipient" for row in rows)
    for axes, row in zip(line[3 + len(plain) :], rows, strict=True):
        who = f"{row.adversary}, " if noisy else ""
        _heading(axes, row.view, f"{who}{row.share:.1%} sent", _INK)


def _heading(axes: Axes, title: str, below: str, ink: str) -> None:
    short = title if len(title) <= 18 else title[:17] + "…"
    axes.annotate(
        short,
        (0.5, 1),
        (0, 14),
        "axes fraction",
        "offset points",
        ha="center",
        fontsize=8.5 if len(short) < 13 else 7,
        color=ink,
        weight="bold" if ink == _INK else "normal",
    )
    axes.annotate(
        below,
        (0.5, 1),
        (0, 4.5),
        "axes fraction",
        "offset points",
        ha="center",
        fontsize=6.5,
        color=_FAINT,
    )


def _legend(figure: Figure, found: Collection[Verdict]) -> None:
    handles = [
        Line2D([], [], marker="s", linestyle="", markersize=7, markerfacecolor="none",
               markeredgewidth=2, markeredgecolor=COLOURS[verdict], label=verdict)
        for verdict in VERDICTS
        if verdict in found
    ]  # fmt: skip
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=7.5,
        labelcolor=_INK,
        handletextpad=0.3,
        columnspacing=1.6,
    )


def defence_curve(points: Sequence[ScoredPoint], path: Path) -> None:
    """Draw the score against the noise multiplier, with the accountant's epsilon on a second axis.

    The two axes share the noise and nothing else: neither is computed from the other.
    """
    figure, axes = drawing.panel(6.6, 4.0)
    levels = sorted({point.noise_multiplier for point in points} - {0.0})
    clips = ["not clipped" if p.clip is None else f"clip {p.clip:g}" for p in points]
    styles = drawing.Styles(list(dict.fromkeys(clips)))
    for name in styles.parts:
        line = [p for p, own in zip(points, clips, strict=True) if own == name]
        _score_line(axes, [p for p in line if p.noise_multiplier > 0], styles.of(name))
        for free in (p for p in line if p.noise_multiplier == 0):
            drawing.no_noise(
                axes, median(free.scores), label=f"{name}, no noise", color=styles.colour(name)
            )
    floor = median(value for point in points for value in point.baselines)
    drawing.target(axes, floor, points[0].guess)
    axes.set_ylabel(points[0].measure)
    if levels:
        axes.set_xscale("log")
        axes.set_xticks(levels, [drawing.short(level) for level in levels])
        axes.minorticks_off()
        axes.set_xlabel("noise multiplier (noise standard deviation / clip)")
        epsilon = {p.noise_multiplier: p.epsilon for p in points}
        above = axes.secondary_xaxis("top")
        above.set_xticks(
            levels,
            ["∞" if (value := epsilon[level]) is None else up(value) for level in levels],
        )
        above.minorticks_off()
        above.set_xlabel(f"epsilon at δ = {points[0].delta:g}, by the accountant alone", fontsize=9)
    styles.legend(axes)
    drawing.save(figure, path)


def _score_line(axes: Axes, line: Sequence[ScoredPoint], style: dict[str, Any]) -> None:
    """Draw the medians of one clip, and the range over the images."""
    if not line:
        return
    ordered = sorted(line, key=lambda p: p.noise_multiplier)
    at = [p.noise_multiplier for p in ordered]
    axes.plot(at, [median(p.scores) for p in ordered], **style)
    low, high = [min(p.scores) for p in ordered], [max(p.scores) for p in ordered]
    axes.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
