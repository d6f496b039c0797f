"""Noise speed: draws compared with torch.randn, and each mechanism's work relative to its draws.

Run: ``python benchmarks/noise_speed.py``; writes benchmarks/results/noise.json.

All jobs take turns in one run, so the ratios are meaningful on a shared machine. Draws are measured
in nanoseconds per value of a vector of 10^7, minimum and median of several repeats. torch.randn
appears twice: into a new vector, for which the system allocates pages, and into a reused one, as in
all of our rows. Mechanisms are measured by the time of ``next()`` divided by that of its draws,
minus 1, over 16 rounds in the middle of a run; minimum, median and maximum.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    Independent,
    Mechanism,
    Toeplitz,
    footprint,
)
from privpart import NoiseStream, SecretSource, SeededSource

RESULT = Path(__file__).parent / "results" / "noise.json"
DIM = 10_000_000
ROUNDS, WARM = 32, 16
THREADS = (1, 2)
DRAW_REPEATS, STREAM_REPEATS = 15, 5

BLT3 = BufferedToeplitz(
    ROUNDS, decay=(0.703864, 0.970182, 0.998105), scale=(0.295937, 0.131099, 0.057899)
)
MECHANISMS: dict[str, Mechanism] = {
    "independent": Independent(ROUNDS),
    "tree": BinaryTree(ROUNDS),
    "tree, online": BinaryTree(ROUNDS, estimator="online"),
    "BLT, 3 buffers": BLT3,
    "Toeplitz, 16 bands": Toeplitz.square_root(ROUNDS, bands=16),
}


def seconds(job: Callable[[], object]) -> float:
    """Return the wall-clock time of one run of ``job``."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def draws() -> dict[str, dict[str, float]]:
    """Return nanoseconds per value of each generator."""
    out = torch.empty(DIM)
    secret, seeded = SecretSource(), SeededSource(0)
    jobs: dict[str, Callable[[], object]] = {
        "torch.randn, fresh vector": lambda: torch.randn(DIM),
        "torch.randn, reused vector": lambda: torch.randn(DIM, out=out),
        "SecretSource, reused vector": lambda: secret.normal(0, DIM, out=out),
        "SeededSource, reused vector": lambda: seeded.normal(0, DIM, out=out),
        "SecretSource, fresh vector": lambda: secret.normal(0, DIM),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(DRAW_REPEATS + 1):
        for name, job in jobs.items():
            spent = seconds(job)
            if repeat:
                times[name].append(1e9 * spent / DIM)
    return {name: spread(values) for name, values in times.items()}


def streams() -> dict[str, dict[str, float]]:
    """Return each mechanism's work as a share of its draws, and its state in vectors."""
    shares: dict[str, list[float]] = {name: [] for name in MECHANISMS}
    for _ in range(STREAM_REPEATS):
        for name, mechanism in MECHANISMS.items():
            shares[name].append(own_work(mechanism))
    return {
        name: spread(values) | {"state_vectors": footprint(MECHANISMS[name]).state_vectors}
        for name, values in shares.items()
    }


def own_work(mechanism: Mechanism) -> float:
    """Return the time of 16 rounds divided by that of their draws alone, minus 1."""
    source, out = SeededSource(0), torch.empty(DIM)
    stream = NoiseStream(mechanism, dim=DIM, stddev=1.0, source=source)
    for _ in range(WARM):
        stream.next(out=out)
    draw = round_ = 0.0
    for _ in range(ROUNDS - WARM):
        draw += seconds(lambda: source.normal(0, DIM, out=out))
        round_ += seconds(lambda: stream.next(out=out))
    program = mechanism.noise_program()
    drawn = sum(len(op.draws) for t in range(WARM, ROUNDS) for op in program.ops(t))
    return round_ / (draw * drawn / (ROUNDS - WARM)) - 1


def spread(values: list[float]) -> dict[str, float]:
    """Return minimum, median and maximum."""
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def machine() -> dict[str, Any]:
    """Return the facts about the machine that a reader needs to judge the figures."""
    packages = ("cryptography", "numpy", "torch")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.system(),
        "packages": {name: metadata.version(name) for name in packages},
        "dim": DIM,
        "draw_repeats": DRAW_REPEATS,
        "stream_repeats": STREAM_REPEATS,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measured(threads: int) -> dict[str, Any]:
    """Run this script in a fresh interpreter with that many threads; return its figures."""
    variables = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, __file__, "--measure"] + (["--streams"] if threads == 1 else [])
    done = subprocess.run(
        command, env={**os.environ, **variables}, check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    """Measure, print and write."""
    if "--measure" in sys.argv:
        rows = {"draws": draws()} | ({"streams": streams()} if "--streams" in sys.argv else {})
        print(json.dumps(rows))
        return
    facts = machine()
    runs = {f"{threads} threads": measured(threads) for threads in THREADS}
    print(f"{facts['processor']}, {facts['cores']} cores, load {facts['load_average']:.2f}")
    for threads, rows in runs.items():
        base = rows["draws"]["torch.randn, reused vector"]
        for name, row in rows["draws"].items():
            ratios = row["least"] / base["least"], row["median"] / base["median"]
            print(
                f"{threads}  {name:28} {row['least']:6.2f} ns least {row['median']:6.2f} median   "
                f"{ratios[0]:.2f} x and {ratios[1]:.2f} x torch.randn reused"
            )
        for name, row in rows.get("streams", {}).items():
            print(
                f"{threads}  {name:28} own work {100 * row['least']:5.1f} % to "
                f"{100 * row['most']:.1f} % (median {100 * row['median']:.1f} %) of its draws; "
                f"{row['state_vectors']:.0f} vectors"
            )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"machine": facts, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
