"""Figures of docs/study.md and docs/fedpt.md, from tables of ``privpart frontier`` and ``sweep``.

Run: ``python examples/studies/figures.py``; reads benchmarks/results/study/*/frontier.csv and
benchmarks/results/fedpt_sweep.csv.
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
    "study-bytes": (
        "accuracy-bytes",
        ("tree",),
        "Fashion-MNIST, 28,000 users, 280 rounds of 100",
    ),
    "study-images": (
        "accuracy-epsilon",
        ("images",),
        "Fashion-MNIST behind EfficientNet-lite0, 7,000 users, 70 rounds of 100",
    ),
    "study-words": (
        "accuracy-epsilon",
        ("words",),
        "Shakespeare, next word: 700 roles, 28 rounds of 50",
    ),
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


def main(docs: Path = DOCS) -> None:
    """Draw each figure."""
    draw_sweep(docs / "fedpt-sweep.png")
    for name, (drawn, tables, title) in FIGURES.items():
        rows = [row for table in tables for row in rows_of(table)]
        with tempfile.TemporaryDirectory() as folder:
            draw_frontier(rows, title, Path(folder))
            (docs / f"{name}.png").write_bytes((Path(folder) / f"{drawn}.png").read_bytes())


if __name__ == "__main__":
    main()
