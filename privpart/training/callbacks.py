"""Callbacks: what is shown and written of each committed round.

``MetricsFile`` writes the metrics of an evaluation on public data, and nothing about which or how
many clients took part or how long they trained, which no guarantee covers. Its file may be
published; the run's ledger may not, nor may the lines on standard error that say why a cohort came
out smaller than it should.
"""

import json
import math
import os
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from privpart.loop import RoundRecord

METRICS = "metrics.jsonl"


class MetricsError(RuntimeError):
    """What is shown of a round could not be written. The round itself is committed."""


class MetricsFile:
    """Callback that appends a line per round to ``metrics.jsonl`` of a folder.

    Each line has the round (from 0) and the metric (null if nothing was evaluated, or if it is not
    finite). It has no time: how long a round took tells how much data its clients hold. A resumed
    run appends to the same file. A crash between a round's commit and its line leaves the line out.

    Raises:
        MetricsError: at each round: the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS

    def __call__(self, record: RoundRecord) -> None:
        """Append one round's line."""
        metric = record.metric
        finite = metric is not None and math.isfinite(metric)
        row = {"round": record.round, "metric": metric if finite else None}
        # Neither a link nor a pipe that somebody left in the folder is written to.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            place = os.open(self._path, flags | os.O_CLOEXEC, 0o666)
            with os.fdopen(place, "a", encoding="utf-8", newline="") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            raise MetricsError(
                f"{self._path} cannot be written: {error}. Rounds that were released are "
                "committed: mend this, for instance by freeing some space, and resume."
            ) from None


def display_of_rounds(
    word: str, *, transient: bool = False, speed_estimate_period: float = 30.0
) -> Progress:
    """Return a display on standard error: ``word``, rounds, time elapsed and left."""
    return Progress(
        TextColumn(word),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=transient,
        speed_estimate_period=speed_estimate_period,
    )


class ProgressBar:
    """Callback that shows rounds, time elapsed and left, and the last metric on standard error.

    If standard error is not a terminal, each metric is printed on a line of its own. A cohort that
    came out smaller than it should gets a line with the reasons; the line is for the operator's
    eyes and not for release, since the guarantee does not cover it. A later round that fell short
    for the same reasons is not listed again.

    Args:
        rounds: of the run, ``done`` of which were committed before it was resumed.
        accuracy: whether the metric is a share of right answers, which is shown in percent.
    """

    def __init__(self, rounds: int, *, done: int = 0, accuracy: bool = True) -> None:
        self._progress = display_of_rounds("round")
        self._console = self._progress.console
        self._bar = self._progress.add_task("", total=rounds, completed=done)
        self._told: set[frozenset[str]] = set()
        self._metric = "test accuracy {:.1%}" if accuracy else "metric {:.4g}"

    def __call__(self, record: RoundRecord) -> None:
        """Advance the bar by one round."""
        self._progress.update(self._bar, completed=record.round + 1)
        self._tell_who_is_missing(record)
        if record.metric is None:
            return
        shown = self._metric.format(record.metric)
        self._progress.update(self._bar, description=shown)
        if not self._console.is_terminal:
            self._console.print(f"round {record.round + 1}: {shown}")

    def _tell_who_is_missing(self, record: RoundRecord) -> None:
        missing = record.missing()
        reasons = frozenset([*record.not_asked, *record.counts.refusals])
        if not missing or reasons in self._told:
            return
        self._told.add(reasons)
        cohort = record.counts.asked + sum(record.not_asked.values())
        self._console.print(
            f"round {record.round + 1}: {record.counts.counted} of the {cohort} clients of the "
            f"cohort counted: {missing}. Not for release; later rounds like it are not listed.",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
