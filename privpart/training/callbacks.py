"""Callbacks: what is shown and written of each committed round.

``MetricsFiles`` writes the metrics of an evaluation on public data, and nothing about which or how
many clients took part or how long they trained, which no guarantee covers. Its files may be
published; the run's ledger may not, nor may ``HealthFile``'s file, TensorBoard's, which hold the
time of each evaluation, and the lines on standard error that say why a cohort came out smaller than
it should.
"""

import csv
import io
import json
import math
import os
import time
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

from accounting.checks import MissingExtraError
from privpart.loop import RoundRecord

FIELDS = ("round", "metric")
JSON_LINES, CSV = "metrics.jsonl", "metrics.csv"


class MetricsError(RuntimeError):
    """What is shown of a round could not be written. The round itself is committed."""


class MetricsFiles:
    """Callback that appends a line per round to ``metrics.jsonl`` and ``metrics.csv`` of a folder.

    Each line has the round (from 0) and the metric (null in JSON and empty in CSV if nothing was
    evaluated, or if it is not finite). It has no time: how long a round took tells how much data
    its clients hold. A resumed run appends to the same files. A crash between a round's commit and
    its line leaves the line out.

    Args:
        folder: must exist.

    Raises:
        MetricsError: here and at each round: a file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / CSV).exists():
            _append(folder / CSV, ",".join(FIELDS) + "\n")

    def __call__(self, record: RoundRecord) -> None:
        """Append one round's line to both files."""
        metric = record.metric
        row = {
            "round": record.round,
            "metric": metric if metric is not None and math.isfinite(metric) else None,
        }
        _append(self._folder / JSON_LINES, json.dumps(row, allow_nan=False) + "\n")
        line = io.StringIO()
        csv.DictWriter(line, FIELDS, lineterminator="\n").writerow(row)
        _append(self._folder / CSV, line.getvalue())


def _append(path: Path, text: str, mode: int = 0o666) -> None:
    """Append to a file, which is neither a link nor a pipe; create it with ``mode``, less umask."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags, mode), "a", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise MetricsError(
            f"{path} cannot be written: {error}. Rounds that were released are committed: mend "
            "this, for instance by freeing some space, and resume."
        ) from None


HEALTH_LINES = "health.jsonl"


class HealthFile:
    """Callback that appends a line per round to ``health.jsonl`` of a folder. Not for release.

    Each line has the values of ``RoundHealth``, the ratio of signal to noise (null without noise)
    and the seconds since the previous line, evaluation included. Rounds that were not measured have
    no line. The first line says that no guarantee covers the file. A resumed run appends to it.

    Args:
        folder: must exist.

    Raises:
        MetricsError: here and at each round: the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / HEALTH_LINES
        self._last = time.monotonic()
        if not self._path.exists():
            self._append({"note": "not for release: not covered by the guarantee"})

    def __call__(self, record: RoundRecord) -> None:
        """Append one round's line."""
        now = time.monotonic()
        seconds, self._last = round(now - self._last, 6), now
        health = record.health
        if health is None:
            return
        low, middle, high = health.norms or (None, None, None)
        self._append(
            {
                "round": record.round,
                "loss": health.loss,
                "norm_10": low,
                "norm_50": middle,
                "norm_90": high,
                "clipped": health.clipped,
                "not_finite": health.not_finite,
                "signal": health.signal,
                "noise": health.noise,
                "signal_to_noise": health.signal / health.noise if health.noise else None,
                "seconds": seconds,
            }
        )

    def _append(self, row: dict[str, object]) -> None:
        _append(self._path, json.dumps(row, allow_nan=False) + "\n", 0o600)


def display_of_rounds(
    word: str, *, transient: bool = False, speed_estimate_period: float = 30.0
) -> Progress:
    """Return a display on standard error: rounds, time elapsed and left, and what is done.

    Args:
        word: what stands first.
        transient: whether it vanishes at the end.
        speed_estimate_period: seconds whose rounds tell the time that is left.
    """
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
        rounds: number of rounds of the run, >= 1.
        done: rounds that were committed before the run was resumed.
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
        cohort = record.asked + sum(record.not_asked.values())
        self._console.print(
            f"round {record.round + 1}: {record.counts.counted} of the {cohort} clients of the "
            f"cohort counted: {missing}. Not for release; later rounds like it are not listed.",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )

    def close(self) -> None:
        """Stop drawing and restore the terminal."""
        self._progress.stop()

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoard:
    """Callback that writes the metric as a TensorBoard scalar; leaving its context closes the file.

    Not for release: the file has the time of each evaluation, and so of the rounds before it.

    Args:
        folder: where the event file is written.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self.refuse_missing()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    @staticmethod
    def refuse_missing() -> None:
        """Check that TensorBoard is installed, before a run begins.

        Raises:
            ConfigError: it is not.
        """
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise MissingExtraError(
                "TensorBoard is not installed: pip install tensorboard, or train without it."
            ) from None

    def __call__(self, record: RoundRecord) -> None:
        """Write the round's metric if the round was evaluated."""
        if record.metric is not None:
            self._writer.add_scalar("metric", record.metric, record.round + 1)

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
