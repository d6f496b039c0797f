"""``privpart freeze-search``: which layers can stay at their start values."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import checks
from privpart.cli import options
from privpart.cli.demo import ENGINE, DataName, sweep_file
from privpart.cli.idle import OF_FOLDER
from privpart.cli.options import Format
from privpart.cli.output import as_csv, plain_console
from privpart.cli.sweep import processors

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from privpart.experiment.freeze_search import FreezeTrial
    from privpart.experiment.sweep_file import SweepFile

NOT_COVERED = (
    "A search looks at accuracies. On the clients' private data it is a release of its own, which "
    "no epsilon of the later training covers: search on public or proxy data, as this command "
    "does."
)


def freeze_search(
    data: Annotated[
        DataName, typer.Option(help="Public or proxy data to train on.")
    ] = DataName.DIGITS,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with Fashion-MNIST's four idx files."), OF_FOLDER
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            help="Points of accuracy that freezing a block may cost, >= 0; below the standard "
            "deviation over seeds, chance decides."
        ),
    ] = 2.0,
    seeds: Annotated[
        int, typer.Option(help="Trainings per trial; all trials have the same seeds.")
    ] = 3,
    jobs: Annotated[
        int | None, typer.Option(help="Processes; by default one per processor.")
    ] = None,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Find which layers to freeze: the largest first, each if accuracy stays (FedPT).

    Trains the demo's network without noise, once per layer and seed. Normalization layers always
    train.
    Example: privpart freeze-search --data digits --tolerance 3
    """
    checks.count("seeds", seeds)
    checks.nonnegative("tolerance", tolerance)
    jobs = checks.count("jobs", jobs if jobs is not None else processors())
    file = sweep_file(data, data_dir, range(seeds))
    rounds = file.tables["privacy"]["rounds"]
    rows, train = _search(file, tolerance, jobs)
    if form is Format.JSON:
        document = {
            "schema": "privpart/freeze-search/1",
            "data": data.value,
            "rounds": rounds,
            "tolerance": tolerance,
            "seeds": seeds,
            "train": train,
            "rows": rows,
            "not_covered": NOT_COVERED,
        }
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(rows), nl=False)
        typer.echo(NOT_COVERED, err=True)
    else:
        _print_table(rows, train, data, rounds, tolerance)


def _search(
    file: "SweepFile", tolerance: float, jobs: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row per trial, and the patterns that train after the last trial that was kept.

    Each trial is a sweep of its own over the seeds of ``file``: its base plan, without noise.
    """
    from privpart.experiment.freeze_search import freeze_search as search
    from privpart.experiment.freeze_search import layer_blocks
    from privpart.experiment.plan_file import validated
    from privpart.experiment.sweep import CellTrainer, train_cells
    from privpart.experiment.sweep_file import sweep_of
    from privpart.experiment.task_data import plan_data

    plan = validated(file.tables)
    module = plan.model.network()
    plan_data(plan.data, module)  # missing files are refused before any training
    names = [name for name, _ in module.named_parameters()]
    accuracies: dict[tuple[str, ...], list[float]] = {}

    def trained(frozen: tuple[str, ...]) -> list[str]:
        return [name for name in names if name.rpartition(".")[0] not in frozen]

    def accuracy(frozen: tuple[str, ...]) -> float:
        typer.echo(f"training with {', '.join(frozen) or 'nothing'} frozen ...", err=True)
        part = {"part": {"trial": {"model.train": trained(frozen)}}}
        cells = sweep_of(file.model_copy(update={"joint": part})).cells
        results = train_cells(cells, trainer)
        accuracies[frozen] = [result.accuracy for result in results]
        return mean(accuracies[frozen])

    with CellTrainer(jobs, options=ENGINE) as trainer:
        trials = list(search(layer_blocks(module), accuracy, tolerance=tolerance / 100))
    count = sum(p.numel() for p in module.parameters())
    rows = [_row(trial, accuracies, count) for trial in trials]
    best = [trial for trial in trials if trial.kept][-1]
    layers = dict.fromkeys(name.rpartition(".")[0] for name in trained(best.frozen))
    return rows, [f"{layer}.*" for layer in layers]


def _row(
    trial: "FreezeTrial", accuracies: dict[tuple[str, ...], list[float]], count: int
) -> dict[str, Any]:
    full, found = accuracies[()], accuracies[trial.frozen]
    differences = [part - whole for part, whole in zip(found, full, strict=True)]
    return {
        "frozen": " ".join(trial.frozen),
        "trained": count - trial.parameter_count,
        "reduction": count / (count - trial.parameter_count),
        "accuracy": trial.accuracy,
        "difference": mean(differences),
        "difference_deviation": stdev(differences) if len(differences) > 1 else None,
        "kept": trial.kept,
    }


def _print_table(
    rows: Sequence[dict[str, Any]],
    train: Sequence[str],
    data: DataName,
    rounds: int,
    tolerance: float,
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=f"{data}, {rounds} rounds without noise; freezing may cost {tolerance:g} points",
        box=SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("frozen")
    for column in ("trained", "reduction", "accuracy (%)", "to full", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        spread = row["difference_deviation"]
        table.add_row(
            row["frozen"].replace(" ", ", ") or "nothing",
            f"{row['trained']:,}",
            f"{row['reduction']:.1f}x",
            f"{100 * row['accuracy']:.1f}",
            f"{100 * row['difference']:+.1f}"
            + ("" if spread is None else f" ± {100 * spread:.1f}"),
            "kept" if row["kept"] else "no",
        )
    console = plain_console(100)
    console.print(table)
    typer.echo("Train " + " ".join(f"--train '{pattern}'" for pattern in train))
    note = "Differences below their standard deviation over seeds mean nothing. " + NOT_COVERED
    typer.echo("\n" + fill(note, 96))
