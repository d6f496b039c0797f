"""Drawing: the rules that every picture follows, with matplotlib and without torch.

Colour says which part trains, dash says which mechanism correlates the noise, and a legend names
only what is drawn. Axes of epsilon and of noise are logarithmic with ticks at 1, 2 and 5, times
powers of ten. The colours follow Okabe and Ito, darkened until each has a contrast of at least 4.5
on white; each has a twin for dark paper.
"""

import io
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from numpy.typing import ArrayLike

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
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), FAINT),
    # Names that people typed hold dollars.
    "text.parse_math": False,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 3,
    "lines.markersize": 4,
    # Ids are random without it, and equal pictures would be unequal files.
    "svg.hashsalt": "privpart",
}
_MOST_TICKS = 13
_LONGEST = 40
"""Characters of a name in a picture."""
_METADATA: Any = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None},
}
"""By format, metadata that leave out what differs between two equal pictures."""


class Styles:
    """Colours of parts and dashes of mechanisms, given out to names as they come."""

    def __init__(self) -> None:
        self._parts: dict[str, int] = {}
        self._mechanisms: dict[str, int] = {}

    def of(self, part: str = "", mechanism: str = "") -> dict[str, Any]:
        """Return matplotlib's keywords of one line: colour, marker, dash and name."""
        number = self._parts.setdefault(part, len(self._parts))
        dash = self._mechanisms.setdefault(mechanism, len(self._mechanisms))
        return {
            "color": self.colour(part),
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": DASHES[dash % len(DASHES)],
            "label": ", ".join(_shortened(name) for name in (part, mechanism) if name),
        }

    def colour(self, part: str = "") -> str:
        """Return the colour of a part, for what stands beside its line."""
        return SERIES[self._parts.setdefault(part, len(self._parts)) % len(SERIES)]


def legend(axes: Axes, *, minimum: int = 2, **place: Any) -> None:  # noqa: ANN401  matplotlib's
    """Name each line, level and target of a panel once, if there are at least so many."""
    named: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        named.setdefault(label, handle)
    if len(named) >= minimum:
        with rc_context(_STYLE):
            axes.legend(named.values(), named.keys(), **place)


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
    return figure, list(cells.flat)


def log_axis(axis: Axis, label: str) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2, 5 and 10, once its data are drawn."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(FixedLocator(round_ticks(*axis.get_view_interval())))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_label_text(label)


def round_ticks(low: float, high: float) -> list[float]:
    """Return the numbers 1, 2 and 5, times powers of ten, between two positive numbers.

    Powers of ten alone where the others would be too many.

    >>> round_ticks(0.7, 12)
    [1.0, 2.0, 5.0, 10.0]
    """
    steps = (1.0, 2.0, 5.0) if high < 1e4 * low else (1.0,)
    ticks = LogLocator(subs=steps, numticks=_MOST_TICKS).tick_values(low, high)
    return [float(f"{tick:.6g}") for tick in ticks if low <= tick <= high]


def title(axes: Axes, text: str) -> None:
    """Write a title in the size of all pictures."""
    axes.set_title(text, fontsize=9)


def short(value: float) -> str:
    """Return a number as a tick is labelled.

    >>> short(0.5), short(1e-05), short(20.0)
    ('0.5', '1e-5', '20')
    """
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign.group(1).replace("+", ""), f"{value:g}")


def target(axes: Axes, value: float, label: str, *, vertical: bool = False) -> None:
    """Draw a line at the value that was asked for; the legend names it."""
    draw = axes.axvline if vertical else axes.axhline
    draw(value, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1.5, label=label)


def no_noise(
    axes: Axes,
    mean: float,
    deviation: float | None = None,
    *,
    label: str = "no noise",
    color: str = FAINT,
) -> None:
    """Draw what training without noise reaches, as a level with a band of one deviation."""
    name = _shortened(label)
    axes.axhline(mean, color=color, linewidth=1.2, alpha=0.75, zorder=1.4, label=name)
    if deviation:
        axes.axhspan(mean - deviation, mean + deviation, color=color, alpha=0.10, linewidth=0)


def band(
    axes: Axes, xs: ArrayLike, values: ArrayLike, errors: ArrayLike, style: Mapping[str, Any]
) -> None:
    """Draw a line with a band around it; a lone point gets a bar.

    Errors are the band's width on either side, (n,), or below and above, (2, n); None is none.
    """
    order = np.argsort(xs)
    width = np.nan_to_num(np.asarray(errors, dtype=float))
    below, above = np.broadcast_to(width, (2, len(order)))[:, order]
    x, y = np.asarray(xs)[order], np.asarray(values)[order]
    axes.plot(x, y, **style)
    # A band would have no width.
    if len(x) == 1:
        axes.vlines(x, y - below, y + above, color=style["color"])
    else:
        axes.fill_between(x, y - below, y + above, color=style["color"], alpha=0.15, linewidth=0)


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
                about["Description"] = json.dumps(_content(figure))
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


def _content(figure: Figure) -> dict[str, Any]:
    """Return the words and lines of a picture, by which two PNG files are compared."""
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


def in_two_schemes(figure: Figure) -> tuple[str, str]:
    """Return a picture as SVG without a ground, for light and for dark paper."""
    text = io.StringIO()
    with _drawing(figure, **{"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata=_METADATA[".svg"], transparent=True)
    light = dark = text.getvalue()
    for colour, twin in DARK.items():
        dark = re.sub(colour, twin, dark, flags=re.IGNORECASE)
    return light, dark
