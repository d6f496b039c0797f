"""Page of a sweep: its pictures, its table and what failed."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from accounting.report import up
from privpart.cli.pages.page import Page, Picture, Pictures, Points, Section, table_of


def sweep_page(
    rows: Sequence[Mapping[str, Any]],
    axes: Sequence[str],
    figures: Mapping[str, Figure],
    notes: Sequence[str],
    failed: Sequence[str],
) -> Page:
    """Return the page of a sweep.

    Args:
        rows: of its table, as ``privpart sweep show --format json`` prints them.
        axes: names of its axes.
        figures: accuracy against "noise" and "epsilon".
        notes: what must be known to read the figures.
        failed: a sentence per cell that failed.
    """
    own = any(row["mean_metric"] is not None for row in rows)
    header = (*axes, "z", "epsilon", "trained", "metric" if own else "accuracy (%)", "seeds")
    cells = [(*(row[axis] for axis in axes), *_figures(row)) for row in rows]
    deltas = sorted({row["delta"] for row in rows if row["epsilon"]})
    at = f"Epsilon at delta {', '.join(f'{d:g}' for d in deltas)}; client, zero-out adjacency."
    done = sum(row["seeds"] for row in rows)
    pictures = Pictures(
        tuple(
            Picture(figure, f"Result against {name}.", _CAPTION[name])
            for name, figure in figures.items()
        )
    )
    return Page(
        "Sweep over plans and seeds",
        "caution",
        f"Simulations: {done} cells of {len(rows)} points, none of them private",
        tuple(notes),
        (
            Section("Results", (pictures,)),
            Section(
                "Table",
                (
                    table_of("Mean and standard deviation over seeds", header, cells),
                    Points(((at,) if deltas else ()) + ("z is the noise multiplier.",)),
                ),
            ),
            Section("Cells that failed", (Points(tuple(failed)),) if failed else ()),
        ),
        ("By the rules of privpart sweep show.",),
    )


_CAPTION = {
    "noise": "By noise. Bands and bars: one standard deviation over seeds.",
    "epsilon": "By epsilon. Levels: the same training without noise.",
}


def _figures(row: Mapping[str, Any]) -> tuple[str, ...]:
    own = row["mean_metric"] is not None
    mean, factor, form = (
        (row["mean_metric"], 1, ".4g") if own else (row["mean_accuracy"], 100, ".2f")
    )
    spread = (
        ""
        if row["standard_deviation"] is None
        else (f" ± {factor * row['standard_deviation']:{form}}")
    )
    tuned = " *" if row["tuned_candidates"] > 1 else ""
    failed = f" ({row['failed']} failed)" if row["failed"] else ""
    return (
        "" if row["noise_multiplier"] is None else f"{row['noise_multiplier']:.4g}",
        "no guarantee" if row["epsilon"] is None else up(row["epsilon"], 4),
        "" if row["trained"] is None else f"{row['trained']:,}",
        "" if mean is None else f"{factor * mean:{form}}{spread}{tuned}",
        f"{row['seeds']}{failed}",
    )
