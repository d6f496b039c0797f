"""Best encoder of all, for one participation: the fixed point of the dual.

Least tr(A^T A X^-1) over X = C^T C with diag X <= 1. For any v > 0 let
M = (V^1/2 A^T A V^1/2)^1/2, V = diag v. Then 2 tr M - sum v is a lower bound; v = diag M makes
X = V^-1/2 M V^-1/2 feasible with error tr M, hence optimal (Denisov et al. 2022, section 3).
The iteration v <- diag M converges to it from one side, mode by mode, so steps of twice its
length in log v converge faster. It stops when X, scaled to a unit diagonal, meets the lower bound.
"""

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.fits.loss import Array
from accounting.mechanisms.dense import Dense
from accounting.mechanisms.mechanism import prefix_sums
from accounting.participation import Participation

_GAP = 1e-6
"""Squared error over its lower bound, minus 1, at which the iteration stops."""
_MOST_STEPS = 100
_MOST_ROUNDS = 4096


def fit_dense(participation: Participation) -> Dense:
    """Return the encoder of least rmse for one participation, to 1 part in a million.

    For reference: O(n^3) per step, about 15 steps (about ten seconds for 1600 rounds).

    Raises:
        ConfigError: more than one participation.
    """
    if participation.max_participations != 1:
        raise ConfigError(
            f"max_participations={participation.max_participations}: the dense optimum is for 1. "
            "Fit 'toeplitz' or 'blt' for more."
        )
    n = checks.count(
        "rounds",
        participation.rounds,
        maximum=_MOST_ROUNDS,
        hint="That is for the dense optimum; fit 'blt' for more.",
    )
    workload = prefix_sums(n).T @ prefix_sums(n)
    v = np.sqrt(np.arange(n, 0.0, -1.0))
    for _ in range(_MOST_STEPS):
        values, vectors = np.linalg.eigh(np.sqrt(v)[:, None] * workload * np.sqrt(v))
        values = np.sqrt(np.maximum(values, 0.0))
        root = (vectors * values) @ vectors.T
        ratio = np.diag(root) / v
        feasible = workload * ((vectors / values) @ vectors.T) * np.sqrt(np.outer(ratio, ratio))
        error = float(np.sqrt(v) @ feasible @ np.sqrt(v))
        if error <= (1 + _GAP) * float(2 * values.sum() - v.sum()):
            return Dense(_unit_columns(root / np.sqrt(np.outer(v, v))))
        v = v * ratio**2
    raise ArithmeticError(f"rounds={n}: the dense optimum did not converge.")


def _unit_columns(gram: Array) -> Array:
    """The lower-triangular C with C^T C = ``gram`` scaled to a unit diagonal.

    numpy's factor has L L^T = X: unit rows, where unit columns are wanted. Reversing the order of
    rounds before and after turns one into the other.
    """
    factor = np.linalg.cholesky(gram[::-1, ::-1])
    encoder = np.tril(factor[::-1, ::-1].T)
    return np.asarray(encoder / np.linalg.norm(encoder, axis=0))
