"""Page of a sweep: its pictures, its table and what failed."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from accounting.report import up
from privpart.cli.output import Table
from privpart.cli.pages.decision import glossary
from privpart.cli.pages.page import Block, Page, Picture, Section, Verdict

_CAPTION = {
    "noise": "By noise. Bands and bars: one standard deviation over seeds.",
    "epsilon": "By epsilon. Levels: the same training without noise.",
}


def sweep_page(
    rows: Sequence[Mapping[str, Any]],
    axes: Sequence[str],
    figures: Mapping[str, Figure],
    notes: Sequence[str],
    failed: Sequence[str],
) -> Page:
    """Return the page of a sweep: its figures by "noise" and "epsilon", notes, and what failed."""
    table, deltas = table_of_sweep(rows, axes)
    pictures = [
        Picture(figure, f"Result against {name}.", _CAPTION[name])
        for name, figure in figures.items()
    ]
    below = Block("points", [*filter(None, [deltas]), "z is the noise multiplier."])
    return Page(
        "Sweep over plans and seeds",
        [
            Verdict(
                "caution",
                f"Simulations: {sum(row['seeds'] for row in rows)} cells of {len(rows)} points, "
                "none of them private",
                notes,
            )
        ],
        [
            Section("Results", [Block("pictures", pictures)]),
            Section("Table", [table, below]),
            Section("Cells that failed", [Block("points", failed)] if failed else []),
            glossary("epsilon", "delta", "noise", "simulation"),
        ],
        "By the rules of privpart sweep.",
    )


def table_of_sweep(rows: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> tuple[Table, str]:
    """Return the table as people read it, and what delta is."""
    in_percent = not any(row["mean_metric"] is not None for row in rows)
    name, factor, form = ("accuracy", 100, ".2f") if in_percent else ("metric", 1, ".4g")
    header = (*axes, "z", "epsilon", "trained", name + " (%)" * in_percent, "seeds", "failed")
    cells = []
    for row in rows:
        mean = row["mean_accuracy" if in_percent else "mean_metric"]
        result = "not finite" * bool(row["seeds"]) if mean is None else f"{factor * mean:{form}}"
        if row["standard_deviation"] is not None:
            result += f" ± {factor * row['standard_deviation']:{form}}"
        noise = "" if row["noise_multiplier"] is None else f"{row['noise_multiplier']:.4g}"
        epsilon = "no guarantee" if row["epsilon"] is None else up(row["epsilon"], 4)
        trained = "" if row["trained"] is None else f"{row['trained']:,}"
        counts = str(row["seeds"]), str(row["failed"] or "")
        cells.append((*(str(row[axis]) for axis in axes), noise, epsilon, trained, result, *counts))
    values = sorted({row["delta"] for row in rows if row["epsilon"] and row["delta"]})
    deltas = ", ".join(f"{delta:g}" for delta in values)
    at = f"Epsilon at delta {deltas}; client, zero-out adjacency." if values else ""
    title = f"Mean and standard deviation of the {name} over seeds"
    return Table(title, header, cells), at
