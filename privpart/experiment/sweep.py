"""Sweep: train the cells of a sweep file, in several processes that share what they may.

The noise of every cell comes from its seed, so cells can be repeated and compared. These models are
simulations and not private, whatever epsilon the same plan would have with secret noise.

One set of processes trains all cells. A process loads libraries and reads the files of a task once,
however many cells it trains. Each cell has a model, clients, an engine and a noise source of its
own, so its result does not depend on the cells before it. Cells without noise that differ in the
mechanism only are one training, whose result each of them gets.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing.connection import Connection, wait
from typing import Any

from torch import Tensor
from torch.multiprocessing import get_context

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.by_name import MechanismChoice, MechanismName
from privpart.engines.options import EngineOptions
from privpart.engines.workers import (
    WorkerError,
    become_a_worker,
    cause_of_death,
    no_interrupts,
)
from privpart.experiment.metric import Accuracy, accuracy
from privpart.experiment.plan_file import PlanFile
from privpart.experiment.sweep_file import Cell
from privpart.experiment.sweep_store import CellResult
from privpart.experiment.task_data import Reader, read_task
from privpart.experiment.train import check_plans
from privpart.experiment.training import Training, training
from privpart.loop import RoundRecord
from privpart.noise.source import SeededSource
from privpart.plan import PrivacyPlan

_START = 300.0
"""Seconds to start a process and to import torch."""
_FIRST_CELL = 900.0
"""Seconds between two rounds while no cell is finished."""
_LEAST_PATIENCE = 60.0
_PATIENCE = 50
_LOOK = 1.0
"""Seconds between looks at the clock; longer ones do not count, as if the machine had slept."""
_END = 5.0
"""Seconds to wait for a killed process, which may be stuck in the kernel."""
_TELL = 0.2
"""Seconds between two messages about finished rounds."""

Outcome = CellResult | str
"""What a cell gave, or its error."""

Finished = Callable[[Cell, Outcome], None]
Advanced = Callable[[Cell, int], None]


@dataclass(slots=True)
class _Process:
    process: Any  # the spawn context's own class
    pipe: Connection
    cell: Cell | None = None
    rounds: int = 0  # of the cell, that were told
    silent: float = 0.0  # seconds that this process waited since the last message
    started: bool = False


class CellTrainer:
    """Trains cells, each on one thread of one of several processes, which stay warm.

    Args:
        jobs: number of processes. 1 trains in the calling process, where nothing can end a cell
            that hangs; with more, a script must start its work under
            ``if __name__ == "__main__":``.
        options: how the engine computes clients; None takes the defaults.
        timeout: seconds without a finished round after which a cell is taken to hang, > 0. It fails
            then, and the others continue. None allows 15 minutes until a cell is finished; then a
            minute, or 50 times the longest time between two rounds so far.

    Raises:
        ConfigError: a value that is not allowed, or a timeout for one process.
    """

    def __init__(
        self, jobs: int, *, options: EngineOptions | None = None, timeout: float | None = None
    ) -> None:
        self._jobs = checks.count("jobs", jobs)
        if timeout is not None:
            checks.positive("cell_timeout", timeout)
            if jobs == 1:
                raise ConfigError(
                    f"cell_timeout={timeout:g}: one process trains every cell itself and nothing "
                    "could end it; leave it out, or set jobs."
                )
        self._options = options
        self._timeout = timeout
        self._longest = 0.0  # seconds between two messages
        self._any_finished = False
        self._read = lru_cache(maxsize=1)(read_task)
        self._processes: list[_Process] = []
        self._closed = False

    def check(self, cells: Sequence[Cell]) -> None:
        """Make the checks of ``privpart train`` on all plans of cells, before any is trained.

        Raises:
            ConfigError: the first fault, with its cell.
        """
        plans = [(_named(cell), plan) for cell in cells for plan in cell.candidates]
        check_plans(
            plans, lambda plan: _put_together(plan, self._options, self._read, lambda _: None)
        )

    def train(
        self, cells: Sequence[Cell], finished: Finished, advanced: Advanced = lambda *_: None
    ) -> None:
        """Train cells, beginning with the first.

        Args:
            cells: to train.
            finished: called with each cell as soon as it is finished, in no fixed order. A cell
                that failed comes with its error; the others continue.
            advanced: called with a cell and how many more of its rounds are finished; of each cell
                that is finished, they sum to ``rounds_of``.

        Raises:
            WorkerError: a process could not start.
        """
        alike: dict[str, list[Cell]] = {}
        for cell in cells:
            alike.setdefault(_training_key(cell), []).append(cell)

        def all_finished(first: Cell, outcome: Outcome) -> None:
            finished(first, outcome)
            for other in alike[_training_key(first)][1:]:
                advanced(other, rounds_of(other))
                finished(other, _outcome_of(other, first, outcome))

        each = [group[0] for group in alike.values()]
        if self._jobs == 1:
            self._train_here(each, all_finished, advanced)
            return
        try:
            self._train_in_processes(each, all_finished, advanced)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes, also those that hang, and what another thread trains."""
        self._closed = True
        for one in self._processes:
            _end(one)
        self._processes = []

    def __enter__(self) -> "CellTrainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _train_here(self, cells: Sequence[Cell], finished: Finished, advanced: Advanced) -> None:
        for cell in cells:
            if self._closed:
                raise WorkerError("the training was ended.")
            told = _Told(partial(advanced, cell))
            outcome = _attempt(cell, self._options, self._read, told)
            told.say()
            advanced(cell, rounds_of(cell) - told.rounds)
            finished(cell, outcome)

    def _train_in_processes(
        self, cells: Sequence[Cell], finished: Finished, advanced: Advanced
    ) -> None:
        todo = deque(cells)
        while todo or any(one.cell for one in self._processes):
            idle = [one for one in self._processes if one.cell is None]
            while len(idle) < len(todo) and len(self._processes) < self._jobs:
                idle.append(self._new_process())
            for one in idle[: len(todo)]:
                self._give(one, todo.popleft())
            for one, said in self._heard():
                if one.cell is None:
                    continue
                if isinstance(said, int):
                    one.rounds += said
                    advanced(one.cell, said)
                    continue
                cell, one.cell = one.cell, None
                self._any_finished |= isinstance(said, CellResult)
                advanced(cell, rounds_of(cell) - one.rounds)
                finished(cell, said)

    def _new_process(self) -> _Process:
        if self._closed:
            raise WorkerError("the training was ended.")
        here, there = get_context("spawn").Pipe()
        in_main = threading.current_thread() is threading.main_thread()
        process = get_context("spawn").Process(
            target=_serve, args=(there, self._options, in_main), daemon=True
        )
        with no_interrupts():
            process.start()
        there.close()
        self._processes.append(_Process(process, here))
        return self._processes[-1]

    def _give(self, one: _Process, cell: Cell) -> None:
        one.cell, one.rounds, one.silent = cell, 0, 0.0
        try:
            one.pipe.send(cell)
        except OSError:  # it has died, which the next look finds
            return

    def _heard(self) -> Iterator[tuple[_Process, int | Outcome]]:
        """Yield what the processes say, after waiting for it; and of those that end, their end."""
        busy = [one for one in self._processes if one.cell is not None]
        began = time.monotonic()
        ready = wait([one.pipe for one in busy], _LOOK)
        # this process may have been stopped in between, and the others too
        waited = min(time.monotonic() - began, 2 * _LOOK)
        for one in busy:
            one.silent += waited
            if one.pipe in ready:
                yield from self._said_by(one)
            elif one.silent > (patience := self._patience(one)):
                self._drop(one)
                yield (
                    one,
                    f"finished no round in {patience:.4g} seconds and was taken to hang. If its "
                    "rounds only take long, set --cell-timeout (timeout) higher.",
                )

    def _said_by(self, one: _Process) -> Iterator[tuple[_Process, int | Outcome]]:
        try:
            said = one.pipe.recv()
        except (EOFError, OSError):
            yield one, self._death_of(one)
            return
        if not one.started:
            one.started, one.silent = True, 0.0
            return
        self._longest = max(self._longest, one.silent)
        one.silent = 0.0
        yield one, said

    def _patience(self, one: _Process) -> float:
        if not one.started:
            return _START
        if self._timeout is not None:
            return self._timeout
        if not self._any_finished:
            return _FIRST_CELL
        return max(_LEAST_PATIENCE, _PATIENCE * self._longest)

    def _drop(self, one: _Process) -> None:
        _end(one)
        self._processes.remove(one)

    def _death_of(self, one: _Process) -> str:
        """Return what ended a process with its cell.

        Raises:
            WorkerError: it had not started, as no other would.
        """
        one.process.join(_END)
        why = f"the process that trained it {cause_of_death(one.process.exitcode)}"
        self._drop(one)
        if not one.started:
            raise WorkerError(f"no cell was trained: {why}.")
        return f"{why}. Run the same command again, with fewer jobs."


