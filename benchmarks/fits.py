"""Fits: errors and CPU seconds of ours beside jax_privacy's, in one run.

Run: ``python benchmarks/fits.py [--python PYTHON]``, where PYTHON is an interpreter that has
jax_privacy (default: this one); writes benchmarks/results/fits.json. Without jax_privacy there,
only our own rows are printed. Errors are the root mean squared error at mu = 1 of prefix sums, or
of the models of SGD with momentum, evaluated by our own code for both, from the coefficients.
jax_privacy fits its BLTs to prefix sums alone; its banded and dense encoders are columns of unit
length, fitted entry by entry, where our BandMF normalises a Toeplitz filter. "Compiling" is the
part of jax_privacy's time before the first step of each number of buffers has been taken; every
call compiles again. It takes minutes.
"""

import frame

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import numpy as np

from accounting import (
    BufferedToeplitz,
    Dense,
    Mechanism,
    Participation,
    Toeplitz,
    Workload,
    error,
    optimize,
)

RUNS = [(256, 1, 256), (200, 5, 40), (512, 1, 512), (1600, 5, 320)]
MOMENTUM = (0.0, 0.9)
BANDS, BUFFERS = 32, 3
MATRIX_ROUNDS = 256
"""The most rounds for which encoders are fitted entry by entry."""
THEIRS = """
import json, sys, time
from importlib import metadata
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
from jax_privacy.matrix_factorization import (
    banded, buffered_toeplitz, dense, optimization, streaming_matrix, toeplitz)
bands, buffers, entries = map(int, sys.argv[2:5])
momenta = json.loads(sys.argv[5])
print(json.dumps({name: metadata.version(name) for name in ("jax-privacy", "jax", "optax")}),
      flush=True)

def told(kind, start, compiling, parameters):
    print(json.dumps([kind, n, k, b, m, time.process_time() - start, compiling, parameters]),
          flush=True)

def filtered(width, response):
    def loss(c):
        squares = toeplitz.per_query_error(
            strategy_coef=c, n=n, workload_coef=response, skip_checks=True)
        return jnp.mean(squares) * toeplitz.sensitivity_squared(c, n)
    start = toeplitz.optimal_max_error_strategy_coefs(width)
    return optimization.optimize(loss, start, max_optimizer_steps=250)

for n, k, b in json.loads(sys.argv[1]):
    m = 0.0
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
    for m in momenta:
        workload = streaming_matrix.momentum_sgd_matrix(m)
        response = (1 - m ** (jnp.arange(n) + 1)) / (1 - m)
        start = time.process_time()
        told("toeplitz", start, None, list(map(float, filtered(bands, response))))
        if n <= entries:
            start = time.process_time()
            fit = banded.optimize(n, bands=min(n // 5, b), A=workload)
            told("bandmf", start, None, fit.materialize().tolist())
        if n <= entries and k == 1:
            start = time.process_time()
            fit = dense.optimize(n, A=workload.materialize(n))
            told("dense", start, None, fit.tolist())
"""


def theirs(python: str, runs: list[tuple[int, ...]]) -> Iterator[Any]:
    """Yield jax_privacy's versions and fits as they come; nothing if PYTHON does not have it."""
    sizes = [str(BANDS), str(BUFFERS), str(MATRIX_ROUNDS), json.dumps(MOMENTUM)]
    command = [python, "-c", THEIRS, json.dumps(runs), *sizes]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as running:
        yield from (json.loads(line) for line in running.stdout or () if line[0] in "[{")
        faults = running.stderr.read().strip().splitlines() if running.stderr else []
    if running.returncode:
        print(f"jax_privacy: {faults[-1]}", file=sys.stderr)


def row(
    whose: str,
    kind: str,
    made: Mechanism,
    run: Participation,
    momentum: float,
    seconds: float,
    compiling: float | None,
) -> dict[str, Any]:
    """Show and return one row, with the error of both workloads."""
    cells = {
        "whose": whose,
        "mechanism": kind,
        "fitted_for_momentum": momentum,
        "rounds": run.rounds,
        "max_participations": run.max_participations,
        "min_separation": run.min_separation,
        "rmse": error(made, run).rmse,
        "model_rmse": error(made, run, Workload(MOMENTUM[-1])).rmse,
        "cpu_seconds": seconds,
        "compiling_cpu_seconds": compiling,
    }
    frame.show(whose, cells)
    return cells


def ours(kind: str, run: Participation, workload: Workload) -> Callable[[], Mechanism] | None:
    """Return what makes our fit of a kind; None where the kind is not fitted to such a run."""
    n, b = run.rounds, run.min_separation
    if kind == "blt":
        return lambda: optimize("blt", run, buffers=BUFFERS, workload=workload)
    if kind == "toeplitz":
        return lambda: optimize("toeplitz", run, bands=BANDS, workload=workload)
    if n > MATRIX_ROUNDS or (kind == "dense" and run.max_participations > 1):
        return None
    if kind == "dense":
        return lambda: optimize("dense", run, workload=workload)

    def normalized() -> Mechanism:
        fit = optimize("toeplitz", run, bands=min(n // 5, b), workload=workload)
        return Toeplitz(n, fit.coefficients, normalize_columns=True)  # type: ignore[attr-defined]

    return normalized


def measured(python: str, runs: list[tuple[int, ...]]) -> tuple[list[dict[str, Any]], Any]:
    """Return a row per fit, ours and theirs, and the versions of theirs."""
    rows, versions = [], {}
    for run in (Participation(*numbers) for numbers in runs):
        for kind, momentum in itertools.product(("blt", "toeplitz", "bandmf", "dense"), MOMENTUM):
            if (fit := ours(kind, run, Workload(momentum))) is not None:
                made: list[Mechanism] = []
                spent = frame.seconds(lambda: made.append(fit()))  # noqa: B023
                rows.append(row("ours", kind, made[0], run, momentum, spent.cpu, None))
    for answer in theirs(python, runs):
        if isinstance(answer, dict):
            versions = answer
            continue
        kind, n, k, b, momentum, seconds, compiling, parameters = answer
        if kind == "blt":
            mechanism: Mechanism = BufferedToeplitz(n, *parameters)
        else:
            mechanism = Toeplitz(n, parameters) if kind == "toeplitz" else Dense(parameters)
        run = Participation(n, k, b)
        rows.append(row("jax_privacy", kind, mechanism, run, momentum, seconds, compiling))
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
        result.write(bands=BANDS, buffers=BUFFERS, momentum=MOMENTUM[-1], rows=rows)


if __name__ == "__main__":
    main()
