"""Workers: processes that live as long as the engine and compute chunks of clients beside it.

Each process is spawned, runs on one thread and builds its model once. Examples, the round's trained
part, features of a frozen prefix and results are in shared memory; only the ids of the clients to
compute travel through a pipe. The engine's own process computes chunks, too, while it would wait.
Results are returned in the order of the chunks, whoever finishes first.

A worker that does not answer for long is taken to hang and ends the round: by default, when it has
taken ``_PATIENCE`` times as long for each client as the slowest client so far. A worker ends when
the process that started it ends, however that ends, also in the middle of a computation.

The pool, the loop of a worker, and how a population travels between them are one file, because each
reads what the other wrote.
"""

import io
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_context

from accounting.checks import ConfigError
from privpart.client import LocalTraining, Watch
from privpart.data.clients import Clients
from privpart.data.users import Users
from privpart.engines.frozen_prefix import Features, share, shared_memory, split
from privpart.engines.methods import LocalComputation, Method
from privpart.messages import ClientId, RoundTask
from privpart.model import PartialModel
from privpart.pool import WorkerError, become_a_worker, cause_of_death, no_interrupts

_SLOTS = 3
"""Chunks that a worker may have computed or queued, so that it does not wait for a busy server; and
that the engine's own process may have put aside, because a round's updates may not fit in memory.
"""
_QUEUED = 2
"""Chunks that a worker computes or has queued; the engine's own process takes of the others."""
_START = 300.0
"""Seconds to start and to import torch."""
_FIRST_ANSWER = 900.0
"""Seconds for a chunk while no pace is known."""
_LEAST_PATIENCE = 60.0
_PATIENCE = 50
_LOOK = 1.0
"""Seconds between looks at the clock; longer ones do not count, as if the machine had slept."""
_SMALL_MESSAGE = 2**14
"""Bytes of which ``_SLOTS`` messages fit into the buffer of a pipe, so that sending never waits."""
_END = 5.0
"""Seconds to wait for a killed process, which may be stuck in the kernel."""


_Seen = list[tuple[float | None, float]]
"""What ``Watch`` gets of each client of a chunk; empty if nobody watches."""
_Answer = tuple[int | None, Tensor, Sequence[float], _Seen]
"""Slot, results, the norms before clipping of updates that were summed, and what was seen."""
Here = Callable[[Sequence[ClientId], Watch | None], tuple[Tensor, Sequence[float]]]
"""Computes a chunk in the engine's own process: its results, and the norms of a sum's updates."""


@dataclass(slots=True)
class _Worker:
    process: Any  # the spawn context's own class
    pipe: Connection
    results: Tensor  # (slots, clients, d)
    totals: Tensor  # (slots, d), float64; of ghost sums
    free: deque[int] = field(default_factory=deque)  # slots
    queued: deque[int] = field(default_factory=deque)  # clients in each chunk without an answer
    silent: float = 0.0  # seconds that the engine has waited since the last answer
    started: bool = False


@dataclass(slots=True)
class _Round:
    common: tuple[Any, ...]  # what a worker gets with each chunk
    dim: int  # active parameters
    summed: bool
    watches: bool
    here: Here | None
    todo: deque[tuple[int, Sequence[ClientId]]]  # chunks that nobody has
    owners: dict[int, _Worker] = field(default_factory=dict)  # of the chunks that were sent


class _Trying(ForkingPickler):
    """Pickles all but the tensors, which can always be sent."""

    def persistent_id(self, value: object) -> int | None:
        """Return a number in place of a tensor, or None for anything else."""
        return 0 if isinstance(value, Tensor) else None


def refuse_unsendable(
    count: int, model: PartialModel, clients: Users | Clients, local: LocalTraining
) -> None:
    """Raise ConfigError if worker processes, which start later, could not be sent something."""
    for what, value, advice in (
        ("the model", model.module, "Define its classes in a module of their own"),
        ("the clients", clients, "Define their classes at the top level of a module"),
        ("the loss or augment", local, "Define it at the top level of a module"),
    ):
        if isinstance(value, Users):
            continue
        try:
            _Trying(io.BytesIO()).dump(value)
        except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
            raise ConfigError(
                f"workers={count}: {what} cannot be sent to another process ({error}). {advice}, "
                "or use workers=1."
            ) from None


