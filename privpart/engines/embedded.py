"""Embedded engine: computes the clients of each round on this machine."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.data.clients import Clients
from privpart.data.users import Users
from privpart.engines.choice import agrees, fastest
from privpart.engines.device import find_device, free_memory
from privpart.engines.frozen_prefix import Features, split
from privpart.engines.memory import Memory
from privpart.engines.methods import (
    Chunk,
    LocalComputation,
    Method,
    Result,
    Work,
    compute,
    one_thread,
)
from privpart.engines.options import EngineOptions, changes_inputs
from privpart.engines.workers import Workers, refuse_unsendable
from privpart.messages import ClientId, ClientUpdate, CohortSum, RoundTask
from privpart.model import PartialModel
from privpart.settings.client import LocalTraining

_ALONE = 3.0
"""Start workers once a round is expected to take this many CPU seconds: each takes about as long to
import torch, so a shorter job is faster without them."""
_LARGE = 2**22
"""Parameters from which a round is expected to take that long, before one was timed."""
_TURNS = 4  # chunks per worker that the rest of a round is worth, where one client follows another
_ROWS = 2**10
"""Words of vectorized clients that are computed at once: more leave the processor's cache."""


class EmbeddedEngine:
    """Simulated clients on this machine.

    Args:
        model: shared by all clients, which train its trainable part and rebuild the rest.
        clients: the clients' data. ``Users`` has all of it in memory, and the fastest ways to
            compute its clients; of any other population, each client's examples are fetched when
            it trains, and clients are computed one after another.
        local: how each client trains, or a function from the round, counted from 0, to that.
        data_seed: order of examples; each (round, client) has its own generator, so the result
            does not depend on the order in which clients run.
        report: called with a sentence that somebody should know: about what a resumed simulation
            has lost. None writes it to standard error.
        options: fields of ``EngineOptions`` by keyword, such as ``workers=2``.

    All options compute the same training, for networks that treat each example separately. Updates
    agree to rounding, 1e-5 of their norm, unless rounding moves an activation across the kink of a
    ReLU; with Adam, which may divide by a number that is only rounding, they agree to 1e-2.
    ``precision="bfloat16"`` rounds more coarsely, see ``EngineOptions``. When vectorized clients
    take several steps, the rounding of one client may depend on the data of others, and so may its
    update at a kink: only "loop" makes every bit of it a function of the client's own data.

    Attributes:
        method: how the clients of the last round were computed; None before the first one.

    Raises:
        ConfigError: options that contradict each other or ``local``, or a device that is not here.
            If ``local`` is a function, each round's training is checked in that round.
    """

    def __init__(
        self,
        model: PartialModel,
        clients: Users | Clients,
        *,
        local: LocalTraining | Callable[[int], LocalTraining],
        data_seed: int,
        report: Callable[[str], None] | None = None,
        **options: Any,  # noqa: ANN401  EngineOptions checks them
    ) -> None:
        self.options = EngineOptions(**options)
        self.model = model
        self.clients = clients
        if isinstance(local, LocalTraining):
            self._refuse(local)
        self.local = local
        self.data_seed = checks.count("data_seed", data_seed, minimum=0)
        self.workers = self.options.workers
        self.method: Method | None = None
        self._loop = Method(bfloat16=self.options.precision == "bfloat16")
        batching = "loop" if self.options.deterministic else self.options.batching
        # what the options prescribe; None leaves it to the rule
        vectorized = replace(self._loop, vectorized=True)
        self._fixed = {"loop": self._loop, "vmap": vectorized, "auto": None}[batching]
        self._chosen: tuple[object, Method] | None = None  # by what the rule looks at
        self._agrees: dict[Method, bool] = {}
        self._memory = Memory(model, report or _to_stderr)
        self._device = find_device(self.options.device)
        free = None if self.options.on_cpu else free_memory(self._device)
        self._chunk_size = self.options.chunk_size(model.dim, free)
        prescribed_loop = self._fixed is not None and not self._fixed.vectorized
        self._cache_prefix = self.options.cache_prefix and not prescribed_loop
        self._computation: LocalComputation | None = None
        self._pool: Workers | None = None
        self._sendable: LocalTraining | None = None
        self._alone = 0.0  # processor seconds of clients in this process
        self._clients_alone = 0
        self._frozen_version = model.frozen_version

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, shape (d,), in the order of the task.

        Raises:
            WorkerError: a worker process died, with the cause.
            ConfigError: an option does not fit the training that a schedule gives for the round.
        """
        local = self.local_of(task.round)
        if local is not self.local:  # unknown when the engine was made
            self._refuse(local)
        computation = self._computation_of(local)
        self.method = self._method_for(computation, task, start, sums=False)
        work = Work(task, local, self.method, summed=False)
        chunks = self._chunks(computation, task.clients)
        keeping = self._memory.round(task, local) if self._needs_memory(local) else nullcontext()
        with keeping:
            for result in self._results(computation, work, start, chunks):
                for client, update in zip(result.clients, result.updates, strict=True):
                    yield task.update(client, update)

    def sums(self, task: RoundTask, start: Tensor) -> Iterator[CohortSum] | None:
        """Return sums of the clients' clipped updates; None if they are not the fastest method.

        Raises:
            WorkerError, ConfigError: as ``run`` does.
        """
        local = self.local_of(task.round)
        if not self.options.sums or self._needs_memory(local) or task.sum_clip_norm == 0:
            return None
        computation = self._computation_of(local)
        method = self._method_for(computation, task, start, sums=True)
        largest = computation.clients_per_ghost_sum(task) if method.ghost_sum else 0
        if not largest and not computation.sums_each(task, method):
            return None
        self.method = method
        chunks = self._chunks(computation, task.clients)
        if largest:
            chunks = equal_chunks(task.clients, largest, self.workers)
        work = Work(task, local, method, summed=True)
        return self._sums(computation, work, start, chunks)

    def sums_of(self, task: RoundTask, updates: Iterable[ClientUpdate]) -> Iterator[CohortSum]:
        """Yield sums of an auditor's updates, clipped by the code that the last ``sums`` chose.

        They are not trained and not clipped; they are computed in this process.
        """
        computation, method = self._computation, self.method
        if computation is None or method is None:
            raise ConfigError("sums_of: no sums of this round were asked for.")
        answers = iter(updates)
        while chunk := list(islice(answers, self._chunk_size)):
            rows = torch.stack([answer.update for answer in chunk])
            total = torch.empty(rows.shape[1], dtype=torch.float64)
            norms = computation.summed_given(task, rows, method, total)
            yield task.sum_of([answer.client for answer in chunk], total, norms)

    def _sums(
        self, computation: LocalComputation, work: Work, start: Tensor, chunks: Sequence[Chunk]
    ) -> Iterator[CohortSum]:
        for result in self._results(computation, work, start, chunks):
            (total,) = result.updates
            yield work.task.sum_of(result.clients, total, result.norms)

    def local_of(self, round_: int) -> LocalTraining:
        """Return how clients train in a round."""
        return self.local if isinstance(self.local, LocalTraining) else self.local(round_)

    @property
    def each_alone(self) -> bool:
        """Whether every bit of an update is a function of its client's own data."""
        return self.options.deterministic

    def refuse_unsendable(self, local: LocalTraining) -> None:
        """Check that the processes of a training, if more than one, can be sent all of it."""
        if self.workers > 1:
            refuse_unsendable(self.workers, self.model, self.clients, local)

    def own_part(self, client: ClientId) -> Tensor | None:
        """Return the local part that a client kept, shape (l,); None before its first round."""
        return self._memory.parts.get(client)

    def close(self) -> None:
        """End the worker processes; the next round starts new ones."""
        if self._pool is not None:
            self._pool.pool.close()
            self._pool = None

    def __enter__(self) -> "EmbeddedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _method_for(
        self, computation: LocalComputation, task: RoundTask, start: Tensor, *, sums: bool
    ) -> Method:
        """Return how a round is computed: as the options say, or by the rule, checked once."""
        if self._fixed is not None:
            return self._fixed
        loop = self._loop
        if not computation.any_examples(task.clients):
            return loop  # nothing to check another one on
        key = computation.local, task.active, sums, len(task.clients)
        if self._chosen is None or self._chosen[0] != key:
            self._chosen = key, fastest(computation, task, sums=sums, bfloat16=loop.bfloat16)
        method = self._chosen[1]
        if method not in self._agrees:
            with one_thread(self.workers > 1):
                self._agrees[method] = method == loop or agrees(computation, task, start, method)
        return method if self._agrees[method] else loop

    def _refuse(self, local: LocalTraining) -> None:
        self.options.refuse(
            local,
            fetches=not isinstance(self.clients, Users),
            local_parts=self.model.own.numel() > 0,
        )

    def _can_cache(self, local: LocalTraining) -> bool:
        """Whether clients compute the same from outputs of the frozen prefix."""
        return not (changes_inputs(local) or self._needs_memory(local))

    def _needs_memory(self, local: LocalTraining) -> bool:
        return local.objective == "moon" or self.model.own.numel() > 0

    def _results(
        self, computation: LocalComputation, work: Work, start: Tensor, chunks: Sequence[Chunk]
    ) -> Iterator[Result]:
        """Yield the results of chunks, in order; the first ones of this process alone."""

        def here(chunk: Chunk) -> Result:
            dim, on_cuda = self.model.active_dim(work.task.active), self._device.type == "cuda"
            shape = (1, dim) if work.summed else (len(chunk), dim)
            dtype = torch.float64 if work.summed else torch.float32
            # page-locked, which torch keeps for the next round: a copy takes a tenth of the time
            out = torch.empty(shape, dtype=dtype, pin_memory=on_cuda)
            began = time.process_time()
            # workers have one thread each, and sums over more threads are rounded differently
            with one_thread(self.options.deterministic or self.workers > 1):
                norms = compute(computation, work, chunk, start, out[0] if work.summed else out)
            self._alone += time.process_time() - began
            self._clients_alone += len(chunk)
            return Result(chunk, out, norms)

        if work.local is not self._sendable:
            self.refuse_unsendable(work.local)
            self._sendable = work.local
        remaining = deque(chunks)
        while remaining and not self._workers_are_ready(computation, sum(map(len, remaining))):
            yield here(remaining.popleft())
        if not remaining:
            return
        pool = self._start_pool(computation)
        try:
            yield from pool.results(work, start, list(remaining), here)
        except BaseException:
            # another round may have replaced the pool while this one was open
            if self._pool is pool:
                self._pool = None
            raise

    def _workers_are_ready(self, computation: LocalComputation, remaining: int) -> bool:
        """Return whether workers compute, too; start them once so many clients more pay for it."""
        if self.workers == 1:
            return False
        if self._pool is None:
            seconds = self._alone + self._alone / max(1, self._clients_alone) * remaining
            if seconds < _ALONE and self.model.parameter_count < _LARGE:
                return False
        return self._start_pool(computation).pool.ready()

    def _computation_of(self, local: LocalTraining) -> LocalComputation:
        version = self.model.frozen_version
        computation = self._computation
        if computation is not None:
            changed = version != self._frozen_version
            if changed or (computation.features is not None and not self._can_cache(local)):
                # a cache, a device and workers hold the old frozen part, which may change again
                self._cache_prefix = False
                self._computation = None
                self.close()
        self._frozen_version = version
        if self._computation is None:
            self._computation = self._new_computation(local)
        self._computation.local = local
        self._computation.memory = self._memory if self._needs_memory(local) else None
        return self._computation

    def _new_computation(self, local: LocalTraining) -> LocalComputation:
        model, clients, features = self.model.on(self._device), self.clients, None
        if isinstance(clients, Users):
            clients = clients.on(self._device)
            parts = split(model) if self._cache_prefix and self._can_cache(local) else None
            if parts is not None:
                features = Features.of(parts[0], clients.x, shared=self.workers > 1)
            if parts is not None and features is not None:
                model = parts[1]
        return LocalComputation(
            model,
            clients,
            local=local,
            data_seed=self.data_seed,
            features=features,
            tf32=self.options.precision == "tf32",
        )

    def _start_pool(self, computation: LocalComputation) -> Workers:
        """Return the worker processes, which start if there are none."""
        if self._pool is not None and self._pool.pool.busy:
            self.close()
        if self._pool is None:
            self._pool = Workers(
                self.workers - 1,
                self.model,
                self.clients,
                data_seed=self.data_seed,
                features=computation.features,
                largest=self._chunk_size,
                sums=self.options.sums,
                timeout=self.options.worker_timeout,
            )
        return self._pool

    def _chunks(
        self, computation: LocalComputation, clients: Sequence[ClientId]
    ) -> list[Sequence[ClientId]]:
        largest = self._chunk_size
        if self.method is None or not self.method.vectorized:
            return shrinking_chunks(clients, largest, self.workers)
        if self._device.type == "cpu" and computation.words > 1:
            largest = min(largest, max(1, _ROWS // (computation.batch_rows * computation.words)))
        return equal_chunks(clients, largest, self.workers)


def _to_stderr(sentence: str) -> None:
    sys.stderr.write(f"privpart: {sentence}\n")


def shrinking_chunks(
    clients: Sequence[ClientId], largest: int, workers: int
) -> list[Sequence[ClientId]]:
    """Return smaller and smaller chunks: no process waits long for the last one of another."""
    ends = [0]
    while left := len(clients) - ends[-1]:
        share = left // (_TURNS * workers) if workers > 1 else left
        ends.append(ends[-1] + max(1, min(largest, share)))
    return [clients[i:j] for i, j in pairwise(ends)]


def equal_chunks(
    clients: Sequence[ClientId], largest: int, workers: int
) -> list[Sequence[ClientId]]:
    """Return chunks of at most ``largest`` clients whose sizes differ by at most one."""
    count = max(1, -(-len(clients) // largest), min(workers, len(clients)))
    # a multiple of the workers: otherwise all would wait for those that compute one chunk more
    count = -(-count // workers) * workers
    ends = [len(clients) * k // count for k in range(count + 1)]
    return [clients[i:j] for i, j in pairwise(ends) if i < j]
