"""Log of runs: where each run came from, how far it went and whom it cost, outside of its folder.

A folder cannot tell that it was restored from a backup. Continuing from an older copy would add the
noise of released rounds to other sums, and the difference of two such sums has no noise. Nor can it
tell what other runs cost the same people. One file of the user's state directory answers both. Each
line is on the disk before what it describes can be released:

    begun     a run was created on this machine, about these people, at this cost
    coming    a round, or an evaluation of metrics, is about to be committed; so a crash is told
              from a round made elsewhere
    round     it was committed
    adopted   somebody vouched for a copy of which this machine did not see every round
    charged   people pay for a run that this machine did not see begin, such as a fork's parent
    closed    a run was ended early
    limit     what all runs about a population may cost from now on
    stated    somebody says what another release about the people cost
    lost      the log before this one is missing

A line ends with a hash of itself and of the line before, so none can be changed, dropped or moved.
What a crash leaves of a line is skipped, and cut off before the next one. A mark beside the log
names a line that it must hold, which tells that it was lost, replaced or restored from an older
copy. Nothing tells that the whole state directory was.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import TypeAdapter

from accounting import Guarantee, checks
from accounting.checks import ConfigError, parsed_json
from accounting.claims import read_releases
from accounting.composed import Release
from privpart.run import store
from privpart.run.population import refuse_population
from privpart.run.store import one_line

VARIABLE = "PRIVPART_STATE_DIR"
Event = Literal[
    "begun", "coming", "round", "adopted", "charged", "closed", "limit", "lost", "stated"
]
_LOG, _MARK, _LOCK = "runs.log", "runs.mark", "runs.lock"
_TAIL = 2**16
"""Bytes that hold the last two lines."""
_LONGEST_FOLDER, _LONGEST_NAME, _LONGEST_LINE = 4096, 200, 30_000
RUN_ID = re.compile("[0-9a-f]{32}")
_PATIENCE = 60.0
"""Seconds to wait for another process that begins a run."""
_APART: ContextVar[Path | None] = ContextVar("apart", default=None)
"""Directory of the log in which a selection keeps its runs until it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the log."""

    event: Event  # what happened
    run: str = ""  # random name of the run; "" if the line is about none
    rounds: int = 0  # committed rounds of the run then
    head: str = ""  # head of its ledger's chain after them; "" if this machine did not see them
    at: str = ""  # when it happened, in UTC
    population: str | None = None  # name of the people that pay
    # cost of the whole plan of this run alone, whoever learns who took part; None without a bound
    mu: float | None = None
    delta: float | None = None  # delta that the run was planned with, or that of a limit
    parent: str | None = None  # run that it was forked from
    planned: int | None = None  # planned rounds
    folder: str | None = None  # where the run was
    epsilon: float | None = None  # of a limit, with ``delta``
    # what the run costs while nobody learns who took part, a selection, or what somebody states, as
    # ``claims.plain`` writes it; None of others, or of what nothing composes with
    sampled: list[dict[str, Any]] | None = None
    by: str | None = None  # who states it
    evaluations: int = 0  # committed evaluations of its metrics then

    def __post_init__(self) -> None:
        named = RUN_ID.fullmatch(self.run) is not None
        # A negative number would count from the end of the chain.
        done = min(self.rounds, self.evaluations)
        if named == (self.event in ("limit", "lost")) or done < 0:
            raise ConfigError(f"{self.event} of {self.run[:40]!r}: its id or rounds are not valid.")
        if self.population is not None:
            refuse_population(self.population)
        if self.mu is not None:
            Guarantee(self.mu)  # which refuses what is out of range
        _ = self.amplified  # likewise
        if self.event == "stated":
            self._refuse_odd_statement()
            return
        if self.delta is not None or self.event == "limit":
            checks.probability("delta", self.delta or 0.0)
        if self.event == "limit":
            checks.positive("epsilon", self.epsilon or 0.0)

    @property
    def amplified(self) -> tuple[Release, ...] | None:
        """What the run costs while nobody learns who was sampled, or of how many it is the best."""
        return None if self.sampled is None else read_releases(self.sampled)

    @property
    def is_selection(self) -> bool:
        """Whether the line charges a selection, whose one release is the best of its runs."""
        return any("expected" in cost for cost in self.sampled or ())

    def _refuse_odd_statement(self) -> None:
        if not self.sampled or len(self.text()) > _LONGEST_LINE:
            raise ConfigError(
                "a stated release: its cost is missing, or too long for a line of the log; state "
                "fewer releases, or a profile of fewer epsilons."
            )
        if self.population is None or not 0 < len(self.by or "") <= _LONGEST_NAME:
            raise ConfigError(
                f"by={str(self.by)[:40]!r}: must name who states the cost, in up to "
                f"{_LONGEST_NAME} characters."
            )

    def text(self) -> bytes:
        """Return the line without its hash: what is not the usual, as JSON."""
        values = {name: getattr(self, name) for name in _USUAL}
        return json.dumps({k: v for k, v in values.items() if v != _USUAL[k]}).encode()


_USUAL = {field.name: field.default for field in fields(Entry)}
_ENTRY = TypeAdapter(Entry)


def directory() -> Path:
    """Return the log's directory: $PRIVPART_STATE_DIR, or privpart in the XDG state directory.

    Raises:
        ConfigError: the variable is not set, and there is no home directory; or the directory would
            be another one wherever a command is called, each with a log of its own.
    """
    if (place := _APART.get()) is not None:
        return place
    try:
        usual = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(os.environ.get(VARIABLE) or Path(usual) / "privpart")
    except RuntimeError:
        raise ConfigError(f"there is no home directory. Set {VARIABLE} to a folder.") from None
    if path.is_absolute():
        return path
    raise ConfigError(
        f"the state directory {path}: must be an absolute path, because what was spent and "
        f"released is kept in it. Set {VARIABLE} to one, such as {path.absolute()}."
    )


@contextmanager
def apart(place: Path) -> Iterator[None]:
    """Read and write another log, in a directory of its own, until the end of the block."""
    token = _APART.set(place)
    try:
        yield
    finally:
        _APART.reset(token)


def is_apart() -> bool:
    """Return whether the log is that of the runs of a selection that has not ended."""
    return _APART.get() is not None


def lines_of(run: str = "") -> list[Entry]:
    """Return the first line of the log, and those about one run, or all.

    Raises:
        ConfigError: the log is damaged, foreign or an older copy, or others can change it.
    """
    with _legible(directory() / _LOG):
        lines = _lines()
        return [Entry(event="lost")] if lines is None else list(_chained(lines, run.encode()))


def heads() -> list[str]:
    """Return the hash at the end of each line of the log; errors are those of ``lines_of``."""
    with _legible(directory() / _LOG):
        lines = _lines() or []
        # For the checks: no line holds this.
        list(_chained(lines, b"\n"))
    return [line[:-1].rpartition(b" ")[2].decode() for line in lines]


def _lines() -> list[bytes] | None:
    """Return the log's lines; None if they are lost."""
    path = directory() / _LOG
    # The mark first: another process may be adding to both.
    size, head = _mark()
    try:
        store.refuse_odd(path)
        with store.opened(path) as file:
            lines = store.complete_lines(file)
    except FileNotFoundError:
        return None if size else []
    if size and not b"".join(lines)[:size].endswith(b" " + head + b"\n"):
        raise ValueError(f"it is an older copy or another machine's, beside its {_MARK}")
    return lines


