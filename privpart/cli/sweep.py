"""``privpart sweep`` and ``privpart sweep show``: train a grid of plans, and show the results."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from accounting import checks
from accounting.report import up
from privpart.cli import options
from privpart.cli.idle import Command, where
from privpart.cli.options import Format
from privpart.cli.output import as_csv, plain_console
from privpart.cli.progress import trainings_told

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from privpart.cli.progress import TrainingsTold
    from privpart.experiment.sweep import CellTrainer, Outcome
    from privpart.experiment.sweep_file import Cell, Sweep
    from privpart.experiment.sweep_store import Point, SweepStore

NOT_PRIVATE = (
    "The noise of a sweep comes from its seeds: these models are NOT private. Epsilon is what a "
    "run of the same plan with secret noise would cost."
)
UNCHARGED = (
    "Fields were tuned per cell on held-out public test examples, which is uncharged. On the "
    "clients' own data each try would be a release that no epsilon here covers."
)


class _RunByDefault(TyperGroup):
    """Runs ``run`` where the first argument is not the name of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  click's, vendored
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    subcommand_metavar="FILE --out DIR | show DIR",
    help="""Train a grid of plans and seeds, or show its results.

    privpart sweep FILE --out DIR runs the sweep in FILE; "run" may be left out.

    privpart sweep show DIR prints the table of a sweep, finished or not.

    Example: privpart sweep examples/fedpt_sweep.toml --out fedpt -j 2

    Example: privpart sweep show fedpt --format csv

    If a file has the name of a command, type its folder, too: privpart sweep ./show --out DIR.
    """,
)


@app.command(cls=Command)
def run(
    file: Annotated[Path, typer.Argument(help="TOML file with a base plan, axes and seeds.")],
    out: Annotated[Path, typer.Option(help="Folder of the sweep.")],
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", help="Processes; by default one per processor.")
    ] = None,
    cell_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds without a finished round after which a cell is taken to hang and fails; "
            "by default 15 minutes until a cell is finished, then a minute, or 50 times the "
            "longest time between two rounds so far. One process (-j 1) has none."
        ),
        where("jobs", 1, "one process trains every cell itself"),
    ] = None,
    html: options.HtmlOption = None,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Train every cell of a grid, for each seed; the same command again resumes the sweep.

    A cell is identified by the hash of its plan and seed: finished cells are never trained twice,
    and after a change of an axis only new cells are trained. Failed cells are recorded, and tried
    again the next time. So are cells that hang (--cell-timeout), or whose process was killed.

    Example: privpart sweep examples/fedpt_sweep.toml --out fedpt -j 2
    """
    jobs = checks.count("jobs", jobs if jobs is not None else processors())
    from privpart.experiment.sweep import CellTrainer
    from privpart.experiment.sweep_file import read_sweep
    from privpart.experiment.sweep_store import SweepStore

    chosen = read_sweep(file)
    trainer = CellTrainer(jobs, timeout=cell_timeout)
    with SweepStore(out, create=True) as store:
        store.describe(chosen.axes, chosen.noise_axes)
        told = _run(chosen, store, trainer, out)
        _show(store, out, form, html)
    told.refuse_no_result()


@app.command(cls=Command)
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the sweep.")],
    html: options.HtmlOption = None,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Print a sweep's table; write it as CSV, and plot accuracy against noise and epsilon.

    Only finished cells are read, so a running sweep may be shown.

    Example: privpart sweep show fedpt
    """
    from privpart.experiment.sweep_store import SweepStore

    with SweepStore(folder) as store:
        _show(store, folder, form, html)


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(
    chosen: "Sweep", store: "SweepStore", trainer: "CellTrainer", out: Path
) -> "TrainingsTold":
    from privpart.cli.train import tell_of_code
    from privpart.experiment.sweep import rounds_of

    done = store.finished()
    missing = [cell for cell in chosen.cells if cell.key not in done]
    plans = [plan for cell in missing for plan in cell.candidates]
    for plan in {tuple(plan.references().items()): plan for plan in plans}.values():
        tell_of_code(plan)
    trainer.check(missing)
    typer.echo(f"{len(chosen.cells)} cells, {len(missing)} to train. {NOT_PRIVATE}", err=True)
    with trainings_told(sum(map(rounds_of, missing)), out) as told, trainer:

        def finished(cell: "Cell", outcome: "Outcome") -> None:
            store.add(cell.key, cell.labels, cell.seed, outcome)
            told.trained(cell, outcome, f"of {len(missing)} cells")

        trainer.train(missing, finished, told.advanced)
    return told


