"""Embedded engine: computes the clients of each round on this machine.

Updates and sums are one file, because both take from a round what was computed to time methods.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from privpart.client import LocalTraining, Watch
from privpart.clip import add_in_place, clip_and_measure, is_clipped
from privpart.data.clients import Clients
from privpart.data.users import Users
from privpart.engines.choice import Choice, Kept
from privpart.engines.device import find_device, free_memory, host_memory, one_thread
from privpart.engines.frozen_prefix import Features, split
from privpart.engines.memory import ClientsWithMemory
from privpart.engines.methods import LocalComputation, Method, prefix_fits
from privpart.engines.options import EngineOptions, changes_inputs
from privpart.engines.workers import Workers, refuse_unsendable
from privpart.messages import ClientHealth, ClientId, ClientUpdate, CohortSum, RoundTask
from privpart.model import PartialModel


@dataclass(frozen=True, slots=True)
class _Looked:
    """A round on whose clients methods were tried, and the results that it can use."""

    task: RoundTask
    start: Tensor
    kept: Kept


_ALONE = 3.0
"""Processor seconds of clients, computed or expected in a round, from which other processes start:
each takes about as long to import torch, so a shorter job is faster without them."""
_LARGE = 2**22
"""Parameters of a network from which a round is expected to take so long before it is timed."""
_TURNS = 2
"""Chunks per worker that the rest of a round is cut into, where one client follows another."""


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
            has lost, and, with ``explain=True``, about what "auto" chose and what it expects of a
            round. None writes it to standard error.
        options: fields of ``EngineOptions`` by keyword, such as ``workers=2``.

    All options compute the same training, for networks that treat each example separately. Updates
    agree to rounding, 1e-5 of their norm, unless rounding moves an activation across the kink of a
    ReLU; with Adam, which may divide by a number that is only rounding, they agree to 1e-2. When
    vectorized clients take several steps, the rounding of one client may depend on the data of
    others, and so may its update at a kink: only "loop" makes every bit of it a function of the
    client's own data.

    Raises:
        ConfigError: options that contradict each other or ``local``, a device that is not here, or
            ``cache_prefix=True`` for a network without such a prefix. If ``local`` is a function,
            each round's training is checked in that round.
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
        if self.options.cache_prefix:
            _frozen_prefix(model)
        self.local = local
        self.data_seed = checks.count("data_seed", data_seed, minimum=0)
        self.workers = self.options.workers
        self._may_sum = self.options.may_sum
        self.method = self._fixed_method()
        self._use_ghost_sum = False  # until a round finds it faster
        self._explained = False
        self._choice: Choice | None = None
        self._looked: _Looked | None = None
        self._report = report or _to_stderr
        self._with_memory = ClientsWithMemory(model, clients, data_seed, self._report)
        self._device = find_device(self.options.device)
        free = None if self.options.on_cpu else free_memory(self._device)
        self._chunk_size = self.options.chunk_size(model.dim, free)
        self._cache_prefix = self.options.cache_prefix
        if self._cache_prefix is None and self.method and not self.method.vectorized:
            self._cache_prefix = False  # a prescribed loop caches only if told to
        self._computation: LocalComputation | None = None
        self._pool: Workers | None = None
        self._alone = 0.0  # processor seconds of clients in this process
        self._clients_alone = 0
        self._frozen_version = model.frozen_version
        self._watched: list[tuple[float | None, float]] = []
        self._watched_clip_norm: float | None = None

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, shape (d,), in the order of the task.

        Raises:
            WorkerError: a worker process died, with the cause.
            ConfigError: the frozen part changed after a round in which it was cached or sent to
                workers; or an option that cannot be used with the training that a schedule gives
                for this round.
        """
        local = self.local_of(task.round)
        if local is not self.local:  # unknown when the engine was made
            self._refuse(local)
        self._forget_health(task)
        if self._needs_memory(local):
            if self._with_memory.empty and self.workers > 1:
                self._report(
                    "engine: clients keep models or local parts, so one process computes them all"
                )
            self._explain(f"{Method()}: clients keep models or local parts")
            yield from self._with_memory.run(task, start, local, self._watch)
            return
        computation = self._ready(task, start, local)
        looked = self._taken(task, start)
        kept = looked.updates
        self._watched += [looked.seen[client] for client in task.clients if client in looked.seen]
        left = [client for client in task.clients if client not in kept]
        others = self._updates(computation, task, left, start, local)
        for client in task.clients:
            yield task.update(client, kept[client] if client in kept else next(others))
        next(others, None)  # ends the round of the workers

    def sums(self, task: RoundTask, start: Tensor) -> Iterator[CohortSum] | None:
        """Return sums of the clients' clipped updates; None if they are not the fastest method.

        Raises:
            WorkerError, ConfigError: as ``run`` does.
        """
        local = self.local_of(task.round)
        if not self._may_sum or self._needs_memory(local) or task.sum_clip_norm == 0:
            return None
        self._forget_health(task)
        computation = self._ready(task, start, local)
        most = computation.clients_per_ghost_sum(task) if self._use_ghost_sum else 0
        found = self._found(task, start)
        each = computation.sums_each(task, self.method or Method())
        if not most and not each and not (found and found.sums):
            return None
        return self._sums(computation, task, start, local, most, self._taken(task, start))

    def local_of(self, round_: int) -> LocalTraining:
        """Return how clients train in a round."""
        return self.local if isinstance(self.local, LocalTraining) else self.local(round_)

    @property
    def each_alone(self) -> bool:
        """Whether every bit of an update is a function of its client's own data."""
        return self.options.deterministic

    @property
    def users(self) -> Users:
        """The clients' data, where all of it is in memory.

        Raises:
            ConfigError: each client's examples are fetched when it trains.
        """
        if not isinstance(self.clients, Users):
            raise ConfigError(
                f"clients: {type(self.clients).__name__} fetches each client's examples; this "
                "needs Users, which have them in memory."
            )
        return self.clients

    def health(self) -> ClientHealth | None:
        """Return how the clients of the last round trained; None without ``health=True``.

        Not for release: no guarantee covers it.
        """
        if not self.options.health or self._watched_clip_norm is None:
            return None
        losses, norms = tuple(zip(*self._watched, strict=True)) or ((), ())
        most = self._watched_clip_norm
        clipped = sum(is_clipped(norm, most) or math.isnan(norm) for norm in norms)
        return ClientHealth(losses, norms, clipped)

    def refuse_unsendable(self, local: LocalTraining) -> None:
        """Check that the processes of a training, if it has more than one, can be sent all of it.

        Raises:
            ConfigError: they cannot.
        """
        if self.workers > 1 and not self._needs_memory(local):
            refuse_unsendable(self.workers, self.model, self.clients, local)

    def own_part(self, client: ClientId) -> Tensor | None:
        """Return the local part that a client kept, shape (l,); None before its first round.

        On a device it would never leave; here it serves to evaluate the client's own model.
        """
        return self._with_memory.own_part(client)

    def close(self) -> None:
        """End the worker processes; the next round starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> "EmbeddedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fixed_method(self) -> Method | None:
        """Return the method that the options prescribe; None leaves it to the first round."""
        options = self.options
        if options.batching == "auto" and not options.deterministic:
            return None
        return Method(options.batching == "vmap", bfloat16=self._bfloat16)

    def _refuse(self, local: LocalTraining) -> None:
        self.options.refuse(
            local,
            fetches=not isinstance(self.clients, Users),
            local_parts=self.model.own.numel() > 0,
        )

    def _needs_memory(self, local: LocalTraining) -> bool:
        return local.objective == "moon" or self.model.own.numel() > 0

    def _forget_health(self, task: RoundTask) -> None:
        self._watched = []
        self._watched_clip_norm = task.clip_norm

    @property
    def _watch(self) -> Watch | None:
        watched = self._watched
        return (lambda *seen: watched.append(seen)) if self.options.health else None

    @property
    def _bfloat16(self) -> bool:
        return self.options.precision == "bfloat16"

    @property
    def _tf32(self) -> bool:
        return self.options.precision == "tf32"

    def _updates(
        self,
        computation: LocalComputation,
        task: RoundTask,
        clients: Sequence[ClientId],
        start: Tensor,
        local: LocalTraining,
    ) -> Iterator[Tensor]:
        method = self.method or Method()
        here = partial(self._compute, computation, task, start, method)
        left = deque(self._chunks(clients))
        while left and not self._workers_are_ready(computation, sum(map(len, left))):
            yield from here(left.popleft(), self._watch)[0]
        if left:
            with self._pool_for(computation) as pool:
                each = pool.updates(task, start, local, method, list(left), self._watch, here)
                for _, update in each:
                    yield update

    def _sums(
        self,
        computation: LocalComputation,
        task: RoundTask,
        start: Tensor,
        local: LocalTraining,
        most: int,
        kept: Kept,
    ) -> Iterator[CohortSum]:
        known: set[ClientId] = set()
        self._watched += kept.seen.values()
        for clients, total, norms in (*kept.sums, *_summed(kept.updates, task)):
            yield task.sum_of(clients, total, norms)
            known.update(clients)
        left = [client for client in task.clients if client not in known]
        if not left and known:
            return
        method = Method(ghost_sum=True) if most else self.method or Method()
        if not most and not computation.sums_each(task, method):  # but some sums were kept
            each = self._updates(computation, task, left, start, local)
            for client, update in zip(left, each, strict=True):
                yield from (task.sum_of(*one) for one in _summed({client: update}, task))
            return
        here = partial(self._compute, computation, task, start, method, summed=True)
        chunks = deque(equal_chunks(left, most, self.workers) if most else self._chunks(left))
        while chunks and not self._workers_are_ready(computation, sum(map(len, chunks))):
            chunk = chunks.popleft()
            yield task.sum_of(chunk, *here(chunk, self._watch))
        if chunks:
            with self._pool_for(computation) as pool:
                summed = pool.sums(task, start, local, method, list(chunks), self._watch, here)
                for some, total, norms in summed:
                    yield task.sum_of(some, total, norms)

    def _compute(
        self,
        computation: LocalComputation,
        task: RoundTask,
        start: Tensor,
        method: Method,
        chunk: Sequence[ClientId],
        watch: Watch | None,
        *,
        summed: bool = False,
    ) -> tuple[Tensor, Sequence[float]]:
        """Return clients' updates, or their sum and their norms before clipping."""
        dim = self.model.active_dim(task.active)
        if summed:
            total = host_memory(dim, device=self._device, dtype=torch.float64)
            with self._here(len(chunk)):
                return total, computation.summed(task, chunk, start, method, total, watch)
        updates = host_memory(len(chunk), dim, device=self._device)
        with self._here(len(chunk)):
            computation.updates(task, chunk, start, method, updates, watch)
        return updates, ()

    @contextmanager
    def _here(self, clients: int) -> Iterator[None]:
        """Within this context, this process computes so many clients."""
        # Workers have one thread each; sums over more threads are rounded differently.
        began = time.process_time()
        with one_thread(self.options.deterministic or self.workers > 1):
            yield
        self._alone += time.process_time() - began
        self._clients_alone += clients

    def _workers_are_ready(self, computation: LocalComputation, left: int) -> bool:
        """Return whether workers compute, too; start them once so many clients more pay for it."""
        if self.workers == 1:
            return False
        if self._pool is None:
            found = self._choice.seconds if self._choice else 0.0
            each = found or self._alone / max(1, self._clients_alone)
            self._start_if_it_pays(computation, self._alone + each * left)
        return self._pool is not None and self._start_pool(computation).ready()

    def _start_if_it_pays(self, computation: LocalComputation, seconds: float) -> None:
        """Start the other processes if clients take so long that they pay."""
        parameters = sum(p.numel() for p in self.model.module.parameters())
        if self.workers > 1 and (seconds >= _ALONE or parameters >= _LARGE):
            self._start_pool(computation)

    def _ready(self, task: RoundTask, start: Tensor, local: LocalTraining) -> LocalComputation:
        """Return this process's computation; try methods until the fastest one is known."""
        if self._computation is None:
            self.refuse_unsendable(local)
        computation = self._computation_of(local)
        if self._choice is None and self.method is None and computation.any_examples(task.clients):
            self._choice = self._new_choice(computation, task)
            self._tell(computation, task)
        if self._choice is None and self.method is not None:
            self._explain(f"{self._setting()}{self.method}: as the options say")
        known = self._choice is None or self._choice.done or self._found(task, start) is not None
        if self._choice is None or known or not computation.any_examples(task.clients):
            return computation

        def timed(seconds: float) -> None:
            self._start_if_it_pays(computation, self._alone + seconds * len(task.clients))

        with self._here(len(task.clients)):
            timed(self._choice.seconds)  # processes start beside the trials
            kept = self._choice.look(computation, task, start, timed)
        self._looked = _Looked(task, start, kept)
        self._tell(computation, task)
        return computation

    def _new_choice(self, computation: LocalComputation, task: RoundTask) -> Choice:
        chunks = equal_chunks(task.clients, self._chunk_size, self.workers)
        return Choice(
            computation,
            task,
            chunk=max(map(len, chunks)),
            workers=self.workers,
            bfloat16=self._bfloat16,
            sums=self._may_sum,
            watches=self.options.health,
        )

    def _tell(self, computation: LocalComputation, task: RoundTask) -> None:
        """Use the method that is the fastest so far; explain it once all were tried."""
        if self._choice is None:
            return
        self.method = self._choice.each
        self._use_ghost_sum = self._choice.fastest.ghost_sum
        if self._choice.settled(computation):
            self._explain(f"{self._setting()}{self._choice.explain(len(task.clients))}")

    def _explain(self, sentence: str) -> None:
        """Report once how clients are computed, if that was asked for."""
        if self.options.explain and not self._explained:
            self._explained = True
            self._report(f"engine: {sentence}")

    def _found(self, task: RoundTask, start: Tensor) -> Kept | None:
        """Return what is known of a round on which methods were tried; None of another round."""
        looked = self._looked
        if looked is None or looked.task != task or not torch.equal(looked.start, start):
            return None
        return looked.kept

    def _taken(self, task: RoundTask, start: Tensor) -> Kept:
        """Return what is known of a round, and forget it."""
        found = self._found(task, start) or Kept()
        self._looked = None
        return found

    def _computation_of(self, local: LocalTraining) -> LocalComputation:
        version = self.model.frozen_version
        if self._computation is not None and version != self._frozen_version:
            if self._pool or self._cache_prefix:
                raise ConfigError(
                    "the frozen part changed after a round that had cached it or sent it to "
                    "workers: use workers=1 and leave cache_prefix out to change it between rounds."
                )
            if self._computation.features is not None:
                # A frozen part that changes once may change in every round.
                self._cache_prefix = False
                self._computation = None
            elif self._device.type != "cpu":  # the device holds a stale copy
                self._computation = None
        self._frozen_version = version
        cached = self._computation is not None and self._computation.features is not None
        if cached and changes_inputs(local):  # a schedule's training that the cache does not fit
            self._cache_prefix = False
            self._computation = None
            self.close()
        if self._computation is None:
            self._computation = self._new_computation(local)
        self._computation.local = local
        return self._computation

    def _new_computation(self, local: LocalTraining) -> LocalComputation:
        model = self.model.on(self._device)
        if not isinstance(self.clients, Users):
            return LocalComputation(
                model, self.clients, local=local, data_seed=self.data_seed, tf32=self._tf32
            )
        users = self.clients.on(self._device)
        parts = None
        if self._cache_prefix is not False and not changes_inputs(local):
            parts = _frozen_prefix(model) if self._cache_prefix else split(model)
        features = None
        if parts is not None and (self._cache_prefix or prefix_fits(parts[0], users.x)):
            model = parts[1]
            features = Features(
                parts[0],
                users.x,
                shared=self.workers > 1,
                together=self.options.batching != "loop",
            )
        return LocalComputation(
            model,
            users,
            local=local,
            data_seed=self.data_seed,
            features=features,
            tf32=self._tf32,
        )

    @contextmanager
    def _pool_for(self, computation: LocalComputation) -> Iterator[Workers]:
        """Yield the worker processes; end those of a round that failed or was left open."""
        pool = self._start_pool(computation)
        try:
            yield pool
        except BaseException:
            # another round may have replaced the pool while this one was open
            if self._pool is pool:
                self._pool = None
            raise

    def _start_pool(self, computation: LocalComputation) -> Workers:
        """Return the worker processes, which start if there are none."""
        if self._pool is not None and self._pool.open:
            self.close()
        if self._pool is None:
            self._pool = Workers(
                self.workers - 1,
                self.model,
                self.clients,
                data_seed=self.data_seed,
                features=computation.features,
                largest=self._chunk_size,
                sums=self._may_sum,
                timeout=self.options.worker_timeout,
            )
        return self._pool

    def _chunks(self, clients: Sequence[ClientId]) -> list[Sequence[ClientId]]:
        vectorized = self.method is not None and self.method.vectorized
        cut = equal_chunks if vectorized or self.workers == 1 else decreasing_chunks
        return cut(clients, self._chunk_size, self.workers)

    def _setting(self) -> str:
        cached = self._computation is not None and self._computation.features is not None
        prefix = "frozen prefix cached, " if cached else ""
        rounded = "products rounded to TF32, " if self._tf32 else ""
        return prefix + rounded + (f"{self.workers} workers, " if self.workers > 1 else "")


