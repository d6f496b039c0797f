"""Accountant peers: what dp_accounting, jax_privacy and PLD_accounting answer, in one run.

Run: ``python benchmarks/accountant_peers.py [--python PYTHON]``, where PYTHON is an interpreter
that has the three (default: this one); writes benchmarks/results/accountant_peers.json. Each row is
a call, as somebody would type it, and its figure; docs/published-budgets.md has our command for it.
It takes two processor minutes.
"""

import frame

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

PRELUDE = """
import json, math, sys
from importlib import metadata
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, scipy.optimize
import dp_accounting
from dp_accounting import NeighboringRelation
from dp_accounting.dp_event import *
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from jax_privacy.batch_selection import BallsInBinsSampling, BMinSepSampling
from jax_privacy.experimental import accounting
from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation
from jax_privacy.matrix_factorization import banded, toeplitz
from PLD_accounting import gaussian_allocation_epsilon_range

ZERO_OUT = {"neighboring_relation": NeighboringRelation.REPLACE_SPECIAL}
ONE = {"neighboring_relation": NeighboringRelation.REPLACE_ONE}

def pld(event, delta, **of):
    return PLDAccountant(**of).compose(event).get_epsilon(delta)

def rdp(event, delta, **of):
    return RdpAccountant(**of).compose(event).get_epsilon(delta)

def dp_sgd(rate, noise, steps):
    return SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)

def cut(size, rate, most, noise, steps):
    step = TruncatedSubsampledGaussianDpEvent(size, rate, most, noise)
    return SelfComposedDpEvent(step, steps)

def rmse(squares, sensitivity_squared=1.0):
    return math.sqrt(sensitivity_squared * float(np.mean(squares)))

square_root = toeplitz.optimal_max_error_strategy_coefs

def estimated(strategy, noise, column, delta, draws):
    of = {"seed": 1, "num_samples": draws}
    losses = [sample_generation.get_privacy_loss_sample(
        strategy, noise, column, positive_sample=sign, **of)[0] for sign in (True, False)]
    delta_of = delta_calculation.delta_from_epsilon_and_samples
    def excess(epsilon):
        return max(delta_of(epsilon, each) for each in losses) - delta
    return scipy.optimize.brentq(excess, 0.0, 20.0)

print(json.dumps({name: metadata.version(name) for name in
                  ("dp-accounting", "jax-privacy", "PLD-accounting", "jax", "optax", "numpy")}),
      flush=True)
for call in json.load(sys.stdin):
    print(json.dumps(float(eval(call))), flush=True)
"""
"""What the calls below stand on."""

CALLS = {
    "dp_accounting": [
        "pld(GaussianDpEvent(1), 1e-5)",
        "pld(GaussianDpEvent(0.1), 1e-5)",
        "rdp(GaussianDpEvent(1), 1e-5)",
        "dp_accounting.get_sigma_gaussian(1, 1e-5)",
        "rdp(SingleEpochTreeAggregationDpEvent(1.13, 1600), 1e-6, **ZERO_OUT)",
        "rdp(SingleEpochTreeAggregationDpEvent(4, [400] * 4), 1e-6, **ZERO_OUT)",
        "rdp(SelfComposedDpEvent(SingleEpochTreeAggregationDpEvent(4, 400), 4), 1e-6, **ZERO_OUT)",
        "pld(dp_sgd(0.01, 1, 1000), 1e-5)",
        "rdp(dp_sgd(0.01, 1, 1000), 1e-5)",
        "pld(dp_sgd(0.04, 1.5, 2249), 1e-5)",
        "pld(dp_sgd(0.001, 0.5, 10_000), 1e-6)",
        "dp_accounting.calibrate_dp_mechanism(PLDAccountant, "
        "lambda z: dp_sgd(0.1, z, 512), 1, 1e-6)",
        "pld(cut(10_000, 0.01, 200, 1, 1000), 1e-6)",
        "pld(cut(10_000, 0.01, 128, 1, 1000), 1e-6)",
        "rdp(SelfComposedDpEvent(SampledWithoutReplacementDpEvent("
        "10_000, 100, GaussianDpEvent(1)), 1000), 1e-6, **ONE)",
        "rdp(RepeatAndSelectDpEvent(GaussianDpEvent(1), 10, 1), 1e-5)",
        "rdp(RepeatAndSelectDpEvent(GaussianDpEvent(1), 10, math.inf), 1e-5)",
    ],
    "jax_privacy": [
        "pld(accounting.amplified_bandmf_event(2, 1000, num_bands=8, sampling_prob=0.08), 1e-5)",
        "pld(accounting.truncated_dpsgd_event(2, 100, sampling_prob=0.02, num_examples=1000, "
        "truncated_batch_size=40), 1e-5)",
        "toeplitz.minsep_sensitivity_squared(square_root(1600), 320, 5)",
        "rmse(toeplitz.per_query_error(strategy_coef=square_root(1600)), "
        "toeplitz.sensitivity_squared(square_root(1600)))",
        "rmse(toeplitz.per_query_error(strategy_coef=toeplitz.optimize_banded_toeplitz(1600, 32), "
        "n=1600))",
        "rmse(banded.per_query_error(banded.optimize(200, bands=40)), 5)",
        "estimated(BallsInBinsSampling(32, 8), 2, np.ones(1), 1e-2, 200_000)",
        "estimated(BMinSepSampling(0.2, 32, 4), 2, np.asarray(square_root(4)), 1e-3, 500_000)",
    ],
    "PLD_accounting": [
        f"gaussian_allocation_epsilon_range(delta=1e-5, {of})[0]"
        for of in (
            "sigma=0.7, num_steps=100",
            "sigma=1, num_steps=100",
            "sigma=1, num_steps=16",
            "sigma=4, num_steps=32",
            "sigma=2 / 10**0.5, num_steps=100",
            "sigma=2, num_steps=16, num_epochs=2",
        )
    ],
}
"""Calls by the package that answers."""


def answers(python: str, calls: list[str]) -> Iterator[Any]:
    """Yield versions, and then the figure of each call as it comes."""
    command = [python, "-W", "ignore", "-c", PRELUDE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as running:
        if running.stdin is not None:
            running.stdin.write(json.dumps(calls))
            running.stdin.close()
        yield from map(json.loads, running.stdout or ())
    if running.returncode:
        raise SystemExit(f"{python} could not answer all calls; see above.")


def main() -> None:
    quick = {"most": 1}
    given = frame.options(
        __doc__, "accountant_peers.json", quick=quick, python=sys.executable, most=99
    )
    asked = [(of, call) for of, calls in CALLS.items() for call in calls[: given.most]]
    figures = answers(given.python, [call for _, call in asked])
    versions = next(figures)
    rows = []
    for (of, call), figure in zip(asked, figures, strict=True):
        rows.append({"of": of, "call": call, "figure": figure})
        print(f"{of:15} {figure:12.7g}  {call}", flush=True)
    frame.Result(given.result).write(packages=versions, rows=rows)


if __name__ == "__main__":
    main()
