"""Fits: our error and CPU seconds beside jax_privacy's, in one run.

Run: ``python benchmarks/fits.py [PYTHON]``, where PYTHON is an interpreter that has jax_privacy
(default: this one). Without jax_privacy there, only our own rows are printed. Errors are the root
mean squared error of the prefix sums at mu = 1, evaluated by our own code for both, from the
coefficients.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from accounting import BufferedToeplitz, Mechanism, Participation, Toeplitz, error, optimize

RUNS = [(1600, 1, 1600), (1600, 5, 320), (2000, 6, 314)]
BANDS = 32
BUFFERS = 3
THEIRS = """
import json, sys, time
import jax
jax.config.update("jax_enable_x64", True)
from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz
for n, k, b in json.loads(sys.argv[1]):
    start = time.process_time()
    blt = buffered_toeplitz.optimize(n=n, min_sep=b, max_participations=k, error="mean",
                                     max_buffers=int(sys.argv[3]))
    taken = time.process_time() - start
    print(json.dumps(["blt", n, k, b, taken, [list(map(float, blt.buf_decay)),
                                              list(map(float, blt.output_scale))]]))
    start = time.process_time()
    coefficients = toeplitz.optimize_banded_toeplitz(n=n, bands=int(sys.argv[2]))
    taken = time.process_time() - start
    print(json.dumps(["toeplitz", n, k, b, taken, list(map(float, coefficients))]))
"""


def timed(fit: Callable[[], Mechanism]) -> tuple[Mechanism, float]:
    """Return what a fit finds and its CPU seconds."""
    start = time.process_time()
    return fit(), time.process_time() - start


def ours(kind: str, run: Participation) -> tuple[Mechanism, float]:
    """Fit one kind, cold."""
    if kind == "blt":
        return timed(lambda: optimize("blt", run, buffers=BUFFERS))
    return timed(lambda: optimize("toeplitz", run, bands=BANDS))


def theirs(python: str) -> list[list[object]]:
    """Return jax_privacy's fits, or nothing if that interpreter does not have it."""
    command = [python, "-c", THEIRS, json.dumps(RUNS), str(BANDS), str(BUFFERS)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        print(f"jax_privacy: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def show(whose: str, kind: str, run: Participation, rmse: float, seconds: float) -> None:
    """Print one row."""
    n, k, b = run.rounds, run.max_participations, run.min_separation
    print(f"{whose:12} {kind:9} {n:6} {k:2} {b:5} {rmse:9.4f} {seconds:8.2f} s")


def main() -> None:
    """Measure and print."""
    np.seterr(all="ignore")
    for n, k, b in RUNS:
        run = Participation(n, k, b)
        for kind in ("blt", "toeplitz"):
            found, seconds = ours(kind, run)
            show("ours", kind, run, error(found, run).rmse, seconds)
    for kind, n, k, b, seconds, parameters in theirs(
        sys.argv[1] if sys.argv[1:] else sys.executable
    ):
        run = Participation(n, k, b)
        made = BufferedToeplitz(n, *parameters) if kind == "blt" else Toeplitz(n, parameters)
        show("jax_privacy", kind, run, error(made, run).rmse, seconds)


if __name__ == "__main__":
    main()