def rounds_of(cell: Cell) -> int:
    """Return the rounds of all trainings of a cell."""
    return sum(plan.privacy.rounds for plan in cell.candidates)


def train_cells(
    cells: Sequence[Cell], trainer: CellTrainer, advanced: Advanced = lambda *_: None
) -> list[CellResult]:
    """Train cells and return their results, in the order of the cells.

    Raises:
        ConfigError: a cell was refused.
        WorkerError: a cell failed otherwise, or a process could not start.
    """
    results: dict[str, CellResult] = {}

    def finished(cell: Cell, outcome: Outcome) -> None:
        if isinstance(outcome, str):
            raise error_of_failures([outcome], _named(cell))
        results[cell.key] = outcome

    trainer.train(cells, finished, advanced)
    return [results[cell.key] for cell in cells]


def _named(cell: Cell) -> str:
    labels = ", ".join(f"{axis}={name}" for axis, name in cell.labels.items())
    return f"the cell with {labels or 'no axis'}, seed {cell.seed}"


def error_of_failures(failures: Sequence[str], said: str) -> Exception:
    """Return the error of trainings that failed: a ConfigError if each was refused by one."""
    refused = all(failure.startswith("ConfigError: ") for failure in failures)
    kind = ConfigError if refused else WorkerError
    return kind(f"{said}: {failures[0].removeprefix('ConfigError: ')}")


