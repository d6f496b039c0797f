"""Drawing: the rules that every picture follows, with matplotlib and without torch.

Colour says which part trains, dash says which mechanism correlates the noise, and a legend names
only what is drawn. Axes of epsilon and of noise are logarithmic with ticks at 1, 2, 5 and 10. What
has no order is drawn as points, never as a line. The colours follow Okabe and Ito, darkened until
each has a contrast of at least 4.5 on white; on a page, each is replaced by its twin for the
reader's colour scheme.
"""

import io
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from accounting.checks import ConfigError
from accounting.report import printable

INK, FAINT, RULE, PAPER = "#1b1f24", "#5b6470", "#d0d5db", "#ffffff"
SERIES = ("#0072b2", "#c24e00", "#aa4c83", "#007a59", "#4d4d4d", "#8a6a00")
"""Colours of parts, in the order in which they are given out."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.6)), (0, (6, 2, 1, 2)), (0, (9, 3)))
"""Dashes of mechanisms, in the order in which they are given out."""
MARKERS = ("o", "s", "^", "D", "v", "P")
DARK = {
    INK: "#e8eaed",
    FAINT: "#a6adb7",
    RULE: "#3a4048",
    PAPER: "#15181c",
    "#0072b2": "#56b4e9",
    "#c24e00": "#f0914a",
    "#007a59": "#2cc295",
    "#aa4c83": "#e3a1c5",
    "#8a6a00": "#f0e442",
    "#4d4d4d": "#bdbdbd",
}
"""The twin of each colour for dark paper."""
# Any, because matplotlib's own type of settings names every key.
_STYLE: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    # Names that people typed hold dollars.
    "text.parse_math": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 4,
    # Ids are random without it, and equal pictures would be unequal files.
    "svg.hashsalt": "privpart",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}
# Marks the names of levels among the texts of a picture, to move them apart later.
_LEVEL = "level"
_STEPS = (1, 2, 5)
_MOST_TICKS = 13
_LONGEST = 40
"""Characters of a name in a picture."""
_METADATA: Any = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None},
}
"""By format, metadata that leave out what differs between two equal pictures."""


@dataclass(slots=True)
class Styles:
    """Colours of parts and dashes of mechanisms; equal names look alike in every panel.

    Args:
        parts: names, in the order of the colours; others follow as they come.
        mechanisms: names, in the order of the dashes; others follow as they come.

    Attributes:
        drawn: pairs of part and mechanism that were asked for.
    """

    parts: Sequence[str] = ()
    mechanisms: Sequence[str] = ()
    drawn: list[tuple[str, str]] = field(default_factory=list, init=False)

    def of(self, part: str = "", mechanism: str = "") -> dict[str, Any]:
        """Return matplotlib's keywords of one line: colour, marker and dash."""
        self.drawn.append((part, mechanism))
        colour = self._all(0, part).index(part)
        dash = self._all(1, mechanism).index(mechanism)
        return {
            "color": SERIES[colour % len(SERIES)],
            "marker": MARKERS[colour % len(MARKERS)],
            "linestyle": DASHES[dash % len(DASHES)],
        }

    def colour(self, part: str = "") -> str:
        """Return the colour of a part, for what stands beside its line."""
        return SERIES[self._all(0, part).index(part) % len(SERIES)]

    def _all(self, which: int, name: str) -> list[str]:
        declared = (self.parts, self.mechanisms)[which]
        return list(dict.fromkeys((*declared, *(pair[which] for pair in self.drawn), name)))

    def legend(self, axes: Axes, **place: Any) -> None:  # noqa: ANN401  matplotlib's
        """Name each colour and each dash that was drawn, if there is more than one of its kind."""
        parts = list(dict.fromkeys(part for part, _ in self.drawn))
        mechanisms = list(dict.fromkeys(mechanism for _, mechanism in self.drawn))
        looks = []
        if len(parts) > 1:
            plain = {"linestyle": ""} if len(mechanisms) > 1 else {}
            looks += [(part or "all", self.of(part, mechanisms[0]) | plain) for part in parts]
        if len(mechanisms) > 1:
            grey = {"marker": "", "color": SERIES[0] if len(parts) == 1 else FAINT}
            looks += [(name or "none", self.of(parts[0], name) | grey) for name in mechanisms]
        if looks:
            handles = [Line2D([], [], label=_shortened(name), **look) for name, look in looks]
            axes.legend(
                handles=handles, handlelength=3, frameon=False, fontsize=8, labelcolor=INK, **place
            )


def panel(width: float = 6.4, height: float = 3.8) -> tuple[Figure, Axes]:
    """Return a figure with one panel, in the style of all pictures."""
    figure, (axes,) = panels(1, width, height)
    return figure, axes


