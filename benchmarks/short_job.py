"""Short job: a training of five rounds from a cold start, beside a plain loop in two processes.

Run: ``python benchmarks/short_job.py [CASE ...]``. Prints processor seconds of all processes of a
job, imports and start-up included, the least and the median of several turns in which all jobs of a
case alternate. The plain job is the fairest one: the process that is started computes half of the
clients of each round with ``torch.optim.SGD`` on one thread, and a second process the other half.
The engine's jobs have an empty cache, and the one that an earlier job left.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

import torch
from engine_speed import CASES, Case, Engine, Plain
from torch.multiprocessing import get_context

_ROUNDS = 5
_KINDS = ("plain", "engine, cold", "engine, remembered", "engine, 2 workers")


def _half(name: str, part: int) -> None:
    case = CASES[name]
    clients = range(part, case.clients, 2)
    plain = Plain(case, case.users(), clients, 1)
    for _ in range(_ROUNDS):
        plain.round()


def _job(kind: str, name: str) -> None:
    torch.set_num_threads(1)
    case: Case = CASES[name]
    if kind == "plain":
        other = get_context("spawn").Process(target=_half, args=(name, 1))
        other.start()
        _half(name, 0)
        other.join()
        return
    workers = 2 if kind == "engine, 2 workers" else 1
    engine = Engine(case, case.users(), range(case.clients), workers)
    for _ in range(_ROUNDS):
        engine.round()
    engine.close()


def _cpu_seconds(kind: str, name: str, cache: str) -> float:
    """Return the user and system time of one job and the processes that it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PRIVPART_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--job", kind, name]
    subprocess.run(command, check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print, or be one of the jobs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=["EMNIST CNN, full", "MLP, full"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--job", choices=_KINDS)
    options = parser.parse_args()
    if options.job:
        _job(options.job, *options.cases)
        return
    for name in options.cases:
        seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        with tempfile.TemporaryDirectory() as kept:
            for _ in range(options.repeats):
                for kind in _KINDS:
                    with tempfile.TemporaryDirectory() as empty:
                        cache = kept if kind == "engine, remembered" else empty
                        seconds[kind].append(_cpu_seconds(kind, name, cache))
        least = min(seconds["plain"])
        for kind, each in seconds.items():
            print(
                f"{name:24} {kind:20} least {min(each):6.2f} median {statistics.median(each):6.2f} "
                f"CPU s, {least / min(each):.2f} x the plain job",
                flush=True,
            )


if __name__ == "__main__":
    main()
