"""Run folder: a run on disk, where each round is committed before anyone may see its model.

    ledger.log                 plan, committed rounds, who took part in them (see ``ledger``)
    state-000012.safetensors   model, optimiser and noise after 12 rounds; only the newest is kept
    closed-000012.safetensors  in its place, the model alone, of a run that was ended early
    start.safetensors          start model of a fork
    key                        noise key, until the run ends; keep the folder secret
    signing-key                signs the ledger, until the run ends
    lock                       held while a process works on the run

A commit has five steps: write the new state durably; tell the rollback guard which row is coming;
append the ledger row, which names the hash of the state; advance the rollback guard; remove the
older state. The ledger row is the point of no return. A crash before it leaves the old state, and
the round is trained again: nothing of it was released, so its noise is still used only once. A
crash after it leaves the new state. No file is ever unpickled.
"""

import hashlib
import json
import os
import platform
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.messages import ClientId, id_order
from privpart.noise.cohorts import SampledCohorts
from privpart.noise.source import NoiseSource, SecretSource, SeededSource
from privpart.plan import PrivacyPlan
from privpart.run import budget_book, witness
from privpart.run.ledger import (
    KEY_BYTES,
    LATER_FACTS,
    LEDGER,
    SCHEMA,
    Ledger,
    Row,
    SigningKey,
    closed_name,
    genesis,
    read_key,
    signed_by,
    state_name,
)
from privpart.run.store import (
    encode_state,
    erase_durably,
    flush_directory,
    is_scratch,
    lock,
    make_private,
    model_hash,
    read_state,
    refuse_planted,
    refuse_shared,
    remove_durably,
    warn_if_readable,
    write_durably,
    write_state,
)
from privpart.server import RoundCounts

_WORDS = (
    "canaries",
    "code",
    "compares_rows",
    "earlier_mu",
    "fork_of",
    "identity",
    "inherited",
    "owners",
    "passed",
    "plan_file",
    "plan_folder",
    "plan_tables",
    "rest",
    "seen_in_clear",
    "unit",
)
"""Facts that a report, or a command that continues the run, takes for this package's own words."""
_RESERVED = {"start", *LATER_FACTS}
SELF_CLIPPED = "self_clipped_since"
"""Fact of a run with secure sums: the first round in which clients clipped their own updates."""
ROWS_DIFFER = "rows_differ"
"""Fact of a run on examples: the first step whose rows may be of others, and a name in ``ROWS``."""
ROWS = {
    "unseen": "the loader dealt nothing that could be compared: parts of a batch, as with "
    "BatchMemoryManager, or objects without a tensor of a row per example",
    "outside": "layers of the network were called outside of a call of the network",
    "inputs": "the network was called with something else than the rows that were dealt, such as "
    "rows that the loop had augmented, embedded, chosen or put into another order",
    "alike": "what the network was called with does not tell the rows of the batch apart",
    "backward": "the gradients did not come unchanged from one backward pass through the call, or "
    "what the network was called with was changed before it",
    "hooks": "a layer or an output of the network has a hook that was added after make_private, "
    "which may change what its gradients come from",
}
"""Why nothing shows that the network got the rows of the examples that were dealt, each once."""
CHECKED = "sampling_checked"
"""Fact: the rounds whose members were compared with those drawn again from the key."""
_KEY = "key"
_SIGNING_KEY = "signing-key"
_LOCK = "lock"
_START = "start.safetensors"
_STATE = re.compile(r"(state|closed)-[0-9]{6,}\.safetensors")


class StorageError(RuntimeError):
    """A round could not be saved. None of it was released, and no saved round was lost."""


