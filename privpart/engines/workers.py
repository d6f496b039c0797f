"""Workers: processes that live as long as the engine and compute chunks of clients.

Each process is spawned, runs on one thread and builds its model once. Examples, the round's trained
part, features of a frozen prefix and results are in shared memory; only the ids of the clients to
compute travel through a pipe. Results are returned in the order of the chunks, whichever worker
finishes first.
"""

import ctypes
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from glob import escape
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_context

from accounting.checks import ConfigError
from privpart.client import LocalTraining
from privpart.data.users import Users
from privpart.engines.frozen_prefix import Features, share, split
from privpart.engines.methods import LocalComputation, Method
from privpart.messages import RoundTask
from privpart.model import PartialModel

_SLOTS = 3
"""Chunks that a worker may have computed or queued, so that it does not wait for a busy server."""


class WorkerError(RuntimeError):
    """A worker process failed. Nothing of the round was released, and it may be run again."""


@dataclass(slots=True)
class _Worker:
    process: Any  # the spawn context's own class
    pipe: Connection
    results: Tensor  # (slots, clients, d)
    totals: Tensor  # (slots, d), float64; of ghost sums


class Workers:
    """A pool of processes.

    Args:
        count: number of processes.
        model: the clients' model; its frozen part must not change from now on.
        users: the clients' data.
        data_seed: see ``LocalComputation``.
        features: outputs of the frozen prefix, if the clients train only the layers behind it.
        largest: most clients in a chunk of ``updates``.
        sums: whether ``sums`` will be called.

    Attributes:
        open: whether answers of a round are still to be read; the next round would take them for
            its own.

    Raises:
        ConfigError: the model cannot be sent to another process.
    """

    def __init__(
        self,
        count: int,
        model: PartialModel,
        users: Users,
        *,
        data_seed: int,
        features: Features | None,
        largest: int,
        sums: bool = False,
    ) -> None:
        context = get_context("spawn")
        module = deepcopy(model.module)
        # The parameters are views of one vector; each worker builds a vector of its own.
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
            parameter.grad = None
        self._model = model
        self.open = False
        groups = model.groups
        self._start = share(torch.empty(model.dim))
        shared = users.shared()
        self._workers: list[_Worker] = []
        try:
            for _ in range(count):
                here, there = context.Pipe()
                settings = (data_seed, features)
                results = share(torch.empty(_SLOTS, largest, model.dim))
                totals = share(torch.empty(_SLOTS * sums, model.dim, dtype=torch.float64))
                process = context.Process(
                    target=_serve,
                    args=(there, module, groups, shared, settings, self._start, results, totals),
                    daemon=True,
                )
                process.start()
                there.close()
                self._workers.append(_Worker(process, here, results, totals))
        except (AttributeError, TypeError, ValueError) as error:  # what pickle raises
            self.close()
            raise ConfigError(
                f"workers={count}: the model cannot be sent to another process ({error}). Define "
                "its classes in a module of their own, or use workers=1."
            ) from None

    def updates(
        self,
        task: RoundTask,
        start: Tensor,
        local: LocalTraining,
        method: Method,
        chunks: Sequence[Sequence[int]],
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each client and its update, shape (c,), in order; c parameters are active.

        Raises:
            WorkerError: a worker died, or could not compute a client. The pool is then closed.
        """
        dim = self._model.active_dim(task.active)
        for chunk, worker, slot, _ in self._answers(task, start, local, method, chunks):
            updates = self._workers[worker].results[slot, : len(chunk), :dim]
            for client, update in zip(chunk, updates, strict=True):
                # one at a time, because malloc reuses a freed block of that size
                yield client, update.clone()

    def sums(
        self,
        task: RoundTask,
        start: Tensor,
        local: LocalTraining,
        chunks: Sequence[Sequence[int]],
    ) -> Iterator[tuple[Sequence[int], Tensor, int]]:
        """Yield each chunk, the sum of its updates, shape (d,), and how many were not clipped.

        Raises:
            WorkerError: as ``updates`` does.
        """
        method = Method(ghost_sum=True)
        for chunk, worker, slot, unclipped in self._answers(task, start, local, method, chunks):
            yield chunk, self._workers[worker].totals[slot].clone(), unclipped

    def _answers(
        self,
        task: RoundTask,
        start: Tensor,
        local: LocalTraining,
        method: Method,
        chunks: Sequence[Sequence[int]],
    ) -> Iterator[tuple[Sequence[int], int, int, int]]:
        """Yield chunk, worker, slot and count in order; the slot is reused afterwards."""
        self.open = True
        self._start.copy_(start)
        todo = deque(enumerate(chunks))
        free = deque((w, slot) for slot in range(_SLOTS) for w in range(len(self._workers)))
        done: dict[int, tuple[int, int, int]] = {}
        # without the cohort, whose thousands of clients would be sent with every chunk
        task = replace(task, clients=())
        try:
            for number, chunk in enumerate(chunks):
                while True:
                    while todo and free:
                        (following, clients), (worker, slot) = todo.popleft(), free.popleft()
                        self._send(worker, (following, slot, task, clients, local, method))
                    if number in done:
                        break
                    done |= self._finished()
                worker, slot, count = done.pop(number)
                yield chunk, worker, slot, count
                if not self._workers:
                    raise WorkerError("another round began before this one's answers were taken.")
                free.append((worker, slot))
            self.open = False
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
        self._workers = []

    def _send(self, number: int, work: tuple[Any, ...]) -> None:
        try:
            self._workers[number].pipe.send(work)
        except OSError:
            raise self._died(number) from None

    def _finished(self) -> dict[int, tuple[int, int, int]]:
        """Wait until a worker answers; return chunk -> (worker, slot, count)."""
        owners = {w.pipe: n for n, w in enumerate(self._workers)}
        deaths = {w.process.sentinel: n for n, w in enumerate(self._workers)}
        ready = wait([*owners, *deaths])
        found: dict[int, tuple[int, int, int]] = {}
        for number in (owners[pipe] for pipe in ready if pipe in owners):
            try:
                answer = self._workers[number].pipe.recv()
            except (EOFError, OSError):
                raise self._died(number) from None
            if isinstance(answer, str):
                raise WorkerError(f"worker {number}: {answer} Nothing of this round was released.")
            chunk, slot, count = answer
            found[chunk] = (number, slot, count)
        if not found:
            raise self._died(next(deaths[sentinel] for sentinel in ready))
        return found

    def _died(self, number: int) -> WorkerError:
        process = self._workers[number].process
        process.join(5)
        return WorkerError(
            f"worker {number} {_cause(process.exitcode)}. Nothing of this round was released: run "
            "it again, or resume a run folder with --resume."
        )


def _cause(code: int | None) -> str:
    if code is None or code >= 0:
        return (
            f"ended with exit code {code}; its own message is on standard error. A script that "
            'uses workers must start its work under `if __name__ == "__main__":`'
        )
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    likely = {
        "SIGKILL": ": the system is out of memory, or somebody ended it",
        "SIGBUS": ": the shared memory in /dev/shm is full",
    }
    return f"was ended by {name}{likely.get(name, '')}"


def _serve(
    pipe: Connection,
    module: torch.nn.Module,
    groups: Sequence[Sequence[str]],
    users: Users,
    settings: tuple[int, Features | None],
    start: Tensor,
    results: Tensor,
    totals: Tensor,
) -> None:
    """Compute chunks until the engine closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the process that owns the run handles it
    torch.set_num_threads(1)
    keep_freed_memory()
    # PartialModel takes patterns, and a name may contain brackets
    groups = [[escape(name) for name in names] for names in groups]
    trainable = [name for names in groups for name in names]
    model = PartialModel(module, train=trainable, seed=None, groups=groups)
    data_seed, features = settings
    if features is not None:
        parts = split(model)
        model = parts[1] if parts is not None else model
    computation: LocalComputation | None = None
    while True:
        try:
            number, slot, task, clients, local, method = pipe.recv()
        except (EOFError, OSError):
            return
        if computation is None:
            computation = LocalComputation(
                model, users, local=local, data_seed=data_seed, features=features
            )
        computation.local = local
        try:
            count = 0
            if method.ghost_sum:
                count = computation.sum(task, clients, start, totals[slot])
            else:
                dim = model.active_dim(task.active)
                computation.updates(task, clients, start, method, results[slot, :, :dim])
            answer: Any = (number, slot, count)
        except Exception as error:  # the engine must learn of it, whatever it is
            answer = f"{type(error).__name__}: {error}, while it computed clients {clients}."
        pipe.send(answer)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_MMAP_FROM = 2**25  # the largest value that glibc accepts
_TRIM_FROM = 2**30


def keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks below 32 MiB for reuse; do nothing with another C library.

    By default every large tensor is a new mapping, whose pages the system clears one fault at a
    time: that was half of the time of small networks. The setting is for a whole process, so call
    this only in processes that this package started.
    """
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM)
        library.mallopt(_M_TRIM_THRESHOLD, _TRIM_FROM)
    except (AttributeError, OSError, TypeError):
        return
