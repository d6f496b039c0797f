"""``privpart frontier``: what to freeze, by a study of arms that were tuned alike."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import checks
from accounting.report import up
from privpart.cli import options
from privpart.cli.options import Format
from privpart.cli.output import as_csv
from privpart.cli.sweep import NOT_PRIVATE, processors, progress_of_rounds

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from privpart.experiment.study.stages import Choice
    from privpart.experiment.study.study_file import Group, Study
    from privpart.experiment.sweep import Outcome
    from privpart.experiment.sweep_file import Cell
    from privpart.experiment.sweep_store import SweepStore

_INTERRUPTED = 130
TUNED = (
    "Values were chosen on held-out users, who are public and whom nothing else uses; no test "
    "example was read for a choice. Chosen on the clients' own data, each trial would be a release "
    "that no epsilon here covers."
)


def frontier(
    file: Annotated[
        Path, typer.Argument(help="TOML file with a base plan, arms, levels of noise and a tuning.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the study.")],
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", help="Processes; by default one per processor.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Where clients are computed: 'cpu', or an accelerator such as 'cuda', which the "
            "processes share."
        ),
    ] = "cpu",
    tune_only: Annotated[
        bool, typer.Option("--tune-only", help="Choose values, and test nothing.")
    ] = False,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Compare parts of a model under privacy, each tuned by the same budget: what to freeze.

    Each arm, at each level of noise, tries the same points of the tuning space, measured on
    held-out users. The best one is then trained with the final seeds and tested. The same command
    again resumes: finished trainings are kept.

    Example: privpart frontier examples/study_digits.toml --out study -j 2
    """
    jobs = checks.count("jobs", jobs if jobs is not None else processors())
    from privpart.engines.options import EngineOptions
    from privpart.experiment.study.study_file import read_study
    from privpart.experiment.sweep import CellTrainer
    from privpart.experiment.sweep_store import SweepStore

    study = read_study(file)
    with SweepStore(out / "tune", create=True) as tuned:
        with SweepStore(out / "final", create=True) as final:
            trainer = CellTrainer(jobs, options=EngineOptions(device=device, explain=True))
            _train(study, trainer, tuned, final, out, tune_only=tune_only)
            _show(study, tuned, final, out, form)


def _train(
    study: "Study",
    trainer: Any,
    tuned: "SweepStore",
    final: "SweepStore",
    out: Path,
    *,
    tune_only: bool,
) -> None:
    from privpart.cli.train import tell_of_code
    from privpart.experiment.study.stages import remaining, run_study

    plans = [
        cells[0].candidates[0] for group in study.groups for cells in study.tuning_cells(group)
    ]
    for plan in {tuple(plan.references().items()): plan for plan in plans}.values():
        tell_of_code(plan)
    rounds = remaining(study, tuned, final, tune_only=tune_only)
    trials, seeds = len(study.points), len(study.file.final.seeds)
    typer.echo(
        f"{len(study.groups)} groups of {trials} trials and {seeds} final seeds; {rounds:,} rounds "
        f"to train. {NOT_PRIVATE}",
        err=True,
    )
    try:
        with progress_of_rounds() as progress, trainer:
            bar = progress.add_task("", total=rounds)
            count = 0

            def advanced(_: "Cell", rounds: int) -> None:
                progress.update(bar, advance=rounds)

            def finished(cell: "Cell", _: "Outcome") -> None:
                nonlocal count
                count += 1
                stage = "tuning" if "trial" in cell.labels else "final"
                progress.update(bar, description=f"{stage}, {count} trained")

            run_study(
                study,
                trainer,
                tuned,
                final,
                tune_only=tune_only,
                advanced=advanced,
                finished=finished,
            )
    except KeyboardInterrupt:
        typer.echo(f"privpart: interrupted; finished trainings are kept in {out}.", err=True)
        raise typer.Exit(_INTERRUPTED) from None


def _show(
    study: "Study", tuned: "SweepStore", final: "SweepStore", out: Path, form: Format
) -> None:
    from privpart.experiment.study.frontier import rows_of, training_rows

    trials, results = tuned.results(), final.results()
    chosen = _chosen(study, trials)
    reached = _reached(study, chosen, trials, results)
    rows = rows_of(study, reached)
    tables = {
        "tuning": list(training_rows(study, trials, "tuning", chosen)),
        "final": list(training_rows(study, results, "final", chosen)),
        "frontier": rows,
    }
    for name, table in tables.items():
        if table:
            (out / f"{name}.csv").write_text(as_csv(table), encoding="utf-8")
    document = {
        "schema": "privpart/frontier/1",
        "study": study.hash,
        "rows": rows,
        "notes": [NOT_PRIVATE, TUNED],
    }
    (out / "study.json").write_text(
        json.dumps(document, indent=2, allow_nan=False), encoding="utf-8"
    )
    if form is Format.JSON:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(rows) if rows else "", nl=False)
    else:
        _print_table(rows)
    for store in (tuned, final):
        for labels, seed, error in store.errors():
            typer.echo(f"privpart: failed: {labels}, seed {seed}: {error}", err=True)


def _chosen(study: "Study", trials: Any) -> "dict[Group, Choice]":
    from privpart.experiment.study.stages import choice

    found = {group: choice(study, group, trials) for group in study.groups}
    return {group: best for group, best in found.items() if best is not None}


def _reached(study: "Study", chosen: "dict[Group, Choice]", trials: Any, results: Any) -> list[Any]:
    from privpart.experiment.study.frontier import Reached

    found = []
    for group, best in chosen.items():
        cells = study.final_cells(group, best.point)
        by_seed = {
            cell.seed: results[cell.key]
            for cell in cells
            if cell.key in results and results[cell.key].accuracy is not None
        }
        tried = [c for cells in study.tuning_cells(group) for c in cells]
        spent = sum(trials[c.key].cpu_seconds for c in tried)
        spent += sum(result.cpu_seconds for result in by_seed.values())
        if by_seed:
            found.append(Reached(group, best, by_seed, spent))
    return found


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column in ("mechanism", "arm"):
        table.add_column(column)
    for column in ("epsilon", "z", "trained", "metric", "to the first arm", ""):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["mechanism"],
            row["arm"],
            "no guarantee" if row["epsilon"] is None else up(row["epsilon"], 4),
            f"{row['noise_multiplier']:.4g}",
            f"{row['trained']:,}",
            _interval(row["metric"], row["low"], row["high"]),
            "" if row["verdict"] in (None, "reference") else _signed(row),
            row["verdict"] or "",
        )
    Console(width=120, highlight=False).print(table)
    typer.echo(f"Intervals are Student's t at 95 % over seeds. {TUNED} {NOT_PRIVATE}")


def _interval(centre: float, low: float | None, high: float | None) -> str:
    return f"{centre:.4f}" + ("" if low is None or high is None else f" [{low:.4f}, {high:.4f}]")


def _signed(row: dict[str, Any]) -> str:
    low, high = row["difference_low"], row["difference_high"]
    ends = "" if low is None else f" [{low:+.4f}, {high:+.4f}]"
    return f"{row['difference']:+.4f}{ends}"