class Committed(Protocol):
    """What a run folder keeps after each round: a ``Server``, or a loop's steps on examples."""

    @property
    def plan_hash(self) -> str:
        """Hash of the plan."""

    @property
    def last_clip_norm(self) -> float:
        """Clip norm of the last round."""

    @property
    def round(self) -> int:
        """Rounds done."""

    @property
    def source(self) -> NoiseSource:
        """Source of the noise."""

    @property
    def cohort(self) -> Sequence[ClientId]:
        """Who took part in the last round."""

    @property
    def parameters(self) -> Tensor:
        """The released parameters, shape (d,)."""

    def load_start(self, start: Tensor) -> None:
        """Begin with these parameters."""

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything that the next round needs, as tensors and values ready for JSON."""

    def load_state_dict(
        self,
        tensors: dict[str, Tensor],
        values: dict[str, Any],
        participations: dict[ClientId, list[int]],
    ) -> None:
        """Continue where ``state_dict`` was taken."""


class RunFolder:
    """A run on disk, locked while it is open; use it in a ``with`` statement.

    ``create`` begins a run; ``open`` resumes one.

    Attributes:
        path: the folder.
        plan: the plan that was fixed when the run was created.
        is_new: whether ``create`` returned it.
    """

    def __init__(self, path: Path, ledger: Ledger, folder_lock: FileLock) -> None:
        self.path = path
        self._ledger = ledger
        self._locks = [folder_lock]
        self._source: NoiseSource | None = None
        self._sampled: SampledCohorts | None = None
        self._process = os.getpid()
        self.is_new = False
        # Called for its checks: a changed ledger is refused before a key is read.
        ledger.rows()
        self._private = ledger.facts["seed"] is None
        self._adopted_at: int | None = ledger.facts.get("adopted_at")
        self.plan = PrivacyPlan.from_dict(ledger.facts["plan"])
        # Computed once: hashing a dense mechanism means hashing a matrix.
        self._plan_hash = self.plan.hash
        if self._private:
            # A copy of the folder has a lock file of its own, but the same key.
            self._locks.append(witness.hold(ledger.facts["run_id"]))

    @staticmethod
    def create(
        path: str | Path,
        plan: PrivacyPlan,
        *,
        seed: int | None = None,
        facts: dict[str, Any] | None = None,
        start: Tensor | None = None,
    ) -> "RunFolder":
        """Begin a run in a folder that does not exist yet or is empty.

        Args:
            path: path of the folder.
            plan: plan of the run; it cannot change afterwards.
            seed: seed of the noise, >= 0, for a simulation, which is not private; None draws a
                secret key from the operating system.
            facts: further values to keep in the ledger, ready for JSON: "delta",
                "population_name", "population" (see ``ids_hash``), "parameters" and "frozen" (names
                with shapes, and with hashes), and whatever else has a name of your own.
            start: trainable part to begin with, shape (d,), if it is not the model's own.

        Raises:
            ConfigError: the folder is not empty, or others can write in it; or a fact has a name of
                this package, or names the public data of a built-in task, or there are too many.
            BudgetExceededError: the fact "population_name" names people whose limit the run would
                pass; nothing was created.
            StorageError: the folder cannot be written.
        """
        chosen = facts or {}
        if taken := sorted(chosen.keys() & {*_WORDS}):
            raise ConfigError(
                f"facts: {', '.join(taken)} are words of this package. Choose others."
            )
        name = chosen.get("population_name")
        if isinstance(name, str) and budget_book.is_public(name):
            raise ConfigError(
                f"facts: population_name={name!r} is for the public data of built-in tasks. Choose "
                "another."
            )
        return create_run(path, plan, seed=seed, facts=chosen, start=start)

    @classmethod
    def _begin(cls, folder: Path, about: dict[str, Any], start: bytes, keys: list[bytes]) -> Self:
        """Write the files of a new run, and open it; ``start`` is empty if there is none."""
        key, signing = keys
        with ExitStack() as undo, _on_disk(f"{folder} cannot be written"):
            make_private(folder)
            folder_lock = locked(folder)
            undo.callback(folder_lock.release)
            # By a process that began a run in it in the meantime.
            _refuse_used(folder)
            if start:
                write_durably(folder / _START, start)
            # Keys before the ledger, which makes it a run: no crash leaves a run without keys.
            write_durably(folder / _SIGNING_KEY, signing)
            if about["seed"] is None:
                write_durably(folder / _KEY, key)
                # Before the ledger, so that every run that exists has a rollback guard.
                witness.note(about["run_id"], witness.Seen(0, genesis(about)))
            run = cls(folder, Ledger.create(folder, about, SigningKey(signing)), folder_lock)
            undo.callback(run.close)
            run._load_keys()
            undo.pop_all()
        run.is_new = True
        return run

    @classmethod
    def open(cls, path: str | Path, *, adopt: bool = False) -> Self:
        """Resume a run, after checking that the folder is its newest copy.

        Args:
            path: path of the folder.
            adopt: resume although this machine did not see all of the run, for instance after a
                move. You vouch that no other copy will ever be continued; the report says so.

        Raises:
            ConfigError: the folder holds no run, or one that is damaged, changed, ended early or in
                use by another process, has another key, or is an older copy of a run that has
                advanced since; or others can write in it, or it holds links, pipes or files of
                others.
            StorageError: the folder cannot be written.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"{folder} holds no run: there is no such folder.")
        try:
            folder_lock = locked(folder)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be opened for writing: {error}.") from None
        with ExitStack() as undo, _on_disk(f"{folder} cannot be written"):
            undo.callback(folder_lock.release)
            run = cls(folder, Ledger(folder), folder_lock)
            undo.callback(run.close)
            # While a last line that was damaged later can still be repaired: it is cut off below.
            if run._private:
                run._unknown(witness.last_seen(run.facts["run_id"]))
            # A process that was killed may have flushed neither its last line, which a power
            # failure would take back with its round, nor the removal of a key.
            run._ledger.settle()
            flush_directory(folder)
            run._load_keys()
            run._refuse_older_copy(adopt)
            run._enter_book()
            run._remove_leftovers()
            run._refuse_closed()
            undo.pop_all()
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the run for other processes."""
        for file_lock in self._locks:
            file_lock.release()

    @property
    def rounds(self) -> int:
        """Number of committed rounds."""
        return len(self._ledger.committed())

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that the ledger keeps about the run."""
        return self._ledger.facts

    def _enter_book(self) -> None:
        """Enter the run in this machine's budget book, unless it is there."""
        with _on_disk(f"{self.path} cannot be resumed"):
            budget_book.enter(self.plan, self.facts, self.path, rounds=self.rounds)

    def source(self) -> NoiseSource:
        """Return the source of the run's noise, for its only ``Server``.

        Raises:
            ConfigError: the key is missing or damaged, or this method was called before: two
                servers would draw the same noise.
        """
        # A forked child has the same key, and would draw the same noise.
        self._refuse_fork()
        if self._source is not None:
            raise ConfigError(
                "source() was called before: a second server would repeat its noise. Open the run "
                "again."
            )
        self._source = self._own_source
        unsigned = self._ledger.signer is None and not self._ended
        if self._source is None or unsigned:
            missing = _SIGNING_KEY if unsigned else _KEY
            raise ConfigError(
                f"{self.path / missing} is missing, so this run cannot be continued. Begin a "
                "fork: a run with a new key, and the cost of both."
            )
        return self._source

    def sample(self, ids: Iterable[object]) -> SampledCohorts:
        """Return the cohorts of a run whose plan samples; call ``source`` before.

        ``commit`` refuses rounds with anybody else. Who takes part is secret: not for release.

        Args:
            ids: the population that the run was begun with, in the same order.

        Raises:
            ConfigError: the plan has no sampling, the population is another one, or the ledger
                names clients that were not drawn.
        """
        if self._source is None:
            raise ConfigError("sample: call source() first; the cohorts come from its key.")
        drawn = SampledCohorts(self.plan, ids, self._source)
        if drawn.population != self.facts["population"]:
            raise ConfigError(
                f"{self.path}: the clients' ids are not those that the run was begun with. Pass "
                "the same clients, in the same order."
            )
        # The key of a complete run is erased.
        if self.rounds < self.plan.rounds:
            self._refuse_unsampled(drawn, self._ledger)
        self._sampled = drawn
        return drawn

    def _refuse_unsampled(self, drawn: SampledCohorts, ledger: Ledger) -> None:
        """Check that everybody in the ledger was drawn for the round."""
        if any(drawn.not_sampled(row.round, row.clients) for row in ledger.rows()):
            raise ConfigError(
                f"{self.path}: its ledger names clients that its sampling did not draw, so its "
                "epsilon does not hold and it is not continued."
            )

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise ConfigError(
                f"{self.path} is open in the process that this one was forked from: two processes "
                "would commit the same round. Work on the run in the process that opened it."
            )

    @property
    def _ended(self) -> bool:
        """Whether the run draws no more noise: it is complete, or was ended early."""
        return self.rounds >= self.plan.mechanism.rounds or "closed" in self.facts

    def _load_keys(self) -> None:
        """Read both keys of a run that has not ended, and compare them with the ledger's record."""
        self._own_source: NoiseSource | None = None
        facts, ended = self.facts, self._ended
        if not self._private:
            self._own_source = SeededSource(facts["seed"])
        elif ended:
            # Nothing draws from it.
            self._own_source = SecretSource()
        try:
            if not ended:
                secret = read_key(self.path / _SIGNING_KEY, facts["public_key"], signed_by)
                self._ledger.signer = None if secret is None else SigningKey(secret)
            if self._own_source is None:
                secret = read_key(self.path / _KEY, facts["key"], named_secret)
                self._own_source = None if secret is None else SecretSource(secret)
        except OSError as error:
            raise ConfigError(f"{self.path}: a key cannot be read: {error}.") from None

    def _refuse_closed(self) -> None:
        if "closed" in self.facts:
            raise ConfigError(
                f"{self.path}: the run was ended early, after {self.rounds} of {self.plan.rounds} "
                "rounds, and its keys are erased. Its report and its model can be read; to "
                "continue from its model, begin a fork, whose report adds the cost of both."
            )

    def end_early(self, reason: str = "") -> None:
        """End the run after the committed rounds: record it, and erase both keys and the noise.

        The model stays. The report covers what was released, under the plan's guarantee, and says
        that the run was ended early. This method closes the run, which cannot be opened again.

        Args:
            reason: kept in the ledger.

        Raises:
            ConfigError: the run is complete, or its signing key is missing.
            StorageError: the disk refused; the run can still be continued, or ended again.
        """
        self._refuse_fork()
        if self._ended:
            raise ConfigError(f"{self.path}: the run is complete, and its keys are erased already.")
        try:
            with _on_disk(f"{self.path} cannot be written"):
                model_file = None
                if self.rounds:
                    state, _ = self._newest_state()
                    model = {"parameters": state["parameters"]}
                    model_file = write_state(self.path / closed_name(self.rounds), model, {})
                closed = {"rounds": self.rounds, "state": model_file, "reason": reason}
                # The point of no return.
                self._ledger.add_fact("closed", closed)
                self._note()
                self._remove_leftovers()
                self._enter_book()
        finally:
            self.close()

    def restore(self, server: Committed) -> None:
        """Load the state after the last committed round into a new server of the same plan.

        Raises:
            ConfigError: the state is missing, damaged, not the newest, or of another plan or model.
        """
        if not self.rounds:
            if server.plan_hash != self._plan_hash:
                raise ConfigError(
                    "the server's plan is not the run's. Build it from RunFolder.plan."
                )
            if (start := self.facts.get("start")) is not None:
                server.load_start(read_state(self.path / _START, start)[0]["parameters"])
            return
        server.load_state_dict(*self._newest_state(), self._ledger.rounds_by_client())

    def _newest_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        name, expected = self._ledger.newest()
        return read_state(self.path / name, expected)

    def commit(self, server: Committed, counts: RoundCounts) -> None:
        """Make the round that ``server`` just ran durable; nobody may see its model before.

        Raises:
            ConfigError: the server is not one round ahead of the ledger, or its plan or noise
                source is not the run's.
            StorageError: the disk refused. The run is unchanged, and nothing is lost.
        """
        self._refuse_fork()
        if server.round != self.rounds + 1 or server.plan_hash != self._plan_hash:
            raise ConfigError(
                f"the run has {self.rounds} rounds, the server {server.round}: a commit needs a "
                "server of this plan that is one round ahead. Open the run again and restore the "
                "server."
            )
        # A server with another source would not add the noise that the ledger names.
        if server.source is not self._source:
            raise ConfigError("the server's noise is not the run's: use RunFolder.source().")
        if self.plan.sampling is not None:
            self._check_sample(server)
        try:
            self._commit(server, counts)
        except OSError as error:
            what = "could not be saved"
            if self.rounds == server.round:
                what = "was saved, and then its commit could not be finished"
            raise StorageError(
                f"round {server.round - 1} {what} in {self.path}: {error}. Nothing of it was "
                f"released; the run stands after {self.rounds} rounds. Make the folder writable, "
                "free some space, and resume."
            ) from None

    def _check_sample(self, server: Committed) -> None:
        """Check that everybody who counted was drawn; in the last round, that a new draw agrees."""
        if self._sampled is None:
            raise ConfigError("sample(ids) was not called: this plan's cohorts come from it.")
        if server.round == self.plan.rounds:
            self._sampled = self._sampled.again()
        if self._sampled.not_sampled(self.rounds, server.cohort):
            raise ConfigError(
                f"round {self.rounds}: a client counted that was not drawn for it. Nothing of it "
                "was released; draw the cohorts by RunFolder.sample."
            )

    def _commit(self, server: Committed, counts: RoundCounts) -> None:
        tensors, values = server.state_dict()
        # The chain hashes who took part. Its head leaves the server with reports and models, and
        # the state of a complete run can be computed from the model: without a secret in the
        # state, whoever guesses the members could test the guess.
        if self._private:
            values["blind"] = secrets.token_hex(32)
        # What an attempt that failed left of this round, or its state would be replaced.
        self._ledger.settle()
        if self._sampled is not None and server.round == self.plan.rounds:
            # Drawn again for this round, and compared with the disk, before the keys are erased.
            self._refuse_unsampled(self._sampled, Ledger(self.path))
            self._ledger.add_fact(CHECKED, self.plan.rounds)
        # Hashing does not hold Python's lock.
        with ThreadPoolExecutor(1) as thread:
            model = thread.submit(model_hash, server.parameters)
            state = write_state(self.path / state_name(server.round), tensors, values)
        if counts.self_clipped and SELF_CLIPPED not in self.facts:
            self._ledger.add_fact(SELF_CLIPPED, self.rounds)
        if counts.rows_differ and ROWS_DIFFER not in self.facts:
            self._ledger.add_fact(ROWS_DIFFER, [self.rounds, counts.rows_differ])
        row = Row(
            round=self.rounds,
            state=state,
            model=model.result(),
            clip_norm=server.last_clip_norm,
            received=counts.received,
            clients=tuple(sorted(server.cohort, key=id_order)),
            summed=counts.summed,
            summed_by=counts.summed_by,
        )
        # So that a crash behind the next line is not taken for a round made elsewhere.
        self._note(coming=self._ledger.following(row).chain)
        # The point of no return.
        self._ledger.append(row)
        self._note()
        self._remove_leftovers()

    def _note(self, coming: str = "") -> None:
        """Record outside the folder where a private run stands."""
        if self._private:
            closed = "closed" in self.facts
            head = self._ledger.chains[-1]
            record = witness.Seen(self.rounds, head, coming, self._adopted_at, closed)
            witness.note(self.facts["run_id"], record)

    def _remove_leftovers(self) -> None:
        """Remove all but the committed state, and the keys of a run that has ended.

        Whoever had the noise key and the released models could compute what the noise hides.
        """
        # A state of a round that was not committed holds noise that is drawn again.
        keep = self._ledger.newest()[0] if self.rounds else ""
        for file in self.path.iterdir():
            if is_scratch(file.name) or (_STATE.fullmatch(file.name) and file.name != keep):
                remove_durably(file)
        if self._ended:
            erase_durably(self.path / _KEY)
            erase_durably(self.path / _SIGNING_KEY)

    def _refuse_older_copy(self, adopt: bool) -> None:
        """Check that this copy stands where this machine saw the run, or adopt it."""
        # A seeded run may be repeated by anybody, so an older copy does no harm.
        if not self._private:
            return
        record = witness.last_seen(self.facts["run_id"])
        why = self._unknown(record)
        if not why:
            if record is not None and record.adopted_at is not None:
                self._adopted_at = record.adopted_at
            self._note()
            return
        if not adopt:
            if self._ended:
                # Nothing is left that a newer copy could have continued.
                return
            raise ConfigError(
                f"{self.path}: {why}. If the original will never be continued, nor another copy, "
                "open the run with adopt=True (--adopt); otherwise begin a fork."
            )
        self._adopted_at = self.rounds
        # Before the folder's own mark, which copies made earlier do not have.
        self._note()
        if not self._ended:
            self._ledger.add_fact("adopted_at", self.rounds)

    def _unknown(self, record: witness.Seen | None) -> str:
        """Return why this machine cannot tell whether this copy is the newest; "" if it is.

        Raises:
            ConfigError: it is not.
        """
        if record is None:
            return "this machine has no record of the run, so a newer copy may exist"
        closed = "closed" in self.facts
        standing = record.standing(self._ledger.chains, closed=closed)
        fault = record.fault(self._ledger.chains, closed=closed)
        if standing in ("older", "another"):
            raise ConfigError(
                f"{self.path}: {fault}. Continuing would reuse the noise of released rounds, which "
                "would then cancel out. Restore the newest copy, or begin a fork: a new run with a "
                "new key, whose report adds the cost of this one."
            )
        if standing == "closed":
            raise ConfigError(f"{self.path}: {fault}. Begin a new run or a fork.")
        if standing == "newer":
            return fault
        if record.adopted_at is None or self._ended or "adopted_at" in self.facts:
            return ""
        return "another copy of the run was adopted on this machine"


