"""Run folder: a run on disk, where each round is committed before anyone may see its model.

    ledger.log                 plan, committed rounds, who took part in them (see ``ledger``)
    state-000012.safetensors   model, optimiser and salts after 12 rounds; only the newest is kept
    noise-000007.safetensors   registers of the noise after 7 rounds, of which the state names the
                               hash: what follows from them and the key is computed when the run
                               is resumed; only the newest is kept, and none of a run that ended
    closed-000012.safetensors  in its place, the model alone, of a run that was ended early
    start.safetensors          start model of a fork
    sum-000007.safetensors     sum of round 7 before its noise, of a run that records its sums
    key                        noise key, until the run ends; keep the folder secret
    signing-key                signs the ledger, until the run ends
    lock                       held while a process works on the run

A commit has five steps: write the new state durably; tell the log of runs which row is coming;
append the ledger row, which names the hash of the state; tell the log that it is there; remove the
older state. The ledger row is the point of no return. A crash before it leaves the old state, and
the round is trained again: nothing of it was released, so its noise is still used only once. A
crash after it leaves the new state. No file is ever unpickled.
"""

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

from filelock import FileLock
from torch import Tensor

from accounting.checks import ConfigError
from accounting.report import installed_version
from privpart.engines.protocol import OPTIMIZER
from privpart.messages import ClientId, id_order
from privpart.noise.cohorts import SampledCohorts
from privpart.noise.metrics import MetricsRelease
from privpart.noise.source import NoiseSource, SecretSource, SeededSource
from privpart.plan import PrivacyPlan
from privpart.run import budget_book, evaluations, log, package, store
from privpart.run.evaluations import Evaluation
from privpart.run.ledger import (
    LEDGER,
    Ledger,
    Row,
    SigningKey,
    closed_name,
    noise_name,
    read_key,
    signed_by,
    state_name,
    sum_name,
)
from privpart.run.lives import life
from privpart.run.population import refuse_population, spoken
from privpart.run.store import StorageError, one_line
from privpart.server import ANOTHER_SERVER, OWN_SERVER, RoundCounts, Server, is_unchanged

ROWS_DIFFER = "rows_differ"
"""Fact of a run on examples: the first step whose rows may be of others, and a reason."""
CHECKED = "sampling_checked"
"""Fact: the rounds whose members were compared with those drawn again from the key."""
KEY = "key"
SIGNING_KEY = "signing-key"
LOCK = "lock"
START = "start.safetensors"
RECORDS = "records_sums"
"""Fact of a run whose sums are kept beside it, for anybody to replay it."""
_STATE = re.compile(r"(state|closed)-[0-9]{6,}\.safetensors")
_SUM = re.compile(r"sum-([0-9]{6,})\.safetensors")
_NOISE = re.compile(r"noise-([0-9]{6,})\.safetensors")


class Committed(Protocol):
    """What a run folder keeps after each round: a ``Server``, or a loop's steps on examples."""

    plan_hash: str
    last_clip_norm: float  # of the last round
    source: NoiseSource

    @property
    def round(self) -> int:
        """Rounds done."""

    @property
    def cohort(self) -> Sequence[ClientId]:
        """Who took part in the last round."""

    @property
    def parameters(self) -> Tensor:
        """The released parameters, shape (d,)."""

    @property
    def registers(self) -> Sequence[str]:
        """Names of the tensors of a state that follow from the noise key."""

    @property
    def checkpoint(self) -> int:
        """The last round, up to now, after which these tensors are to be on the disk."""

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
        """Continue where ``state_dict`` was taken, or from older registers, see ``Server``."""


class RunEndedError(ConfigError):
    """A run was ended early; nothing continues it."""


