"""Engine: carries a round's work to the clients and brings their updates back.

Chunks: how the clients of a round are dealt to workers, and computed together.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.client import LocalTraining
from privpart.data.users import Users
from privpart.engines.device import one_thread, usable
from privpart.engines.frozen_prefix import Features, split
from privpart.engines.methods import (
    LocalWork,
    Method,
    choose,
    prefix_fits,
    refuse_other_than_lockstep,
)
from privpart.engines.moon import Remembering
from privpart.engines.workers import Workers
from privpart.messages import ClientUpdate, CohortSum, RoundTask
from privpart.model import PartialModel

Batching = Literal["auto", "loop", "vmap"]
Precision = Literal["float32", "bfloat16"]

_CHUNK_BYTES = 2**24
"""Updates computed at once: they stay below what malloc gives back to the system each time."""


class EmbeddedEngine:
    """Simulated clients on this machine.

    Args:
        model: shared by all clients; rebuilt part and trained part as in ``PartialModel``.
        users: the clients' data.
        local: how each trains; or a schedule, from the round, from 0, to how they train in it.
        data_seed: order of examples; each (round, client) has its own generator, so the result
            does not depend on the order in which clients run.
        workers: processes. 1 computes in this one; more need a script that starts its work under
            ``if __name__ == "__main__":``.
        batching: "loop" computes one client after another, "vmap" many at once; "auto" chooses
            when the first round comes: by the network, then by timing a few of its clients.
        cache_prefix: keep the outputs of frozen layers below the lowest trained one; None does so
            where it is exact and fits into memory, until the frozen part changes, not by ``.data``.
        deterministic: the same bits whatever the number of workers: "loop", nothing cached.
        precision: "bfloat16" rounds products of matrices and convolutions to 8 bits, one client
            after another: faster for large convolutions where the processor has such products,
            and slower for small networks. Updates then differ by about 1e-2 of their norm.
        sums: let ``sums`` answer for clients of ``steps=1`` where "auto" finds that faster: the
            engine clips and adds up, on the CPU; the server cannot clip again.
        device: "cpu", or an accelerator as "cuda:1": one process computes there, on copies; updates
            are clipped on the CPU. The order of examples is the same, masks of dropout are others.
        report: gets a sentence about what "auto" chose; None writes it to standard error.

    All choices are the same training, for networks that see each example by itself. Updates agree
    to rounding, 1e-5 of their norm, unless that rounding moves an activation across the kink of a
    ReLU; with Adam, which divides by what may itself be rounding, to 1e-2. Where clients take
    several steps at once, one's rounding may depend on what others hold, and at a kink its update:
    only "loop" makes it a function of its own data in every bit.

    Raises:
        ConfigError: options that contradict each other or ``local``, or a prefix that cannot be
            cached.
    """

    def __init__(
        self,
        model: PartialModel,
        users: Users,
        *,
        local: LocalTraining | Callable[[int], LocalTraining],
        data_seed: int,
        workers: int = 1,
        batching: Batching = "auto",
        cache_prefix: bool | None = None,
        deterministic: bool = False,
        precision: Precision = "float32",
        sums: bool = False,
        device: str | torch.device = "cpu",
        report: Callable[[str], None] | None = None,
    ) -> None:
        checks.choice("batching", batching, get_args(Batching))
        if deterministic and (batching == "vmap" or cache_prefix):
            raise ConfigError(
                "deterministic=True: means batching='loop' without cache_prefix; leave them out."
            )
        checks.choice("precision", precision, get_args(Precision))
        if precision == "bfloat16" and batching == "vmap":
            raise ConfigError("precision='bfloat16': one after another, not batching='vmap'.")
        self.model, self.users, self.local = model, users, local
        self.data_seed = checks.count("data_seed", data_seed, minimum=0)
        self._report = report or _to_stderr
        self._memory = Remembering(model, users, data_seed, self._report)  # of "moon"
        self.workers = checks.count("workers", workers)
        self._device = usable(device, workers=workers, deterministic=deterministic)
        self._bfloat16, self._deterministic = precision == "bfloat16", deterministic
        self._all_together = batching == "vmap"
        if self._all_together and isinstance(local, LocalTraining):
            refuse_other_than_lockstep(local, None)
        self.method: Method | None = None
        self._may_sum = sums and self._device.type == "cpu" and not self._bfloat16
        self._summed = False  # until the first round finds it faster
        if batching != "auto" or deterministic:
            self.method = Method(batching == "vmap", bfloat16=self._bfloat16)
        default = False if deterministic or batching == "loop" else None
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
        if self._all_together:
            refuse_other_than_lockstep(local, task.active)
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
        if not self._may_sum or local.objective == "moon":
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
        if self._bfloat16 or self._cache_prefix or self._device.type != "cpu":
            raise ConfigError("precision, cache_prefix, device: not with the objective moon.")
        if self._memory.empty and self.workers > 1:
            self._report("engine: moon's clients remember, so all are computed in one process")
        return self._memory.run(task, start, local)

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
                with one_thread(self._deterministic):
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
                work, task, start, bfloat16=self._bfloat16, sums=self._may_sum
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
                largest=self._most(),
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
        parts = None if self._cache_prefix is False else split(model)
        if parts is None and self._cache_prefix:
            raise ConfigError(
                "cache_prefix=True: the network must be an nn.Sequential whose first layers are "
                "frozen and neither random nor stateful."
            )
        features, shared = None, self.workers > 1
        if parts is not None and (self._cache_prefix or prefix_fits(parts[0], users.x)):
            model, features = parts[1], Features(parts[0], users.x, shared=shared)
        return LocalWork(model, users, local=local, data_seed=self.data_seed, features=features)

    def _most(self) -> int:
        """Clients whose updates are computed at once, at most."""
        return max(1, min(128, _CHUNK_BYTES // (4 * self.model.dim)))

    def _chunks(self, clients: Sequence[int]) -> list[Sequence[int]]:
        together = self.method is not None and self.method.together
        deal = equal_chunks if together or self.workers == 1 else ever_smaller_chunks
        return deal(clients, self._most(), self.workers)

    def _where(self) -> str:
        cached = self._work is not None and self._work.features is not None
        where = ", frozen prefix cached" if cached else ""
        return where + (f", {self.workers} workers" if self.workers > 1 else "")


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
