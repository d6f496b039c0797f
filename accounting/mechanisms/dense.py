"""Dense: any lower-triangular encoder, given as a matrix. For reference and small n."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import OneStream, prefix_sums
from accounting.mechanisms.program import OUT, NoiseProgram, Op
from accounting.participation import Participation
from accounting.sensitivity import Array, Sensitivity, gram_sensitivity, same_rounds
from accounting.workload import PREFIX, Workload


@dataclass(frozen=True, slots=True, eq=False)
class Dense(OneStream):
    """The mechanism whose encoder is ``matrix``.

    Args:
        matrix: C, shape (n, n), finite, lower triangular (so that the guarantee holds when rounds
            depend on earlier releases) with a positive diagonal. Copied, and read-only after.

    >>> Dense([[1.0, 0.0], [0.5, 1.0]]).prefix_variance()
    array([1.  , 1.25])
    """

    matrix: Array

    name = "dense"

    def __init__(self, matrix: ArrayLike) -> None:
        copied = _lower_triangular(matrix)
        copied.flags.writeable = False
        object.__setattr__(self, "matrix", copied)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dense) and np.array_equal(self.matrix, other.matrix)

    def __hash__(self) -> int:
        return hash((self.rounds, self.matrix.tobytes()))

    @property
    def rounds(self) -> int:
        """Number of rounds n."""
        return len(self.matrix)

    def encoder(self) -> Array:
        """C, shape (n, n)."""
        return self.matrix

    def decoder(self) -> Array:
        """B = A C^-1, shape (n, n)."""
        from scipy.linalg import solve_triangular

        transposed = solve_triangular(
            self.matrix, prefix_sums(self.rounds).T, lower=True, trans="T"
        )
        return np.tril(np.asarray(transposed, dtype=np.float64).T)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """By the rules for any Gram matrix: exact where they are, else an upper bound."""
        same_rounds(self.rounds, participation)
        return gram_sensitivity(self.matrix.T @ self.matrix, participation)

    def noise_program(self) -> NoiseProgram:
        """y_t = z_t / C_tt - sum_{j<t} (C_tj / C_tt) y_j, from all earlier y."""

        def ops(t: int) -> list[Op]:
            *past, diagonal = self.matrix[t, : t + 1].tolist()
            lags = ((j, -c / diagonal) for j, c in enumerate(past))
            # rounded up: more noise in a round costs nothing
            round_ = [Op(OUT, lags, [(t, math.nextafter(1 / diagonal, math.inf))])]
            return [*round_, Op(t, [(OUT, 1.0)])] if t < self.rounds - 1 else round_

        def filter_error() -> float:
            lags = np.abs(np.tril(self.matrix, -1)).sum(axis=1) / np.diag(self.matrix)
            return (self.rounds + 6) * float(lags.max())

        return NoiseProgram(
            self.rounds,
            ops,
            rows=lambda rounds: min(rounds, self.rounds - 1),
            spread=self._spread,
            filter_error=filter_error,
        )

    def _spread(self) -> float:
        from scipy.linalg import solve_triangular

        inverse = solve_triangular(self.matrix, np.eye(self.rounds), lower=True)
        with np.errstate(over="ignore", invalid="ignore"):  # infinite, which is refused
            return float(np.sqrt((inverse**2).sum(axis=1).max()))

    def prefix_variance(self) -> Array:
        """Squared row norms of B."""
        return np.asarray((self.decoder() ** 2).sum(axis=1))


def _lower_triangular(matrix: ArrayLike) -> Array:
    try:
        copied = np.array(matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError("matrix: must be a square array of numbers.") from None
    if copied.ndim != 2 or copied.shape[0] != copied.shape[1] or not copied.size:
        raise ConfigError(f"matrix: has shape {copied.shape}; must be square, one row per round.")
    if not np.isfinite(copied).all():
        raise ConfigError("matrix: every entry must be finite.")
    if np.triu(copied, 1).any():
        raise ConfigError(
            "matrix: must be lower triangular; noise that looks ahead has no guarantee when rounds "
            "depend on earlier releases."
        )
    if not (np.diag(copied) > 0).all():
        raise ConfigError("matrix: every diagonal entry must be positive.")
    return copied


_GAP = 1e-6  # squared error over its lower bound, minus 1, at which the iteration stops
_MOST_STEPS = 200
_REMEMBERED = 12
_MOST_ROUNDS = 4096


def fit_dense(participation: Participation, workload: Workload = PREFIX) -> Dense:
    """Return the encoder of least rmse for one participation, to 1 part in a million.

    It minimises tr(A^T A X^-1) over X = C^T C with diag X <= 1. For any v > 0 let
    M = (V^1/2 A^T A V^1/2)^1/2, V = diag v. Then 2 tr M - sum v is a lower bound; v = diag M makes
    X = V^-1/2 M V^-1/2 feasible with error tr M, hence optimal (Denisov et al. 2022, section 3).
    The iteration v <- diag M converges to it from one side, mode by mode, slowly under momentum, so
    it is accelerated in log v (Anderson 1965). It stops when X, scaled to a unit diagonal, meets
    the bound, so that no step needs to be trusted.

    O(n^3) per step; about 8 steps for prefix sums, 30 for momentum 0.9.
    """
    if participation.max_participations != 1:
        raise ConfigError(
            f"max_participations={participation.max_participations}: the dense optimum is for 1. "
            "Fit 'toeplitz' or 'blt' for more."
        )
    hint = "That is for the dense optimum; fit 'blt' for more."
    n = checks.count("rounds", participation.rounds, maximum=_MOST_ROUNDS, hint=hint)
    models = workload.models(np.eye(n))
    squares = models.T @ models
    logs = np.log(np.diag(squares)) / 2
    past: list[tuple[Array, Array]] = []
    smallest = math.inf
    for _ in range(_MOST_STEPS):
        v = np.exp(logs)
        values, vectors = np.linalg.eigh(np.sqrt(v)[:, None] * squares * np.sqrt(v))
        values = np.sqrt(np.maximum(values, 0.0))
        root = (vectors * values) @ vectors.T
        ratio = np.diag(root) / v
        feasible = squares * ((vectors / values) @ vectors.T) * np.sqrt(np.outer(ratio, ratio))
        error = float(np.sqrt(v) @ feasible @ np.sqrt(v))
        excess = error - float(2 * values.sum() - v.sum())
        if excess <= _GAP * error:
            return Dense(_unit_columns(root / np.sqrt(np.outer(v, v))))
        if not excess < 2 * smallest:  # a step went too far: begin anew before it
            logs, past = past[-1][0], []
            smallest = math.inf
            continue
        smallest = min(smallest, excess)
        past = [*past, (logs, np.log(ratio))][-_REMEMBERED:]
        logs = _next_step(past)
    raise ArithmeticError(f"rounds={n}: the dense optimum did not converge.")


def _next_step(past: list[tuple[Array, Array]]) -> Array:
    """Return the point at which the steps' residuals, as far as known, cancel best."""
    points, residuals = (np.array(values) for values in zip(*past, strict=True))
    ahead = points + 2 * residuals
    if len(past) == 1:
        return np.asarray(ahead[0])
    changes = np.diff(residuals, axis=0).T
    weights = np.linalg.lstsq(changes, residuals[-1], rcond=1e-10)[0]
    return np.asarray(ahead[-1] - np.diff(ahead, axis=0).T @ weights)


def _unit_columns(gram: Array) -> Array:
    """Return the lower-triangular C with C^T C = ``gram`` scaled to a unit diagonal.

    numpy's factor has L L^T = X: unit rows instead of unit columns. Reversing the order of rounds
    before and after turns one into the other.
    """
    factor = np.linalg.cholesky(gram[::-1, ::-1])
    encoder = np.tril(factor[::-1, ::-1].T)
    return np.asarray(encoder / np.linalg.norm(encoder, axis=0))
