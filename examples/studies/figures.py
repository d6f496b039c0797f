"""Figures of docs/study.md and docs/fedpt.md, from tables of ``privpart frontier`` and ``sweep``.

Run: ``python examples/studies/figures.py``; reads benchmarks/results/study/*/frontier.csv,
benchmarks/results/fedpt_sweep.csv and benchmarks/results/membership.csv.
"""

import csv
import tempfile
from pathlib import Path
from typing import Any

from privpart.cli.pages import drawing
from privpart.cli.pages.plots import draw_frontier, sweep_figures

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
TASKS = {  # file in docs -> table, level with noise, table of what an update gives away, title
    "study-arms": ("tree", "2", "leakage", "Fashion-MNIST, 28,000 users, tree"),
    "study-words": ("words", "8", "", "Next word, 700 roles of Shakespeare, BLT"),
}


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


def draw_task(path: Path, table: str, level: str, attacked: str, title: str) -> None:
    """Draw a bar per arm: accuracy, what an update gives away, bytes and seconds of a client."""
    rows = [row for row in rows_of(table) if row["level"] == level]
    pictures = (
        {r["arm"]: r for r in read(RESULTS / "study" / f"{attacked}.csv")} if attacked else {}
    )
    columns = {f"accuracy at epsilon {level}, %": [100 * row["metric"] for row in rows]}
    if pictures:
        found = [float(pictures[row["arm"]]["leakage_psnr"]) for row in rows]
        columns["an image from its update, dB"] = found
    columns["a client sends, KB"] = [row["bytes_up"] / 1e3 for row in rows]
    columns["a client's step, ms"] = [1e3 * float(row["client_seconds"]) for row in rows]
    figure, cells = drawing.panels(len(columns), 9.2 / len(columns), 0.9 + 0.3 * len(rows))
    styles, places = drawing.Styles(), range(len(rows), 0, -1)
    for axes, (label, values) in zip(cells, columns.items(), strict=True):
        most = max(values)
        for place, value, row in zip(places, values, rows, strict=True):
            axes.hlines(place, 0, value, color=styles.colour(row["arm"]), linewidth=9)
            axes.text(value + 0.03 * most, place, f"{value:.3g}", va="center", fontsize=8)
        if axes is cells[0]:
            for place, row in zip(places, rows, strict=True):
                ends = [100 * row["low"], 100 * row["high"]]
                axes.hlines(place, *ends, color=drawing.INK, linewidth=1.5)
        axes.set(xlim=(0, 1.3 * most), ylim=(0.4, len(rows) + 0.6), xlabel=label)
        axes.grid(visible=False)
    if pictures:
        guess = float(next(iter(pictures.values()))["leakage_baseline"])
        drawing.target(cells[1], guess, "best image without an attack", vertical=True)
    cells[0].set_yticks(list(places), [row["arm"] for row in rows])
    figure.suptitle(title, fontsize=9)
    drawing.save(figure, path)


def draw_membership(path: Path) -> None:
    """Draw how well RMIA tells who took part, against epsilon, for both parts."""
    figure, axes = drawing.panel(6.4, 3.4)
    found = [row for row in read(RESULTS / "membership.csv") if row["attack"] == "RMIA"]
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
        at = [levels.index(row["epsilon"]) + 0.1 * (number - 0.5) for row in own]
        style = {"color": drawing.SERIES[number], "marker": drawing.MARKERS[number]}
        style |= {"linestyle": "none", "markersize": 5, "capsize": 3}
        axes.errorbar(at, middle, ends, label=f"{part} training", **style)
        for place, row, top in zip(at, own, high, strict=True):
            share = f"{100 * float(row['accuracy']):.0f} %"
            axes.text(place, top + 0.01, share, ha="center", fontsize=7, color=style["color"])
    names = ["no noise" if level == "inf" else f"epsilon {float(level):g}" for level in levels]
    axes.set_xticks(range(len(names)), names)
    axes.axhline(0.5, color=drawing.FAINT, linewidth=0.8)
    axes.set_ylabel("area under RMIA's ROC curve")
    about = f"digits, {own[0]['users']} users, seeds: {own[0]['seeds']}"
    axes.set_title(f"{about}; above each point: test accuracy", fontsize=9)
    drawing.legend(axes)
    drawing.save(figure, path)


def main(docs: Path = DOCS) -> None:
    """Draw each figure."""
    draw_membership(docs / "membership.png")
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
