"""Witness: outside a run folder, how far each run has come, so that an older copy is noticed.

A folder cannot tell by itself that it was put back from a backup. Continuing from an older copy
would draw the noise of rounds that are already released a second time, for other sums: their
difference has no noise. So every committed round moves a counter in the user's state directory
first, and a folder that stands behind its counter is refused.

Not noticed: putting back the folder and the witness together, as with a whole machine's snapshot.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from accounting.checks import ConfigError
from privpart.run.files import write_durably

VARIABLE = "PRIVPART_STATE_DIR"


@dataclass(frozen=True, slots=True)
class Seen:
    """The furthest that a run is known to have come: rounds committed, and its chain's head."""

    rounds: int
    chain: str


def directory() -> Path:
    """Return where witnesses live: $PRIVPART_STATE_DIR, or privpart in the XDG state directory."""
    if own := os.environ.get(VARIABLE):
        return Path(own)
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        raise ConfigError(f"there is no home directory: set {VARIABLE} to a folder.") from None
    return Path(base) / "privpart"


def last_seen(run_id: str) -> Seen | None:
    """Return what this machine knows of a run, or None if it never saw it.

    Raises:
        ConfigError: the witness cannot be read.
    """
    path = _path(run_id)
    try:
        values = json.loads(path.read_text())
        return Seen(int(values["rounds"]), str(values["chain"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the witness {path} cannot be read: {error}.") from None


def hold(run_id: str) -> FileLock:
    """Take a run for this process, whatever copy of its folder it opened; ``release`` gives back.

    Raises:
        ConfigError: another process, or another copy, has it.
    """
    directory().mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(directory() / f"{run_id}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"run {run_id[:12]} is open already, perhaps as a copy in another folder: both going "
            "on would draw the same noise."
        ) from None
    return lock


def knows(run_id: str, chains: Sequence[str], folder: Path) -> bool:
    """Whether this machine has seen the run; ``chains`` are the heads after 0, 1, ... rounds.

    Raises:
        ConfigError: it has seen it go further than this copy, or another way.
    """
    seen = last_seen(run_id)
    if seen is None:
        return False
    if seen.rounds >= len(chains) or chains[seen.rounds] != seen.chain:
        raise ConfigError(
            f"{folder} is an older copy: it stands after {len(chains) - 1} rounds, while "
            f"{seen.rounds} were released. Going on would add the noise of released rounds to "
            "other sums, and their difference has none. Put the newest copy back, or begin a "
            "fork: a new run with a new key, whose report adds the cost of this one."
        )
    return True


def note(run_id: str, seen: Seen) -> None:
    """Record, durably, how far a run has come."""
    path = _path(run_id)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(path, json.dumps({"rounds": seen.rounds, "chain": seen.chain}).encode())


def _path(run_id: str) -> Path:
    return directory() / f"{run_id}.json"
