"""Progress: what whoever waits sees of the rounds on standard error, and nobody else may see."""

import time
from collections.abc import Callable

from rich import progress
from rich.console import Console
from rich.markup import escape

from privpart.loop import RoundRecord

_LONG, _OFTEN, _LONG_IN_A_LOG = 5.0, 0.5, 60.0
"""Seconds after which a round says how many clients have answered, and between such lines."""


def display_of_rounds(
    word: str, *, transient: bool = False, speed_estimate_period: float = 30.0
) -> progress.Progress:
    """Return a display on standard error: ``word``, rounds, time elapsed and left."""
    return progress.Progress(
        progress.TextColumn(word),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=transient,
        speed_estimate_period=speed_estimate_period,
    )


class ProgressBar:
    """Callback that shows rounds, time elapsed and left, and the last metric on standard error.

    If standard error is not a terminal, each metric is printed on a line of its own. A cohort that
    came out smaller than it should gets a line with the reasons; the line is for the operator's
    eyes and not for release, since the guarantee does not cover it. A later round that fell short
    for the same reasons is not listed again. Of a round that takes long, it says how many clients
    have answered so far, which is not for release either.

    Args:
        rounds: of the run, ``done`` of which were committed before it was resumed.
        accuracy: whether the metrics are shares of right answers, which are shown in percent.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        rounds: int,
        *,
        done: int = 0,
        accuracy: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = display_of_rounds("round")
        self._console = self._progress.console
        self._bar = self._progress.add_task("", total=rounds, completed=done)
        self._told: set[frozenset[str]] = set()
        self._number = "{} {:.1%}" if accuracy else "{} {:.4g}"
        self._clock, self._round, self._metrics = clock, -1, ""
        self._next = 0.0

    def __call__(self, record: RoundRecord) -> None:
        """Advance the bar by one round."""
        if record.metrics:
            pairs = record.metrics.items()
            # names are own code's, and brackets would be styles
            self._metrics = escape(", ".join(self._number.format(*pair) for pair in pairs))
        self._progress.update(self._bar, completed=record.round + 1, description=self._metrics)
        self._tell_who_is_missing(record)
        if record.metrics and not self._console.is_terminal:
            self._console.print(f"round {record.round + 1}: {self._metrics}", highlight=False)

    def heard(self, number: int, done: int, asked: int) -> None:
        """Show how many clients of a round have answered, if it takes long."""
        now, is_terminal = self._clock(), self._console.is_terminal
        if number != self._round:
            self._round, self._next = number, now + (_LONG if is_terminal else _LONG_IN_A_LOG)
        if now < self._next:
            return
        self._next = now + (_OFTEN if is_terminal else _LONG_IN_A_LOG)
        shown = f"{done:,} of {asked:,} clients"
        self._progress.update(self._bar, description=f"{shown}  {self._metrics}".rstrip())
        if not is_terminal:
            self._console.print(f"round {number + 1}: {shown}")

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
