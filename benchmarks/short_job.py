"""Short job: a training of five rounds from a cold start, beside plain PyTorch in two processes.

Run: ``python benchmarks/short_job.py``; writes benchmarks/results/short_job.json. A job is a whole
command: imports, start-up and rounds. The plain job is the fairest one: the process that is started
computes half of the clients of each round on one thread, and a second process the other half. The
engine's jobs have an empty cache, or the one that an earlier job left. All jobs of all cases take
turns, and results are written after each turn.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engine_cases import CASES, Plain
from engine_speed import Engine
from machine import machine
from torch.multiprocessing import get_context

RESULT = Path(__file__).parent / "results" / "short_job.json"
_ROUNDS = 5
_KINDS = ("plain", "engine, cold", "engine, remembered", "engine, cold, 2 workers")
_LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def _half(name: str, part: int) -> None:
    case = CASES[name]
    layout = _LAYOUTS["channels last" if case.convolutional else "contiguous"]
    plain = Plain(case, case.users(), range(part, case.clients, 2), layout=layout)
    for _ in range(_ROUNDS):
        plain.round()


def _job(kind: str, name: str) -> None:
    torch.set_num_threads(1)
    if kind == "plain":
        other = get_context("spawn").Process(target=_half, args=(name, 1))
        other.start()
        _half(name, 0)
        other.join()
        return
    engine = Engine(CASES[name], workers=2 if kind.endswith("workers") else 1)
    for _ in range(_ROUNDS):
        engine.round()
    engine.close()


def _seconds(kind: str, name: str, cache: str) -> tuple[float, float]:
    """Return wall-clock seconds of a job, and the processor time of all its processes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PRIVPART_CACHE_DIR": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages are compiled
    command = [sys.executable, __file__, "--job", kind, "--cases", name]
    subprocess.run(command, check=True, env=environment)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print, or be one of the jobs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=list(CASES)[:9], choices=list(CASES))
    parser.add_argument("--kinds", nargs="*", default=list(_KINDS), choices=_KINDS)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--resume", action="store_true", help="add to the turns of the result")
    parser.add_argument("--job", choices=_KINDS)
    options = parser.parse_args()
    if options.job:
        _job(options.job, *options.cases)
        return
    found: dict[str, dict[str, list[tuple[float, float]]]] = {
        name: {kind: [] for kind in options.kinds} for name in options.cases
    }
    done = 0
    if options.resume and options.result.exists():
        found = json.loads(options.result.read_text())["seconds"]
        done = min(len(times) for kinds in found.values() for times in kinds.values())
    with tempfile.TemporaryDirectory() as kept:
        for _ in range(done, options.turns):
            for name, kinds in found.items():
                for kind, times in kinds.items():
                    with tempfile.TemporaryDirectory() as empty:
                        cache = kept if kind == "engine, remembered" else empty
                        times.append(_seconds(kind, name, cache))
            _write(options.result, found)
    for name, kinds in found.items():
        print(name, {kind: _row(times, kinds["plain"]) for kind, times in kinds.items()})


def _row(times: list[tuple[float, float]], plain: list[tuple[float, float]]) -> dict[str, float]:
    row = {}
    for place, clock in enumerate(("wall", "cpu")):
        own, base = [t[place] for t in times], [t[place] for t in plain]
        row |= {f"{clock}_least": min(own), f"{clock}_median": statistics.median(own)}
        row |= {
            f"{clock}_ratio_least": min(base) / min(own),
            f"{clock}_ratio_median": statistics.median(base) / statistics.median(own),
        }
    return {key: round(value, 3) for key, value in row.items()}


def _write(path: Path, found: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    cases: dict[str, Any] = {
        name: {
            "turns": len(kinds["plain"]),
            "jobs": {kind: _row(times, kinds["plain"]) for kind, times in kinds.items()},
        }
        for name, kinds in found.items()
    }
    document = {
        "method": {
            "job": f"{_ROUNDS} rounds by a command, imports and start-up included",
            "ratio": "seconds of plain PyTorch in two processes over those of the job",
            "seconds": "wall-clock and processor seconds of each turn",
        },
        "machine": machine("torch") | {"threads": "one of each process"},
        "cases": cases,
        "seconds": found,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