def _chained(lines: Sequence[bytes], wanted: bytes) -> Iterator[Entry]:
    before = b""
    for number, line in enumerate(lines):
        text, _, chain = line[:-1].rpartition(b" ")
        if _link(before, text) != chain:
            raise ValueError(f"line {number} does not follow from the lines before it")
        before = chain
        if wanted in text or not number:
            # Which refuses a key that is there twice.
            parsed_json(text)
            yield _ENTRY.validate_json(text, strict=True)


def hold(run: str) -> FileLock:
    """Return a lock on a run, across all copies of its folder, held until ``release``.

    Raises:
        ConfigError: the run is open in another process, or as another copy; or others can write in
            the log's directory.
        StorageError: the disk refused.
    """
    busy = (
        f"run {run[:12]} is open already, perhaps as a copy in another folder: both would draw the "
        "same noise. Close the other one first."
    )
    with _writable():
        store.make_private(directory())
        return store.lock(directory() / f"{run}.lock", busy)


@contextmanager
def writing() -> Iterator[None]:
    """Keep other processes from adding lines, so that what is read stays true until ``append``.

    Raises:
        ConfigError: another process has been writing for long, or others can write here.
        StorageError: the disk refused.
    """
    busy = (
        f"the log of runs in {directory()} is in use: another process has been beginning a run for "
        f"{_PATIENCE:g} seconds. Try again."
    )
    with _writable():
        if not directory().is_dir():
            store.make_private(directory())
        log_lock = store.lock(directory() / _LOCK, busy, patience=_PATIENCE)
    try:
        yield
    finally:
        log_lock.release()


