"""Turns: jobs that run one after the other, again and again, so that other load slows them alike.

The machines that these benchmarks run on are shared. A ratio is therefore taken within one run, and
of processor time as well as of wall-clock time: the time of the process's threads, without that of
other programs.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Job = Callable[[], object]


class Seconds(NamedTuple):
    """Seconds of one job, once."""

    wall: float
    cpu: float


def seconds(job: Job) -> Seconds:
    """Run a job; return its seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    job()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def in_turns(jobs: Mapping[str, Job], turns: int) -> dict[str, list[Seconds]]:
    """Return the seconds of every job in every turn, after a turn that does not count."""
    times: dict[str, list[Seconds]] = {name: [] for name in jobs}
    for turn in range(turns + 1):
        for name, job in jobs.items():
            spent = seconds(job)
            if turn:
                times[name].append(spent)
    return times


def nanoseconds(times: list[Seconds], values: int) -> dict[str, float]:
    """Return the least and the median nanoseconds per value."""
    wall, cpu = ([1e9 * s / values for s in column] for column in zip(*times, strict=True))
    return {
        "cpu_least": min(cpu),
        "cpu_median": statistics.median(cpu),
        "wall_least": min(wall),
        "wall_median": statistics.median(wall),
    }


def ratios(times: list[Seconds], base: list[Seconds]) -> dict[str, float]:
    """Return times over the base's: of the least ones, and the median over the turns."""
    found = {}
    for clock in ("cpu", "wall"):
        above, below = ([getattr(s, clock) for s in column] for column in (times, base))
        pairs = [a / b for a, b in zip(above, below, strict=True)]
        found[f"{clock}_least"] = min(above) / min(below)
        found[f"{clock}_median"] = statistics.median(pairs)
    return found
