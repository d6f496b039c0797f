"""Progress of trainings, on standard error: a bar on a terminal, a line for each in a log."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from rich.progress import Progress, TaskID

    from privpart.experiment.sweep import Outcome
    from privpart.experiment.sweep_file import Cell

_INTERRUPTED = 130


def progress_of_rounds() -> "Progress":
    """Return a display of the rounds of trainings, whose lengths differ."""
    from privpart.loop import display_of_rounds

    return display_of_rounds("rounds", transient=True, speed_estimate_period=300)


@dataclass(slots=True)
class TrainingsTold:
    """Tells of trainings; see ``trainings_told``.

    Attributes:
        progress: the display.
        bar: counts the rounds.
        count: trainings that are finished or failed.
        failures: errors of those that failed.
    """

    progress: "Progress"
    bar: "TaskID"
    count: int = 0
    failures: list[str] = field(default_factory=list)

    def advanced(self, _: "Cell", rounds: int) -> None:
        """Count more rounds of a training."""
        self.progress.update(self.bar, advance=rounds)

    def trained(self, cell: "Cell", outcome: "Outcome", what: str) -> None:
        """Count a training that is finished or failed, and tell of it."""
        self.count += 1
        if isinstance(outcome, str):
            self.failures.append(outcome)
        self.progress.update(self.bar, description=f"{self.count} {what}")
        if not self.progress.console.is_terminal:
            task = self.progress.tasks[self.bar]
            labels = ", ".join(f"{axis}={value}" for axis, value in cell.labels.items())
            result = "failed" if isinstance(outcome, str) else f"metric {outcome.accuracy:.4f}"
            typer.echo(
                f"{self.count} {what}, {timedelta(seconds=round(task.elapsed or 0))}: {labels}, "
                f"seed {cell.seed}: {result}",
                err=True,
            )

    def refuse_no_result(self) -> None:
        """Raise the error of a command whose every training failed.

        Raises:
            ConfigError: each was refused.
            WorkerError: another fault is among them.
        """
        from privpart.experiment.sweep import error_of_failures

        if self.failures and len(self.failures) == self.count:
            raise error_of_failures(
                self.failures, f"all {self.count} trainings failed, the first with"
            )


@contextmanager
def trainings_told(rounds: int, kept: Path) -> Iterator[TrainingsTold]:
    """Tell how far trainings are: a bar on a terminal, and in a log a line for each training.

    Args:
        rounds: of all trainings that are missing.
        kept: folder that keeps what is finished, named where the user interrupts.
    """
    try:
        with progress_of_rounds() as progress:
            yield TrainingsTold(progress, progress.add_task("", total=rounds))
    except KeyboardInterrupt:
        typer.echo(f"privpart: interrupted; finished trainings are kept in {kept}.", err=True)
        raise typer.Exit(_INTERRUPTED) from None