def _show(store: "SweepStore", out: Path, form: Format, html: Path | None) -> None:
    from privpart.cli.pages import plots

    points, axes = store.points(), store.axes
    rows = [_row(point, axes) for point in points]
    if rows:
        (out / "sweep.csv").write_text(as_csv(rows), encoding="utf-8")
        plots.draw_sweep(points, axes, store.noise_axes, out)
    notes = [NOT_PRIVATE, *([UNCHARGED] if any(point.tuned > 1 for point in points) else [])]
    notes += delta_warnings(store)
    failed = [f"failed: {labels}, seed {seed}: {error}" for labels, seed, error in store.errors()]
    if html is not None:
        from privpart.cli.pages.sweep import sweep_page

        figures = plots.sweep_figures(points, axes, store.noise_axes) if rows else {}
        sweep_page(rows, axes, figures, notes, failed).write(html)
    if form is Format.JSON:
        document = {"schema": "privpart/sweep-table/1", "rows": rows, "notes": notes}
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(rows) if rows else "", nl=False)
    else:
        _print_table(points, axes, notes)
    for line in failed:
        typer.echo(f"privpart: {line}", err=True)


def delta_warnings(store: "SweepStore") -> list[str]:
    """Return the warnings about delta of all cells that are done, each once."""
    return sorted({result.delta_warning for result in store.results().values()} - {""})


def _row(point: "Point", axes: Sequence[str]) -> dict[str, Any]:
    return {axis: point.labels.get(axis, "") for axis in axes} | {
        "noise_multiplier": point.noise_multiplier,
        "epsilon": point.epsilon,
        "delta": point.delta,
        "trained": point.trained,
        "mean_accuracy": None if point.own_metric else point.mean,
        "mean_metric": point.mean if point.own_metric else None,
        "standard_deviation": point.deviation,
        "seeds": len(point.seeds),
        "failed": point.failed,
        "tuned_candidates": point.tuned,
        "noise_source": "seeded",
    }


def _print_table(points: Sequence["Point"], axes: Sequence[str], notes: Sequence[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for axis in axes:
        table.add_column(axis)
    own = any(point.own_metric for point in points)
    result, factor, form = ("metric", 1, ".4g") if own else ("accuracy (%)", 100, ".2f")
    for column in ("z", "epsilon", "trained", result, "seeds", "failed"):
        table.add_column(column, justify="right")
    for point in points:
        spread = "" if point.deviation is None else f" ± {factor * point.deviation:{form}}"
        tuned = " *" if point.tuned > 1 else ""
        table.add_row(
            *(point.labels.get(axis, "") for axis in axes),
            "" if point.noise_multiplier is None else f"{point.noise_multiplier:.4g}",
            "no guarantee" if point.epsilon is None else up(point.epsilon, 4),
            "" if point.trained is None else f"{point.trained:,}",
            f"{factor * point.mean:{form}}{spread}{tuned}"
            if point.mean is not None
            else "not finite" * bool(point.seeds),
            str(len(point.seeds)),
            str(point.failed) if point.failed else "",
        )
    plain_console(120).print(table)
    deltas = sorted({point.delta for point in points if point.epsilon and point.delta})
    if deltas:
        typer.echo(
            f"Epsilon at delta {', '.join(f'{d:g}' for d in deltas)}; client, zero-out adjacency."
        )
    typer.echo("z is the noise multiplier.")
    name = "Metric" if own else "Accuracy"
    typer.echo(f"{name}: mean and standard deviation over seeds. {notes[0]}")
    for note in notes[1:]:
        typer.echo(f"* {note}" if note is UNCHARGED else f"Warning: {note}")