class Workers:
    """A pool of processes.

    Args:
        count: number of processes, beside the engine's own.
        model: the clients' model; its frozen part must not change from now on.
        clients: the clients' data. Of ``Users``, each process has the same memory; any other
            population is pickled to each, its tensors shared.
        data_seed: see ``LocalComputation``.
        features: outputs of the frozen prefix, if the clients train only the layers behind it.
        largest: most clients in a chunk of ``updates``.
        sums: whether ``sums`` will be called.
        timeout: seconds without an answer after which a worker that has started is taken to hang,
            > 0; None follows the pace of the clients so far.

    Attributes:
        open: whether answers of a round are still to be read; the next round would take them for
            its own.

    Raises:
        ConfigError: the model or the clients cannot be sent to another process.
    """

    def __init__(
        self,
        count: int,
        model: PartialModel,
        clients: Users | Clients,
        *,
        data_seed: int,
        features: Features | None,
        largest: int,
        sums: bool = False,
        timeout: float | None = None,
    ) -> None:
        context = get_context("spawn")
        module = deepcopy(model.module)
        # The parameters are views of one vector; each worker builds a vector of its own.
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
            parameter.grad = None
        self._model = model
        self._timeout = timeout
        self._pace = 0.0  # most seconds per client of a chunk; 0 before the first answer
        self.open = False
        groups = model.groups
        self._start = shared_memory(model.dim)
        self._workers: list[_Worker] = []
        shared = clients.shared() if isinstance(clients, Users) else _packed(clients, count + 1)
        try:
            for _ in range(count):
                here, there = context.Pipe()
                settings = (data_seed, features)
                in_main = threading.current_thread() is threading.main_thread()
                results = shared_memory(_SLOTS, largest, model.dim)
                totals = shared_memory(_SLOTS * sums, model.dim, dtype=torch.float64)
                process = context.Process(
                    target=_serve,
                    args=(there, module, groups, shared, settings, self._start, results, totals),
                    kwargs={"started_by_main_thread": in_main},
                    daemon=True,
                )
                self._workers.append(_Worker(process, here, results, totals))
                with no_interrupts():
                    process.start()
                there.close()
        except BaseException as error:
            self.close()
            if not isinstance(error, AttributeError | TypeError | ValueError):  # pickle's
                raise
            raise ConfigError(
                f"workers={count + 1}: the model cannot be sent to another process ({error}). "
                "Define its classes in a module of their own, or use workers=1."
            ) from None

    def updates(
        self,
        task: RoundTask,
        start: Tensor,
        local: LocalTraining,
        method: Method,
        chunks: Sequence[Sequence[ClientId]],
        watch: Watch | None = None,
        here: Here | None = None,
    ) -> Iterator[tuple[ClientId, Tensor]]:
        """Yield each client and its update, shape (c,), in order; c parameters are active.

        ``watch`` is called once per client, in order. ``here`` computes in this process.

        Raises:
            ConfigError: the loss or ``augment`` cannot be sent to another process.
            WorkerError: a worker died, or could not compute a client. The pool is then closed.
        """
        answers = self._answers(task, start, local, method, chunks, watch is not None, here)
        for chunk, (slot, updates, _, seen) in answers:
            _tell(watch, seen)
            for client, update in zip(chunk, updates, strict=True):
                # one at a time, because malloc reuses a freed block of that size
                yield client, update if slot is None else update.clone()

    def sums(
        self,
        task: RoundTask,
        start: Tensor,
        local: LocalTraining,
        method: Method,
        chunks: Sequence[Sequence[ClientId]],
        watch: Watch | None = None,
        here: Here | None = None,
    ) -> Iterator[tuple[Sequence[ClientId], Tensor, Sequence[float]]]:
        """Yield each chunk, the sum of its updates, shape (d,), and their norms before clipping.

        Raises:
            WorkerError: as ``updates`` does.
        """
        watches = watch is not None
        answers = self._answers(task, start, local, method, chunks, watches, here, summed=True)
        for chunk, (slot, total, norms, seen) in answers:
            _tell(watch, seen)
            yield chunk, total if slot is None else total.clone(), norms

    def _answers(
        self,
        task: RoundTask,
        start: Tensor,
        local: LocalTraining,
        method: Method,
        chunks: Sequence[Sequence[ClientId]],
        watches: bool,
        here: Here | None,
        *,
        summed: bool = False,
    ) -> Iterator[tuple[Sequence[ClientId], _Answer]]:
        """Yield chunk and answer in order; the slot is reused afterwards."""
        self.open = True
        self._start.copy_(start)
        # without the cohort, whose thousands of clients would be sent with every chunk
        common = (replace(task, clients=()), local, method, watches, summed)
        dim = self._model.active_dim(task.active)
        round_ = _Round(common, dim, summed, watches, here, deque(enumerate(chunks)))
        done: dict[int, _Answer] = {}
        for worker in self._workers:
            worker.free = deque(range(_SLOTS))
        try:
            for number, chunk in enumerate(chunks):
                while number not in done:
                    aside = sum(slot is None for slot, *_ in done.values())
                    done |= self._some_answers(round_, number, room=aside < _SLOTS)
                answer = done.pop(number)
                yield chunk, answer
                if not self._workers:
                    raise WorkerError("another round began before this one's answers were taken.")
                if answer[0] is not None:
                    round_.owners[number].free.append(answer[0])
            self.open = False
        except BaseException:
            self.close()
            raise

    def ready(self) -> bool:
        """Return whether all processes have started, or one ended, as the next round will say."""
        for worker in self._workers:
            if not worker.started and worker.pipe.poll():
                try:
                    worker.started = worker.pipe.recv() is None
                except (EOFError, OSError):
                    return True
        return all(w.started or w.process.exitcode is not None for w in self._workers)

    def close(self) -> None:
        """End the processes, also those that hang or were stopped."""
        for worker in self._workers:
            worker.pipe.close()
            if worker.process.pid is not None:
                worker.process.kill()
        for worker in self._workers:
            if worker.process.pid is not None:
                worker.process.join(_END)
        self._workers = []

    def _some_answers(self, round_: "_Round", wanted: int, *, room: bool) -> dict[int, _Answer]:
        """Hand chunks out, and return answers by chunk; compute one here rather than wait.

        Without ``room`` for answers that are put aside, only the wanted one is computed here.
        """
        todo, here = round_.todo, round_.here
        # what is wanted next is computed here, because it need not be put aside
        mine = todo.popleft() if here and wanted not in round_.owners else None
        done = self._finished(round_, wait=False)
        self._hand_out(round_)
        if mine is None and wanted not in done:
            mine = todo.popleft() if here and todo and room else None
            done |= {} if mine else self._finished(round_, wait=True)
        if here and mine:
            done[mine[0]] = _computed(here, mine[1], round_.watches)
        return done

    def _hand_out(self, round_: "_Round") -> None:
        """Give chunks to workers that have room, first to those that have none."""
        for already in range(_QUEUED):
            for place, worker in enumerate(self._workers):
                if round_.todo and worker.free and len(worker.queued) <= already:
                    number, clients = round_.todo.popleft()
                    round_.owners[number] = worker
                    work = (number, worker.free.popleft(), clients, *round_.common)
                    self._send(place, work, len(clients))

    def _send(self, number: int, work: tuple[Any, ...], clients: int) -> None:
        worker = self._workers[number]
        if not worker.queued:
            worker.silent = 0.0
        worker.queued.append(clients)
        try:
            message = ForkingPickler.dumps(work)
            with self._killed_if_it_does_not_read(worker, len(message)):
                worker.pipe.send_bytes(message)
        except OSError:
            raise self._died(number) from None
        except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
            raise ConfigError(
                f"workers={len(self._workers) + 1}: the loss or augment cannot be sent to another "
                f"process ({error}). Define it at the top level of a module, or use workers=1."
            ) from None

    def _finished(self, round_: "_Round", *, wait: bool) -> dict[int, _Answer]:
        """Return the answers that came, by chunk; wait until there is one, or a worker started."""
        owners = {w.pipe: n for n, w in enumerate(self._workers)}
        deaths = {w.process.sentinel: n for n, w in enumerate(self._workers)}
        while not (ready := self._wait([*owners, *deaths], _LOOK if wait else 0.0)) and wait:
            self._refuse_silence()
        found: dict[int, _Answer] = {}
        for number in (owners[pipe] for pipe in ready if pipe in owners):
            worker = self._workers[number]
            for answer in self._read(number):
                if answer is None:
                    worker.started = True
                    worker.silent = 0.0
                    continue
                chunk, slot, norms, seen, seconds = answer
                clients = self._note_answer(worker, seconds)
                summed = worker.totals[slot] if round_.summed else None
                places = worker.results[slot, :clients] if summed is None else summed
                found[chunk] = (slot, places[..., : round_.dim], norms, seen)
        if ready and not any(pipe in owners for pipe in ready):
            raise self._died(next(deaths[sentinel] for sentinel in ready))
        return found

    def _read(self, number: int) -> Iterator[Any]:
        """Yield what a worker has sent: one message at least, which must be there."""
        pipe, more = self._workers[number].pipe, True
        while more:
            try:
                answer = pipe.recv()
                more = pipe.poll()
            except (EOFError, OSError):
                raise self._died(number) from None
            if isinstance(answer, str):
                raise WorkerError(f"worker {number}: {answer} Nothing of this round was released.")
            if isinstance(answer, ConfigError):
                raise answer
            yield answer

    def _wait(self, ends: Sequence[Connection | int], seconds: float) -> Sequence[object]:
        """Wait for a while; count the time for each worker that owes an answer."""
        began = time.monotonic()
        ready = wait(ends, seconds)
        # this process may have been stopped in between, and its workers too
        waited = min(time.monotonic() - began, 2 * _LOOK)
        for worker in self._workers:
            if worker.queued:
                worker.silent += waited
        return ready

    def _note_answer(self, worker: _Worker, seconds: float) -> int:
        """Return how many clients a worker's oldest chunk has, which took so long."""
        worker.silent = 0.0
        clients = worker.queued.popleft()
        self._pace = max(self._pace, seconds / clients)
        return clients

    def _patience(self, worker: _Worker, clients: int) -> float:
        """Return how many seconds a worker may take for a number of clients."""
        if not worker.started:
            return _START
        if self._timeout is not None:
            return self._timeout
        if not self._pace:
            return _FIRST_ANSWER
        return max(_LEAST_PATIENCE, _PATIENCE * self._pace * clients)

    def _refuse_silence(self) -> None:
        for number, worker in enumerate(self._workers):
            if not worker.queued:
                continue
            most = self._patience(worker, worker.queued[0])
            if worker.silent > most:
                raise WorkerError(
                    f"worker {number} has not answered for {most:.4g} seconds and is taken to "
                    "hang. Nothing of this round was released: run it again, or resume a run "
                    "folder with --resume. If its clients only take long, set --worker-timeout "
                    "(worker_timeout) higher."
                )

    @contextmanager
    def _killed_if_it_does_not_read(self, worker: _Worker, length: int) -> Iterator[None]:
        """Bound the time of sending a message that may not fit into the pipe."""
        if length <= _SMALL_MESSAGE:
            yield
            return
        guard = threading.Timer(self._patience(worker, sum(worker.queued)), worker.process.kill)
        guard.daemon = True
        guard.start()
        try:
            yield
        finally:
            guard.cancel()

    def _died(self, number: int) -> WorkerError:
        process = self._workers[number].process
        process.join(_END)
        return WorkerError(
            f"worker {number} {cause_of_death(process.exitcode)}. Nothing of this round was "
            "released: run it again, or resume a run folder with --resume."
        )


