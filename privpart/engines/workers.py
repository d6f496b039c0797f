"""Workers: processes that live as long as the engine and compute chunks of clients beside it.

Examples, the round's trained part, features of a frozen prefix and results are in shared memory;
only the ids of the clients to compute travel through a pipe. The engine's own process computes
chunks, too, while it would wait. Results are returned in the order of the chunks, whoever finishes
first. A worker that fails, or does not answer for long, ends the round (see ``privpart.pool``).
"""

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from glob import escape
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.data.clients import Clients
from privpart.data.users import Users
from privpart.engines.frozen_prefix import Features, shared_memory, split
from privpart.engines.methods import Chunk, LocalComputation, Result, Work, compute
from privpart.model import PartialModel
from privpart.pool import Pool, Tell, WorkerError
from privpart.settings.client import LocalTraining

_SLOTS = 3
"""Chunks of each worker that are computed, queued or not read yet, so that it does not wait for a
busy server; and that the engine's own process may put aside, because a round's updates may not fit
in memory."""
_QUEUED = 2
"""Chunks that a worker computes or has queued; the engine's own process takes of the others."""
_ADVICE = (
    "Nothing of this round was released: run it again, or resume a run folder with --resume; with "
    "a higher worker_timeout (from Python) if its clients only take long."
)


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
            _WithoutTensors(io.BytesIO()).dump(value)
        except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
            raise ConfigError(
                f"workers={count}: {what} cannot be sent to another process ({error}). {advice}, "
                "or use workers=1."
            ) from None


class _WithoutTensors(ForkingPickler):
    """Pickles all but the tensors, which can always be sent."""

    def persistent_id(self, value: object) -> int | None:
        """Return a number in place of a tensor, or None for anything else."""
        return 0 if isinstance(value, Tensor) else None


