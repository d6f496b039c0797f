"""Engine: carries a round's work to the clients and brings their updates back."""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.client import LocalTraining, client_update
from privpart.engines.choice import choose, prefix_fits
from privpart.engines.frozen_prefix import Features, split
from privpart.engines.local_work import LocalWork, Method, Users, client_generator
from privpart.engines.workers import WorkerError, Workers
from privpart.messages import ClientUpdate, RoundTask
from privpart.partial import PartialModel

__all__ = ["Batching", "EmbeddedEngine", "Engine", "Users", "WorkerError"]

Batching = Literal["auto", "loop", "vmap"]
Precision = Literal["float32", "bfloat16"]

_CHUNK_BYTES = 2**24
"""Updates computed at once: they stay below what malloc gives back to the system each time."""

_TURNS = 2
"""Chunks per worker for what is left of a round, where one client follows another."""


class Engine(Protocol):
    """Runs clients, wherever they are."""

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the task that trained from ``start``, shape (d,)."""
        ...


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
            where it is exact and fits into memory, until the frozen part is changed.
        deterministic: the same bits whatever the number of workers: "loop", nothing cached.
        precision: "bfloat16" rounds products of matrices and convolutions to 8 bits, one client
            after another: faster for large convolutions where the processor has such products,
            and slower for small networks. Updates then differ by about 1e-2 of their norm.
        report: gets a sentence about what "auto" chose; None writes it to standard error.

    All choices are the same training. Updates agree to rounding, 1e-5 of their norm, unless that
    rounding moves an activation across the kink of a ReLU.

    Raises:
        ConfigError: options that contradict each other, or a prefix that cannot be cached.
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
        report: Callable[[str], None] | None = None,
    ) -> None:
        checks.choice("batching", batching, get_args(Batching))
        if deterministic and (batching == "vmap" or cache_prefix):
            raise ConfigError(
                "deterministic=True: means batching='loop' without cache_prefix; leave them out."
            )
        checks.choice("precision", precision, get_args(Precision))
        if precision == "bfloat16" and batching == "vmap":
            raise ConfigError(
                "precision='bfloat16': one client after another, not batching='vmap'."
            )
        self.model, self.users, self.local = model, users, local
        self._previous: dict[int, Tensor] = {}  # of "moon": what each device keeps to itself
        self.data_seed = checks.count("data_seed", data_seed, minimum=0)
        self.workers = checks.count("workers", workers)
        self._bfloat16 = precision == "bfloat16"
        self.method: Method | None = None
        if batching != "auto" or deterministic:
            self.method = Method(batching == "vmap", bfloat16=self._bfloat16)
        self._cache_prefix = False if deterministic or batching == "loop" else None
        if cache_prefix is not None:
            self._cache_prefix = cache_prefix
        self._report = report or _to_stderr
        self._work: LocalWork | None = None
        self._pool: Workers | None = None
        self._frozen = self._frozen_version()

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, shape (d,), in the order of the task.

        Raises:
            WorkerError: a worker process died, with its cause.
            ConfigError: the frozen part was changed after a round in which it was cached or sent
                to workers.
        """
        local = self.local_of(task.round)
        if local.objective == "moon":
            yield from self._with_memory(task, start, local)
            return
        work = self._local_work(local)
        if self.method is None:
            self.method, reason = choose(work, task, start, bfloat16=self._bfloat16)
            self._report(f"engine: {self.method}{self._where()}: {reason}")
        chunks = self._chunks(task.clients)
        for client, update in self._computed(work, task, start, local, chunks):
            yield task.update(client, update)

    def local_of(self, round_: int) -> LocalTraining:
        """Return how clients train in a round."""
        return self.local if isinstance(self.local, LocalTraining) else self.local(round_)

    def _with_memory(
        self, task: RoundTask, start: Tensor, local: LocalTraining
    ) -> Iterator[ClientUpdate]:
        """MOON's clients remember their last model: in this process, whatever the workers.

        And in memory only: on a disk it would be an update that nobody clipped or noised.
        """
        if self._bfloat16:
            raise ConfigError("precision='bfloat16': not with the objective moon.")
        if not self._previous and self.workers > 1:
            self._report("engine: moon's clients remember, so all are computed in one process")
        if not self._previous and task.round:
            self._report(
                f"engine: begins with round {task.round}, so moon's clients that took part before "
                "have forgotten their own last model: from here on this is another run than one "
                "that never stopped. The guarantee is the same"
            )
        for client in task.clients:
            x, y = self.users.examples(client)
            delta = client_update(
                self.model,
                start,
                x,
                y,
                local=local,
                clip_norm=task.clip_norm,
                generator=client_generator(self.data_seed, task.round, client),
                active=task.active,
                previous=self._previous.setdefault(client, start.clone()),
            )
            yield task.update(client, delta)

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
        self,
        work: LocalWork,
        task: RoundTask,
        start: Tensor,
        local: LocalTraining,
        chunks: Sequence[Sequence[int]],
    ) -> Iterator[tuple[int, Tensor]]:
        method = self.method or Method()
        if self.workers == 1:
            for chunk in chunks:
                updates = torch.empty(len(chunk), self.model.active_dim(task.active))
                work.updates(task, chunk, start, method, updates)
                yield from zip(chunk, updates, strict=True)
            return
        if self._pool is None:
            self._pool = Workers(
                self.workers,
                self.model,
                self.users,
                data_seed=self.data_seed,
                features=work.features,
                largest=self._most(),
            )
        try:
            yield from self._pool.updates(task, start, local, method, chunks)
        except BaseException:
            self._pool = None
            raise

    def _local_work(self, local: LocalTraining) -> LocalWork:
        """What computes in this process; built when the first round comes."""
        version = self._frozen_version()
        if self._work is not None and version != self._frozen:
            if self._pool or self._cache_prefix:
                raise ConfigError(
                    "the frozen part changed after a round that had cached it or sent it to "
                    "workers: use workers=1 and leave cache_prefix out to change it between rounds."
                )
            if self._work.features is not None:
                self._work, self._cache_prefix = None, False
        self._frozen = version
        if self._work is None:
            self._work = self._built(local)
        self._work.local = local
        return self._work

    def _built(self, local: LocalTraining) -> LocalWork:
        parts = None if self._cache_prefix is False else split(self.model)
        if parts is None and self._cache_prefix:
            raise ConfigError(
                "cache_prefix=True: the network must be an nn.Sequential whose first layers are "
                "frozen and neither random nor stateful."
            )
        model, features = self.model, None
        shared = self.workers > 1
        if parts is not None and (self._cache_prefix or prefix_fits(parts[0], self.users.x)):
            model, features = parts[1], Features(parts[0], self.users.x, shared=shared)
        return LocalWork(
            model, self.users, local=local, data_seed=self.data_seed, features=features
        )

    def _most(self) -> int:
        """Clients whose updates are computed at once, at most."""
        return max(1, min(128, _CHUNK_BYTES // (4 * self.model.dim)))

    def _chunks(self, clients: Sequence[int]) -> list[Sequence[int]]:
        """Clients computed together: equal chunks, for who computes one more is waited for."""
        together = self.method is not None and self.method.together
        if self.workers > 1 and not together:
            return self._ever_smaller_chunks(clients)
        count = max(1, -(-len(clients) // self._most()), min(self.workers, len(clients)))
        count = -(-count // self.workers) * self.workers
        ends = [len(clients) * k // count for k in range(count + 1)]
        return [clients[i:j] for i, j in pairwise(ends) if i < j]

    def _ever_smaller_chunks(self, clients: Sequence[int]) -> list[Sequence[int]]:
        """Guided self-scheduling (Polychronopoulos and Kuck 1987): a small last one ends soon."""
        chunks, left = [], clients
        while left:
            size = min(self._most(), -(-len(left) // (_TURNS * self.workers)))
            chunks.append(left[:size])
            left = left[size:]
        return chunks

    def _where(self) -> str:
        cached = self._work is not None and self._work.features is not None
        where = ", frozen prefix cached" if cached else ""
        return where + (f", {self.workers} workers" if self.workers > 1 else "")

    def _frozen_version(self) -> int:
        """Grows with every change in place of the frozen part."""
        frozen = set(self.model.frozen)
        return sum(p._version for n, p in self.model.module.named_parameters() if n in frozen)


def _to_stderr(sentence: str) -> None:
    sys.stderr.write(f"privpart: {sentence}\n")