_SHARED_FROM = 2**20
"""Bytes from which a tensor gets shared memory of its own, which costs a file descriptor."""
_MOST_SHARED = 100


@dataclass(frozen=True, slots=True)
class _Packed:
    """A population pickled once for all processes, its tensors in shared memory."""

    pickled: Tensor  # bytes; in shared memory, so that starting a process sends little
    large: list[Tensor]
    small: Tensor  # the bytes of all other tensors, one after the other

    def unpacked(self) -> Clients:
        """Return the population; its tensors are views of the shared memory."""
        clients: Clients = _Unpickler(self).load()
        return clients


class _Pickler(pickle.Pickler):
    """Pickles a population without its tensors, which are listed instead."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.large: list[Tensor] = []
        self._small: list[Tensor] = []
        self._end = 0
        # with the tensor, whose id would otherwise be given to another one
        self._places: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}

    def persistent_id(self, value: object) -> tuple[Any, ...] | None:
        """Return where a tensor lies, or None for anything else."""
        if type(value) is not Tensor or value.requires_grad or not value.numel():
            return None
        if not value.is_cpu or value.layout is not torch.strided:
            return None
        if id(value) not in self._places:
            self._places[id(value)] = (value, self._place(value))
        return self._places[id(value)][1]

    def _place(self, tensor: Tensor) -> tuple[Any, ...]:
        if tensor.nbytes >= _SHARED_FROM and len(self.large) < _MOST_SHARED:
            self.large.append(tensor)
            return (len(self.large) - 1, 0, 0, None, None)
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        begin = -(-self._end // 16) * 16  # aligned for every type
        self._small += [torch.zeros(begin - self._end, dtype=torch.uint8), raw]
        self._end = begin + len(raw)
        return (None, begin, self._end, tensor.dtype, tensor.shape)

    def small(self) -> Tensor:
        """Return the bytes of all small tensors in shared memory."""
        return share(torch.cat([*self._small, torch.empty(0, dtype=torch.uint8)]))


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: _Packed) -> None:
        super().__init__(io.BytesIO(packed.pickled.numpy().tobytes()))
        self._packed = packed

    def persistent_load(self, place: tuple[Any, ...]) -> Tensor:
        number, begin, end, dtype, shape = place
        large, small = self._packed.large, self._packed.small
        if number is not None:
            return large[int(number)]
        found: Tensor = small[begin:end].view(dtype).view(shape)
        return found


def _packed(clients: Clients, workers: int) -> _Packed:
    """Pickle a population for other processes.

    Raises:
        ConfigError: it cannot be pickled.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(clients)
    except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
        raise ConfigError(
            f"workers={workers}: the clients cannot be sent to another process ({error}). Define "
            "their classes at the top level of a module, or use workers=1."
        ) from None
    pickled = share(torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8))
    return _Packed(pickled, pickler.large, pickler.small())


