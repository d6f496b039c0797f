"""Run folder: a run on disk. A round is committed here before anyone may see its model.

    ledger.sqlite           plan, committed rounds, participations (see ``ledger``)
    state-000012.safetensors    model, optimiser and noise after 12 rounds: only the newest
    start.safetensors       of a fork: the model to begin with
    key                     noise key, until the run is complete; keep the folder secret
    lock                    held while a process works on the run

One commit: write the new state durably; append the ledger row, which names its hash (the point of
no return); move the witness; remove the older state. A crash before the row leaves the old state,
and the round is trained again: nothing of it was released, so its noise is used once. A crash after
the row leaves the new state. No file is ever unpickled.
"""

import hashlib
import json
import secrets
import sqlite3
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.noise.source import NoiseSource, SecretSource, SeededSource
from privpart.plan import PrivacyPlan
from privpart.run import witness
from privpart.run.files import encode_state, read_state, remove_durably, write_durably
from privpart.run.ledger import SCHEMA, Ledger, genesis, next_row
from privpart.server import RoundCounts, Server

_RESERVED = ("start", "genesis", "adopted_at")
_KEY, _LEDGER, _LOCK, _START = "key", "ledger.sqlite", "lock", "start.safetensors"


class StorageError(RuntimeError):
    """A round could not be saved. Nothing of it was released, and nothing saved was lost."""


