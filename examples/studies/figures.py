"""Figures of docs/study.md, docs/fedpt.md and docs/what-leaks.md; prints the last one's table.

Run: ``python examples/studies/figures.py``; reads the tables in benchmarks/results/study,
benchmarks/results/fedpt_sweep.csv and benchmarks/results/membership.csv.
"""

import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from accounting.report import down
from privpart.cli.pages import drawing
from privpart.cli.pages.plots import draw_frontier, sweep_figures
from privpart.study.frontier import Interval

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
NUMBERS = {"epsilon", "metric", "low", "high", "difference_low", "difference_high", "difference"}
FIGURES = {  # file in docs -> file that ``privpart frontier`` draws, tables shown together, title
    "study-epsilon": (
        "accuracy-epsilon",
        ("tree", "blt", "bandmf"),
        "Fashion-MNIST, 28,000 users, 280 rounds of 100",
    ),
    "study-images": (
        "accuracy-epsilon",
        ("images",),
        "Fashion-MNIST behind EfficientNet-lite0, 7,000 users, 70 rounds of 100",
    ),
}
TASKS = {  # file in docs -> table, level with noise, title
    "study-arms": ("tree", "2", "Fashion-MNIST, 28,000 users, tree"),
    "study-body": ("body", "2", "Fashion-MNIST behind a pretrained body, 2,000 users, BLT"),
    "study-words": ("words", "8", "Next word, 700 roles of Shakespeare, BLT"),
}
EXACT = 60.0
"""A reconstruction of so many dB is the image itself, up to rounding."""


class Column(NamedTuple):
    """A panel of a task's figure.

    Attributes:
        label: below its axis.
        values: of each arm, with the ends of its interval, which are the value itself without one.
        guess: what is reached without an attack; None for what no attack measures.
    """

    label: str
    values: Sequence[tuple[float, ...]]
    guess: float | None = None


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table, as text."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw_sweep(path: Path) -> None:
    """Draw the sweep of FedPT's Table 5 against epsilon."""
    axes = ("model.train", "privacy.mechanism", "noise")
    numbers = ("mean_accuracy", "standard_deviation", "epsilon", "noise_multiplier", "delta")
    rows = [
        row | {column: float(row[column]) if row[column] else None for column in numbers}
        for row in read(RESULTS / "fedpt_sweep.csv")
    ]
    drawing.save(sweep_figures(rows, axes, ("noise",))["epsilon"], path)


def rows_of(table: str) -> list[dict[str, Any]]:
    """Return the rows of a frontier, with numbers where the figures need them."""
    rows: list[dict[str, Any]] = read(RESULTS / "study" / table / "frontier.csv")
    for row in rows:
        for column in NUMBERS:
            row[column] = float(row[column]) if row[column] else None
        row["bytes_up"] = int(row["bytes_up"])
    return rows


def rows_of_bodies(level: str) -> list[dict[str, Any]]:
    """Return rows as ``rows_of`` does, of the study that bodies.py computed."""
    measured = {row["arm"]: row for row in read(RESULTS / "study" / "body" / "memory.csv")}
    reached: dict[str, list[float]] = {}
    for row in read(RESULTS / "study" / "body" / "final.csv"):
        if row["level"] == level:
            reached.setdefault(row["arm"], []).append(float(row["metric"]))
    rows = []
    for arm, values in reached.items():
        found, own = Interval.of(values), measured[arm]
        rows.append(
            {"arm": arm, "level": level, "metric": found.mean, "low": found.low, "high": found.high}
            | {"bytes_up": int(own["bytes_up"]), "memory_bytes": own["computed_bytes"]}
            | {"client_seconds": float(own["step_ms"]) / 1e3}
        )
    return rows


def optional(table: str, name: str) -> dict[str, dict[str, Any]]:
    """Return what was measured of each arm of a table; nothing if it was not."""
    path = RESULTS / "study" / table / f"{name}.csv"
    return {row["arm"]: row for row in read(path)} if path.exists() else {}


def columns_of(table: str, level: str) -> tuple[list[str], list[Column]]:
    """Return the arms of a task at a level of noise, and what is shown of each."""
    found = rows_of_bodies(level) if table == "body" else rows_of(table)
    rows = [row for row in found if row["level"] == level]
    arms = [row["arm"] for row in rows]
    reached = [tuple(100 * row[end] for end in ("metric", "low", "high")) for row in rows]
    columns = [Column("accuracy, %", reached)]
    if pictures := optional(table, "leakage"):
        scores = [float(pictures[arm]["leakage_psnr"]) for arm in arms]
        guess = float(pictures[arms[0]]["leakage_baseline"])
        columns.append(Column("image from update, dB", [(own,) * 3 for own in scores], guess))
    if members := optional(table, "membership"):
        areas = [
            tuple(float(members[arm][end]) for end in ("auc", "auc_low", "auc_high"))
            for arm in arms
        ]
        columns.append(Column("who took part, area", areas, 0.5))
    for label, field, unit in (
        ("client sends, KB", "bytes_up", 1e-3),
        ("its memory, MB", "memory_bytes", 1e-6),
        ("its step, ms", "client_seconds", 1e3),
    ):
        columns.append(Column(label, [(unit * float(row[field]),) * 3 for row in rows]))
    return arms, columns