def _computed(here: Here, chunk: Sequence[ClientId], watches: bool) -> _Answer:
    seen: _Seen = []
    results, norms = here(chunk, partial(_note, seen) if watches else None)
    return None, results, norms, seen


def _tell(watch: Watch | None, seen: _Seen) -> None:
    if watch is not None:
        for loss, norm in seen:
            watch(loss, norm)


def _note(seen: _Seen, loss: float | None, norm: float) -> None:
    seen.append((loss, norm))


def _serve(
    pipe: Connection,
    module: torch.nn.Module,
    groups: Sequence[Sequence[str]],
    clients: "Users | _Packed",
    settings: tuple[int, Features | None],
    start: Tensor,
    results: Tensor,
    totals: Tensor,
    *,
    started_by_main_thread: bool,
) -> None:
    """Compute chunks until the engine closes the pipe."""
    become_a_worker(started_by_main_thread=started_by_main_thread)
    # PartialModel takes patterns, and a name may contain brackets
    groups = [[escape(name) for name in names] for names in groups]
    trainable = [name for names in groups for name in names]
    model = PartialModel(module, train=trainable, seed=None, groups=groups)
    data_seed, features = settings
    if features is not None:
        parts = split(model)
        model = parts[1] if parts is not None else model
    population = clients if isinstance(clients, Users) else clients.unpacked()
    computation: LocalComputation | None = None
    pipe.send(None)  # it has started
    while True:
        try:
            number, slot, chunk, task, local, method, watches, summed = pipe.recv()
        except (EOFError, OSError):
            return
        except Exception as error:  # such as a loss whose module this process cannot import
            pipe.send(f"{type(error).__name__}: {error}, while it read its task.")
            continue
        if computation is None:
            computation = LocalComputation(
                model, population, local=local, data_seed=data_seed, features=features
            )
        computation.local = local
        began = time.monotonic()
        try:
            seen: _Seen = []
            watch = partial(_note, seen) if watches else None
            dim = model.active_dim(task.active)
            places = totals[slot, :dim] if summed else results[slot, :, :dim]
            compute = computation.summed if summed else computation.updates
            norms = compute(task, chunk, start, method, places, watch) or ()
            answer: Any = (number, slot, norms, seen, time.monotonic() - began)
        except ConfigError as error:
            answer = ConfigError(str(error))
        except Exception as error:  # the engine must learn of it, whatever it is
            answer = f"{type(error).__name__}: {error}, while it computed clients {chunk}."
        pipe.send(answer)
