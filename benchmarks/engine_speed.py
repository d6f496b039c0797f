"""Engine speed: rounds of simulated clients, beside plain PyTorch in two processes.

Run: ``python benchmarks/engine_speed.py``; writes benchmarks/results/engine.json.
``short_job.py`` measures whole jobs from a cold start. ``--resume`` keeps cases that were measured.

Every way has two processes of one thread, and all ways of a case take turns in one run. The
baseline is the faster of two memory layouts of images. Rounds are measured after a few that start
processes, check the method and fill caches. Processor seconds are those of all processes of a way.
"""

import frame

import time
from collections.abc import Sequence
from typing import Any

import torch
from engine_cases import CASES, CLIP, DEFAULT, SMALLEST, Case, Plain
from torch import Tensor
from torch.multiprocessing import get_context

from privpart import EmbeddedEngine, RoundTask, Users
from privpart.clip import add_in_place

TURN = 0.5
"""Seconds of rounds that a turn lasts at least."""
_SETTLING, _STARTING = 4, 30.0
"""Rounds before the first turn, and seconds in which the engine's workers start."""
METHOD = {
    "round": "every client of a cohort trains from the same start, its update is clipped to 1 and "
    "all are added up; see engine_cases.py for cohorts and networks",
    "ways": "two processes of one thread each; plain PyTorch in two layouts of images; rounds "
    "after the first four, or after those in which the engine's workers start",
    "seconds": "least, median and most of the turns; a turn is half a second of rounds; ratio: of "
    "plain PyTorch's faster layout to the engine, of the least and the median",
    "difference_of_sums": "between one engine's round and one of plain PyTorch, whose batches have "
    "another order, over the length of the engine's sum",
}


class PlainPair:
    """Plain PyTorch in two processes, which add their halves of the cohort up."""

    def __init__(self, name: str, layout: str) -> None:
        context = get_context("spawn")
        self._sums = [torch.zeros(CASES[name].model().dim).share_memory_() for _ in range(2)]
        self._pipes, self._processes = [], []
        for part, total in enumerate(self._sums):
            here, there = context.Pipe()
            half = context.Process(target=_half, args=(name, part, layout, total, there))
            half.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(half)

    def round(self) -> Tensor:
        for pipe in self._pipes:
            pipe.send(True)
        for pipe in self._pipes:
            pipe.recv()
        return self._sums[0] + self._sums[1]

    def cpu(self) -> float:
        return _cpu([process.pid for process in self._processes])

    def settled(self) -> bool:
        return True

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()


def _half(name: str, part: int, layout: str, total: Tensor, pipe: Any) -> None:
    torch.set_num_threads(1)
    case = CASES[name]
    plain = Plain(case, case.users(), range(part, case.clients, 2), layout=layout)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        total.copy_(plain.round())
        pipe.send(True)


class Engine:
    """The same work with the engine; further options are the engine's."""

    def __init__(
        self, case: Case, users: Users | None = None, workers: int = 1, **options: Any
    ) -> None:
        model = case.model()
        self.start = model.flat.clone()
        self.task = RoundTask(0, tuple(range(case.clients)), CLIP, "benchmark")
        self.engine = EmbeddedEngine(
            model,
            users or case.users(),
            local=case.local(),
            data_seed=0,
            workers=workers,
            sums=True,
            **({"precision": case.precision} | options),
        )

    def round(self) -> Tensor:
        total = torch.zeros(len(self.start), dtype=torch.float64)
        sums = self.engine.sums(self.task, self.start)
        if sums is not None:
            for part in sums:
                total += part.total
            return total
        for update in self.engine.run(self.task, self.start):
            add_in_place(total, update.update)
        return total

    def cpu(self) -> float:
        pool = self.engine._pool
        return _cpu(pool.pool.pids if pool else [])

    def settled(self) -> bool:
        """Whether all processes compute."""
        pool = self.engine._pool
        return pool is not None and pool.pool.ready()

    def close(self) -> None:
        self.engine.close()


def _cpu(pids: Sequence[int]) -> float:
    """Return the processor seconds of this process and of others."""
    return time.process_time() + sum(map(frame.of_process, pids))


def measure(name: str, turns: int, limit: float) -> dict[str, Any]:
    """Measure all ways of a case, in fewer turns if they take ``limit`` seconds."""
    case = CASES[name]
    ways: dict[str, Any] = {f"plain, {layout}": PlainPair(name, layout) for layout in case.layouts}
    ways["engine"] = Engine(case, workers=2)
    sums: dict[str, Tensor] = {}
    for own, way in ways.items():
        until, rounds = time.perf_counter() + min(_STARTING, limit), 0
        while rounds < _SETTLING or (not way.settled() and time.perf_counter() < until):
            sums[own] = way.round()
            rounds += 1
    times = frame.in_turns(
        {own: way.round for own, way in ways.items()},
        turns,
        clocks={own: way.cpu for own, way in ways.items()},
        at_least=TURN,
        warm=False,
        limit=limit,
    )
    for way in ways.values():
        way.close()
    rows = {own: frame.spreads(spent) for own, spent in times.items()}
    plain = [row for own, row in rows.items() if own != "engine"]
    return {
        "ratio": {
            key: min(row[key] for row in plain) / rows["engine"][key]
            for key in ("wall_least", "wall_median", "cpu_least", "cpu_median")
        },
        "aim": case.aim,
        "turns": len(times["engine"]),
        "engine": str(ways["engine"].engine.method),
        "difference_of_sums": float(
            (sums["engine"] - sums["plain, contiguous"]).norm() / sums["engine"].norm()
        ),
        "ways": rows,
    }


def main() -> None:
    given = frame.options(
        __doc__,
        "engine.json",
        quick={"turns": 1, "seconds": 1.0, "cases": SMALLEST},
        turns=5,
        seconds=600.0,
        cases=frame.among(CASES, DEFAULT),
        resume=False,
    )
    torch.set_num_threads(1)
    result = frame.Result(given.result, "torch", threads="two processes of one each")
    result.cases(
        given.cases,
        lambda name: measure(name, given.turns, given.seconds),
        resume=given.resume,
        method=METHOD,
    )


if __name__ == "__main__":
    main()
