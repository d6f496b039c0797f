"""``privpart demo``: train, account and audit on real data, and say what the numbers mean."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import checks
from accounting.checks import ConfigError
from privpart.cli.recipes import Data, processors, recipe_for

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from rich.progress import Progress, TaskID

    from attacks import LeakageReport
    from privpart.cli.demo_tables import Accuracy
    from privpart.data.tasks import Task
    from privpart.experiment.recipe import Cell, Recipe

DELTA = 1e-5
NOISE_MULTIPLIERS = (0.0, 0.3, 1.0, 3.0)
PARTS = {"full": ("*",), "partial": ("conv*", "norm.*", "dense2.*")}
AUDITED_IMAGES = 4


def demo(
    out: Annotated[Path, typer.Option(help="Folder for report.json and the pictures.")] = Path(
        "out"
    ),
    data: Annotated[Data, typer.Option(help="What to train on.")] = Data.DIGITS,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with Fashion-MNIST's four idx files.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="First seed; the same seed gives the same numbers.")
    ] = 0,
    seeds: Annotated[int, typer.Option(help="Trainings per noise level and part.")] = 5,
    jobs: Annotated[
        int | None, typer.Option(help="Processes; by default one per processor.")
    ] = None,
) -> None:
    """Train a full and a partial model at several noise levels, report the cost, audit the leak.

    Digits take about a minute on two processors, Fashion-MNIST several.
    """
    checks.count("seed", seed, minimum=0)
    checks.count("seeds", seeds)
    jobs = checks.count("jobs", jobs if jobs is not None else processors())
    _make_folder(out)

    from rich.console import Console
    from rich.progress import Progress

    from attacks import picture
    from privpart.cli import demo_tables, plots

    recipe = recipe_for(data, data_dir)
    task = recipe.load()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        accuracies = _train(recipe, task, range(seed, seed + seeds), jobs, progress)
        audits = _audit(task, seed, progress)
    budgets = [
        recipe.plan(z).report(DELTA, noise_source="seeded") for z in NOISE_MULTIPLIERS if z > 0
    ]
    report = {
        "schema": "privpart/demo/1",
        "version": version("privpart"),
        "noise_source": "seeded: not private",
        "seed": seed,
        "recipe": asdict(recipe) | {"data_dir": None if data_dir is None else str(data_dir)},
        "budget": [budget.to_dict() for budget in budgets],
        "accuracy": [accuracy.to_dict() for accuracy in accuracies],
        "leakage": {name: _without_times(audit.to_dict()) for name, audit in audits.items()},
        "notes": demo_tables.notes(recipe),
    }
    (out / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    plots.draw_accuracy(accuracies, budgets, out / "accuracy.png")
    picture.grid(list(audits.values()), out / "leakage.png")
    demo_tables.show(recipe, budgets, accuracies, audits)
    typer.echo(f"\nWritten: {out / 'report.json'}, {out / 'accuracy.png'}, {out / 'leakage.png'}")


def _train(
    recipe: "Recipe", task: "Task", seeds: Sequence[int], jobs: int, progress: "Progress"
) -> list["Accuracy"]:
    from privpart.cli.demo_tables import Accuracy
    from privpart.experiment.recipe import Cell, train_cells
    from privpart.wire import encode_update

    cells = [
        Cell(part, train, z, seed)
        for z in NOISE_MULTIPLIERS
        for part, train in PARTS.items()
        for seed in seeds
    ]
    results = _tracked(train_cells(recipe, cells, jobs=jobs), cells, progress)
    grouped: dict[tuple[str, float], list[float]] = {}
    for cell, result in zip(cells, results, strict=True):
        grouped.setdefault((cell.part, cell.noise_multiplier), []).append(result)
    models = {
        part: recipe.model(train, image_size=task.train_x.shape[-1], seed=seeds[0])
        for part, train in PARTS.items()
    }
    return [
        Accuracy(
            part=part,
            noise_multiplier=z,
            seeds=tuple(seeds),
            accuracies=tuple(found),
            trained=models[part].dim,
            numbers=models[part].parameter_count,
            update_bytes=len(encode_update(models[part], models[part].flat)),
        )
        for (part, z), found in grouped.items()
    ]


def _tracked(
    results: Iterator[float], cells: Sequence["Cell"], progress: "Progress"
) -> Iterator[float]:
    bar = progress.add_task("training", total=len(cells))
    for cell, result in zip(cells, results, strict=True):
        progress.update(bar, advance=1, description=f"training (z = {cell.noise_multiplier:g})")
        yield result


def _audit(task: "Task", seed: int, progress: "Progress") -> dict[str, "LeakageReport"]:
    """Attack a convolutional and a dense network, untrained, one image at a time."""
    import torch

    from attacks import leakage, suite
    from attacks.networks import smooth_lenet, smooth_mlp

    torch.set_num_threads(1)  # so that the numbers do not depend on the machine's processors
    size = task.test_x.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    networks = {
        "conv net": (
            smooth_lenet(generator, size=size),
            {
                "full": ["*"],
                "all but dense1": ["conv*", "dense2.*"],
                "conv2 only": ["conv2.*"],
                "conv1 only": ["conv1.*"],
            },
        ),
        "dense net": (
            smooth_mlp(generator, size=size),
            {"first layer only": ["dense1.*"], "last layer only": ["dense2.*"]},
        ),
    }
    bar = progress.add_task("audit", total=6 * AUDITED_IMAGES)
    return {
        name: leakage(
            network,
            task.test_x[:AUDITED_IMAGES],
            task.test_y[:AUDITED_IMAGES],
            views=views,
            dataset_mean=task.train_x.mean(dim=0),
            attacks=suite(restarts=2, max_evaluations=300, newton_steps=0, steps=0, tv=0),
            seed=seed,
            progress=partial(_advance, progress, bar, name),
        )
        for name, (network, views) in networks.items()
    }


def _advance(progress: "Progress", bar: "TaskID", name: str, step: str) -> None:
    progress.update(bar, advance=1, description=f"audit ({name}, {step})")


def _without_times(report: dict[str, Any]) -> dict[str, Any]:
    """Drop what differs between two equal runs."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in report["rows"]]
    return report | {"rows": rows}


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be made: {error.strerror}.") from None
