"""Pool: warm processes that work off jobs, and end with the process that started them.

A process that sends nothing for longer than the pool's patience is taken to hang and is ended. Its
jobs fail, the others continue, and another process takes its place when there is work for it.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.multiprocessing import get_context

START = 300.0
"""Seconds to start a process and to import torch."""
FIRST = 900.0
"""Seconds between two messages while no job is finished."""
SHORTEST = 60.0
FACTOR = 50
"""Once a job is finished, patience is this many times the longest silence so far."""
LOOK = 1.0
"""Seconds between looks at the clock; longer ones do not count, as if the machine had slept."""
END = 5.0
"""Seconds to wait for a killed process, which may be stuck in the kernel."""
_STARTED = (False, None)  # the first message of every process

_PR_SET_PDEATHSIG = 1  # of prctl(2)

Tell = Callable[[object], None]
"""Sends a message about the job that a process is working on."""
Work = Callable[[Any, Tell], object]
"""Works off one job and returns its answer; it must not raise."""


class WorkerError(RuntimeError):
    """A worker process failed. Nothing of its job was released, and the job may be run again."""


@dataclass(slots=True, eq=False)
class Worker:
    """A process of a pool."""

    process: Any  # the spawn context's own class
    pipe: Connection
    jobs: list[Any] = field(default_factory=list)
    silent: float = 0.0
    started: bool = False


class Pool:
    """Up to ``count`` processes, started when there are jobs for them.

    Args:
        count: number of processes.
        make: at the top level of a module; each process calls it once and gives its jobs to the
            function that it returns.
        args: arguments of ``make``.
        timeout: seconds of silence after which a process is taken to hang. None allows 15 minutes
            until a job is finished; then a minute, or 50 times the longest silence so far.

    Attributes:
        closed: whether ``close`` was called.
    """

    def __init__(
        self, count: int, make: Callable[..., Work], *args: object, timeout: float | None = None
    ) -> None:
        self._count, self._make, self._args, self._timeout = count, make, args, timeout
        self._workers: list[Worker] = []
        self._longest = 0.0
        self._any_finished = self.closed = False

    @property
    def busy(self) -> bool:
        """Whether a job is unfinished."""
        return any(worker.jobs for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Start all processes now, and not only when there are jobs for them."""
        while len(self._workers) < self._count:
            self._workers.append(self._new())

    def ready(self) -> bool:
        """Return whether all processes have started, or one ended, as its next job will say."""
        for worker in self._workers:
            try:
                if not worker.started and worker.pipe.poll():
                    worker.started = worker.pipe.recv() == _STARTED
            except (EOFError, OSError):
                return True
        return all(worker.started for worker in self._workers)

    def idle(self, queued: int = 1) -> Worker | None:
        """Return a process with fewer than ``queued`` jobs, a new one if all others have some.

        Raises:
            WorkerError: the pool was closed, by another thread for instance.
        """
        if self.closed:
            raise WorkerError("the training was ended.")
        freest = min(self._workers, key=lambda worker: len(worker.jobs), default=None)
        if len(self._workers) < self._count and (freest is None or freest.jobs):
            freest = self._new()
            self._workers.append(freest)
        return freest if freest is not None and len(freest.jobs) < queued else None

    def give(self, worker: Worker, job: object) -> None:
        """Send a job to a process."""
        worker.silent = worker.silent if worker.jobs else 0.0
        worker.jobs.append(job)
        # a process that has died is noticed by ``heard``
        with suppress(OSError):
            worker.pipe.send(job)

    def heard(self, seconds: float | None = None) -> Iterator[tuple[Any, bool, Any]]:
        """Wait for messages; yield each with its job, and whether it is the job's answer.

        Args:
            seconds: to wait at most; None takes ``LOOK``.

        Jobs of a process that died or hung are answered by a ``WorkerError``.

        Raises:
            WorkerError: a process ended before it had started, as every other would.
        """
        busy = [worker for worker in self._workers if worker.jobs]
        began = time.monotonic()
        ready = wait([worker.pipe for worker in busy], LOOK if seconds is None else seconds)
        # this process may have been stopped in between, and the others too
        waited = min(time.monotonic() - began, 2 * LOOK)
        for worker in busy:
            worker.silent += waited
            if worker.pipe in ready:
                yield from self._read(worker)
            elif worker.silent > (patience := self._patience(worker)):
                yield from self._end(
                    worker, f"sent nothing for {patience:.4g} seconds and was taken to hang"
                )

    def close(self) -> None:
        """End all processes, also those that hang."""
        self.closed = True
        for worker in self._workers:
            _kill(worker)
        self._workers = []

    def _new(self) -> Worker:
        ours, theirs = get_context("spawn").Pipe()
        in_main = threading.current_thread() is threading.main_thread()
        process = get_context("spawn").Process(
            target=_serve, args=(theirs, in_main, self._make, *self._args), daemon=True
        )
        # Ctrl-C reaches no process that is started with it blocked
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return Worker(process, ours)

    def _read(self, worker: Worker) -> Iterator[tuple[Any, bool, Any]]:
        try:
            finished, message = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(END)
            cause = cause_of_death(worker.process.exitcode)
            if not worker.started:
                raise WorkerError(f"no process could start: the first {cause}.") from None
            yield from self._end(worker, cause)
            return
        if not worker.started:
            worker.started, worker.silent = True, 0.0
            return
        self._longest, worker.silent = max(self._longest, worker.silent), 0.0
        self._any_finished |= finished
        yield (worker.jobs.pop(0) if finished else worker.jobs[0]), finished, message

    def _end(self, worker: Worker, cause: str) -> Iterator[tuple[Any, bool, Any]]:
        _kill(worker)
        self._workers.remove(worker)
        yield from ((job, True, WorkerError(f"its process {cause}.")) for job in worker.jobs)

    def _patience(self, worker: Worker) -> float:
        if not worker.started:
            return START
        if self._timeout is not None:
            return self._timeout
        return max(SHORTEST, FACTOR * self._longest) if self._any_finished else FIRST


def _kill(worker: Worker) -> None:
    worker.pipe.close()
    worker.process.kill()
    worker.process.join(END)


def _serve(pipe: Connection, in_main: bool, make: Callable[..., Work], *args: object) -> None:
    """Work off jobs until the other end closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the process that owns the run handles it
    _end_with_the_parent(started_by_main_thread=in_main)
    torch.set_num_threads(1)
    keep_freed_memory()
    work = make(*args)
    pipe.send(_STARTED)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        except Exception as error:  # such as a loss whose module this process cannot import
            pipe.send((True, WorkerError(f"{type(error).__name__}: {error}, as it read its job.")))
            continue
        pipe.send((True, work(job, lambda message: pipe.send((False, message)))))


def cause_of_death(code: int | None) -> str:
    """Describe an exit code, as the predicate of a sentence."""
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


def _end_with_the_parent(*, started_by_main_thread: bool) -> None:
    """Kill this process when the one that started it has ended, in whatever way.

    A thread watches the parent. Linux does it too, for a process that is stopped or never leaves a
    function written in C; but it would also do it when the thread that started this process ends.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    if started_by_main_thread:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        except (AttributeError, OSError):
            return  # no Linux


def _die_with(parent: int) -> None:
    wait([parent])
    os.kill(os.getpid(), signal.SIGKILL)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_MMAP_FROM, _TRIM_FROM = 2**25, 2**30  # the first is the largest value that glibc accepts


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
