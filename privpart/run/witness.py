"""Rollback guard: a record, outside the run folder, of how far each run has advanced.

A folder cannot tell by itself that it was restored from a backup. Continuing from an older copy
would add the noise of rounds that were already released to other sums, and the difference of two
such sums has no noise. Every committed round therefore advances a counter in the user's state
directory before its release, and a folder that is behind its counter is refused.

The guard does not notice that folder and counter were restored together, for instance from a
snapshot of the whole machine.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from accounting.checks import ConfigError, parsed_json
from privpart.run.files import make_private, read_small, refuse_odd, refuse_shared, write_durably

VARIABLE = "PRIVPART_STATE_DIR"
_LONGEST = 4096
"""Bytes of the longest record; ours have about 100."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The furthest known point of a run: its committed rounds and the head of its chain."""

    rounds: int
    chain: str


def directory() -> Path:
    """Return the guard's directory: $PRIVPART_STATE_DIR, or privpart in the XDG state directory.

    Raises:
        ConfigError: the variable is not set, and there is no home directory; or the directory would
            be another one wherever a command is called, each with a book and guards of its own.
    """
    own = os.environ.get(VARIABLE)
    found = Path(own) if own else _of_the_user() / "privpart"
    if not found.is_absolute():
        raise ConfigError(
            f"the state directory {found}: must be an absolute path, because what was spent and "
            f"released is kept in it. Set {VARIABLE} to one, such as {found.absolute()}."
        )
    return found


def _of_the_user() -> Path:
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        raise ConfigError(f"there is no home directory. Set {VARIABLE} to a folder.") from None


def last_seen(run_id: str) -> Seen | None:
    """Return this machine's record of a run, or None if it has none.

    Raises:
        ConfigError: the record is damaged, or others can change it.
    """
    path = _path(run_id)
    try:
        refuse_shared(path.parent)
        refuse_odd(path)
        return _seen(parsed_json(read_small(path, _LONGEST)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the rollback guard {path} cannot be read: {error}. Restore it; or, if you know that "
            "no newer copy of the run exists, remove it and adopt the run (--adopt)."
        ) from None


def _seen(values: object) -> Seen:
    rounds = values.get("rounds") if isinstance(values, dict) else None
    chain = values.get("chain") if isinstance(values, dict) else None
    if type(rounds) is not int or rounds < 0 or not isinstance(chain, str):
        raise ValueError("it is not a record of rounds and chain")
    return Seen(rounds, chain)


def hold(run_id: str) -> FileLock:
    """Return a lock on a run, across all copies of its folder, held until ``release``.

    Raises:
        ConfigError: the run is open in another process, or as another copy; or others can write in
            the guard's directory.
    """
    make_private(directory())
    refuse_odd(path := directory() / f"{run_id}.lock")
    lock = FileLock(path, mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"run {run_id[:12]} is open already, perhaps as a copy in another folder: both would "
            "draw the same noise. Close the other one first."
        ) from None
    return lock


def knows(run_id: str, chains: Sequence[str], folder: Path) -> bool:
    """Return whether this machine has a record of the run, after checking the copy against it.

    Args:
        run_id: name of the run.
        chains: heads of the copy's chain after 0, 1, ... rounds.
        folder: folder of the copy, for the message.

    Raises:
        ConfigError: the record is further than this copy, or of another chain.
    """
    seen = last_seen(run_id)
    if seen is None:
        return False
    if seen.rounds >= len(chains) or chains[seen.rounds] != seen.chain:
        raise ConfigError(
            f"{folder} is an older copy: it stands after {len(chains) - 1} rounds, while "
            f"{seen.rounds} were released. Continuing would reuse the noise of released rounds, "
            "which would then cancel out. Restore the newest copy, or begin a fork: a new run with "
            "a new key, whose report adds the cost of this one."
        )
    return True


def note(run_id: str, seen: Seen) -> None:
    """Record durably how far a run has advanced."""
    path = _path(run_id)
    if not path.parent.is_dir():
        make_private(path.parent)
    write_durably(path, json.dumps({"rounds": seen.rounds, "chain": seen.chain}).encode())


def _path(run_id: str) -> Path:
    return directory() / f"{run_id}.json"