class RunFolder:
    """A run on disk, locked while it is open; use it in a ``with`` statement.

    ``create_run`` begins a run; ``open`` resumes one.

    Attributes:
        path: the folder.
        plan: the plan that was fixed when the run was created.
        is_new: whether ``create_run`` returned it.
        is_paced: whether its commits wait for the ends of slots, see ``privpart.training.pace``.
    """

    def __init__(self, path: Path, ledger: Ledger, folder_lock: FileLock) -> None:
        self.path = path
        self._ledger = ledger
        self._locks = [folder_lock]
        self._source: NoiseSource | None = None
        self._sampled: SampledCohorts | None = None
        self._process = os.getpid()
        # of the registers that the newest state needs; none are those before the first round
        self._registers: dict[str, Any] = {"round": 0, "file": ""}
        self.is_new = self.is_paced = False
        # Called for its checks: a changed ledger is refused before a key is read.
        ledger.rows()
        self._private = ledger.facts["seed"] is None
        self.plan = PrivacyPlan.from_dict(ledger.facts["plan"])
        # Computed once: hashing a dense mechanism means hashing a matrix.
        self._plan_hash = self.plan.hash
        # Of code by which no round was committed yet, what the next commit will say.
        with store.damage_named(path / LEDGER):
            made_by = package.named(ledger.facts)
        mine = {"privpart": installed_version(), **package.facts()}
        self._packages = None if mine in made_by else [*made_by[1:], mine]
        if self._private:
            # A copy of the folder has a lock file of its own, but the same key.
            self._locks.append(log.hold(ledger.facts["run_id"]))

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
        refuse_without_folder(folder)
        try:
            folder_lock = locked(folder)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be opened for writing: {one_line(error)}."
            ) from None
        with ExitStack() as undo, on_disk(f"{folder} cannot be written"):
            undo.callback(folder_lock.release)
            run = cls(folder, Ledger(folder), folder_lock)
            undo.callback(run.close)
            run._refuse_part_of_a_selection(adopt=adopt)
            # While a last line that was damaged later can still be repaired: it is cut off below.
            entries = log.lines_of(run.facts["run_id"]) if run._is_logged else []
            why = run._unknown(entries)
            run._refuse_lost_line(why)
            # A process that was killed may have flushed neither its last line, which a power
            # failure would take back with its round, nor the removal of a key.
            run._ledger.settle()
            store.flush_directory(folder)
            run._load_keys()
            run._enter_log(entries, why, adopt=adopt)
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
    def newest_row(self) -> Row:
        """The last committed round, of which there is one."""
        return self._ledger.committed()[-1]

    @property
    def is_complete(self) -> bool:
        """Whether all planned rounds and evaluations are committed."""
        return self._ledger.is_complete

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """The committed evaluations of the plan's metrics."""
        return self._ledger.evaluations

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that the ledger keeps about the run."""
        return self._ledger.facts

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
        unsigned = self._ledger.signer is None and not self._ledger.has_ended
        if self._source is None or unsigned:
            missing = self.path / (SIGNING_KEY if unsigned else KEY)
            raise ConfigError(
                f"{missing} is missing, so this run cannot be continued. Begin a fork: a run with "
                "a new key, and the cost of both."
            )
        return self._source

    def sample(self, ids: Iterable[object]) -> SampledCohorts:
        """Return the cohorts of a run whose plan samples; call ``source`` before.

        ``commit`` refuses rounds with anybody else. Who takes part is secret: not for release.
        ``ids`` are the population that the run was begun with, in the same order.

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

    def _load_keys(self) -> None:
        """Read both keys of a run that has not ended, and compare them with the ledger's record."""
        self._own_source: NoiseSource | None = None
        facts, ended = self.facts, self._ledger.has_ended
        if not self._private:
            self._own_source = SeededSource(facts["seed"])
        elif ended:
            # Nothing draws from it.
            self._own_source = SecretSource()
        try:
            if not ended:
                secret = read_key(self.path / SIGNING_KEY, facts["public_key"], signed_by)
                self._ledger.signer = None if secret is None else SigningKey(secret)
            if self._own_source is None:
                secret = read_key(self.path / KEY, facts["key"], named_secret)
                self._own_source = None if secret is None else SecretSource(secret)
        except OSError as error:
            raise ConfigError(f"{self.path}: a key cannot be read: {one_line(error)}.") from None

    def _refuse_closed(self) -> None:
        if "closed" in self.facts:
            raise RunEndedError(
                f"{self.path}: the run was ended early, after {self.rounds} of {self.plan.rounds} "
                "rounds, and its keys are erased. Its report and its model can be read; to "
                "continue from its model, begin a fork, whose report adds the cost of both."
            )

    def _refuse_part_of_a_selection(self, *, adopt: bool) -> None:
        """Refuse a run of a selection, unless that continues it; its winner has ended."""
        is_part = "selection" in self.facts and not log.is_apart()
        if is_part and (adopt or not self._ledger.has_ended):
            raise ConfigError(
                f"{self.path}: is one of the trainings of a selection, of which nothing but the "
                "best one is released. Continue the selection: the same command, privpart tune."
            )

    def end_early(self, reason: str = "", *, by_training: bool = False) -> None:
        """End the run after the committed rounds: record it, and erase both keys and the noise.

        The model stays. The report covers what was released, under the plan's guarantee, and says
        that the run was ended early. This method closes the run, which cannot be opened again.
        The ledger keeps the reason, and whether the training asked for it (``StopTraining``).

        Raises:
            ConfigError: the run is complete, or its signing key is missing.
            StorageError: the disk refused; the run can still be continued, or ended again.
        """
        self._refuse_fork()
        if self._ledger.has_ended:
            raise ConfigError(f"{self.path}: the run is complete, and its keys are erased already.")
        try:
            with on_disk(f"{self.path} cannot be written"):
                model_file = None
                if self.rounds:
                    model = {"parameters": self._newest_state()[0]["parameters"]}
                    file = self.path / closed_name(self.rounds)
                    model_file = store.write_state(file, model, {}).state
                closed = {"rounds": self.rounds, "state": model_file, "reason": reason}
                by = {"by_training": True} if by_training else {}
                # The point of no return.
                self._ledger.add_fact("closed", closed | by)
                if self._is_logged:
                    self._note("closed")
                self._remove_leftovers()
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
                server.load_start(store.read_state(self.path / START, start)[0]["parameters"])
            return
        tensors, values = self._newest_state()
        with store.damage_named(self.path / self._ledger.newest()[0]):
            saved = values.get("registers", self._registers)
            if rounds := saved["round"]:
                tensors |= store.read_state(self.path / noise_name(rounds), saved["file"])[0]
        server.load_state_dict(tensors, values, self._ledger.rounds_by_client())
        self._registers = saved

    def _newest_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        name, expected = self._ledger.newest()
        return store.read_state(self.path / name, expected)

    def commit(self, server: Committed, counts: RoundCounts) -> None:
        """Make the round that ``server`` just ran durable; nobody may see its model before.

        Raises:
            ConfigError: the server is not one round ahead of the ledger, its plan or noise source
                is not the run's, or the counts are not those of its last round.
            StorageError: the disk refused. The run is unchanged, and nothing is lost.
        """
        self._refuse_fork()
        if (metrics := self.plan.metrics) is not None:
            evaluations.refuse_before(metrics, self.rounds, self.evaluations, server.cohort)
        if server.round != self.rounds + 1 or server.plan_hash != self._plan_hash:
            raise ConfigError(
                f"the run has {self.rounds} rounds, the server {server.round}: a commit needs a "
                "server of this plan that is one round ahead. Open the run again and restore the "
                "server."
            )
        # A server with another source would not add the noise that the ledger names.
        if server.source is not self._source:
            raise ConfigError("the server's noise is not the run's: use RunFolder.source().")
        # The ledger says by them who clipped.
        if isinstance(server, Server) and counts != server.last_counts:
            raise ConfigError("counts: must be those that run_round returned of this round.")
        if self.plan.sampling is not None:
            self._check_sample(server)
        try:
            self._commit(server, counts)
        except (OSError, StorageError) as error:
            what = "could not be saved"
            if self.rounds == server.round:
                what = "was saved, and then its commit could not be finished"
            raise StorageError(
                f"round {server.round - 1} {what} in {self.path}: {error}. Nothing of it was "
                f"released; the run stands after {self.rounds} rounds. Make the folder writable, "
                "free some space, and resume."
            ) from None

    @property
    def evaluation_due(self) -> bool:
        """Whether the metrics of the newest model are to be released before the next round."""
        return evaluations.is_due(self.plan.metrics, self.rounds, self.evaluations)

    def commit_metrics(self, release: MetricsRelease) -> Evaluation:
        """Make the metrics that were just noised durable; nobody may see them before.

        Raises:
            ConfigError: none are due, the noise or the plan is not the run's, or somebody trained.
            StorageError: the disk refused. The run is unchanged: open it again, and evaluate again,
                under new noise.
        """
        self._refuse_fork()
        if release.source is not self._source or release.plan_hash != self._plan_hash:
            raise ConfigError("metrics: their noise or plan is not the run's.")
        trained = self._ledger.rounds_by_client()
        evaluation = evaluations.checked_evaluation(
            release, self.plan.metrics, self.rounds, self.evaluations, trained
        )
        with on_disk(f"the metrics after round {release.round} could not be saved in {self.path}"):
            self._ledger.settle()
            self._append(evaluation)
        return evaluation

    def _append(self, row: Row | Evaluation) -> None:
        """Commit a row, which of a private run is in the log of runs before and after."""
        noted: AbstractContextManager[None] = nullcontext()
        if self._private:
            coming = self._entry("coming", self._ledger.following(row))
            rounds, evaluated = coming.rounds, coming.evaluations
            if isinstance(row, Row):
                done = replace(coming, event="round", rounds=rounds + 1)
            else:
                done = replace(coming, event="round", evaluations=evaluated + 1)
            noted = log.committing(coming, done)
        with noted:
            # The point of no return.
            self._ledger.append(row)
        self._remove_leftovers()

    def note_late(self) -> None:
        """Keep in the ledger that a round is not released at the end of its slot."""
        self._ledger.add_fact("late_rounds", self.facts.get("late_rounds", 0) + 1)

    def rounds_by_client(self) -> dict[ClientId, list[int]]:
        """Map each client to its committed rounds, ascending."""
        return self._ledger.rounds_by_client()

    def note_move(self, move: dict[str, Any]) -> None:
        """Keep in the ledger which node answers for some clients from the next round on."""
        self._ledger.add_fact("moves", [*self.facts.get("moves", ()), move])

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
        digest = ""
        if self.facts.get(RECORDS) and isinstance(server, Server):
            file = self.path / sum_name(self.rounds)
            digest = store.write_state(file, *server.recorded()).state
        saved = self._take_registers(server, tensors, values)
        written = store.write_state(self.path / state_name(server.round), tensors, values)
        if counts.rows_differ and ROWS_DIFFER not in self.facts:
            self._ledger.add_fact(ROWS_DIFFER, [self.rounds, counts.rows_differ])
        if "round_seconds" in self.facts and not self.is_paced:
            self.note_late()
        if self._packages is not None:
            self._ledger.add_fact(package.PACKAGES, self._packages)
            self._packages = None
        clipped_by = counts.clipped_by
        if OPTIMIZER not in clipped_by and not is_unchanged(server, Server, OWN_SERVER):
            clipped_by = {ANOTHER_SERVER: len(server.cohort)}
        self._append(
            Row(
                round=self.rounds,
                state=written.state,
                model=written.tensors["parameters"],
                clip_norm=server.last_clip_norm,
                received=counts.received,
                clients=tuple(sorted(server.cohort, key=id_order)),
                clipped_by=clipped_by,
                sum=digest,
            )
        )
        self._registers = saved

    def _take_registers(
        self, server: Committed, tensors: dict[str, Tensor], values: dict[str, Any]
    ) -> dict[str, Any]:
        """Take the registers out of a state, and save them if they would take long to make again.

        Returns:
            After how many rounds the saved ones are, and the hash of their file; the state names
            it, unless nothing is drawn any more.
        """
        registers = {name: tensors.pop(name) for name in server.registers if name in tensors}
        saved = self._registers
        if registers and server.checkpoint > saved["round"]:
            written = store.write_state(self.path / noise_name(server.round), registers, {})
            saved = {"round": server.round, "file": written.state}
        if server.round < self.plan.mechanism.rounds:
            values["registers"] = saved
        return saved

    @property
    def _is_logged(self) -> bool:
        """Whether the log of runs has lines on this run: on a simulation, only for its people."""
        return self._private or "population_name" in self.facts

    def _note(self, event: log.Event) -> None:
        """Tell the log of runs where the run stands."""
        with log.writing():
            log.append(self._entry(event, self._ledger.chains[-1]))

    def _entry(self, event: log.Event, head: str) -> log.Entry:
        """Return a line of the log of runs, with what is committed now."""
        return log.Entry(
            event=event,
            run=self.facts["run_id"],
            rounds=self.rounds,
            evaluations=len(self.evaluations),
            head=head,
        )

    def _remove_leftovers(self) -> None:
        """Remove all but the committed state, and the keys of a run that has ended.

        Whoever had the noise key and the released models could compute what the noise hides.
        """
        # The model of a round that was not committed is not released; the round is drawn anew.
        keep = self._ledger.newest()[0] if self.rounds else ""
        files = list(self.path.iterdir())
        # Of the model after the last round, nothing is drawn any more.
        ended = self.rounds == self.plan.mechanism.rounds or self._ledger.has_ended
        saved = [int(of[1]) for file in files if (of := _NOISE.fullmatch(file.name))]
        needed = max((n for n in saved if n <= self.rounds and not ended), default=0)
        registers = noise_name(needed) if needed else ""
        for file in files:
            of_sum = _SUM.fullmatch(file.name)
            lost = of_sum and int(of_sum[1]) >= self.rounds
            older = _STATE.fullmatch(file.name) and file.name != keep
            unneeded = _NOISE.fullmatch(file.name) and file.name != registers
            if unneeded or store.is_scratch(file.name):
                # Registers are as secret as the key: with the released models they tell the noise.
                store.erase_durably(file)
            elif lost or older:
                store.remove_durably(file)
        if self._ledger.has_ended:
            store.erase_durably(self.path / KEY)
            store.erase_durably(self.path / SIGNING_KEY)

    def _unknown(self, entries: list[log.Entry]) -> str:
        """Return why this machine cannot tell whether this copy is the newest; "" if it is.

        Raises:
            ConfigError: it is not.
        """
        # A seeded run may be repeated by anybody, so an older copy does no harm.
        if not self._private:
            return ""
        seen, chains = life(self.facts["run_id"], entries), self._ledger.chains
        standing = seen.standing(chains, closed="closed" in self.facts)
        fault = seen.fault(chains, closed="closed" in self.facts)
        if standing in ("older", "another"):
            raise ConfigError(
                f"{self.path}: {fault}. Continuing would reuse the noise of released rounds, which "
                "would then cancel out. Restore the newest copy, or begin a fork: a new run with a "
                "new key, whose report adds the cost of this one."
            )
        if standing == "closed":
            raise ConfigError(f"{self.path}: {fault}. Begin a new run or a fork.")
        return fault

    def _refuse_lost_line(self, why: str) -> None:
        """Check that no committed round is missing at the ledger's end, before anything is removed.

        A crash before a row is committed leaves the state before it. A copy from elsewhere with a
        torn last line may lack a round that was released there.
        """
        fault = ""
        if self.rounds and not os.path.lexists(self.path / (name := self._ledger.newest()[0])):
            fault = f"{name}, the state after its last row, is missing"
        elif why and not self._ledger.has_ended and self._ledger.unread:
            fault = f"{self._ledger.unread} bytes behind its last row are no row"
        if fault:
            raise ConfigError(
                f"{self.path / LEDGER}: {fault}: a later row may have been cut off or damaged. "
                "Nothing was changed; copy the folder again from where it is whole, or restore it."
            )

    def _enter_log(self, entries: list[log.Entry], why: str, *, adopt: bool) -> None:
        """Tell the log of runs what it lacks: an adoption, a charge, or what a crash cut off."""
        if why and not adopt and not self._ledger.has_ended:
            raise ConfigError(
                f"{self.path}: {why}. If the original will never be continued, nor another copy, "
                "open the run with adopt=True (--adopt); otherwise begin a fork."
            )
        run_id, people = self.facts["run_id"], self.facts.get("population_name")
        seen = life(run_id, entries)
        payer = budget_book.charged_as(self.facts)
        entries = entries if payer == run_id else log.lines_of(payer)
        payers = {spoken(e.population) for e in entries if e.run == payer and e.population}
        unpaid = people is not None and spoken(refuse_population(people)) not in payers
        adopted, head = bool(why and adopt), self._ledger.chains[-1]
        # A selection's own log charges nobody.
        if adopted or (unpaid and not log.is_apart()):
            with log.writing():
                # Of a copy that may not be the newest, the rounds are not those of the run.
                stands = self._entry("adopted", head) if adopted else self._entry("charged", "")
                budget_book.enter(stands, self.plan, self.facts, self.path)
        elif seen.head and not why and (seen.head, seen.closed) != (head, "closed" in self.facts):
            self._note("closed" if "closed" in self.facts else "round")


def named_secret(secret: bytes) -> str:
    """Return what the ledger names of a noise key."""
    return SecretSource(secret).identity


def refuse_without_folder(folder: Path) -> None:
    """Refuse what cannot hold a run."""
    if not folder.is_dir():
        reason = "it is a file" if folder.exists() else "there is no such folder"
        raise ConfigError(f"{folder} holds no run: {reason}.")


@contextmanager
def on_disk(failure: str) -> Iterator[None]:
    """Turn what the disk refuses into a ``StorageError``, which begins with ``failure``."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{failure}: {one_line(error)}.") from None


def locked(folder: Path) -> FileLock:
    """Return a lock on the folder, held by this process until ``release``.

    Raises:
        ConfigError: another process holds it; or others can write in the folder, or it holds links,
            pipes or files of others.
    """
    store.refuse_shared(folder)
    store.refuse_planted(folder)
    store.warn_if_readable(folder)
    return store.lock(folder / LOCK, f"{folder} is in use: another process works on this run.")


def holds_a_run(path: str | Path) -> bool:
    """Return whether a run was begun in this folder."""
    # Path.exists raises of names that are too long.
    return os.path.lexists(Path(path) / LEDGER)