def create_run(
    path: str | Path,
    plan: PrivacyPlan,
    *,
    seed: int | None = None,
    facts: dict[str, Any],
    start: Tensor | None = None,
) -> RunFolder:
    """Begin a run as ``RunFolder.create`` does, with facts for which this package answers."""
    folder = Path(path)
    _refuse_used(folder)
    checks.count("seed", seed or 0, minimum=0)
    keys = [secrets.token_bytes(KEY_BYTES) for _ in range(2)]
    source = SecretSource(keys[0]) if seed is None else SeededSource(seed)
    about = {
        "schema": SCHEMA,
        "run_id": secrets.token_hex(16),
        "plan": plan.to_dict(),
        "seed": seed,
        "key": source.identity,
        "public_key": signed_by(keys[1]),
        "versions": versions(),
    }
    if taken := sorted(facts.keys() & {*about, *_RESERVED}):
        raise ConfigError(f"facts: {', '.join(taken)} are the run's own names. Choose others.")
    about |= facts
    if plan.sampling is not None and not isinstance(about.get("population"), str):
        raise ConfigError(
            "facts: population is missing: a run that samples fixes who may be drawn, and in "
            "which order, before it begins. Give ids_hash(ids)."
        )
    start_file = b"" if start is None else encode_state({"parameters": start}, {})
    if start is not None:
        about["start"] = hashlib.sha256(start_file).hexdigest()
    # As it will be read back.
    about = json.loads(json.dumps(about, allow_nan=False))
    with ExitStack() as undo, _on_disk(f"{folder} cannot be begun"):
        with budget_book.charged(plan, about, folder):
            run = RunFolder._begin(folder, about, start_file, keys)
            undo.callback(run.close)
        undo.pop_all()
    return run


