"""Engine: carries a round's work to the clients and brings their updates back.

Chunks: how the clients of a round are dealt to workers, and computed together.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from privpart.client import LocalTraining
from privpart.data.users import Users
from privpart.engines.device import one_thread, usable
from privpart.engines.frozen_prefix import Features, split
from privpart.engines.methods import LocalWork, Method, choose, prefix_fits
from privpart.engines.moon import Remembering
from privpart.engines.options import EngineOptions
from privpart.engines.workers import Workers
from privpart.messages import ClientUpdate, CohortSum, RoundTask
from privpart.model import PartialModel


class EmbeddedEngine:
    """Simulated clients on this machine.

    Args:
        model: shared by all clients; rebuilt part and trained part as in ``PartialModel``.
        users: the clients' data.
        local: how each trains; or a schedule, from the round, from 0, to how they train in it.
        data_seed: order of examples; each (round, client) has its own generator, so the result
            does not depend on the order in which clients run.
        report: gets a sentence about what "auto" chose; None writes it to standard error.
        options: fields of ``EngineOptions`` by keyword, such as ``workers=2``.

    All choices are the same training, for networks that see each example by itself. Updates agree
    to rounding, 1e-5 of their norm, unless that rounding moves an activation across the kink of a
    ReLU; with Adam, which divides by what may itself be rounding, to 1e-2. Where clients take
    several steps at once, one's rounding may depend on what others hold, and at a kink its update:
    only "loop" makes it a function of its own data in every bit.

    Raises:
        ConfigError: options that contradict each other or ``local``, a device that is not here, or
            ``cache_prefix=True`` for a network without such a prefix. If ``local`` is a schedule,
            each round's training is checked in that round.
    """

    def __init__(
        self,
        model: PartialModel,
        users: Users,
        *,
        local: LocalTraining | Callable[[int], LocalTraining],
        data_seed: int,
        report: Callable[[str], None] | None = None,
        **options: Any,  # noqa: ANN401  their types are in EngineOptions, once
    ) -> None:
        self.options = EngineOptions(**options)
        if isinstance(local, LocalTraining):
            self.options.refuse(local)
        if self.options.cache_prefix:
            _frozen_prefix(model)
        self.model = model
        self.users = users
        self.local = local
        self.data_seed = checks.count("data_seed", data_seed, minimum=0)
        self.workers = self.options.workers
        self.method: Method | None = None  # "auto" chooses in the first round
        batching, deterministic = self.options.batching, self.options.deterministic
        if batching != "auto" or deterministic:
            self.method = Method(batching == "vmap", bfloat16=self._bfloat16)
        self._report = report or _to_stderr
        self._memory = Remembering(model, users, data_seed, self._report)  # of "moon"
        self._device = usable(self.options.device)
        self._summed = False  # until the first round finds it faster
        default = False if deterministic or batching == "loop" else None
        cache_prefix = self.options.cache_prefix
        self._cache_prefix = default if cache_prefix is None else cache_prefix
        self._work: LocalWork | None = None
        self._pool: Workers | None = None
        self._frozen = self.model.frozen_version

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, shape (d,), in the order of the task.

        Raises:
            WorkerError: a worker process died, with its cause.
            ConfigError: the frozen part was changed after a round in which it was cached or sent
                to workers; or "vmap" where groups take turns or the objective is not fedavg.
        """
        local = self.local_of(task.round)
        self.options.refuse(local, groups_take_turns=task.active is not None)
        if local.objective == "moon":
            yield from self._remembering(task, start, local)
            return
        work = self._ready(task, start, local)
        for client, update in self._computed(work, task, start, local):
            yield task.update(client, update)

    def sums(self, task: RoundTask, start: Tensor) -> Iterator[CohortSum] | None:
        """Return sums of the clients' clipped updates; None where they are not the fastest way.

        Raises:
            WorkerError, ConfigError: as ``run`` does.
        """
        local = self.local_of(task.round)
        if not self.options.may_sum or local.objective == "moon":
            return None
        work = self._ready(task, start, local)
        most = work.summed_at_once(task) if self._summed else 0
        return self._added_up(work, task, start, local, most) if most else None

    def local_of(self, round_: int) -> LocalTraining:
        """Return how clients train in a round."""
        return self.local if isinstance(self.local, LocalTraining) else self.local(round_)

    def _remembering(
        self, task: RoundTask, start: Tensor, local: LocalTraining
    ) -> Iterator[ClientUpdate]:
        if self._memory.empty and self.workers > 1:
            self._report("engine: moon's clients remember, so all are computed in one process")
        return self._memory.run(task, start, local)

    @property
    def _bfloat16(self) -> bool:
        return self.options.precision == "bfloat16"

    def close(self) -> None:
        """End the worker processes; the next round starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> "EmbeddedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _computed(
        self, work: LocalWork, task: RoundTask, start: Tensor, local: LocalTraining
    ) -> Iterator[tuple[int, Tensor]]:
        method, dealt = self.method or Method(), self._chunks(task.clients)
        if self.workers == 1:
            for chunk in dealt:
                updates = torch.empty(len(chunk), self.model.active_dim(task.active))
                with one_thread(self.options.deterministic):
                    work.updates(task, chunk, start, method, updates)
                yield from zip(chunk, updates, strict=True)
            return
        with self._pool_of(work) as pool:
            yield from pool.updates(task, start, local, method, dealt)

    def _added_up(
        self, work: LocalWork, task: RoundTask, start: Tensor, local: LocalTraining, most: int
    ) -> Iterator[CohortSum]:
        dealt = equal_chunks(task.clients, most, self.workers)
        if self.workers == 1:
            for chunk in dealt:
                total = torch.empty(self.model.dim, dtype=torch.float64)
                yield task.sum_of(chunk, total, work.sum(task, chunk, start, total))
            return
        with self._pool_of(work) as pool:
            for chunk, total, unclipped in pool.sums(task, start, local, dealt):
                yield task.sum_of(chunk, total, unclipped)

    def _ready(self, task: RoundTask, start: Tensor, local: LocalTraining) -> LocalWork:
        """What computes in this process; the way is chosen when the first round comes."""
        work = self._local_work(local)
        if self.method is None and any(len(self.users.indices[c]) for c in task.clients):
            self.method, fastest, reason = choose(
                work, task, start, bfloat16=self._bfloat16, sums=self.options.may_sum
            )
            self._summed = fastest.summed
            self.close()  # workers of rounds without examples have no room for sums
            self._report(f"engine: {fastest}{self._where()}: {reason}")
        return work

    @contextmanager
    def _pool_of(self, work: LocalWork) -> Iterator[Workers]:
        """The worker processes; those of a round that failed, or is still open, are gone."""
        if self._pool is not None and self._pool.open:
            self.close()
        if self._pool is None:
            self._pool = Workers(
                self.workers,
                self.model,
                self.users,
                data_seed=self.data_seed,
                features=work.features,
                largest=self.options.chunk_size(self.model.dim),
                sums=self._summed,
            )
        pool = self._pool
        try:
            yield pool
        except BaseException:
            if self._pool is pool:
                self._pool = None
            raise

    def _local_work(self, local: LocalTraining) -> LocalWork:
        """What computes in this process; built when the first round comes."""
        version = self.model.frozen_version
        if self._work is not None and version != self._frozen:
            if self._pool or self._cache_prefix:
                raise ConfigError(
                    "the frozen part changed after a round that had cached it or sent it to "
                    "workers: use workers=1 and leave cache_prefix out to change it between rounds."
                )
            if self._work.features is not None:
                self._work, self._cache_prefix = None, False
            if self._device.type != "cpu":  # what is there is a copy
                self._work = None
        self._frozen = version
        if self._work is None:
            self._work = self._built(local)
        self._work.local = local
        return self._work

    def _built(self, local: LocalTraining) -> LocalWork:
        model, users = self.model.on(self._device), self.users.on(self._device)
        parts = None
        if self._cache_prefix is not False:
            parts = _frozen_prefix(model) if self._cache_prefix else split(model)
        features, shared = None, self.workers > 1
        if parts is not None and (self._cache_prefix or prefix_fits(parts[0], users.x)):
            model, features = parts[1], Features(parts[0], users.x, shared=shared)
        return LocalWork(model, users, local=local, data_seed=self.data_seed, features=features)

    def _chunks(self, clients: Sequence[int]) -> list[Sequence[int]]:
        together = self.method is not None and self.method.together
        deal = equal_chunks if together or self.workers == 1 else ever_smaller_chunks
        return deal(clients, self.options.chunk_size(self.model.dim), self.workers)

    def _where(self) -> str:
        cached = self._work is not None and self._work.features is not None
        where = ", frozen prefix cached" if cached else ""
        return where + (f", {self.workers} workers" if self.workers > 1 else "")


def _frozen_prefix(model: PartialModel) -> tuple[nn.Sequential, PartialModel]:
    parts = split(model)
    if parts is None:
        raise ConfigError(
            "cache_prefix=True: the network must be an nn.Sequential whose first layers are frozen "
            "and neither random nor stateful."
        )
    return parts


def _to_stderr(sentence: str) -> None:
    sys.stderr.write(f"privpart: {sentence}\n")


_TURNS = 2
"""Chunks per worker for what is left of a round, where one client follows another."""


def equal_chunks(clients: Sequence[int], most: int, workers: int) -> list[Sequence[int]]:
    """Return chunks of at most ``most`` clients, equal_chunks as far as can be.

    Their number is a multiple of that of the workers: who computes one more is waited for.
    """
    count = max(1, -(-len(clients) // most), min(workers, len(clients)))
    count = -(-count // workers) * workers
    ends = [len(clients) * k // count for k in range(count + 1)]
    return [clients[i:j] for i, j in pairwise(ends) if i < j]


def ever_smaller_chunks(clients: Sequence[int], most: int, workers: int) -> list[Sequence[int]]:
    """Factoring (Hummel, Schonberg and Flynn 1992): a small last chunk ends soon.

    As many of each size as there are workers, but of the last. A worker whose chunks were smaller
    would be done early, and wait: updates leave in order, and until then there is no room.
    """
    chunks, left = [], clients
    while left:
        size = min(most, -(-len(left) // (_TURNS * workers)))
        for _ in range(min(workers, -(-len(left) // size))):
            chunks.append(left[:size])
            left = left[size:]
    return chunks
