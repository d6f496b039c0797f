"""The pictures of ``privpart inspect``."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor


def steps(found: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Draw one client's step sizes, a line per way of training, a tick where averaging happened."""
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


def rows(found: Mapping[str, Sequence[Tensor]], path: Path) -> None:
    """Draw a row of images per name, each of shape (C, H, W) with values in [0, 1]."""
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


def grid(images: Sequence[Tensor], path: Path, columns: int = 8) -> None:
    """Draw images of shape (H, W) or (C, H, W) with values in [0, 1], eight in a row."""
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(columns, rows + 0.2), layout="constrained")
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for cell in cells:
        cell.axis("off")
    for cell, image in zip(cells, images, strict=False):
        _show(cell, image)
    figure.savefig(path, dpi=120)


def _show(cell: Axes, image: Tensor) -> None:
    plane = image if image.dim() == 2 else image.movedim(0, 2).squeeze(2)
    cell.imshow(plane.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