def _training_key(cell: Cell) -> str:
    """Return a key that cells have in common if they are the same training."""
    if all(map(_draws_nothing, cell.candidates)):
        choices = [plan.privacy for plan in cell.candidates]
        plans = [
            plan.model_copy(update={"privacy": own.model_copy(update={"mechanism": _TREE})})
            for plan, own in zip(cell.candidates, choices, strict=True)
        ]
        cell = replace(cell, candidates=tuple(plans))
    return cell.key


_TREE = MechanismChoice(name=MechanismName("tree"))


def _draws_nothing(plan: PlanFile) -> bool:
    """Return whether a plan's mechanism has no influence on its training."""
    p = plan.privacy
    takes_turns = plan.schedule is not None or plan.select is not None
    return (
        p.noise_multiplier == 0
        and p.sampling is None
        and p.adaptive_clipping is None
        and not takes_turns
    )


def _outcome_of(other: Cell, first: Cell, outcome: Outcome) -> Outcome:
    """Return the outcome of a cell that is the same training as the first."""
    if isinstance(outcome, str):
        return outcome
    chosen = [plan.to_json() for plan in first.candidates].index(outcome.plan)
    plan = other.candidates[chosen]
    try:
        plan.privacy_plan()  # a mechanism that this plan cannot have fails here too
    except ConfigError as error:
        return f"ConfigError: {error}"
    return replace(outcome, plan=plan.to_json(), cpu_seconds=0.0)


class _Told:
    """Callback that tells somebody how many rounds were finished, a few times per second.

    Args:
        tell: called with the number of rounds since the last call.
    """

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.rounds = 0
        self._told = 0
        self._last = time.monotonic()
        self._tell = tell

    def __call__(self, _: RoundRecord) -> None:
        self.rounds += 1
        if time.monotonic() - self._last >= _TELL:
            self.say()

    def say(self) -> None:
        """Tell what was not told yet."""
        if self.rounds > self._told:
            self._tell(self.rounds - self._told)
        self._told, self._last = self.rounds, time.monotonic()


