"""``privpart sweep`` and ``privpart sweep show``: train a grid of plans, and show the results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

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
    from privpart.study.store import Store


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
    from privpart.study.runner import Runner
    from privpart.study.store import Store
    from privpart.study.sweep import read_sweep

    jobs, sweep = processes(jobs), read_sweep(file)
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
    from privpart.study.sweep import sweep_rows

    rows, axes, noise_axes = sweep_rows(store), store.axes, store.noise_axes
    if rows:
        (out / "sweep.csv").write_text(as_csv(rows), encoding="utf-8")
        plots.draw_sweep(rows, axes, noise_axes, out)
    notes = [NOT_PRIVATE, *delta_warnings(store)]
    if html is not None:
        from privpart.cli.pages.sweep import sweep_page

        figures = plots.sweep_figures(rows, axes, noise_axes) if rows else {}
        sweep_page(rows, axes, figures, notes, failures_of(store)).write(html)
    document = {"schema": "privpart/sweep-table/1", "rows": rows, "notes": notes}
    print_results(document, form, store, lambda: _print_table(rows, axes, notes))


def _print_table(
    rows: Sequence[Mapping[str, Any]], axes: Sequence[str], notes: Sequence[str]
) -> None:
    from privpart.cli.pages.sweep import table_of_sweep

    title, header, cells, deltas = table_of_sweep(rows, axes)
    print_table(title, header, cells)
    if deltas:
        typer.echo(deltas)
    typer.echo(f"z is the noise multiplier. {notes[0]}")
    for warning in notes[1:]:
        typer.echo(f"Warning: {warning}")
