"""Sweep: runs the cells of a sweep file on several processes, each finished cell kept at once.

The noise of every cell comes from its seed, so that cells can be repeated and compared: these
models are simulations and not private, whatever their epsilon says about a run with secret noise.
"""

import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch
from joblib import Parallel, delayed
from torch import Tensor

from accounting.checks import ConfigError
from privpart.engines.workers import WorkerError, keep_freed_memory
from privpart.loop import fit
from privpart.noise.source import SeededSource
from privpart.plan_file import PlanFile
from privpart.server import Server
from privpart.sweep_file import Cell, Sweep
from privpart.sweep_store import SweepStore
from privpart.training import Training, accuracy, training


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a cell gave.

    Attributes:
        accuracy: on the test examples that chose nothing, in [0, 1].
        epsilon: of the plan, had its noise been secret; None without noise.
        noise_multiplier: of the plan, solved for if it has a target.
        delta: of the epsilon.
        trained: numbers that train.
        numbers: of the whole network.
        chosen: the plan that was trained; by held-out accuracy if there were several.
        tuned: how many there were.
        engine: how the clients were computed.
        cpu_seconds: processor time.
    """

    accuracy: float
    epsilon: float | None
    noise_multiplier: float
    delta: float
    trained: int
    numbers: int
    chosen: PlanFile
    tuned: int
    engine: str
    cpu_seconds: float


def run_sweep(
    sweep: Sweep,
    store: SweepStore,
    *,
    jobs: int,
    finished: Callable[[Cell], None] = lambda _: None,
) -> int:
    """Train the cells that the store does not have yet; return how many failed.

    Args:
        sweep: what to train.
        store: gets each cell as soon as it is finished; a kill loses only the cells in work.
        jobs: processes, of one thread each.
        finished: called after each cell.

    A cell that fails is recorded with its error and tried again the next time.

    Raises:
        WorkerError: a process was killed.
    """
    done = store.finished()
    missing = [cell for cell in sweep.cells if cell.key not in done]
    failed = 0
    work = (delayed(_attempt)(number, cell) for number, cell in enumerate(missing))
    outcomes = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)(work)
    try:
        for number, outcome in outcomes:
            store.add(missing[number], outcome)
            failed += isinstance(outcome, str)
            finished(missing[number])
    except BrokenProcessPool:
        raise WorkerError(
            "a process of the sweep was ended, by the system for its memory or by somebody. "
            "Finished cells are kept: run the same command again, perhaps with fewer jobs."
        ) from None
    return failed


def run_cell(cell: Cell) -> Result:
    """Train the candidates of one cell on one thread and return the best.

    Raises:
        ConfigError: whatever is wrong with the plan or its data.
    """
    torch.set_num_threads(1)
    began = time.process_time()
    tried = [_train(plan, cell) for plan in cell.candidates]
    best = max(range(len(tried)), key=lambda number: tried[number].chooses)
    run, plan = tried[best], cell.candidates[best]
    privacy, delta = run.server.plan, plan.privacy.delta
    return Result(
        accuracy=run.accuracy,
        epsilon=privacy.guarantee().epsilon(delta) if privacy.noise_multiplier else None,
        noise_multiplier=float(privacy.noise_multiplier),
        delta=delta,
        trained=run.setup.model.dim,
        numbers=run.setup.model.numbers,
        chosen=plan,
        tuned=len(tried),
        engine="; ".join(run.said) or str(run.setup.engine.method),
        cpu_seconds=time.process_time() - began,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One training: ``chooses`` is its accuracy on the examples that are held out for that."""

    setup: Training
    server: Server
    chooses: float
    accuracy: float
    said: list[str]


def _train(plan: PlanFile, cell: Cell) -> _Run:
    said: list[str] = []
    setup = training(plan, report=said.append)
    server = Server(
        plan.privacy_plan(),
        setup.start,
        source=SeededSource(cell.seed),
        optimizer=plan.server,
    )
    fit(server, setup.engine, setup.cohorts)
    chooses, measured = _accuracies(setup, server.parameters, cell.held_out)
    return _Run(setup, server, chooses, measured, said)


def _accuracies(setup: Training, parameters: Tensor, held_out: float) -> tuple[float, float]:
    """On the first share of the test examples, which chooses, and on the others."""
    first = round(held_out * len(setup.test_x))
    if held_out and not 0 < first < len(setup.test_x):
        raise ConfigError(
            f"held_out={held_out:g}: leaves {first} of {len(setup.test_x)} test examples to choose "
            "by; both parts need some."
        )
    setup.model.load(setup.whole(parameters))
    module, x, y = setup.model.module, setup.test_x, setup.test_y
    chooses = accuracy(module, x[:first], y[:first]) if first else 0.0
    return chooses, accuracy(module, x[first:], y[first:])


def _attempt(number: int, cell: Cell) -> tuple[int, Result | str]:
    """In a process of joblib's."""
    keep_freed_memory()
    try:
        return number, run_cell(cell)
    except Exception as error:
        return number, f"{type(error).__name__}: {error}"