class RunFolder:
    """A run on disk, locked while it is open; use it in a ``with`` statement.

    Make one with ``create``, go on with ``open``.

    Attributes:
        path: the folder.
        plan: what the run promised when it was created.
        rounds: committed rounds.
    """

    def __init__(self, path: Path, ledger: Ledger, lock: FileLock) -> None:
        self.path, self._ledger, self._lock = path, ledger, lock
        self._source: NoiseSource | None = None
        rows = ledger.rows()
        self.rounds = len(rows)
        self._head = rows[-1].chain if rows else genesis(ledger.facts)
        self._state_hash = rows[-1].state if rows else None
        self._chains = [genesis(ledger.facts), *(row.chain for row in rows)]
        self._private = ledger.facts["seed"] is None
        self.plan = PrivacyPlan.from_dict(ledger.facts["plan"])
        self._plan_hash = self.plan.hash  # once: a dense mechanism is a whole matrix to hash
        self._hold = witness.hold(ledger.facts["run_id"]) if self._private else None

    @classmethod
    def create(
        cls,
        path: str | Path,
        plan: PrivacyPlan,
        *,
        seed: int | None = None,
        facts: dict[str, Any] | None = None,
        start: Tensor | None = None,
    ) -> Self:
        """Begin a run in a folder that does not exist yet, or is empty.

        Args:
            path: of the folder.
            plan: fixed from here on.
            seed: of the noise, for a simulation, which is then not private; None draws a secret
                key from the operating system.
            facts: more to keep in the ledger, such as delta; JSON.
            start: trainable part to begin with, if it is not the plan's own.

        Raises:
            ConfigError: the folder holds something.
            StorageError: it cannot be written.
        """
        folder = Path(path)
        if folder.exists() and not (folder.is_dir() and _is_free(folder)):
            raise ConfigError(
                f"{folder} is not empty: a run begins in a folder of its own. To go on with the "
                "run in it, open it (--resume)."
            )
        run_id = secrets.token_hex(16)
        about = {"schema": SCHEMA, "run_id": run_id, "plan": plan.to_dict(), "seed": seed}
        checks.count("seed", seed or 0, minimum=0)
        if taken := sorted((facts or {}).keys() & {*about, *_RESERVED}):
            raise ConfigError(f"facts: {', '.join(taken)} are the run's own; choose other names.")
        about |= facts or {}
        first = b"" if start is None else encode_state({"parameters": start}, {})
        if start is not None:
            about["start"] = hashlib.sha256(first).hexdigest()
        about = json.loads(json.dumps(about, allow_nan=False))  # as it will be read back
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = locked(folder)
            if start is not None:
                write_durably(folder / _START, first)
            if seed is None:
                write_durably(folder / _KEY, secrets.token_bytes(32))
                # before the ledger: a run that exists has a witness
                witness.note(run_id, witness.Seen(0, genesis(about)))
            ledger = Ledger.create(folder / _LEDGER, about)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"{folder} cannot be written: {error}.") from None
        return cls(folder, ledger, lock)

    @classmethod
    def open(cls, path: str | Path, *, adopt: bool = False) -> Self:
        """Go on with a run, after checking that this is its newest copy.

        Args:
            path: of the folder.
            adopt: go on although this machine never saw the run, as after a move. You vouch that
                the original will never be continued; the report says so.

        Raises:
            ConfigError: no run, a damaged or changed one, one that another process works on, or
                an older copy of a run that has gone further.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"{folder} holds no run: there is no such folder.")
        try:
            lock = locked(folder)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be opened for writing: {error}.") from None
        run = None
        try:
            run = cls(folder, Ledger(folder / _LEDGER), lock)
            run._refuse_older_copy(adopt)
            run._remove_leftovers()
        except BaseException as error:
            lock.release() if run is None else run.close()
            if isinstance(error, OSError | sqlite3.Error):
                raise StorageError(f"{folder} cannot be written: {error}.") from None
            raise
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the run."""
        self._ledger.close()
        for lock in filter(None, (self._lock, self._hold)):
            lock.release()

    @property
    def facts(self) -> dict[str, Any]:
        """What the ledger keeps about the run."""
        return self._ledger.facts

    def source(self) -> NoiseSource:
        """Return the source of the run's noise, for its one ``Server``.

        Raises:
            ConfigError: the key is missing or damaged, or the source was given out before: two
                servers would draw the same noise.
        """
        if self._source is not None:
            raise ConfigError("source: given out before; a second server would repeat its noise.")
        self._source = self._make_source()
        return self._source

    def _make_source(self) -> NoiseSource:
        if not self._private:
            return SeededSource(self._ledger.facts["seed"])
        try:
            return SecretSource((self.path / _KEY).read_bytes())
        except (OSError, ConfigError):
            if self.rounds >= self.plan.rounds:
                return SecretSource()  # complete: no draw will be taken from it
            raise ConfigError(
                f"{self.path / _KEY} is missing or damaged: the noise of this run cannot be "
                "continued. Begin a fork: a new key, and the cost of both."
            ) from None

    def restore(self, server: Server) -> None:
        """Put a fresh server of the same plan and model where the last committed round left it.

        Raises:
            ConfigError: the state is missing, damaged or not the newest, or of another plan.
        """
        if self._state_hash is None:
            if server.plan_hash != self._plan_hash:
                raise ConfigError("the server has another plan than the run.")
            if (start := self.facts.get("start")) is not None:
                server.load_start(read_state(self.path / _START, start)[0]["parameters"])
            return
        tensors, values = read_state(self._state_path(self.rounds), self._state_hash)
        server.load_state_dict(tensors, values, self._ledger.rounds_by_client())

    def commit(self, server: Server, counts: RoundCounts) -> None:
        """Make the round that ``server`` just ran durable; only then may its model be seen.

        Raises:
            ConfigError: the server is not one round ahead of the ledger.
            StorageError: the disk refused. The run stands where it stood; nothing is lost.
        """
        if server.round != self.rounds + 1 or server.plan_hash != self._plan_hash:
            raise ConfigError(
                f"the run has {self.rounds} rounds, the server {server.round}: a commit needs a "
                "server of this plan that is one round ahead. Open the run again and restore."
            )
        if server.source is not self._source:
            raise ConfigError("the server's noise is not the run's: give it RunFolder.source().")
        try:
            self._commit(server, counts)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(
                f"round {server.round - 1} could not be saved in {self.path}: {error}. Nothing of "
                f"it was released; the run stands after {self.rounds} rounds. Make the folder "
                "writable, with room to spare, and resume."
            ) from None

    def _commit(self, server: Server, counts: RoundCounts) -> None:
        data = encode_state(*server.state_dict())
        state, clients = hashlib.sha256(data).hexdigest(), sorted(server.cohort)
        write_durably(self._state_path(server.round), data)
        row = next_row(
            self._head,
            round_=self.rounds,
            state=state,
            clip_norm=server.last_clip_norm,
            received=counts.received,
            clients=clients,
            summed=counts.summed,
        )
        self._ledger.append(row, clients)
        self.rounds, self._head, self._state_hash = server.round, row.chain, state
        if self._private:
            witness.note(self.facts["run_id"], witness.Seen(self.rounds, self._head))
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Keep the committed state only; a complete run needs no key, and is safer without."""
        keep = self._state_path(self.rounds)
        for file in self.path.glob("*"):
            if (file.name.startswith("state-") and file != keep) or file.suffix == ".part":
                remove_durably(file)
        if self.rounds >= self.plan.rounds:
            remove_durably(self.path / _KEY)

    def _refuse_older_copy(self, adopt: bool) -> None:
        if not self._private:
            return
        if not witness.knows(self.facts["run_id"], self._chains, self.path):
            if not adopt:
                raise ConfigError(
                    f"{self.path}: this machine has no record of the run, so it cannot tell "
                    "whether a newer copy exists. If the original will never be continued, open "
                    "the run with adopt=True (--adopt); otherwise begin a fork."
                )
            self._ledger.add_fact("adopted_at", self.rounds)
        witness.note(self.facts["run_id"], witness.Seen(self.rounds, self._head))

    def _state_path(self, rounds: int) -> Path:
        return self.path / state_name(rounds)


def state_name(rounds: int) -> str:
    """Return the name of the state file after so many rounds."""
    return f"state-{rounds:06d}.safetensors"


def locked(folder: Path) -> FileLock:
    """Take a folder for this process; ``release`` gives it back."""
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"{folder} is in use: another process works on this run.") from None
    return lock


def holds_a_run(path: str | Path) -> bool:
    """Whether a run was begun in this folder."""
    return (Path(path) / _LEDGER).exists()


def _is_free(folder: Path) -> bool:
    """Whether a folder is empty, or holds what a crash left before a run had begun."""
    return all(f.name in (_KEY, _LOCK, _START) or f.suffix == ".part" for f in folder.iterdir())
