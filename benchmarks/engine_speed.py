"""Engine speed: rounds of simulated clients, beside plain PyTorch in two processes.

Run: ``python benchmarks/engine_speed.py``; writes benchmarks/results/engine.json.
``short_job.py`` measures whole jobs from a cold start.

Every way has two processes of one thread, and all ways of a case take turns in one run, so that
other load affects all of them alike. The baseline is the faster of two memory layouts of images.
Rounds are measured after a few that start processes, choose a method and fill caches. Processor
seconds are those of all processes of a way.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from engine_cases import CASES, CLIP, Case, Plain
from machine import machine
from torch import Tensor
from torch.multiprocessing import get_context

from privpart import EmbeddedEngine, RoundTask, Users
from privpart.clip import add_in_place

RESULT = Path(__file__).parent / "results" / "engine.json"
_TURN = 0.5
_SETTLING, _STARTING = 4, 30.0
"""Rounds before the first turn, and seconds in which the engine's workers start."""
_LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


class Way(Protocol):
    """A way to compute rounds."""

    def round(self) -> Tensor:
        """Return the sum of the clipped updates."""

    def cpu(self) -> float:
        """Return the processor seconds of all its processes."""

    def close(self) -> None:
        """End them."""

    def settled(self) -> bool:
        """Return whether all processes compute."""


class PlainPair:
    """Plain PyTorch in two processes, which add their halves of the cohort up."""

    def __init__(self, name: str, layout: str) -> None:
        context, case = get_context("spawn"), CASES[name]
        dim = case.model().dim
        self._sums = [torch.zeros(dim).share_memory_() for _ in range(2)]
        self._pipes, self._processes = [], []
        for part, total in enumerate(self._sums):
            here, there = context.Pipe()
            half = context.Process(target=_half, args=(name, part, layout, total, there))
            half.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(half)

    def round(self) -> Tensor:
        """Return the sum of the clipped updates."""
        for pipe in self._pipes:
            pipe.send(True)
        for pipe in self._pipes:
            pipe.recv()
        return self._sums[0] + self._sums[1]

    def cpu(self) -> float:
        """Return the processor seconds of all its processes."""
        return _cpu([process.pid for process in self._processes])

    def settled(self) -> bool:
        """Return whether all processes compute."""
        return True

    def close(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()


def _half(name: str, part: int, layout: str, total: Tensor, pipe: Any) -> None:  # noqa: ANN401
    torch.set_num_threads(1)
    case: Case = CASES[name]
    clients = range(part, case.clients, 2)
    plain = Plain(case, case.users(), clients, layout=_LAYOUTS[layout])
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        total.copy_(plain.round())
        pipe.send(True)


class Engine:
    """The same work with the engine."""

    def __init__(
        self,
        case: Case,
        users: Users | None = None,
        workers: int = 1,
        **options: Any,  # noqa: ANN401  the engine's
    ) -> None:
        model = case.model()
        self.start = model.flat.clone()
        self.task = RoundTask(0, tuple(range(case.clients)), CLIP, "benchmark")
        self.said: list[str] = []
        self.engine = EmbeddedEngine(
            model,
            users or case.users(),
            local=case.local(),
            data_seed=0,
            workers=workers,
            sums=True,
            explain=True,
            report=self.said.append,
            **({"precision": case.precision} | options),
        )

    def round(self) -> Tensor:
        """Return the sum of the clipped updates."""
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
        """Return the processor seconds of all its processes."""
        pool = self.engine._pool
        return _cpu([w.process.pid for w in pool._workers] if pool else [])

    def settled(self) -> bool:
        """Return whether all processes compute."""
        pool = self.engine._pool
        return pool is not None and pool.ready()

    def close(self) -> None:
        """End the workers."""
        self.engine.close()


def _cpu(pids: Sequence[int]) -> float:
    """Return the processor seconds of this process and of others."""
    return time.process_time() + sum(map(_cpu_of, pids))


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, turns: int, seconds: float) -> dict[str, Any]:
    """Measure all ways of a case in so many turns, fewer if they took that many seconds."""
    case = CASES[name]
    layouts = list(_LAYOUTS) if case.convolutional else ["contiguous"]
    ways: dict[str, Way] = {f"plain, {layout}": PlainPair(name, layout) for layout in layouts}
    engine = ways["engine"] = Engine(case, workers=2)
    sums: dict[str, Tensor] = {}
    for own, way in ways.items():
        began, rounds = time.perf_counter(), 0
        while rounds < _SETTLING or (not way.settled() and time.perf_counter() - began < _STARTING):
            sums[own] = way.round()
            rounds += 1
    wall: dict[str, list[float]] = {own: [] for own in ways}
    cpu: dict[str, list[float]] = {own: [] for own in ways}
    began = time.perf_counter()
    while len(wall["engine"]) < turns and time.perf_counter() - began < seconds:
        for own, way in ways.items():
            spent = turn(way)
            wall[own].append(spent[0])
            cpu[own].append(spent[1])
    for way in ways.values():
        way.close()
    rows = {
        own: {
            f"{clock}_{which}": function(times[own])
            for clock, times in (("wall", wall), ("cpu", cpu))
            for which, function in (
                ("least", min),
                ("median", statistics.median),
                ("most", max),
            )
        }
        for own in ways
    }
    plain = [row for own, row in rows.items() if own != "engine"]
    ratios = {
        f"{clock}_{which}": min(row[f"{clock}_{which}"] for row in plain)
        / rows["engine"][f"{clock}_{which}"]
        for clock in ("wall", "cpu")
        for which in ("least", "median")
    }
    same = float((sums["engine"] - sums["plain, contiguous"]).norm() / sums["engine"].norm())
    return {
        "ratio": ratios,
        "aim": case.aim,
        "turns": len(wall["engine"]),
        "engine": engine.said,  # type: ignore[attr-defined]
        "difference_of_sums": same,
        "ways": rows,
    }


def turn(way: Way) -> tuple[float, float]:
    """Return wall-clock and processor seconds of a round, the mean over at least half a second."""
    began, began_cpu, rounds = time.perf_counter(), way.cpu(), 0
    while rounds == 0 or time.perf_counter() - began < _TURN:
        way.round()
        rounds += 1
    return (time.perf_counter() - began) / rounds, (way.cpu() - began_cpu) / rounds


def main() -> None:
    """Write the results and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=600, help="at most, for a case")
    parser.add_argument("--cases", nargs="*", default=list(CASES)[:9], choices=list(CASES))
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--resume", action="store_true", help="keep cases that were measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {}
    if options.resume and options.result.exists():
        cases = json.loads(options.result.read_text())["cases"]
    for name in (name for name in options.cases if name not in cases):
        cases[name] = measure(name, options.turns, options.seconds)
        print(name, {k: round(v, 2) for k, v in cases[name]["ratio"].items()}, flush=True)
        _write(options.result, cases)


def _write(path: Path, cases: dict[str, Any]) -> None:
    document = {
        "method": {
            "round": "every client of a cohort trains from the same start, its update is clipped "
            "to 1 and all are added up; see engine_cases.py for cohorts and networks",
            "ways": "two processes of one thread each; plain PyTorch in two layouts of images; "
            "rounds after the first four, or after those in which the engine's workers start",
            "seconds": "least, median and most of the turns; a turn is half a second of rounds; "
            "ratio: of plain PyTorch's faster layout to the engine, of the least and the median",
            "difference_of_sums": "between one engine's round and one of plain PyTorch, whose "
            "batches have another order, over the length of the engine's sum",
        },
        "machine": machine("torch") | {"threads": "two processes of one each"},
        "cases": cases,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
