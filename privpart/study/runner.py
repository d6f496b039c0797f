"""Runner: trains cells, in several processes that share what they may.

The noise of every cell comes from its seed, so cells can be repeated and compared. These models are
simulations and not private, whatever epsilon the same plan would have with secret noise.

A process loads libraries and reads the files of a task once, however many cells it trains. Each
cell has a model, clients, an engine and a noise source of its own, so its result does not depend on
the cells before it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from accounting import checks
from accounting.checks import ConfigError
from privpart.engines.options import EngineOptions
from privpart.loop import Heard, RoundRecord
from privpart.noise.source import SeededSource
from privpart.pool import Pool, WorkerError
from privpart.study.cell import Cell
from privpart.study.store import CellResult, Store
from privpart.training.plan_file import PlanFile
from privpart.training.task_data import Reader, read_task
from privpart.training.training import Own, Training, training, without_canaries

_REPORT_INTERVAL = 0.2
"""Seconds between two messages about finished rounds."""
_ADVICE = "with -j 1 if its rounds only take long"

Outcome = CellResult | str
"""What a cell gave, or its error."""
Finished = Callable[[Cell, Outcome], None]
Advanced = Callable[[Cell, float], None]


class Runner:
    """Trains cells, each on one thread of one of several processes, which stay warm.

    Args:
        jobs: number of processes. 1 trains in the calling process, where nothing can end a cell
            that hangs; with more, a script must start its work under
            ``if __name__ == "__main__":``. Or an executor, whose processes may be on other
            machines, see ``cluster``.
        options: how the engine computes clients; None takes the defaults.
    """

    def __init__(self, jobs: int | Executor, *, options: EngineOptions | None = None) -> None:
        self._options = options
        self._executor = jobs if isinstance(jobs, Executor) else None
        here = 1 if isinstance(jobs, Executor) else checks.count("jobs", jobs)
        self._pool = None if here == 1 else Pool(here, _trainer, options)
        # cells next to each other mostly share a task; the data of several would fill the memory
        self._read = lru_cache(maxsize=1)(read_task)

    def check(self, cells: Sequence[Cell]) -> None:
        """Make the checks of ``privpart train`` on the plans of cells, before any is trained.

        Raises:
            ConfigError: the first fault, with its cell.
        """
        refuse_unfit(cells, self._options, read=self._read)

    def train(
        self,
        cells: Sequence[Cell],
        finished: Finished = lambda *_: None,
        advanced: Advanced = lambda *_: None,
        store: Store | None = None,
    ) -> None:
        """Train cells, beginning with the first.

        Args:
            cells: to train.
            finished: called with each cell as soon as it is finished, in no fixed order. A cell
                that failed comes with its error; the others continue.
            advanced: called with a cell and how many more of its rounds are finished; of each cell
                that is finished, they sum to its rounds.
            store: cells that it has are not trained; it gets each outcome before ``finished``.

        Raises:
            WorkerError: a process could not start.
        """
        done = {} if store is None else store.results()
        queue = deque(cell for cell in cells if cell.key not in done)
        # a cell that fails has rounds that it never reports; finish adds them
        remaining = {cell.key: float(cell.plan.privacy.rounds) for cell in queue}

        def advance(cell: Cell, rounds: float) -> None:
            remaining[cell.key] -= rounds
            advanced(cell, rounds)

        def finish(cell: Cell, outcome: Outcome) -> None:
            # before the caller hears of it: an interrupt in between trains nothing twice
            if store is not None:
                store.add(cell.key, cell.labels, cell.seed, outcome)
            advanced(cell, remaining[cell.key])
            finished(cell, outcome)

        if self._executor is not None:
            _train_on(self._executor, queue, self._options, finish)
            return
        if self._pool is not None:
            _train_in(self._pool, queue, finish, advance)
            return
        train = _trainer(self._options, self._read)
        for cell in queue:
            finish(cell, train(cell, partial(advance, cell)))

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes, also those that hang, and what another thread trains in them."""
        if self._pool is not None:
            self._pool.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False)


def refuse_unfit(
    cells: Sequence[Cell],
    options: EngineOptions | None,
    *,
    read: Reader = read_task,
    objects: Own | None = None,
    metrics: bool = False,
) -> None:
    """Make the checks of ``privpart train`` on the plans of cells; raise the first fault.

    ``read`` and ``objects`` are those of ``training``; with ``metrics``, each training has a folder
    that keeps its noised metrics.
    """
    # To put a training together takes seconds, and a sweep has hundreds of plans: what seeds,
    # privacy, the server and the learning rate do not change is put together once.
    excluded: dict[str, Any] = {"privacy": True, "server": True, "client": {"learning_rate"}}
    excluded |= {"model": {"seed"}, "data": {"seed"}}
    alike: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        # of the privacy table, sampling alone changes what is put together
        sampled = "sampled" * (cell.plan.privacy.sampling is not None)
        same = alike.setdefault(cell.plan.model_dump_json(exclude=excluded) + sampled, {})
        same.setdefault(cell.plan.model_dump_json(include={"privacy"}), cell)
    for same in alike.values():
        setup = None
        for cell in same.values():
            try:
                _refuse_tables(cell.plan, metrics=metrics)
                if setup is None:
                    setup = _put_together(cell.plan, options, read, lambda _: None, objects)
                else:
                    setup = setup.under(cell.plan)
                setup.rehearse(setup.promise())
            except ConfigError as error:
                raise ConfigError(f"{cell.name}: {error}") from None


