"""Callbacks: what is written and logged of each committed round.

``MetricsFile`` writes the metrics of an evaluation on public data, and nothing about which or how
many clients took part or how long they trained, which no guarantee covers. Its file may be
published; the run's ledger may not.
"""

import inspect
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

from accounting.checks import ConfigError, MissingExtraError, parsed_json
from privpart.loop import Callback, RoundRecord
from privpart.run.store import append_durably, complete_lines, one_line, opened
from privpart.training.own_code import described

METRICS = "metrics.jsonl"


class MetricsError(RuntimeError):
    """What is shown of a round could not be written. The round itself is committed."""


class Logger(Protocol):
    """Whoever keeps metrics by step, such as a run of Weights & Biases."""

    def log(self, metrics: dict[str, float], *, step: int) -> object:
        """Keep metrics under a step, the number of rounds done."""


class MetricsFile:
    """Callback that appends a line per round to ``metrics.jsonl`` of a folder.

    Each line has the round (from 0; -1 before training) and the metrics by name (null if one is not
    finite), none if nothing was evaluated; and "stopped", a reason, if the training ended by it. It
    has no time: how long a round took tells how much data its clients hold. It is the last
    callback, so its line says that the others got the record. A round has one line, however often
    a run is resumed.

    Attributes:
        rows: its lines so far.

    Raises:
        MetricsError: when it is made, and at each round: the file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        lines: list[bytes] = []
        try:
            with suppress(FileNotFoundError), opened(self._path) as file:
                lines = complete_lines(file)
            self.rows = [{"round": None, **parsed_json(line)} for line in lines]
            if any(type(row["round"]) is not int for row in self.rows):
                raise ValueError("a line has no round")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise MetricsError(
                f"{self._path} cannot be read: {error}. Move it away, and resume."
            ) from None
        # What a crash left behind the last line is cut off by the next append.
        self._size = sum(map(len, lines))

    @property
    def last_round(self) -> int:
        """The last round that has a line: -1 is that before training, -2 none."""
        return int(self.rows[-1]["round"]) if self.rows else -2

    def asked_to_stop(self, after: int) -> str | None:
        """The reason of the ``StopTraining`` in the line of a round, the last; None if none."""
        is_asked = self.last_round == after and "stopped" in self.rows[-1]
        return str(self.rows[-1]["stopped"]) if is_asked else None

    def __call__(self, record: RoundRecord) -> None:
        """Append one round's line."""
        if record.round <= self.last_round:
            return
        metrics = {n: v if math.isfinite(v) else None for n, v in record.metrics.items()}
        row: dict[str, Any] = {"round": record.round, "metrics": metrics}
        if record.stopped is not None:
            row["stopped"] = record.stopped
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            append_durably(self._path, line, self._size)
        except OSError as error:
            raise _unwritten(self._path, error) from None
        self._size += len(line)
        self.rows.append(row)


def _unwritten(path: Path, error: OSError) -> MetricsError:
    return MetricsError(
        f"{path} cannot be written: {one_line(error)}. Rounds that were released are committed: "
        "mend this, for instance by freeing some space, and resume."
    )


class TensorBoard:
    """Logger that writes TensorBoard's event files into a folder; pass it as a callback.

    An event has the number of rounds in place of its time, which would tell how long rounds took
    and so how much data their clients hold.

    Raises:
        MissingExtraError: the package tensorboard is not installed.
        ConfigError: the folder cannot be written. Nothing is written before the first round.
        MetricsError: at a round: an event cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).absolute()
        self._writer: Any = None
        self._step = -1
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError(
                "TensorBoard: is not installed: pip install tensorboard"
            ) from None
        self._open = SummaryWriter
        nearest = self._folder
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(
                f"TensorBoard: {self._folder} cannot be written; name another folder."
            )

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Write metrics under a step, the number of rounds done."""
        try:
            # What was written of this step and later ones is from before a resume.
            if self._writer is None or step <= self._step:
                self._writer = self._open(str(self._folder), purge_step=step)
            self._step = step
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step, walltime=float(step))
            self._writer.flush()
        except OSError as error:
            raise _unwritten(self._folder, error) from None


def callbacks_of(given: object) -> list[Callback]:
    """Return callbacks, checked before a run exists; a logger becomes one that logs evaluations.

    Raises:
        ConfigError: they are not a sequence of functions and loggers.
    """
    if not isinstance(given, Sequence):
        raise ConfigError(_MUST_BE.format("are", described(given)))
    return [_callback(one) for one in given]


def _callback(one: Any) -> Callback:  # noqa: ANN401  anything
    log = getattr(one, "log", None)
    if callable(one) and not isinstance(one, type):
        return cast("Callback", one)
    if callable(one) or not callable(log):
        raise ConfigError(_MUST_BE.format("have", described(one)))
    try:
        with suppress(ValueError):  # compiled functions have no signature
            inspect.signature(log).bind({}, step=0)
    except TypeError as error:
        raise ConfigError(
            f"callbacks: log of {described(one)} is not called as log(metrics, step=0): {error}."
        ) from None

    def show(record: RoundRecord) -> None:
        if record.metrics:
            log(dict(record.metrics), step=record.round + 1)

    return show


_MUST_BE = (
    "callbacks: {} {}; must be a list of functions from a record of a round, and of loggers: "
    "objects with log(metrics, step=...)."
)
