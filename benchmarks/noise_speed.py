"""Noise speed: draws and streams of integers compared with the float32 noise of before.

Run: ``python benchmarks/noise_speed.py``; writes benchmarks/results/noise.json.

Everything is measured per parameter of a model of 10^7, on one thread, in reused vectors; the last
part on one thread and on two. What is compared takes turns (``benchmarks/turns.py``). A stream is
measured over cycles of 8 rounds in the middle of a run, so that a tree's cycles have equal work.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy loads

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from float_noise import FloatStream, float_draw
from machine import machine
from turns import Job, Seconds, in_turns, nanoseconds, ratios, seconds

from accounting import BinaryTree, BufferedToeplitz, Independent, Mechanism, Toeplitz
from privpart import NoiseStream, SecretSource

RESULT = Path(__file__).parent / "results" / "noise.json"
DIM = 10_000_000
STDDEV = 2.0**20
PIECE = 2**19
"""Coordinates that a stream draws at once."""
ROUNDS, FIRST, CYCLE = 64, 16, 8
TURNS, CYCLES = 9, 4

BLT3 = BufferedToeplitz(
    ROUNDS, decay=(0.703864, 0.970182, 0.998105), scale=(0.295937, 0.131099, 0.057899)
)
MECHANISMS: dict[str, Mechanism] = {
    "independent": Independent(ROUNDS),
    "tree": BinaryTree(ROUNDS),
    "tree, online": BinaryTree(ROUNDS, estimator="online"),
    "Toeplitz, 8 bands": Toeplitz.square_root(ROUNDS, bands=8),
    "BLT, 3 buffers": BLT3,
}
AIMS = {"draw": 1.2} | dict.fromkeys(("tree", "Toeplitz, 8 bands", "BLT, 3 buffers"), 1.6)
BEFORE = "float32 draw, before"


def draws(dim: int) -> dict[str, list[Seconds]]:
    """Return the seconds of an exact draw, and of what stands beside it."""
    exact = SecretSource().draws(0, b"")
    integers = np.empty(dim, np.int32)
    floats, copied = torch.empty(dim), torch.empty(dim)
    zeros, words = bytes(8 * PIECE), bytearray(8 * PIECE + 15)
    starts = range(0, dim, PIECE)

    def exact_draw() -> None:
        for start in starts:
            exact.rounded(0, start, integers[start : start + PIECE], weight=STDDEV)

    def keystream() -> None:
        cipher = Cipher(algorithms.AES256(bytes(32)), modes.CTR(bytes(16))).encryptor()
        for start in starts:
            cipher.update_into(zeros[: 8 * min(PIECE, dim - start)], words)

    jobs: dict[str, Job] = {
        "exact draw": exact_draw,
        BEFORE: lambda: float_draw(0, 0, STDDEV, floats),
        "torch.randn": lambda: torch.randn(dim, out=floats),
        "AES-256 words alone": keystream,
        "memory copy": lambda: copied.copy_(floats),
    }
    return in_turns(jobs, TURNS)


def stream(mechanism: Mechanism, dim: int) -> dict[str, list[Seconds]]:
    """Return the seconds of cycles of rounds: of the exact stream, and of floats."""
    exact = NoiseStream(mechanism, dim=dim, stddev=STDDEV, source=SecretSource())
    floats = FloatStream(mechanism.noise_program(), dim, STDDEV)
    integers, numbers = torch.empty(dim, dtype=exact.dtype), torch.empty(dim)
    jobs: dict[str, Job] = {
        "exact": lambda: exact.next(out=integers),
        "before": lambda: floats.next(numbers),
    }
    cycles: dict[str, list[Seconds]] = {name: [] for name in jobs}
    for t in range(FIRST + CYCLES * CYCLE):
        for name, job in jobs.items():
            spent = seconds(job)
            if t >= FIRST and not (t - FIRST) % CYCLE:
                cycles[name].append(Seconds(0.0, 0.0))
            if t >= FIRST:
                wall, cpu = cycles[name][-1]
                cycles[name][-1] = Seconds(wall + spent.wall, cpu + spent.cpu)
    return cycles


def two_threads(dim: int) -> dict[str, list[Seconds]]:
    """Return the seconds of a tree's stream on one thread and on two, which take turns."""
    streams = [
        NoiseStream(BinaryTree(ROUNDS), dim=dim, stddev=STDDEV, source=SecretSource())
        for _ in range(2)
    ]
    out = torch.empty(dim, dtype=streams[0].dtype)

    def job(threads: int) -> None:
        torch.set_num_threads(threads)
        streams[threads - 1].next(out=out)
        torch.set_num_threads(1)

    return in_turns({"1 thread": lambda: job(1), "2 threads": lambda: job(2)}, 2 * CYCLE)


def rows(
    times: dict[str, list[Seconds]], base: str, values: int, *, aim: float | None = None
) -> dict[str, Any]:
    """Return nanoseconds per value of every job, and the first job's ratio to the base."""
    first = next(iter(times))
    return {
        "nanoseconds": {name: nanoseconds(spent, values) for name, spent in times.items()},
        "ratio": ratios(times[first], times[base]),
        "aim": aim,
    }


def measured(dim: int) -> dict[str, Any]:
    """Measure everything."""
    torch.set_num_threads(1)
    streams = {
        name: rows(stream(mechanism, dim), "before", CYCLE * dim, aim=AIMS.get(name))
        for name, mechanism in MECHANISMS.items()
    }
    threads = two_threads(dim)
    return {
        "draw": rows(draws(dim), BEFORE, dim, aim=AIMS["draw"]),
        "streams": streams,
        "threads": rows(threads, "2 threads", dim),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures in words."""
    text = []
    parts = {"draw": found["draw"], **found["streams"], "tree, threads": found["threads"]}
    for part, own in parts.items():
        for name, row in own["nanoseconds"].items():
            cpu, wall = (f"{row[f'{c}_least']:6.2f} {row[f'{c}_median']:6.2f}" for c in CLOCKS)
            text.append(f"{part:20} {name:22} ns, least and median: processor {cpu}, wall {wall}")
        cpu, wall = (
            f"{own['ratio'][f'{c}_least']:.2f} {own['ratio'][f'{c}_median']:.2f}" for c in CLOCKS
        )
        aim = f" (aim: at most {own['aim']})" if own["aim"] else ""
        text.append(f"{part:20} ratio: processor {cpu}, wall {wall}{aim}")
    return text


CLOCKS = ("cpu", "wall")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--print-only", action="store_true", help="write no file")
    options = parser.parse_args()
    facts = machine("cryptography", "numpy", "torch") | {"dim": options.dim}
    found = measured(options.dim)
    facts["load_average_after"] = os.getloadavg()[0]
    print(*lines(found), sep="\n")
    if not options.print_only:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps({"machine": facts, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
