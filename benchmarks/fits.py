"""Fits: errors and CPU seconds of ours beside jax_privacy's, in one run.

Run: ``python benchmarks/fits.py [--python PYTHON]``, where PYTHON is an interpreter that has
jax_privacy (default: this one); writes benchmarks/results/fits.json. Without jax_privacy there,
only our own rows are printed. Errors are the root mean squared error of the prefix sums at mu = 1,
evaluated by our own code for both, from the coefficients. "Compiling" is the part of jax_privacy's
time before the first step of each number of buffers has been taken; every call compiles again. It
takes minutes.
"""

import frame

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import numpy as np

from accounting import BufferedToeplitz, Mechanism, Participation, Toeplitz, error, optimize

RUNS = [(512, 1, 512), (1600, 5, 320), (2000, 6, 314)]
BANDS, BUFFERS = 32, 3
THEIRS = """
import json, sys, time
from importlib import metadata
import jax
jax.config.update("jax_enable_x64", True)
from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz
bands, buffers = int(sys.argv[2]), int(sys.argv[3])
print(json.dumps({name: metadata.version(name) for name in ("jax-privacy", "jax", "optax")}),
      flush=True)

def told(kind, start, compiling, parameters):
    print(json.dumps([kind, n, k, b, time.process_time() - start, compiling, parameters]),
          flush=True)

for n, k, b in json.loads(sys.argv[1]):
    start = last = time.process_time()
    compiling = 0.0
    def step(seen):
        global compiling, last
        now = time.process_time()
        compiling += (now - last) * (seen.step == 0)
        last = now
    blt = buffered_toeplitz.optimize(n=n, min_sep=b, max_participations=k, error="mean",
                                     max_buffers=buffers, callback=step)
    told("blt", start, compiling, [list(map(float, blt.buf_decay)),
                                   list(map(float, blt.output_scale))])
    start = time.process_time()
    coefficients = toeplitz.optimize_banded_toeplitz(n=n, bands=bands)
    told("toeplitz", start, None, list(map(float, coefficients)))
"""


def theirs(python: str, runs: list[tuple[int, ...]]) -> Iterator[Any]:
    """Yield jax_privacy's versions and fits as they come; nothing if PYTHON does not have it."""
    command = [python, "-c", THEIRS, json.dumps(runs), str(BANDS), str(BUFFERS)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as running:
        yield from (json.loads(line) for line in running.stdout or () if line[0] in "[{")
        faults = running.stderr.read().strip().splitlines() if running.stderr else []
    if running.returncode:
        print(f"jax_privacy: {faults[-1]}", file=sys.stderr)


def row(
    whose: str, made: Mechanism, run: Participation, seconds: float, compiling: float | None
) -> dict[str, Any]:
    """Show and return one row."""
    cells = {
        "whose": whose,
        "mechanism": made.name,
        "rounds": run.rounds,
        "max_participations": run.max_participations,
        "min_separation": run.min_separation,
        "rmse": error(made, run).rmse,
        "cpu_seconds": seconds,
        "compiling_cpu_seconds": compiling,
    }
    frame.show(whose, cells)
    return cells


def measured(python: str, runs: list[tuple[int, ...]]) -> tuple[list[dict[str, Any]], Any]:
    """Return a row per fit, ours and theirs, and the versions of theirs."""
    rows, versions = [], {}
    for run in (Participation(*numbers) for numbers in runs):
        for kind, size in (("blt", {"buffers": BUFFERS}), ("toeplitz", {"bands": BANDS})):
            made: list[Mechanism] = []
            spent = frame.seconds(lambda: made.append(optimize(kind, run, **size)))  # noqa: B023
            rows.append(row("ours", made[0], run, spent.cpu, None))
    for answer in theirs(python, runs):
        if isinstance(answer, dict):
            versions = answer
            continue
        kind, n, k, b, seconds, compiling, parameters = answer
        fit = BufferedToeplitz(n, *parameters) if kind == "blt" else Toeplitz(n, parameters)
        rows.append(row("jax_privacy", fit, Participation(n, k, b), seconds, compiling))
    return rows, versions


def main() -> None:
    quick = {"rounds": [64]}
    given = frame.options(
        __doc__, "fits.json", quick=quick, rounds=[n for n, *_ in RUNS], python=sys.executable
    )
    np.seterr(all="ignore")
    result = frame.Result(given.result, "numpy", "scipy")
    known = {run[0]: run for run in RUNS}
    rows, versions = measured(given.python, [known.get(n, (n, 1, n)) for n in given.rounds])
    result.machine["packages"] |= versions | {"privpart": metadata.version("privpart")}
    if versions:
        result.write(bands=BANDS, buffers=BUFFERS, rows=rows)


if __name__ == "__main__":
    main()
