"""``privpart sweep`` and ``privpart sweep show``: train a grid of plans, and show the results."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from accounting.report import up
from privpart.cli import options
from privpart.cli.idle import Command, where
from privpart.cli.options import Format
from privpart.cli.output import as_csv, print_table
from privpart.cli.trainings import (
    NOT_PRIVATE,
    JobsOption,
    delta_warnings,
    failures_of,
    name_code,
    print_results,
    processes,
    train_stages,
)

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from privpart.study.store import Point, Store


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
    jobs: JobsOption = None,
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
    jobs = processes(jobs)
    from privpart.study.runner import Runner
    from privpart.study.store import Store
    from privpart.study.sweep import read_sweep

    sweep = read_sweep(file)
    with Runner(jobs, timeout=cell_timeout) as runner, Store(out, create=True) as store:
        store.describe(sweep.axes, sweep.noise_axes)
        done = store.results()
        missing = [cell for cell in sweep.cells if cell.key not in done]
        name_code(missing)
        runner.check(missing)
        typer.echo(f"{len(sweep.cells)} cells, {len(missing)} to train. {NOT_PRIVATE}", err=True)
        rounds = sum(cell.plan.privacy.rounds for cell in missing)
        trainings = train_stages([missing], runner, store, out, rounds)
        _show(store, out, form, html)
    trainings.refuse_no_result()


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
    from privpart.study.store import Store

    with Store(folder) as store:
        _show(store, folder, form, html)


def _show(store: "Store", out: Path, form: Format, html: Path | None) -> None:
    from privpart.cli.pages import plots

    points, axes = store.points(), store.axes
    rows = [_row(point, axes) for point in points]
    if rows:
        (out / "sweep.csv").write_text(as_csv(rows), encoding="utf-8")
        plots.draw_sweep(points, axes, store.noise_axes, out)
    notes = [NOT_PRIVATE, *delta_warnings(store)]
    if html is not None:
        from privpart.cli.pages.sweep import sweep_page

        figures = plots.sweep_figures(points, axes, store.noise_axes) if rows else {}
        sweep_page(rows, axes, figures, notes, failures_of(store)).write(html)
    document = {"schema": "privpart/sweep-table/1", "rows": rows, "notes": notes}
    print_results(document, form, store, lambda: _print_table(points, axes, notes))


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
        "tuned_candidates": 1,  # values are tuned by `privpart frontier`
        "noise_source": "seeded",
    }


def _print_table(points: Sequence["Point"], axes: Sequence[str], notes: Sequence[str]) -> None:
    in_percent = not any(point.own_metric for point in points)
    name, factor, form = ("accuracy", 100, ".2f") if in_percent else ("metric", 1, ".4g")
    header = (*axes, "z", "epsilon", "trained", name + " (%)" * in_percent, "seeds", "failed")
    rows = []
    for point in points:
        result = "not finite" * bool(point.seeds)
        if point.mean is not None:
            result = f"{factor * point.mean:{form}}"
        if point.deviation is not None:
            result += f" ± {factor * point.deviation:{form}}"
        rows.append(
            (
                *(point.labels.get(axis, "") for axis in axes),
                "" if point.noise_multiplier is None else f"{point.noise_multiplier:.4g}",
                "no guarantee" if point.epsilon is None else up(point.epsilon, 4),
                "" if point.trained is None else f"{point.trained:,}",
                result,
                str(len(point.seeds)),
                str(point.failed) if point.failed else "",
            )
        )
    print_table(f"Mean and standard deviation of the {name} over seeds", header, rows)
    deltas = sorted({point.delta for point in points if point.epsilon and point.delta})
    if deltas:
        typer.echo(
            f"Epsilon at delta {', '.join(f'{d:g}' for d in deltas)}; client, zero-out adjacency."
        )
    typer.echo(f"z is the noise multiplier. {notes[0]}")
    for warning in notes[1:]:
        typer.echo(f"Warning: {warning}")