def named_secret(secret: bytes) -> str:
    """Return what the ledger names of a noise key."""
    return SecretSource(secret).identity


def versions() -> dict[str, str]:
    """Return the versions of what computes a run."""
    try:
        version = metadata.version("privpart")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return {
        "privpart": version,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


@contextmanager
def _on_disk(failure: str) -> Iterator[None]:
    """Turn what the disk refuses into a ``StorageError``, which begins with ``failure``."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{failure}: {error}.") from None


def locked(folder: Path) -> FileLock:
    """Return a lock on the folder, held by this process until ``release``.

    Raises:
        ConfigError: another process holds it; or others can write in the folder, or it holds links,
            pipes or files of others.
    """
    refuse_shared(folder)
    refuse_planted(folder)
    warn_if_readable(folder)
    return lock(folder / _LOCK, f"{folder} is in use: another process works on this run.")


def holds_a_run(path: str | Path) -> bool:
    """Return whether a run was begun in this folder."""
    # Path.exists raises of names that are too long.
    return os.path.lexists(Path(path) / LEDGER)


def _refuse_used(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and _is_free(folder)):
        raise ConfigError(
            f"{folder} is not empty: a run begins in a folder of its own. To resume the run in it, "
            "open it (--resume)."
        )


def _is_free(folder: Path) -> bool:
    """Return whether a folder is empty, apart from leftovers of a crash before a run began."""
    names = (_KEY, _SIGNING_KEY, _LOCK, _START)
    return all(file.name in names or is_scratch(file.name) for file in folder.iterdir())