def draw_task(path: Path, table: str, level: str, title: str) -> None:
    """Draw a bar per arm: accuracy, what its update and its model give away, what it costs."""
    arms, columns = columns_of(table, level)
    figure, cells = drawing.panels(len(columns), 10.6 / len(columns), 0.9 + 0.3 * len(arms))
    styles, places = drawing.Styles(), range(len(arms), 0, -1)
    few = len(arms) <= len(drawing.SERIES)  # else the whole network has its colour, and the parts
    colours = [styles.colour(arm if few or not i else "part") for i, arm in enumerate(arms)]
    for axes, column in zip(cells, columns, strict=True):
        most = max(high for _, _, high in column.values if high < EXACT or column.guess is None)
        most = max(most, column.guess or 0.0)
        for place, (value, low, high), colour in zip(places, column.values, colours, strict=True):
            exact = column.guess is not None and value > EXACT
            end = 1.2 * most if exact else value
            axes.hlines(place, 0, end, color=colour, linewidth=9)
            if low < high:
                axes.hlines(place, low, high, color=drawing.INK, linewidth=1.5)
            text, at = "exact" if exact else f"{value:#.3g}".rstrip("."), max(end, min(high, most))
            axes.text(at + 0.03 * most, place, text, va="center", fontsize=8)
        axes.set(xlim=(0, 1.6 * most), ylim=(0.4, len(arms) + 0.6), xlabel=column.label)
        axes.grid(visible=False)
        if column.guess is not None:
            drawing.target(axes, column.guess, "without an attack", vertical=True)
    cells[0].set_yticks(list(places), arms)
    figure.suptitle(f"{title}, epsilon {level}", fontsize=9)
    drawing.save(figure, path)


def draw_membership(path: Path) -> None:
    """Draw how well RMIA tells who took part, against epsilon, for both parts."""
    rows = [row for row in read(RESULTS / "membership.csv") if row["attack"] == "RMIA"]
    names = list(dict.fromkeys(row["data"] for row in rows))
    figure, cells = drawing.panels(len(names), 4.8, 3.4)
    for axes, data in zip(cells, names, strict=True):
        _draw_members(axes, data, [row for row in rows if row["data"] == data])
    cells[0].set_ylabel("area under RMIA's ROC curve")
    drawing.legend(cells[0])
    drawing.save(figure, path)


def print_membership() -> None:
    """Print what RMIA tells in each cell, and the most that any attack proves there."""
    rows = read(RESULTS / "membership.csv")
    for row in (row for row in rows if row["attack"] == "RMIA"):
        cell = {name: row[name] for name in ("data", "epsilon", "part")}
        proved = max(float(other["proved"]) for other in rows if cell.items() <= other.items())
        level = "no noise" if row["epsilon"] == "inf" else f"{float(row['epsilon']):g}"
        low, middle, high = (f"{float(row[f'auc{end}']):.3f}" for end in ("_low", "", "_high"))
        right = f"{100 * float(row['accuracy']):.0f} %"
        area = f"{middle} ({low} to {high})"
        print("|", " | ".join([row["data"], level, row["part"], right, area, down(proved, 2)]), "|")


def _draw_members(axes: Axes, data: str, found: list[dict[str, Any]]) -> None:
    levels = list(dict.fromkeys(row["epsilon"] for row in found))
    for number, part in enumerate(dict.fromkeys(row["part"] for row in found)):
        own = [row for row in found if row["part"] == part]
        low, middle, high = (
            [float(row[f"auc{end}"]) for row in own] for end in ("_low", "", "_high")
        )
        ends = [
            [m - x for m, x in zip(middle, low, strict=True)],
            [y - m for m, y in zip(middle, high, strict=True)],
        ]
        at = [levels.index(row["epsilon"]) + 0.4 * (number - 0.5) for row in own]
        style = {"color": drawing.SERIES[number], "marker": drawing.MARKERS[number]}
        style |= {"linestyle": "none", "markersize": 5, "capsize": 3}
        axes.errorbar(at, middle, ends, label=f"{part} training", **style)
        for place, row, top in zip(at, own, high, strict=True):
            share = f"{100 * float(row['accuracy']):.0f} %"
            axes.text(place, top + 0.01, share, ha="center", fontsize=7, color=style["color"])
    names = ["no noise" if level == "inf" else f"epsilon {float(level):g}" for level in levels]
    axes.set_xticks(range(len(names)), names)
    axes.margins(0.08, 0.1)
    axes.axhline(0.5, color=drawing.FAINT, linewidth=0.8)
    about = f"{data}, {own[0]['users']} users, seeds: {own[0]['seeds']}"
    axes.set_title(f"{about}; above each point: test accuracy", fontsize=9)


def main(docs: Path = DOCS) -> None:
    """Draw each figure."""
    draw_membership(docs / "membership.png")
    print_membership()
    for name, task in TASKS.items():
        draw_task(docs / f"{name}.png", *task)
    draw_sweep(docs / "fedpt-sweep.png")
    for name, (drawn, tables, title) in FIGURES.items():
        rows = [row for table in tables for row in rows_of(table)]
        with tempfile.TemporaryDirectory() as folder:
            draw_frontier(rows, title, Path(folder))
            (docs / f"{name}.png").write_bytes((Path(folder) / f"{drawn}.png").read_bytes())


if __name__ == "__main__":
    main()