def panels(
    count: int, width: float = 4.6, height: float = 3.6, *, rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """Return a figure with rows of ``count`` panels; those of a row share the vertical axis."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(width * count, height * rows), layout="constrained")
        cells = figure.subplots(rows, count, sharex="col", sharey="row", squeeze=False)
        for axes in cells.flat:
            axes.grid(visible=True)
            axes.set_axisbelow(True)
    return figure, list(cells.flat)


def log_axis(axis: Axis, label: str) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2, 5 and 10, once its data are drawn."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    low, high = axis.get_view_interval()
    ticks = round_ticks(low, high)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_label_text(label, color=INK)


def round_ticks(low: float, high: float) -> list[float]:
    """Return the numbers 1, 2 and 5, times powers of ten, between two positive numbers.

    Powers of ten alone where the others would be too many, and the two ends where none is between.

    >>> round_ticks(0.7, 12)
    [1.0, 2.0, 5.0, 10.0]
    >>> round_ticks(2.1, 4.9)
    [2.1, 3.0, 4.0]
    """
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    inside = [(s, p) for p in powers for s in range(1, 10) if low <= float(f"{s}e{p}") <= high]
    ticks = [float(f"{s}e{p}") for s, p in inside if s in _STEPS]
    if len(ticks) > _MOST_TICKS:
        tens = [float(f"1e{p}") for s, p in inside if s == 1]
        return tens[:: -(-len(tens) // _MOST_TICKS)]
    if len(ticks) >= 2:
        return ticks
    return [float(f"{low:.2g}"), *(float(f"{s}e{p}") for s, p in inside)]


def title(axes: Axes, text: str) -> None:
    """Write a title in the size of all pictures."""
    axes.set_title(text, fontsize=9, color=INK)


def short(value: float) -> str:
    """Return a number as a tick is labelled.

    >>> short(0.5), short(1e-05), short(20.0)
    ('0.5', '1e-5', '20')
    """
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign.group(1).replace("+", ""), f"{value:g}")


def target(axes: Axes, value: float, label: str, *, vertical: bool = False) -> None:
    """Draw a line at the value that was asked for, with its name beside it."""
    draw = axes.axvline if vertical else axes.axhline
    draw(value, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
    _name_line(axes, value, label, INK, vertical=vertical)


def no_noise(
    axes: Axes,
    mean: float,
    deviation: float | None = None,
    *,
    label: str = "no noise",
    color: str = FAINT,
    linestyle: Any = "-",  # noqa: ANN401  matplotlib's
) -> None:
    """Draw what training without noise reaches, as a level with a band of one deviation."""
    axes.axhline(mean, color=color, linewidth=1.2, alpha=0.75, linestyle=linestyle, zorder=1.4)
    if deviation:
        axes.axhspan(mean - deviation, mean + deviation, color=color, alpha=0.10, linewidth=0)
    _name_line(axes, mean, label, color, vertical=False).set_gid(_LEVEL)
    names = [t for t in axes.texts if isinstance(t, Annotation) and t.get_gid() == _LEVEL]
    lowest = min(names, key=lambda name: name.xy[1])
    # Two levels may be close: the lowest is named below its line.
    for name in names:
        below = len(names) > 1 and name is lowest
        name.set_verticalalignment("top" if below else "bottom")
        name.xyann = (-2, -3 if below else 3)


def _name_line(axes: Axes, value: float, label: str, color: str, *, vertical: bool) -> Annotation:
    place = (value, 1.0) if vertical else (1.0, value)
    return axes.annotate(
        _shortened(label),
        place,
        (3, -3) if vertical else (-2, 3),
        xycoords=("data", "axes fraction") if vertical else ("axes fraction", "data"),
        textcoords="offset points",
        ha="left" if vertical else "right",
        va="top" if vertical else "bottom",
        fontsize=7.5,
        color=color,
    )


def band(
    axes: Axes,
    xs: Sequence[float],
    means: Sequence[float],
    deviations: Sequence[float | None],
    style: Mapping[str, Any],
) -> None:
    """Draw a line with a band of one deviation on either side; a lone point gets a bar."""
    around = zip(xs, means, (deviation or 0.0 for deviation in deviations), strict=True)
    interval_band(
        axes, [(x, mean, mean - spread, mean + spread) for x, mean, spread in around], style
    )


def interval_band(
    axes: Axes, points: Sequence[tuple[float, float, float, float]], style: Mapping[str, Any]
) -> None:
    """Draw points (x, value, low, high) as a line with a band; a lone point gets a bar."""
    xs, values, lows, highs = zip(*sorted(points), strict=True)
    axes.plot(xs, values, **style)
    # A band would have no width.
    if len(xs) == 1:
        axes.vlines(xs, lows, highs, color=style["color"])
    else:
        axes.fill_between(xs, lows, highs, color=style["color"], alpha=0.15, linewidth=0)


def categories(
    axes: Axes,
    names: Sequence[str],
    groups: Mapping[str, Mapping[str, tuple[float, float]]],
    styles: Styles,
) -> None:
    """Draw values of names that have no order: points with bars, each group beside the others.

    Args:
        axes: the panel.
        names: one per place on the axis.
        groups: per part, a value and its deviation by name.
        styles: colours of the groups.
    """
    for number, (part, values) in enumerate(groups.items()):
        shift = 0.16 * (number - (len(groups) - 1) / 2)
        style = styles.of(part) | {"linestyle": ""}
        for place, name in enumerate(names):
            if name in values:
                band(axes, [place + shift], [values[name][0]], [values[name][1]], style)
    axes.set_xticks(
        range(len(names)), [printable(_shortened(name)) for name in names], parse_math=False
    )
    axes.set_xlim(-0.5, max(len(names), 1) - 0.5)
    axes.grid(visible=False, axis="x")


def _shortened(name: str) -> str:
    """Return a name that leaves room for the picture."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def save(figure: Figure, path: Path) -> None:
    """Write a picture; the ending of the file's name, .png, .svg or .pdf, sets the format.

    Raises:
        ConfigError: another ending, or the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in _METADATA:
        raise ConfigError(f"plot={path}: must end in {', '.join(_METADATA)}.")
    about = dict(_METADATA[suffix])
    try:
        with _drawing(figure):
            if suffix == ".png":
                about["Description"] = json.dumps(drawn(figure))
            figure.savefig(path, dpi=150, metadata=about)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot={path}: cannot be written: {error}") from None


@contextmanager
def _drawing(figure: Figure, **style: str) -> Iterator[None]:
    """Draw a figure with every name that somebody typed as it is."""
    for text in figure.findobj(Text):
        # findobj is typed to return any artist.
        if isinstance(text, Text):
            text.set_text(printable(text.get_text()))
            # A dollar begins no formula.
            text.set_parse_math(False)
    with rc_context(_STYLE | style), warnings.catch_warnings():
        # letters that the font lacks are boxes
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def drawn(figure: Figure) -> dict[str, Any]:
    """Return what a picture shows, by which two are compared: its words, and where its lines are.

    A PNG has it in its metadata, as ``Description``.
    """
    lines = [line.get_xydata() for axes in figure.axes for line in axes.lines]
    for axes in figure.axes:
        for collection in axes.collections:
            lines += [path.vertices for path in collection.get_paths()]
    return {
        "words": [text.get_text() for text in figure.findobj(Text) if text.get_text()],
        "lines": [
            [[float(f"{value:.6g}") for value in point] for point in np.asarray(line, dtype=float)]
            for line in lines
        ],
    }


def inline_svg(figure: Figure, name: str, title: str) -> str:
    """Return a picture as an SVG element for a page, which sets the colours by its own scheme.

    Args:
        figure: the picture.
        name: unlike that of any other picture on the page; its ids begin with it.
        title: what the picture shows, for who cannot see it; escaped here.
    """
    text = io.StringIO()
    with _drawing(figure, **{"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata=_METADATA[".svg"], transparent=True)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    # A style inside the picture would be the whole page's.
    for element in ("metadata", "style"):
        svg = re.sub(rf"<{element}\b.*?</{element}>", "", svg, flags=re.DOTALL)
    # Ids of two pictures on one page must differ.
    ids = {old: f"{name}-{i}" for i, old in enumerate(re.findall(r'\bid="([^"]*)"', svg))}
    svg = re.sub(r'\bid="([^"]*)"', lambda match: f'id="{ids[match.group(1)]}"', svg)
    svg = re.sub(
        r'(xlink:href="#|url\(#)([^")]*)',
        # Text may look like one.
        lambda to: to.group(1) + ids.get(to.group(2), to.group(2)),
        svg,
    ).replace("xlink:href", "href")
    # The page sets these colours by the reader's scheme.
    for number, colour in enumerate(DARK):
        svg = re.sub(colour, f"var(--c{number})", svg, flags=re.IGNORECASE)
    size = re.search(r'viewBox="([^"]*)"', svg)
    box = size.group(1) if size else ""
    return (
        f'<svg viewBox="{box}" role="img" aria-labelledby="{name}-title">'
        f'<title id="{name}-title">{escape(title, quote=False)}</title>{svg[svg.index(">") + 1 :]}'
    )


def colour_variables(*, dark: bool) -> str:
    """Return the colours of one scheme as CSS custom properties, as ``inline_svg`` names them."""
    return "; ".join(
        f"--c{number}: {twin if dark else colour}"
        for number, (colour, twin) in enumerate(DARK.items())
    )
