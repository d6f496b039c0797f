"""A picture of costs: one group of bars per resource, each a share of what full training takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from accounting import ConfigError

_RESOURCES = {
    "bytes down": "bytes_down",
    "bytes up": "bytes_up",
    "forward FLOPs": "forward_flops",
    "backward FLOPs": "backward_flops",
    "memory": "memory_bytes",
}
_COLOURS = ("#b3552c", "#1f6f8b", "#5b8c5a", "#c9a227", "#7a5195", "#888888")


def draw(rows: Sequence[dict[str, Any]], *, title: str, path: Path) -> None:
    """Draw ``rows``, the first of which is full training, into ``path``; its suffix decides how."""
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
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot={path}: cannot be written: {error}") from None
