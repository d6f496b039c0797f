"""Loop: the only round loop, ``fit``.

The accountant is silent in here: the guarantee follows from the plan, which the server enforces.

Callbacks: what ``fit`` calls after each round, once the round is committed.

They write what evaluation on public data said, and nothing about who came: no guarantee covers
numbers of clients, so these files may be published where the run's own ledger may not.
"""

import csv
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.messages import ClientUpdate, CohortSum, RoundTask
from privpart.server import RoundCounts, Server


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One finished round.

    Attributes:
        round: from 0.
        counts: received, counted and refused updates; not covered by the guarantee.
        metric: what ``evaluate`` returned, if it ran.
    """

    round: int
    counts: RoundCounts
    metric: float | None


class CohortTooSmallError(RuntimeError):
    """A round had fewer well-formed updates than the plan's minimum; nothing was released.

    The server stands where it stood before: ``fit`` may be called again.
    """


class Engine(Protocol):
    """Runs clients, wherever they are."""

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the task that trained from ``start``, shape (d,)."""
        ...


@runtime_checkable
class SummingEngine(Engine, Protocol):
    """An engine whose clipping and adding up are trusted as the server's own would be."""

    def sums(self, task: RoundTask, start: Tensor) -> Iterator[CohortSum] | None:
        """Return sums in which each client of the task is once; None where ``run`` must do it."""
        ...


def fit(
    server: Server,
    engine: Engine,
    cohorts: Sequence[Sequence[int]],
    *,
    commit: Callable[[Server, RoundCounts], None] | None = None,
    evaluate: Callable[[Tensor], float] | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callable[[RoundRecord], None]] = (),
) -> list[RoundRecord]:
    """Run the rounds from ``server.round`` to the last cohort and return a record of each.

    Args:
        server: owns the model, the noise and the limits.
        engine: runs the clients.
        cohorts: per round, counted from round 0 also when a run is resumed, the ids of the clients
            to ask; chosen without looking at data. Those whose limit is reached are not asked.
        commit: makes a round durable, as ``RunFolder.commit``. Called before anything else, here
            or outside, sees the round's model.
        evaluate: of the trainable part, shape (d,); on public data, for it is not accounted.
        evaluate_every: rounds between evaluations, >= 1; None evaluates after the last round only.
        callbacks: called after each round, in order.

    Raises:
        ConfigError: more cohorts than planned rounds, or ``evaluate_every`` is not a count.
        CohortTooSmallError: see there.
    """
    if evaluate_every is not None:
        checks.count("evaluate_every", evaluate_every)
    if len(cohorts) > server.plan.rounds:
        raise ConfigError(f"{len(cohorts)} cohorts, but the plan has {server.plan.rounds} rounds.")
    records = []
    for number in range(server.round, len(cohorts)):
        task = server.task(server.eligible(cohorts[number]))
        try:
            counts = _run_round(server, engine, task)
            if counts.released and commit is not None:
                commit(server, counts)
        except BaseException as error:
            if server.round != number:  # else nothing was drawn, and the round may be tried again
                server.halt(f"round {number} was not committed ({type(error).__name__})")
            raise
        if not counts.released:
            raise CohortTooSmallError(
                f"round {number}: fewer than {server.plan.minimum_cohort} well-formed updates "
                f"among the {counts.received} that came. Nothing was released; try again later."
            )
        due = number + 1 == len(cohorts) or (evaluate_every and (number + 1) % evaluate_every == 0)
        metric = evaluate(server.parameters) if evaluate is not None and due else None
        record = RoundRecord(number, counts, metric)
        records.append(record)
        for callback in callbacks:
            callback(record)
    return records


def _run_round(server: Server, engine: Engine, task: RoundTask) -> RoundCounts:
    if isinstance(engine, SummingEngine):
        sums = engine.sums(task, server.parameters)
        if sums is not None:
            return server.run_round((), sums=sums)
    return server.run_round(engine.run(task, server.parameters))


Callback = Callable[[RoundRecord], None]

FIELDS = ("round", "metric", "seconds")
JSON_LINES, CSV = "metrics.jsonl", "metrics.csv"


class MetricsFiles:
    """One line per round in ``metrics.jsonl`` and ``metrics.csv`` of a folder.

    Lines are appended and flushed, so a run that is resumed goes on in the same files. A crash
    between a round's commit and its line leaves the line out.

    Args:
        folder: exists.

    Each line has round (from 0), metric (None, or empty, where nothing was evaluated) and seconds
    since the last line.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last = time.monotonic()
        if not (folder / CSV).exists():
            (folder / CSV).write_text(",".join(FIELDS) + "\n", encoding="utf-8")

    def __call__(self, record: RoundRecord) -> None:
        """Append one round."""
        now = time.monotonic()
        row = {
            "round": record.round,
            "metric": record.metric,
            "seconds": round(now - self._last, 6),
        }
        self._last = now
        with (self._folder / JSON_LINES).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row, allow_nan=False) + "\n")
        with (self._folder / CSV).open("a", encoding="utf-8", newline="") as table:
            csv.DictWriter(table, FIELDS, lineterminator="\n").writerow(row)


class ProgressBar:
    """A line on standard error: rounds, time, time left and the last metric, as a percentage.

    Where standard error is no terminal, each metric is a line of its own.

    Args:
        rounds: in all, >= 1.
        done: of them, before the run was resumed.
    """

    def __init__(self, rounds: int, *, done: int = 0) -> None:
        columns = (
            TextColumn("round"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._console = Console(stderr=True)
        self._progress = Progress(*columns, console=self._console)
        self._bar = self._progress.add_task("", total=rounds, completed=done)

    def __call__(self, record: RoundRecord) -> None:
        """Move on by one round."""
        self._progress.update(self._bar, completed=record.round + 1)
        if record.metric is None:
            return
        self._progress.update(self._bar, description=f"test {record.metric:.1%}")
        if not self._console.is_terminal:
            self._console.print(f"round {record.round + 1}: test accuracy {record.metric:.1%}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoard:
    """The metric as a TensorBoard scalar; a context that closes its file.

    Args:
        folder: of the event file.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "TensorBoard is not installed: pip install tensorboard, or leave it out."
            ) from None
        self._writer = SummaryWriter(str(folder))

    def __call__(self, record: RoundRecord) -> None:
        """Write the round's metric, if it has one."""
        if record.metric is not None:
            self._writer.add_scalar("metric", record.metric, record.round + 1)

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
