"""Figures of docs/study.md, from the tables that ``privpart frontier`` wrote.

Run: ``python examples/studies/figures.py``; reads benchmarks/results/study/*/frontier.csv.
"""

import csv
import tempfile
from pathlib import Path
from typing import Any

from privpart.cli.frontier_plots import draw_frontier

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "study"
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


def rows_of(table: str) -> list[dict[str, Any]]:
    """Return the rows of a frontier, with numbers where the figures need them."""
    with (RESULTS / table / "frontier.csv").open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        for column in NUMBERS:
            row[column] = float(row[column]) if row[column] else None
        row["bytes_up"] = int(row["bytes_up"])
    return rows


def main() -> None:
    """Draw each figure."""
    for name, (drawn, tables, title) in FIGURES.items():
        rows = [row for table in tables for row in rows_of(table)]
        with tempfile.TemporaryDirectory() as folder:
            draw_frontier(rows, title, Path(folder))
            (DOCS / f"{name}.png").write_bytes((Path(folder) / f"{drawn}.png").read_bytes())


if __name__ == "__main__":
    main()
