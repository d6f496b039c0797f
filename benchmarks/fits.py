"""Fits: our error and CPU seconds beside jax_privacy's, in one run.

Run: ``python benchmarks/fits.py [PYTHON] [OUT.json]``, where PYTHON is an interpreter that has
jax_privacy (default: this one). Without jax_privacy there, only our own rows are printed. Errors
are the root mean squared error of the prefix sums at mu = 1, evaluated by our own code for both,
from the coefficients. "Compiling" is the part of jax_privacy's time before the first step of each
number of buffers has been taken; every call compiles again. It takes minutes.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from accounting import BufferedToeplitz, Mechanism, Participation, Toeplitz, error, optimize

RUNS = [(512, 1, 512), (1600, 5, 320), (2000, 6, 314)]
BANDS = 32
BUFFERS = 3
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


def timed(fit: Callable[[], Mechanism]) -> tuple[Mechanism, float]:
    """Return what a fit finds and its CPU seconds."""
    start = time.process_time()
    return fit(), time.process_time() - start


def ours(kind: str, run: Participation) -> tuple[Mechanism, float]:
    """Fit one kind, cold."""
    if kind == "blt":
        return timed(lambda: optimize("blt", run, buffers=BUFFERS))
    return timed(lambda: optimize("toeplitz", run, bands=BANDS))


def theirs(python: str) -> Iterator[Any]:
    """Yield jax_privacy's versions and fits as they come; nothing if PYTHON does not have it."""
    command = [python, "-c", THEIRS, json.dumps(RUNS), str(BANDS), str(BUFFERS)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        if running.stdout is None or running.stderr is None:
            raise TypeError("both are pipes")
        yield from (json.loads(line) for line in running.stdout if line.startswith(("[", "{")))
        faults = running.stderr.read().strip().splitlines()
    if running.returncode:
        print(f"jax_privacy: {faults[-1]}", file=sys.stderr)


def row(
    whose: str, made: Mechanism, run: Participation, seconds: float, compiling: float | None
) -> dict[str, Any]:
    """Print one row and return it."""
    n, k, b = run.rounds, run.max_participations, run.min_separation
    rmse = error(made, run).rmse
    spent = f"{seconds:8.2f} s" + (f", {compiling:.2f} s of it compiling" if compiling else "")
    print(f"{whose:12} {made.name:9} {n:6} {k:2} {b:5} {rmse:9.4f} {spent}", flush=True)
    return {
        "whose": whose,
        "mechanism": made.name,
        "rounds": n,
        "max_participations": k,
        "min_separation": b,
        "rmse": rmse,
        "cpu_seconds": seconds,
        "compiling_cpu_seconds": compiling,
    }


def measured(python: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a row per fit, ours and theirs, and the versions of theirs."""
    rows, versions = [], {}
    for n, k, b in RUNS:
        run = Participation(n, k, b)
        for kind in ("blt", "toeplitz"):
            found, seconds = ours(kind, run)
            rows.append(row("ours", found, run, seconds, None))
    for told in theirs(python):
        if isinstance(told, dict):
            versions = told
            continue
        kind, n, k, b, seconds, compiling, parameters = told
        made = BufferedToeplitz(n, *parameters) if kind == "blt" else Toeplitz(n, parameters)
        rows.append(row("jax_privacy", made, Participation(n, k, b), seconds, compiling))
    return rows, versions


def main() -> None:
    """Measure, print, and write a file if one is named."""
    np.seterr(all="ignore")
    arguments = dict(enumerate(sys.argv[1:]))
    rows, versions = measured(arguments.get(0, sys.executable))
    if 1 in arguments:
        facts = machine("numpy", "scipy")
        facts["packages"] |= versions | {"privpart": metadata.version("privpart")}
        content = {"machine": facts, "bands": BANDS, "buffers": BUFFERS, "rows": rows}
        Path(arguments[1]).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
