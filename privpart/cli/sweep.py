"""``privpart sweep``: train a grid of plans, and show the results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privpart.cli import options
from privpart.cli.idle import without
from privpart.cli.options import Format
from privpart.cli.output import as_csv, print_table
from privpart.cli.trainings import (
    NOT_PRIVATE,
    JobsOption,
    delta_warnings,
    failures_of,
    print_results,
    processes,
    tell_of_code,
    train_stages,
)

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from concurrent.futures import Executor

    from privpart.cli.trainings import Trainings
    from privpart.study.store import Store


def sweep(
    out: Annotated[Path, typer.Option(help="Folder of the sweep.")],
    file: Annotated[
        Path | None,
        typer.Argument(
            help="TOML file with a base plan, axes and seeds; without it, the sweep in --out is "
            "shown, finished or not."
        ),
    ] = None,
    jobs: Annotated[JobsOption, without("file", "nothing is trained")] = None,
    html: options.HtmlOption = None,
    form: options.FormatOption = "table",
) -> None:
    """Train every cell of a grid, for each seed; the same command again resumes the sweep.

    A cell is identified by the hash of its plan and seed: finished cells are never trained twice,
    and after a change of an axis only new cells are trained. Failed cells are recorded, and tried
    again the next time. So are cells that hang, or whose process was killed. The table is also
    written as CSV, with plots of accuracy against noise and epsilon.

    Example: privpart sweep examples/fedpt_sweep.toml --out fedpt -j 2

    Example: privpart sweep --out fedpt --format csv
    """
    from privpart.study.store import Store

    if file is None:
        with Store(out) as store:
            _show(store, out, form, html)
    else:
        _train(file, out, processes(jobs), form, html).refuse_no_result()


def _train(
    file: Path, out: Path, jobs: "int | Executor", form: Format, html: Path | None
) -> "Trainings":
    from privpart.study.runner import Runner
    from privpart.study.store import Store
    from privpart.study.sweep import read_sweep

    swept = read_sweep(file)
    with Runner(jobs) as runner, Store(out, create=True) as store:
        store.describe(swept.axes, swept.noise_axes)
        done = store.results()
        missing = [cell for cell in swept.cells if cell.key not in done]
        tell_of_code(*(cell.plan for cell in missing))
        runner.check(missing)
        typer.echo(f"{len(swept.cells)} cells, {len(missing)} to train. {NOT_PRIVATE}", err=True)
        rounds = sum(cell.plan.privacy.rounds for cell in missing)
        trainings = train_stages([missing], runner, store, out, rounds)
        _show(store, out, form, html)
    return trainings


def _show(store: "Store", out: Path, form: Format, html: Path | None) -> None:
    from privpart.cli.pages import drawing, plots
    from privpart.study.sweep import sweep_rows

    rows, axes = sweep_rows(store), store.axes
    figures = plots.sweep_figures(rows, axes, store.noise_axes) if rows else {}
    if rows:
        (out / "sweep.csv").write_text(as_csv(rows), encoding="utf-8")
    for name, figure in figures.items():
        drawing.save(figure, out / f"accuracy-{name}.png")
    notes = [NOT_PRIVATE, *delta_warnings(store)]
    if html is not None:
        from privpart.cli.pages.sweep import sweep_page

        sweep_page(rows, axes, figures, notes, failures_of(store)).write(html)
    document = {"schema": "privpart/sweep-table/1", "rows": rows, "notes": notes}
    print_results(document, form, store, lambda: _print_table(rows, axes, notes))


def _print_table(
    rows: Sequence[Mapping[str, Any]], axes: Sequence[str], notes: Sequence[str]
) -> None:
    from privpart.cli.pages.sweep import table_of_sweep

    table, deltas = table_of_sweep(rows, axes)
    print_table(table)
    if deltas:
        typer.echo(deltas)
    typer.echo(f"z is the noise multiplier. {notes[0]}")
    for warning in notes[1:]:
        typer.echo(f"Warning: {warning}")
