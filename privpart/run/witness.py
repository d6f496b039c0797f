"""Rollback guard: a record, outside the run folder, of how far each run has advanced.

A folder cannot tell by itself that it was restored from a backup. Continuing from an older copy
would add the noise of rounds that were already released to other sums, and the difference of two
such sums has no noise. Every committed round therefore advances a record in the user's state
directory before its release, and a folder that does not stand where its record stands is refused.

A round is recorded twice: as coming, before the ledger has it, and as committed, after. So a crash
between the two is told from a round that was made elsewhere. The record also keeps that a copy was
adopted, since copies that were made before do not say so, and that the run was ended early.

The guard does not notice that folder and record were restored together, for instance from a
snapshot of the whole machine.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock
from pydantic import TypeAdapter

from accounting.checks import ConfigError, parsed_json
from privpart.run.store import (
    lock,
    make_private,
    one_line,
    read_small,
    refuse_odd,
    refuse_shared,
    write_durably,
)

VARIABLE = "PRIVPART_STATE_DIR"
_LONGEST = 4096
"""Bytes of the longest record; ours have about 300."""


Standing = Literal["newest", "newer", "older", "another", "closed"]
"""How a copy of a run stands beside the record; "closed" if only the record says it was closed."""
_STANDS: Mapping[Standing, str] = {
    "newest": "",
    "older": "this folder is an older copy: it stands after {rounds} rounds, while {seen} were "
    "released on this machine",
    "another": "this machine saw another chain of the run, of {seen} rounds",
    "closed": "the run was closed after {seen} rounds on this machine, and this copy was not",
    "newer": "this machine saw {seen} of the {rounds} rounds; the others were made elsewhere",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What this machine saw of a run.

    Attributes:
        rounds: number of committed rounds.
        chain: head of the ledger's chain after them.
        coming: head after the round that is being committed; "" if none is.
        adopted_at: rounds of the copy that was adopted last; None if all rounds were made here.
        closed: whether the run was ended early.
    """

    rounds: int
    chain: str
    coming: str = ""
    adopted_at: int | None = None
    closed: bool = False

    def standing(self, chains: Sequence[str], *, closed: bool) -> Standing:
        """Return how a copy of the run stands beside this record.

        Args:
            chains: heads of the copy's chain after 0, 1, ... rounds.
            closed: whether the copy was ended early.
        """
        rounds = len(chains) - 1
        # The record is written before a release, so it is never behind what was released.
        if rounds < self.rounds:
            return "older"
        if chains[self.rounds] != self.chain:
            return "another"
        # Copies that were made before the closing still have the key.
        if self.closed and not closed:
            return "closed"
        noted = rounds == self.rounds or chains[self.rounds + 1 :] == [self.coming]
        return "newest" if noted else "newer"

    def fault(self, chains: Sequence[str], *, closed: bool) -> str:
        """Return what is wrong with a copy that does not stand here, or ""; see ``standing``."""
        says = _STANDS[self.standing(chains, closed=closed)]
        return says.format(rounds=len(chains) - 1, seen=self.rounds)

    @property
    def unspent(self) -> bool:
        """Whether the record shows that nobody saw a model of the run."""
        return self.rounds == 0 and self.adopted_at is None


def directory() -> Path:
    """Return the guard's directory: $PRIVPART_STATE_DIR, or privpart in the XDG state directory.

    Raises:
        ConfigError: the variable is not set, and there is no home directory; or the directory would
            be another one wherever a command is called, each with a book and guards of its own.
    """
    chosen = os.environ.get(VARIABLE)
    path = Path(chosen) if chosen else _of_the_user() / "privpart"
    if not path.is_absolute():
        raise ConfigError(
            f"the state directory {path}: must be an absolute path, because what was spent and "
            f"released is kept in it. Set {VARIABLE} to one, such as {path.absolute()}."
        )
    return path


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
        # Whoever can write here could make an old copy look like the newest.
        refuse_shared(path.parent)
        refuse_odd(path)
        return _seen(run_id, parsed_json(read_small(path, _LONGEST)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the rollback guard {path} cannot be read: {one_line(error)}. Restore it; or, if you "
            "know that no newer copy of the run exists, remove it and adopt the run (--adopt)."
        ) from None


def _seen(run_id: str, values: object) -> Seen:
    # A record copied from another run would hide a rollback of this one.
    if not isinstance(values, dict) or values.pop("run", None) != run_id:
        raise ValueError("it is the record of another run")
    seen = TypeAdapter(Seen).validate_json(json.dumps(values), strict=True)
    # A negative number would count from the end of the chain.
    if seen.rounds < 0 or (seen.adopted_at or 0) < 0:
        raise ValueError("it holds negative numbers")
    return seen


def hold(run_id: str) -> FileLock:
    """Return a lock on a run, across all copies of its folder, held until ``release``.

    Raises:
        ConfigError: the run is open in another process, or as another copy; or others can write in
            the guard's directory.
    """
    make_private(directory())
    return lock(
        directory() / f"{run_id}.lock",
        f"run {run_id[:12]} is open already, perhaps as a copy in another folder: both would draw "
        "the same noise. Close the other one first.",
    )


def note(run_id: str, seen: Seen) -> None:
    """Record durably what this machine saw of a run."""
    path = _path(run_id)
    if not path.parent.is_dir():
        make_private(path.parent)
    write_durably(path, json.dumps({"run": run_id, **asdict(seen)}).encode())


def _path(run_id: str) -> Path:
    return directory() / f"{run_id}.json"