def _serve(pipe: Connection, options: EngineOptions | None, in_main: bool) -> None:
    """Train cells until the other end closes the pipe."""
    become_a_worker(started_by_main_thread=in_main)
    read = lru_cache(maxsize=1)(read_task)
    pipe.send(0)  # it has started
    while True:
        try:
            cell = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(_attempt(cell, options, read, _Told(pipe.send)))


def _end(one: _Process) -> None:
    one.pipe.close()
    one.process.kill()
    one.process.join(_END)


def _attempt(cell: Cell, options: EngineOptions | None, read: Reader, told: _Told) -> Outcome:
    try:
        return run_cell(cell, options, read=read, told=told)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_cell(
    cell: Cell,
    options: EngineOptions | None = None,
    *,
    read: Reader = read_task,
    told: Callable[[RoundRecord], None] = lambda _: None,
) -> CellResult:
    """Train the candidates of one cell and return the result of the best.

    Args:
        cell: to train.
        options: how the engine computes clients; None takes the defaults.
        read: see ``training``.
        told: called after each round.

    Raises:
        ConfigError: a fault of the plan or of its data.
    """
    began = time.process_time()
    tried = [_train(plan, cell, options, read, told) for plan in cell.candidates]
    best = max(tried, key=lambda run: run.chooses)
    plan, promised = best.setup.plan, best.promised
    delta = plan.privacy.delta
    return CellResult(
        accuracy=best.accuracy,
        epsilon=promised.guarantee().epsilon(delta) if promised.noise_multiplier else None,
        noise_multiplier=float(promised.noise_multiplier),
        delta=delta,
        trained=best.setup.model.dim,
        parameter_count=best.setup.model.parameter_count,
        tuned=len(tried),
        plan=plan.to_json(),
        engine="; ".join(best.said) or str(best.setup.engine.method),
        cpu_seconds=time.process_time() - began,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """A finished training. ``chooses`` is its accuracy on the held-out examples."""

    setup: Training
    promised: PrivacyPlan
    chooses: float
    accuracy: float
    said: list[str]


def _train(
    plan: PlanFile,
    cell: Cell,
    options: EngineOptions | None,
    read: Reader,
    told: Callable[[RoundRecord], None],
) -> _Run:
    said: list[str] = []
    setup = _put_together(plan, options, read, said.append)
    promised = setup.promise()
    # nothing is released, and a setting that diverges loses by its metric
    server, _ = setup.run(
        promised, SeededSource(cell.seed), callbacks=[told], stop_if_diverged=False
    )
    chooses, measured = _accuracies(setup, server.parameters, cell.held_out)
    return _Run(setup, promised, chooses, measured, said)


def _put_together(
    plan: PlanFile, options: EngineOptions | None, read: Reader, report: Callable[[str], None]
) -> Training:
    if plan.references():
        read = read_task  # one's own network may write to the examples that it is given
    # no report is made of a cell, which would state whose clipping the server could not check
    options = replace(options or EngineOptions(explain=plan.select is None), sums=True)
    return training(plan, options=options, report=report, read=read)


def _accuracies(setup: Training, parameters: Tensor, held_out: float) -> tuple[float, float]:
    """Return the metric on the held-out first test examples, and on the others.

    A plan's own metric measures once; it cannot be held out in part.
    """
    if not held_out and not isinstance(setup.metric, Accuracy):
        return 0.0, setup.evaluate(parameters)
    x, y = setup.test
    first = round(held_out * len(x))
    if held_out and not 0 < first < len(x):
        raise ConfigError(
            f"held_out={held_out:g}: leaves {first} of {len(x)} test examples to choose by; both "
            "parts need at least one."
        )
    setup.model.load(setup.whole(parameters))
    module = setup.model.module
    chooses = accuracy(module, x[:first], y[:first]) if first else 0.0
    return chooses, accuracy(module, x[first:], y[first:])