def append(*entries: Entry) -> None:
    """Add lines, inside of ``writing``; they are on the disk when this returns.

    Raises:
        ConfigError: the last line is damaged, or others can change the log.
        StorageError: the disk refused.
    """
    path = directory() / _LOG
    # A log that lacks rounds is told by the folders, which have them.
    is_marked = any(entry.event not in ("coming", "round") for entry in entries)
    with _legible(path):
        if is_marked:
            # Which refuses an older copy, before a new mark would hide that it is one.
            list(_chained(_lines() or [], b"\n"))
        before, end = _last(path)
        is_lost = not end and _mark()[0] > 0
    with _writable():
        if is_lost:
            line, before = _linked(b"", Entry(event="lost", at=now()))
            # The mark first: with the lost log's mark, a crash would leave a log nobody can read.
            _write_mark(end := len(line), before)
            store.write_durably(path, line)
        data, head = _linked(before, *entries)
        store.append_durably(path, data, end)
        if is_marked:
            _write_mark(end + len(data), head)


def _linked(before: bytes, *entries: Entry) -> tuple[bytes, bytes]:
    """Return the lines that follow a line with the hash ``before``, and the hash of the last."""
    data = b""
    for entry in entries:
        text = entry.text()
        before = _link(before, text)
        data += text + b" " + before + b"\n"
    return data, before


def _write_mark(size: int, head: bytes) -> None:
    mark = {"size": size, "head": head.decode()}
    store.write_durably(directory() / _MARK, json.dumps(mark).encode())


@contextmanager
def committing(coming: Entry, committed: Entry) -> Iterator[None]:
    """Add a line before a commit, and one after it, which is missing if that fails."""
    with writing():
        append(coming)
        yield
        append(committed)


def now() -> str:
    """Return the time in UTC, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def shown(folder: Path) -> str:
    """Return the path of a folder as text, whatever bytes it has."""
    return os.fsencode(folder.resolve()).decode("utf-8", "backslashreplace")[:_LONGEST_FOLDER]


def _link(before: bytes, text: bytes) -> bytes:
    return hashlib.sha256(before + b"|" + text).hexdigest().encode()


def _last(path: Path) -> tuple[bytes, int]:
    """Return the hash at the end of the last complete line, and where that line ends."""
    store.refuse_shared(path.parent)
    store.refuse_odd(path)
    try:
        with store.opened(path) as file:
            # A process that was killed may not have flushed its line, and a power failure could
            # take that one back and leave the next, which follows from it.
            os.fsync(file.fileno())
            end = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, end - _TAIL))
            # The first one may be a part of a line.
            lines = store.complete_lines(file)
    except FileNotFoundError:
        return b"", 0
    before, last = (b"", b"", *lines)[-2:]
    text, _, chain = last[:-1].rpartition(b" ")
    if last and _link(before[:-1].rpartition(b" ")[2], text) != chain:
        raise ValueError("its last line does not follow from the line before it")
    return chain, start + sum(map(len, lines))


def _mark() -> tuple[int, bytes]:
    """Return where a line ends that the log must hold, and its hash; 0 before the first line."""
    path = directory() / _MARK
    try:
        # Whoever can write here could make an old copy look like the newest.
        store.refuse_shared(path.parent)
        store.refuse_odd(path)
        values = parsed_json(store.read_small(path, _LONGEST_FOLDER))
    except FileNotFoundError:
        return 0, b""
    return int(values["size"]), str(values["head"]).encode()


@contextmanager
def _legible(path: Path) -> Iterator[None]:
    """Name the log where it cannot be read, and the ways out."""
    try:
        yield
    except (ConfigError, OSError, *store.HANDLED) as error:
        raise ConfigError(
            f"the log of runs {path} cannot be read: {one_line(error).rstrip('.')}. Restore it, "
            f"with {_MARK}, from a backup; or move it away to begin a new one: what was spent "
            "before is then unknown, and every run has to be adopted (--adopt)."
        ) from None


@contextmanager
def _writable() -> Iterator[None]:
    """Name the state directory where the disk refuses it."""
    try:
        yield
    except OSError as error:
        raise store.StorageError(
            f"the log of runs in {directory()} cannot be written: {one_line(error)}. Make that "
            f"folder writable, or set {VARIABLE} to another one."
        ) from None
