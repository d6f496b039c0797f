"""``privpart demo``: train, account and audit on real data, and say what the results mean."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import checks
from accounting.checks import ConfigError
from privpart.cli.idle import OF_FOLDER
from privpart.cli.trainings import JobsOption, processes, progress_of_rounds
from privpart.engines.options import EngineOptions

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from rich.progress import Progress, TaskID

    from accounting import PrivacyReport
    from attacks import LeakageReport
    from privpart.cli.demo_tables import Accuracy
    from privpart.study.cell import BasePlan, Cell
    from privpart.study.runner import Outcome, Runner
    from privpart.study.sweep import SweepFile
    from privpart.training.task_data import PlanData

AUDITED_IMAGES = 4
ENGINE = EngineOptions(batching="vmap")
"""Vectorized clients take less than half of the processor time of one client after another, on both
networks. With "auto", the numbers would depend on how busy the machine is."""
_PLANS = Path(__file__).parents[1] / "study" / "plans"


class DataName(StrEnum):
    """Data sets by the name that people type."""

    DIGITS = "digits"
    FASHION_MNIST = "fashion-mnist"


def demo(
    out: Annotated[Path, typer.Option(help="Folder for report.json and the pictures.")] = Path(
        "out"
    ),
    data: Annotated[DataName, typer.Option(help="What to train on.")] = DataName.DIGITS,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with Fashion-MNIST's four idx files."), OF_FOLDER
    ] = None,
    seed: Annotated[
        int, typer.Option(help="First seed; the same seed gives the same numbers.")
    ] = 0,
    seeds: Annotated[int, typer.Option(help="Trainings per noise level and part.")] = 5,
    jobs: JobsOption = None,
) -> None:
    """Train full and partial models at several noise levels; report privacy and leakage.

    Digits take about a minute on two cores, Fashion-MNIST several minutes.
    """
    checks.count("seed", seed, minimum=0)
    checks.count("seeds", seeds)
    jobs = processes(jobs)
    file, base = sweep_file(data, data_dir, range(seed, seed + seeds))
    _make_folder(out)

    from privpart.cli import demo_tables
    from privpart.cli.pages import plots
    from privpart.study.runner import Runner
    from privpart.study.sweep import sweep_of
    from privpart.training.task_data import plan_data

    cells = sweep_of(file, base).cells
    plan = cells[0].plan
    examples = plan_data(plan.data, plan.model.network())
    with (
        progress_of_rounds() as progress,
        ThreadPoolExecutor(1) as thread,
        Runner(jobs, options=ENGINE) as runner,  # left first, so that Ctrl-C ends it
    ):
        train = partial(_train, cells, runner, progress)
        # other processes train while this one attacks
        future = thread.submit(train) if jobs > 1 else None
        accuracies = train() if future is None else []
        audits = _audit(examples, seed, progress)
        if future is not None:
            accuracies = future.result()
    budgets = _budgets(cells)
    report = {
        "schema": "privpart/demo/1",
        "version": version("privpart"),
        "noise_source": "seeded: not private",
        "seed": seed,
        "recipe": file.model_dump(mode="json", by_alias=True),
        "budget": [budget.to_dict() for budget in budgets],
        "accuracy": [accuracy.to_dict() for accuracy in accuracies],
        "leakage": {name: _without_times(audit.to_dict()) for name, audit in audits.items()},
        "notes": demo_tables.notes(plan),
    }
    (out / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    plots.draw_accuracy(accuracies, budgets, out / "accuracy.png")
    plots.draw_reconstructions(list(audits.values()), out / "leakage.png")
    demo_tables.show(plan, budgets, accuracies, audits)
    typer.echo(f"\nWritten: {out / 'report.json'}, {out / 'accuracy.png'}, {out / 'leakage.png'}")


def sweep_file(
    data: DataName, data_dir: Path | None, seeds: Sequence[int]
) -> "tuple[SweepFile, BasePlan]":
    """Return the trainings of the demo on ``data``, with these seeds."""
    from privpart.study.cell import BasePlan, read_file
    from privpart.study.sweep import SweepFile

    path = _PLANS / f"{data.value.replace('-', '_')}.toml"
    file, base = read_file(path, SweepFile, "sweep")
    tables = dict(base.tables)
    if data_dir is not None:
        tables["data"] = tables["data"] | {"directory": str(data_dir)}
    file = file.model_copy(update={"plan": tables, "seeds": list(seeds)})
    return file, BasePlan(tables, base.folder)


def _train(cells: "Sequence[Cell]", runner: "Runner", progress: "Progress") -> list["Accuracy"]:
    from privpart.cli.demo_tables import Accuracy
    from privpart.study.runner import error_of_failures
    from privpart.training.costs import message_bytes

    bar = progress.add_task("training", total=sum(cell.plan.privacy.rounds for cell in cells))
    results = {}

    def advance(cell: "Cell", rounds: int) -> None:
        progress.update(bar, advance=rounds, description=f"training (z = {cell.labels['noise']})")

    def finish(cell: "Cell", outcome: "Outcome") -> None:
        if isinstance(outcome, str):
            raise error_of_failures([outcome], cell.name)
        results[cell.key] = outcome

    runner.train(cells, finish, advance)
    points: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        points.setdefault((cell.labels["part"], cell.labels["noise"]), []).append(cell)
    accuracies = []
    for (part, _), group in points.items():
        first, model = results[group[0].key], group[0].plan.model.partial()
        accuracies.append(
            Accuracy(
                part=part,
                noise_multiplier=first.noise_multiplier,
                seeds=tuple(cell.seed for cell in group),
                accuracies=tuple(results[cell.key].accuracy for cell in group),
                trained=first.trained,
                parameter_count=first.parameter_count,
                update_bytes=message_bytes(model),
            )
        )
    return accuracies


def _budgets(cells: "Sequence[Cell]") -> "list[PrivacyReport]":
    """Return the guarantee at each noise level but zero."""
    plans = {cell.labels["noise"]: cell.plan for cell in cells}
    return [
        plan.privacy_plan().report(plan.privacy.delta, noise_source="seeded")
        for plan in plans.values()
        if plan.privacy.noise_multiplier
    ]


def _audit(examples: "PlanData", seed: int, progress: "Progress") -> dict[str, "LeakageReport"]:
    """Attack an untrained convolutional network and a dense one, one image at a time."""
    import torch

    from attacks import leakage, suite
    from attacks.networks import smooth_lenet, smooth_mlp

    torch.set_num_threads(1)  # the last digits depend on the number of threads
    size = examples.test_x.shape[-1]
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
            examples.test_x[:AUDITED_IMAGES],
            examples.test_y[:AUDITED_IMAGES],
            views=views,
            dataset_mean=examples.users.x.mean(dim=0),
            attacks=suite(restarts=2, max_evaluations=300, newton_steps=0, steps=0, tv=0),
            seed=seed,
            progress=partial(_advance, progress, bar, name),
        )
        for name, (network, views) in networks.items()
    }


def _advance(progress: "Progress", bar: "TaskID", name: str, step: str) -> None:
    progress.update(bar, advance=1, description=f"audit ({name}, {step})")


def _without_times(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without the times, which differ between equal runs."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in report["rows"]]
    return report | {"rows": rows}


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be made: {error.strerror}.") from None