def _frozen_prefix(model: PartialModel) -> tuple[nn.Sequential, PartialModel]:
    parts = split(model)
    if parts is None:
        raise ConfigError(
            "cache_prefix=True: the network must be an nn.Sequential whose first layers are frozen "
            "and neither random nor stateful."
        )
    return parts


def _summed(
    updates: Mapping[ClientId, Tensor], task: RoundTask
) -> Iterator[tuple[Sequence[ClientId], Tensor, Sequence[float]]]:
    """Yield the sum of updates that were clipped one by one, and their norms."""
    if not updates:
        return
    most = task.clip_norm if task.sum_clip_norm is None else task.sum_clip_norm
    total = torch.zeros(len(next(iter(updates.values()))), dtype=torch.float64)
    norms = []
    for update in updates.values():
        clipped, norm = clip_and_measure(update, most)
        norms.append(norm)
        if not math.isnan(norm):
            add_in_place(total, clipped)
    yield list(updates), total, norms


def _to_stderr(sentence: str) -> None:
    sys.stderr.write(f"privpart: {sentence}\n")


def equal_chunks(clients: Sequence[ClientId], most: int, workers: int) -> list[Sequence[ClientId]]:
    """Return chunks of at most ``most`` clients whose sizes differ by at most one."""
    count = max(1, -(-len(clients) // most), min(workers, len(clients)))
    # a multiple of the workers: otherwise all would wait for those that compute one chunk more
    count = -(-count // workers) * workers
    ends = [len(clients) * k // count for k in range(count + 1)]
    return [clients[i:j] for i, j in pairwise(ends) if i < j]


def decreasing_chunks(
    clients: Sequence[ClientId], most: int, workers: int
) -> list[Sequence[ClientId]]:
    """Return chunks of at most ``most`` clients by factoring (Hummel, Schonberg and Flynn 1992).

    Chunks get smaller, so that all workers finish at about the same time.
    """
    chunks = []
    left = clients
    while left:
        size = min(most, -(-len(left) // (_TURNS * workers)))
        # One chunk of each size per worker. A worker with a smaller chunk would finish early and
        # wait: results leave in order, and its slots are free only when they have left.
        for _ in range(min(workers, -(-len(left) // size))):
            chunks.append(left[:size])
            left = left[size:]
    return chunks