class Workers:
    """Processes that compute chunks of a round's clients.

    Args:
        count: number of processes, beside the engine's own.
        model: its frozen part must not change from now on.
        clients: of ``Users``, each process has the same memory; of any other population a copy.
        data_seed, features: see ``LocalComputation``.
        largest: most clients in a chunk that is not summed.
        sums: whether chunks will be summed.
        timeout: see ``Pool``.

    Attributes:
        pool: the processes; while it is busy, answers of a round are not read yet, and another
            round would take them for its own.
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
        module = deepcopy(model.module)
        # The parameters are views of one vector; each worker builds a vector of its own.
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
            parameter.grad = None
        self._model, self._slots = model, _SLOTS * count
        self._start = shared_memory(model.dim)
        self._results = shared_memory(self._slots, largest, model.dim)
        self._totals = shared_memory(self._slots * sums, model.dim, dtype=torch.float64)
        # pickled once, and not by torch, which would open a file for each of its tensors
        population = clients.shared() if isinstance(clients, Users) else pickle.dumps(clients)
        settings = data_seed, features, self._start, self._results, self._totals
        self.pool = Pool(
            count, _computing, module, model.groups, population, *settings, timeout=timeout
        )
        self.pool.start()

    def results(
        self,
        work: Work,
        start: Tensor,
        chunks: Sequence[Chunk],
        here: Callable[[Chunk], Result] | None = None,
    ) -> Iterator[Result]:
        """Yield the results of each chunk of the round's clients, in order.

        ``start`` is the round's trained part, shape (d,). ``here`` computes a chunk in this
        process; None leaves all to the others.

        Raises:
            WorkerError: a worker died, or could not compute a client. All are ended then.
            ConfigError: a client's examples cannot be trained on.
        """
        self._start.copy_(start)
        # without the cohort, whose thousands of clients would be sent with every chunk
        work = replace(work, task=replace(work.task, clients=()))
        todo = deque(enumerate(chunks))
        free = deque(range(self._slots))
        done: dict[int, Result | tuple[int, Sequence[float]]] = {}
        given: set[int] = set()
        try:
            for number, chunk in enumerate(chunks):
                while number not in done:
                    # what is wanted next is computed here, because it need not be put aside
                    own_chunk = todo.popleft() if here and number not in given else None
                    done |= self._answers(0.0)
                    self._hand_out(work, todo, free, given, kept=1 if here else 0)
                    if own_chunk is None and number not in done:
                        aside = sum(isinstance(result, Result) for result in done.values())
                        own_chunk = todo.popleft() if here and todo and aside < _SLOTS else None
                        done |= {} if own_chunk else self._answers(None)
                    if here and own_chunk:
                        done[own_chunk[0]] = here(own_chunk[1])
                result = done.pop(number)
                if isinstance(result, Result):
                    yield result
                else:
                    slot, norms = result
                    yield self._read(slot, norms, work, chunk)
                    free.append(slot)
                if self.pool.closed:
                    raise WorkerError("another round began before this one's answers were taken.")
        except BaseException:
            self.pool.close()
            raise

    def _hand_out(
        self,
        work: Work,
        todo: deque[tuple[int, Chunk]],
        free: deque[int],
        given: set[int],
        kept: int,
    ) -> None:
        """Give chunks to workers that have room, first to those that have none.

        The last ``kept`` chunks wait for whoever has nothing to do, which may be this process.
        """
        while todo and free and (worker := self.pool.idle(_QUEUED)):
            if worker.jobs and len(todo) <= kept:
                return
            number, chunk = todo.popleft()
            given.add(number)
            self.pool.give(worker, _Job(number, free.popleft(), chunk, work))

    def _answers(self, seconds: float | None) -> dict[int, tuple[int, Sequence[float]]]:
        """Return slot and norms of each chunk whose answer came within so many seconds."""
        answers = {}
        for job, _, answer in self.pool.heard(seconds):
            if isinstance(answer, WorkerError):
                raise WorkerError(f"a worker failed: {answer} {_ADVICE}")
            if isinstance(answer, ConfigError):
                raise answer
            answers[job.number] = job.slot, answer
        return answers

    def _read(self, slot: int, norms: Sequence[float], work: Work, chunk: Chunk) -> Result:
        dim = self._model.active_dim(work.task.active)
        if work.summed:
            updates: Iterable[Tensor] = [self._totals[slot, :dim].clone()]
        else:
            rows = self._results[slot, : len(chunk), :dim]
            # one at a time, because malloc reuses a freed block of that size
            updates = (row.clone() for row in rows)
        return Result(chunk, updates, norms)


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    slot: int
    chunk: Chunk
    work: Work


def _computing(
    module: nn.Module,
    groups: Sequence[Sequence[str]],
    clients: Users | bytes,
    data_seed: int,
    features: Features | None,
    start: Tensor,
    results: Tensor,
    totals: Tensor,
) -> Callable[[_Job, Tell], object]:
    """Return what computes chunks in a worker."""
    # PartialModel takes patterns, and a name may contain brackets
    groups = [[escape(name) for name in names] for names in groups]
    trainable = [name for names in groups for name in names]
    model = PartialModel(module, train=trainable, seed=None, groups=groups)
    parts = split(model) if features is not None else None
    model = parts[1] if parts is not None else model
    population = clients if isinstance(clients, Users) else pickle.loads(clients)
    computation: LocalComputation | None = None

    def answer(job: _Job, _: Tell) -> object:
        nonlocal computation
        work = job.work
        if computation is None:
            computation = LocalComputation(
                model, population, local=work.local, data_seed=data_seed, features=features
            )
        computation.local = work.local
        dim = model.active_dim(work.task.active)
        out = totals[job.slot, :dim] if work.summed else results[job.slot, :, :dim]
        try:
            return compute(computation, work, job.chunk, start, out)
        except ConfigError as error:
            return ConfigError(str(error))
        except Exception as error:  # the engine must learn of it, whatever it is
            return WorkerError(
                f"{type(error).__name__}: {error}, while it computed clients {job.chunk}."
            )

    return answer
