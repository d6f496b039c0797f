"""Drawings of the concept pages: who sees what, a tree, correlated noise, a partial model.

Drawn in black, white and two colours that also differ in lightness; words say what colours say.
"""

from html import escape

import numpy as np

from accounting import BinaryTree, BufferedToeplitz, Independent, Mechanism, Participation

INK, PALE, BLUE, ORANGE = "#1b1f24", "#f3f5f7", "#cfe3f5", "#f7cf9b"


def drawings() -> dict[str, str]:
    """Return the SVG text of each drawing by its file name."""
    return {
        "who-sees-what.svg": who_sees_what(),
        "tree.svg": tree(),
        "correlated-noise.svg": correlated_noise(),
        "partial-model.svg": partial_model(),
    }


def svg(width: int, height: int, *shapes: str) -> str:
    """Return shapes on a white ground, with a marker for the heads of arrows."""
    head = '<path d="M0 0 L8 4 L0 8 z" fill="#1b1f24"/>'
    marker = (
        f'<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">{head}'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="13" fill="{INK}">'
        f"<defs>{marker}</marker></defs>"
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(shapes)}</svg>\n'
    )


def words(x: float, y: float, text: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    """Return lines of text about a point."""
    lines = text.split("\n")
    top = y - 8 * (len(lines) - 1) + 4.5
    spans = "".join(
        f'<tspan x="{x}" y="{top + 16 * n}">{escape(line)}</tspan>' for n, line in enumerate(lines)
    )
    return f'<text text-anchor="{anchor}" font-weight="{weight}">{spans}</text>'


def box(x: float, y: float, w: float, h: float, text: str, fill: str = PALE) -> str:
    """Return a box with text in its middle."""
    shape = f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{INK}"/>'
    return shape + words(x + w / 2, y + h / 2, text)


def arrow(x: float, y: float, to_x: float, to_y: float, *, dashed: bool = False) -> str:
    """Return an arrow; a dashed one carries integers under masks."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<path d="M{x} {y} L{to_x} {to_y}" stroke="{INK}" stroke-width="1.5" fill="none"{dash} '
        'marker-end="url(#head)"/>'
    )


def who_sees_what() -> str:
    """Clients, server and the outside, with what each of them sees."""
    shapes = []
    for n in range(3):
        y = 40 + 60 * n
        shapes += [box(20, y, 110, 44, "client\nits own data", BLUE), arrow(130, y + 22, 288, 122)]
    shapes += [
        words(212, 52, "one clipped update\nper client"),
        box(290, 72, 150, 100, "server\nsees every update\nadds the noise", ORANGE),
        arrow(440, 122, 578, 122),
        words(508, 92, "noised\nmodels"),
        box(580, 72, 150, 100, "everybody else\nsees every model\nof every round", BLUE),
        words(365, 200, "trusted: secure sums show it sums only"),
        words(655, 200, "epsilon bounds\nwhat they can learn"),
    ]
    return svg(750, 230, *shapes)


def tree() -> str:
    """Eight rounds, the nodes that one round is in, and those that make a prefix sum."""
    shapes, place = [], {}
    for level in range(4):
        for n in range(8 >> level):
            width = 80 * (1 << level)
            place[level, n] = (40 + width * (n + 0.5), 205 - 55 * level)
    for (level, n), (x, y) in place.items():
        if level < 3:
            to_x, to_y = place[level + 1, n // 2]
            shapes.append(f'<path d="M{x} {y} L{to_x} {to_y}" stroke="{INK}" stroke-width="1"/>')
    touched = {(0, 2), (1, 1), (2, 0), (3, 0)}
    summed = {(2, 0), (1, 2), (0, 6)}
    for node, (x, y) in place.items():
        fill = ORANGE if node in touched else "white"
        edge = 3.5 if node in summed else 1
        shapes.append(
            f'<circle cx="{x}" cy="{y}" r="15" fill="{fill}" stroke="{INK}" stroke-width="{edge}"/>'
        )
        if node[0] == 0:
            shapes.append(words(x, y + 29, f"round {node[1]}"))
    shapes += [
        words(40, 262, "filled: a client of round 2 is in these 4 sums", anchor="start"),
        words(40, 284, "thick: these 3 sums make the model after round 6", anchor="start"),
    ]
    return svg(720, 300, *shapes)


def correlated_noise() -> str:
    """Noise in the model after each round, by three mechanisms at the same guarantee."""
    rounds = 63
    blt = BufferedToeplitz(
        rounds,
        decay=(0.703864, 0.970182, 0.998105),
        scale=(0.295937, 0.131099, 0.057899),
    )
    left, bottom, wide, high, top = 70.0, 250.0, 440.0, 220.0, 8.5
    rows: list[tuple[str, Mechanism, str, str]] = [
        ("independent noise", Independent(rounds), "#8a4b00", "none"),
        ("tree", BinaryTree(rounds), INK, "2 4"),
        ("BLT, three buffers", blt, "#0b5394", "9 4"),
    ]
    shapes = [
        f'<path d="M{left} {bottom - high} V{bottom} H{left + wide}" stroke="{INK}" fill="none"/>',
        words(left + wide / 2, bottom + 36, "round"),
        words(12, 16, "noise in the model (standard deviation, mu = 1)", anchor="start"),
    ]
    for tick in (0, 2, 4, 6, 8):
        shapes.append(words(left - 14, bottom - high * tick / top, str(tick)))
    for tick in (0, 16, 32, 48):
        shapes.append(words(left + wide * tick / rounds, bottom + 16, str(tick)))
    for name, mechanism, colour, dash in rows:
        squared = mechanism.sensitivity(Participation(rounds)).squared
        deviation = np.sqrt(squared * mechanism.prefix_variance())
        points = " ".join(
            f"{left + wide * (t + 1) / rounds:.1f},{bottom - high * value / top:.1f}"
            for t, value in enumerate(deviation)
        )
        style = f'stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"'
        shapes.append(f'<polyline points="{points}" fill="none" {style}/>')
        y = bottom - high * float(deviation[-1]) / top
        shapes.append(words(left + wide + 8, y, f"{name}: {deviation[-1]:.1f}", anchor="start"))
    return svg(690, 300, *shapes)


def partial_model() -> str:
    """A network of four layers, the two that train, and what is sent."""
    names = ["conv1", "conv2", "dense1", "dense2"]
    trained = {"conv1", "dense2"}
    shapes = [words(20, 20, "the client's network", anchor="start", weight="bold")]
    for n, name in enumerate(names):
        kind = "trains" if name in trained else "frozen"
        shapes.append(
            box(20 + 125 * n, 40, 100, 50, f"{name}\n{kind}", ORANGE if name in trained else PALE)
        )
        if n < 3:
            shapes.append(arrow(120 + 125 * n, 65, 143 + 125 * n, 65))
    shapes += [
        arrow(195, 160, 195, 94),
        arrow(320, 160, 320, 94),
        box(130, 162, 255, 44, "public seed or public weights:\nnever sent, no noise", PALE),
        arrow(70, 90, 70, 248),
        arrow(445, 90, 445, 248),
        box(20, 250, 475, 40, "one update: all trained parameters, clipped together", ORANGE),
        arrow(495, 270, 568, 270),
        box(570, 245, 130, 50, "server: sum,\nnoise, step", BLUE),
    ]
    return svg(720, 310, *shapes)