def _train_in(pool: Pool, queue: deque[Cell], finish: Finished, advance: Advanced) -> None:
    while queue or pool.busy:
        while queue and (worker := pool.idle()):
            pool.give(worker, queue.popleft())
        for cell, is_finished, message in pool.heard():
            if not is_finished:
                advance(cell, message)
            elif isinstance(message, WorkerError):
                finish(cell, f"{message} Run the same command again, {_ADVICE}.")
            else:
                finish(cell, message)


_one_at_a_time = threading.Lock()
"""Of an executor's process with several threads: torch's settings are those of a process."""
_read_once = lru_cache(maxsize=1)(read_task)


def _train_there(cell: Cell, options: EngineOptions | None) -> Outcome:
    with _one_at_a_time:
        torch.set_num_threads(1)
        return _trainer(options, _read_once)(cell, lambda _: None)


def _train_on(
    executor: Executor, queue: deque[Cell], options: EngineOptions | None, finish: Finished
) -> None:
    cells = {executor.submit(_train_there, cell, options): cell for cell in queue}
    try:
        for future in as_completed(cells):
            error = future.exception()
            lost = f"its worker was lost ({type(error).__name__}: {error})"
            finish(cells[future], future.result() if error is None else lost)
    finally:
        for future in cells:
            future.cancel()


def run_cell(
    cell: Cell,
    options: EngineOptions | None = None,
    *,
    read: Reader = read_task,
    watch: Callable[[RoundRecord], None] = lambda _: None,
    heard: Heard | None = None,
) -> CellResult:
    """Train one cell.

    Args:
        cell: to train.
        options: how the engine computes clients; None takes the defaults.
        read: see ``training``.
        watch: called after each round.
        heard: called within rounds, see ``fit``.
    """
    began = time.process_time()
    methods: list[str] = []
    _refuse_tables(cell.plan)
    setup = _put_together(cell.plan, options, read, methods.append)
    promised = setup.promise()
    # nothing is released, and a setting that diverges loses by its metric
    server, _ = setup.run(
        promised, SeededSource(cell.seed), callbacks=[watch], heard=heard, stop_if_diverged=False
    )
    delta = cell.plan.privacy.delta
    return CellResult(
        accuracy=setup.evaluate(server.parameters),
        epsilon=promised.guarantee().epsilon(delta) if promised.noise_multiplier else None,
        noise_multiplier=float(promised.noise_multiplier),
        delta=delta,
        trained=setup.model.dim,
        parameter_count=setup.model.parameter_count,
        plan=cell.plan.to_json(),
        engine="; ".join(methods) or str(setup.engine.method),
        cpu_seconds=time.process_time() - began,
    )


def _trainer(
    options: EngineOptions | None, read: Reader | None = None
) -> Callable[[Cell, Callable[[float], None]], Outcome]:
    """Return what trains a cell, and tells now and then how many rounds, or shares, are done."""
    read = read or lru_cache(maxsize=1)(read_task)

    def train(cell: Cell, tell: Callable[[float], None]) -> Outcome:
        told, last = 0.0, time.monotonic()

        def reached(rounds: float) -> None:
            nonlocal told, last
            if time.monotonic() - last >= _REPORT_INTERVAL:
                tell(rounds - told)
                told, last = rounds, time.monotonic()

        # one cell that fails must not end the trainings of the others
        try:
            return run_cell(
                cell,
                options,
                read=read,
                watch=lambda record: reached(record.round + 1),
                heard=lambda number, done, asked: reached(number + done / asked),
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return train


def _refuse_tables(plan: PlanFile, *, metrics: bool = False) -> None:
    """Refuse what a training of a study would not do, which has no folder unless ``metrics``."""
    if plan.privacy.metrics is not None and not metrics:
        raise ConfigError(
            "privacy.metrics: are released by privpart train, into a run's folder; a study has "
            "none. Leave the table out."
        )
    if plan.canaries is not None:
        raise without_canaries()
    if plan.data.evaluate_at:
        raise ConfigError(
            "data.evaluate_at: each training of a study is measured once, at its end; leave it out."
        )


def _put_together(
    plan: PlanFile,
    options: EngineOptions | None,
    read: Reader,
    report: Callable[[str], None],
    objects: Own | None = None,
) -> Training:
    if plan.references():
        read = read_task  # one's own network may write to the examples that it is given
    # no report is made of a cell, which would state whose clipping the server could not check
    options = replace(options or EngineOptions(), sums=True)
    return training(plan, objects=objects, options=options, report=report, read=read)
