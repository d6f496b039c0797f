"""Rooms of the three packages: who imports whom, and the picture that the site shows of it."""

import ast
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("accounting", "attacks", "privpart")
SOURCES = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
"""Every module of the three packages."""


@cache
def tree(path: Path) -> ast.Module:
    """Return the parsed file."""
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    """Return a file's name as it is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCES}


def imported_by(path: Path, *, at_once: bool = False) -> set[str]:
    """Return the modules of ours that a file imports, inside functions and for types too.

    With ``at_once`` only those that importing the file itself imports.
    """
    imports = set()
    for node in tree(path).body if at_once else ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                imports.add(inner if inner in MODULES else node.module)
    return (imports & MODULES.keys()) - {module_name(path)}


def room(module: str) -> str:
    """Return the room of a module: a package, or a folder or file of privpart."""
    return module if module.count(".") < 1 else ".".join(module.split(".")[:2])


def rooms() -> dict[str, set[str]]:
    """Return each room and the rooms that it imports from.

    accounting and attacks are one room each; privpart's doors (its ``__init__`` and ``__main__``),
    which only forward, are none.
    """
    arrows: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        package = name.partition(".")[0]
        if name in ("privpart", "privpart.__main__"):
            continue
        place = room(name) if package == "privpart" else package
        below = {
            room(target) if target.startswith("privpart.") else target.partition(".")[0]
            for target in imported_by(path)
        }
        arrows.setdefault(place, set()).update(below - {place, "privpart"})
    return arrows


def floors(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the rooms by floor, the ground first; each stands above all that it imports from.

    Raises ``ValueError`` if rooms import each other in a circle.
    """
    height: dict[str, int] = {}
    remaining = dict(arrows)
    while remaining:
        ready = [name for name, below in remaining.items() if below <= height.keys()]
        if not ready:
            raise ValueError(f"rooms in a circle: {sorted(remaining)}")
        for name in ready:
            height[name] = 1 + max((height[b] for b in remaining.pop(name)), default=-1)
    return [sorted(n for n in height if height[n] == h) for h in range(max(height.values()) + 1)]


def lines(place: str) -> int:
    """Number of source lines in a room."""
    return sum(
        len(path.read_text().splitlines())
        for name, path in MODULES.items()
        if name == place or name.startswith(f"{place}.")
    )


def needed(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the arrows without those that a longer way implies (the transitive reduction)."""

    @cache
    def reached(place: str) -> frozenset[str]:
        return frozenset(arrows[place]).union(*(reached(below) for below in arrows[place]))

    return {
        place: {b for b in below if not any(b in reached(other) for other in below - {b})}
        for place, below in arrows.items()
    }


def drawing() -> Any:
    """Draw the rooms by floor, each with an arrow to what it imports and no other way implies."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    matplotlib.rcParams["svg.hashsalt"] = "rooms"  # the same bytes at each build
    arrows = rooms()
    storeys = floors(arrows)
    figure = Figure(figsize=(9, 0.8 * len(storeys)), layout="tight")
    axes = figure.add_subplot()
    axes.set(xlim=(0, 10), ylim=(-0.2, len(storeys)))
    axes.axis("off")
    centre: dict[str, tuple[float, float]] = {}
    for y, storey in enumerate(storeys):
        for column, place in enumerate(storey):
            x = 10 * (column + 0.5) / len(storey)
            centre[place] = (x, y + 0.3)
            name = place.removeprefix("privpart.")
            name += "" if (ROOT / place.replace(".", "/")).is_dir() else ".py"
            axes.add_patch(
                FancyBboxPatch(
                    (x - 0.75, y + 0.06), 1.5, 0.48, "round,pad=0.03", fc="#eef3f8", ec="#5b7d9d"
                )
            )
            axes.text(
                x, y + 0.3, f"{name}\n{lines(place):,}", ha="center", va="center", fontsize=7.5
            )
    for place, below in needed(arrows).items():
        (x, y) = centre[place]
        for other in below:
            (to_x, to_y) = centre[other]
            arrow = FancyArrowPatch(
                (x, y - 0.28),
                (to_x, to_y + 0.28),
                arrowstyle="-|>",
                mutation_scale=8,
                color="#8aa0b4",
                lw=0.7,
                zorder=0,
            )
            axes.add_patch(arrow)
    return figure
