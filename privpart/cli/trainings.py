"""Trainings: what the commands that train many cells share.

Progress goes to standard error: a bar on a terminal, a line for each training in a log.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import checks
from accounting.checks import ConfigError
from privpart.cli.options import Format
from privpart.cli.output import print_result, say

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from concurrent.futures import Executor

    from rich.progress import Progress, TaskID

    from privpart.study.cell import Cell
    from privpart.study.runner import Outcome, Runner
    from privpart.study.store import Store
    from privpart.training.plan_file import PlanFile

NOT_PRIVATE = (
    "The noise of a sweep comes from its seeds: these models are NOT private. Epsilon is what a "
    "run of the same plan with secret noise would cost."
)
JobsOption = Annotated[
    str | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="<n|dask:address>",
        help="Processes; by default one per processor. Or a Dask cluster that you trust, whose "
        "workers have the plan's code and files: dask:tcp://HOST:8786.",
    ),
]
INTERRUPTED = 130
_REFUSED = "ConfigError: "


def processes(jobs: str | None) -> "int | Executor":
    """Return the number of processes, or the cluster, that was typed; or one per processor."""
    if jobs is not None and jobs.startswith("dask:"):
        from privpart.study.cluster import connect

        return connect(jobs.removeprefix("dask:"))
    if jobs is not None:
        if not jobs.isdecimal():
            raise ConfigError(f"jobs={jobs}: must be a whole number of processes, or dask:ADDRESS.")
        return checks.count("jobs", int(jobs))
    # those that this process may use: a container often has fewer than its machine
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(slots=True)
class Trainings:
    """Collects trainings that are finished or failed, and shows them with their rounds."""

    progress: "Progress"
    bar: "TaskID"
    outcomes: "dict[str, Outcome]" = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """The errors of those that failed."""
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, str)]

    def advanced(self, _: "Cell", rounds: float) -> None:
        """Count more rounds of a training."""
        self.progress.update(self.bar, advance=rounds)

    def finished(self, cell: "Cell", outcome: "Outcome") -> None:
        """Keep the outcome of a training, and show it."""
        self.outcomes[cell.key] = outcome
        trained = f"{len(self.outcomes)} trained"
        self.progress.update(self.bar, description=trained)
        # a log has no bar that could be updated, so it gets a line per training
        if not self.progress.console.is_terminal:
            elapsed = timedelta(seconds=round(self.progress.tasks[self.bar].elapsed or 0))
            labels = ", ".join(f"{axis}={value}" for axis, value in cell.labels.items())
            result = "failed" if isinstance(outcome, str) else f"metric {outcome.accuracy:.4f}"
            typer.echo(f"{trained}, {elapsed}: {labels}, seed {cell.seed}: {result}", err=True)

    def refuse_no_result(self, missing: str = "") -> None:
        """Raise the error of a command whose every training failed, or that lacks its result.

        ``missing`` says what it lacks. It is a ConfigError if each training that failed was refused
        by one, or no metric was finite, and a WorkerError otherwise.
        """
        from privpart.pool import WorkerError

        failures = self.failures
        if failures and len(failures) == len(self.outcomes):
            missing = f"all {len(failures)} trainings failed, the first with"
        elif missing and failures:
            missing += f"; {len(failures)} trainings failed, the first with"
        if missing:
            failures = failures or [f"{_REFUSED}no metric was finite. Lower the learning rates."]
            refused = all(failure.startswith(_REFUSED) for failure in failures)
            kind = ConfigError if refused else WorkerError
            raise kind(f"{missing}: {failures[0].removeprefix(_REFUSED)}")


@contextmanager
def shown_trainings(rounds: int) -> Iterator[Trainings]:
    """Yield what counts trainings of so many rounds in all, and show it."""
    from privpart.training.progress import display_of_rounds

    with display_of_rounds("rounds", transient=True, speed_estimate_period=300) as progress:
        yield Trainings(progress, progress.add_task("", total=rounds))


def tell_of_code(*plans: "PlanFile") -> None:
    """Say on standard error which code plans are about to import."""
    # by reference: hundreds of cells may name the same code
    for plan in {tuple(plan.references().items()): plan for plan in plans}.values():
        for key, reference in plan.references().items():
            say(f"imports {reference} ({key}) from {plan.folder}")


def train_stages(
    stages: "Iterable[Sequence[Cell]]", runner: "Runner", store: "Store", out: Path, rounds: int
) -> Trainings:
    """Train what a store in ``out`` lacks, stage by stage, and show how far the trainings are.

    Later stages may depend on the results of earlier ones; ``rounds`` are missing in all.
    """
    try:
        with shown_trainings(rounds) as trainings:
            for cells in stages:
                runner.train(cells, trainings.finished, trainings.advanced, store)
            return trainings
    except KeyboardInterrupt:
        say(f"interrupted; finished trainings are kept in {out}.")
        raise typer.Exit(INTERRUPTED) from None


def print_results(
    document: dict[str, Any], form: Format, store: "Store", print_table: Callable[[], None]
) -> None:
    """Print the rows of a document, and what failed."""
    print_result(form, document, document["rows"], print_table)
    for line in failures_of(store):
        say(line)


def delta_warnings(store: "Store") -> list[str]:
    """Return the warnings about delta of all cells that are done, each once."""
    return sorted({result.delta_warning for result in store.results().values()} - {""})


def failures_of(store: "Store") -> list[str]:
    """Return a sentence for each cell that failed."""
    return [f"failed: {labels}, seed {seed}: {error}" for labels, seed, error in store.errors()]
