"""Banded inverse: noise that mixes the last few draws, so that no state is kept at all.

The noise of round t is r_0 z_t + r_1 z_{t-1} + ... + r_{p-1} z_{t-p+1}: C^-1 is banded Toeplitz.

           r_0                            1
    C^-1 = r_1 r_0           r = (1, -l)  l   1
            0  r_1 r_0       gives C =    l^2 l   1
            0   0  r_1 r_0                l^3 l^2 l  1

Each z is a function of the key and its round, so a server draws it again instead of keeping it: the
state is 0 vectors, and a round costs p draws. Two members of the family are known by name:

    DP-lambda-CGD     p = 2, r = (1, -lambda), columns normalised; C_ij ~ lambda^(i-j)
                      (Kalinin, McKenna, Pagh and Lampert 2026, arXiv 2601.22334)
    BISR              the first p coefficients of (1 - x)^(1/2): banded inverse square root
                      (Kalinin, McKenna, Upadhyay and Lampert 2025, arXiv 2505.12128)

With columns normalised, C has unit columns and round t's noise is multiplied by the norm of column
t before: every round weighs the same, and the last ones, whose columns are short, get less noise.

The noise is rounded at the output: a round's sum of real draws, not each draw, becomes integers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.buffered_toeplitz import blt_coefficients
from accounting.mechanisms.program import OUT, SCRATCH, NoiseProgram, Op
from accounting.mechanisms.toeplitz import (
    Filter,
    Objective,
    column_norms,
    convolve,
    earliest_with_gradient,
    forward_substitution,
    lower_toeplitz,
    minimized,
    toeplitz_sensitivity,
)
from accounting.participation import Participation
from accounting.sensitivity import Array, Sensitivity, rounded_up, same_rounds
from accounting.workload import PREFIX, Workload

_MOST_ROUNDS = 32_768
"""Of a fit, or of normalised columns, with three bands or more; two bands have closed forms."""


@dataclass(frozen=True, slots=True)
class BandedInverse(Filter):
    """The mechanism whose noise matrix C^-1 is Toeplitz with the given bands.

    Args:
        rounds: number of rounds n, 1 to a million.
        coefficients: r_0 > 0, then r_1, ..., r_{p-1}, each 0 or negative, at most n of them, whose
            sum is not negative. C then has no negative entry and does not grow.
        normalize_columns: divide each column of C by its norm.

    >>> from accounting import Participation, footprint
    >>> BandedInverse.square_root(8, bands=3).coefficients  # BISR
    (1.0, -0.5, -0.125)
    >>> footprint(BandedInverse(8, (1.0, -0.5)))
    Footprint(state_vectors=0, draws_per_round=1.875)
    """

    name = "banded-inverse"

    def _check_later(self, coefficients: tuple[float, ...]) -> None:
        for index, value in enumerate(coefficients[1:], start=1):
            if not value <= 0:
                raise ConfigError(
                    f"coefficients[{index}]={value:g}: must be 0 or negative; the sensitivity of "
                    "other noise filters is not known here."
                )
        total = coefficients[0] + sum(coefficients[1:])
        if total < -1e-12 * coefficients[0]:
            raise ConfigError(
                f"coefficients: sum to {total:g}; a negative sum makes the encoder grow without "
                "bound. Use smaller ones after the first."
            )

    @staticmethod
    def _check_bands(bands: int | None, rounds: int) -> None:
        if bands is None:
            raise ConfigError("bands is missing: a banded inverse needs bands, or coefficients.")
        Filter._check_bands(bands, rounds)

    @staticmethod
    def _root(bands: int) -> tuple[float, ...]:
        """Return the first coefficients of (1 - x)^(1/2)."""
        return (1.0, *np.cumprod(1 - 1.5 / np.arange(1, bands)))

    @staticmethod
    def _fit() -> "Callable[[Participation, int | None, Objective, Workload], BandedInverse]":
        return fit_banded_inverse

    def encoder(self) -> Array:
        """C, shape (n, n), lower triangular without negative entries."""
        matrix = lower_toeplitz(_encoder_column(self._column()))
        return matrix / self._norms() if self.normalize_columns else matrix

    def decoder(self) -> Array:
        """B = A C^-1, shape (n, n)."""
        if self.normalize_columns:
            return np.cumsum(self._norms()[:, None] * lower_toeplitz(self._column()), axis=0)
        return lower_toeplitz(np.cumsum(self._column()))

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Exact if the earliest rounds are the worst ones, else a labelled upper bound.

        Each coefficient of C is a sum of at most p products of numbers that are not negative, so
        after n rounds its relative error is at most n (p + 1) units, which are added. (Not to unit
        columns: the noise program rounds their weights up.)
        """
        same_rounds(self.rounds, participation)
        k = participation.max_participations
        if self.normalize_columns and (k == 1 or self.bands == 1):
            return Sensitivity(float(k), exact=True, rule="unit columns, orthogonal")
        real = self._real_sensitivity(participation)
        squared = rounded_up(real.squared, 2 * self.rounds * (self.bands + 2))
        return Sensitivity(squared, real.exact, real.rule)

    def _real_sensitivity(self, participation: Participation) -> Sensitivity:
        if not self.normalize_columns:
            return toeplitz_sensitivity(_encoder_column(self._column()), participation)
        if self.bands == 2:
            decay = -self.coefficients[1] / self.coefficients[0]
            squared = _earliest_geometric(decay, self._norms(), participation)
            return Sensitivity(squared, True, "earliest rounds of unit geometric columns")
        hint = "That is for normalised columns; two bands take more rounds."
        checks.count("rounds", self.rounds, maximum=_MOST_ROUNDS, hint=hint)
        return _by_pairs(_encoder_column(self._column()), participation)

    def noise_program(self) -> NoiseProgram:
        """y_t = w_t sum_j r_j z_{t-j}: the last p draws, made again from the key.

        w_t is the norm of column t of C, rounded up, which only adds noise, if columns are
        normalised; else 1. A power of two is taken out of it, so that no product is larger than a
        register and the filter is that of r to the last bit.
        """
        bands = list(enumerate(self.coefficients[: self.bands]))
        spread = math.sqrt(math.fsum(r * r for r in self.coefficients))
        unit, weights = 1.0, None
        if self.normalize_columns:
            up = rounded_up(1.0, 2 * self.rounds * (self.bands + 2))
            unit = math.ldexp(1.0, math.frexp(float(self._norms().max()) * up)[1])
            weights = (self._norms() * (up / unit)).tolist()

        def ops(t: int) -> list[Op]:
            target = OUT if weights is None else SCRATCH
            mixed = Op(target, draws=[(t - j, r * unit) for j, r in bands[: t + 1] if r])
            return [mixed] if weights is None else [mixed, Op(OUT, [(SCRATCH, weights[t])])]

        return NoiseProgram(
            self.rounds,
            ops,
            rows=lambda _: 0,
            spread=lambda: spread * unit,
            rounded="output",
            draws_again=True,
        )

    def prefix_variance(self) -> Array:
        """Squared row norms of B, in O(n p): draw u enters prefix sum t through its last lags."""
        if not self.normalize_columns:
            return np.asarray(np.cumsum(np.cumsum(self._column()) ** 2))
        norms, reached = self._norms(), np.zeros(self.rounds)
        variance = np.zeros(self.rounds)
        for lag, r in enumerate(self.coefficients[: self.bands]):
            before = reached**2
            reached[: self.rounds - lag] += r * norms[lag:]
            variance[lag:] += (reached**2 - before)[: self.rounds - lag]
        return np.asarray(np.cumsum(variance))

    def _norms(self) -> Array:
        return column_norms(_encoder_column(self._column()))


def _encoder_column(column: Array) -> Array:
    """Return the first column of C: the coefficients of 1 / r(x)."""
    if not column[2:].any() and len(column) > 1:
        decay = -column[1] / column[0]
        return np.asarray(blt_coefficients((decay,), (decay,), len(column)) / column[0])
    return forward_substitution(column, np.eye(1, len(column))[0])


def _earliest_geometric(decay: float, norms: Array, participation: Participation) -> float:
    """Return ||v||^2 of rounds 0, b, 2b, ... for unit columns of C_ij = decay^(i-j), in O(k).

    That is the worst pattern: with column norms w, w_t^2 = 1 + decay^2 w_{t+1}^2, two columns have
    the product X_{i, i+d} = decay^d w_{i+d} / w_i, which falls with i and with d, and of all
    patterns this one has the least i and the least d in every pair.
    """
    k, b = participation.max_participations, participation.min_separation
    joined = norms[: k * b : b].tolist()
    carried, products = 0.0, 0.0
    for norm in joined:
        products += norm * carried
        carried = decay**b * (carried + 1 / norm)
    return len(joined) + 2 * products


def _by_pairs(column: Array, participation: Participation) -> Sensitivity:
    """Return the sensitivity of unit columns, from the largest product of every pair of rounds.

    In any pattern the a-th round is at least a b, and the e-th after it at least e b later. So the
    pair's product is at most the largest X_{i, i+d} with i >= a b and d >= e b, and where rounds 0,
    b, 2b, ... attain all of these, their sum is the sensitivity. One diagonal of X at a time.
    """
    n, k, b = len(column), participation.max_participations, participation.min_separation
    norms = column_norms(column)
    largest, bound, earliest = np.zeros(n), float(k), float(k)
    for lag in range(n - 1, b - 1, -1):
        product = np.cumsum(column[: n - lag] * column[lag:])[::-1]
        product = product / (norms[: n - lag] * norms[lag:])
        largest[: n - lag] = np.maximum(largest[: n - lag], product)
        if lag % b == 0 and lag < k * b:
            pairs = k - lag // b
            later = np.maximum.accumulate(largest[::-1])[::-1]
            bound += 2 * float(later[: pairs * b : b].sum())
            earliest += 2 * float(product[: pairs * b : b].sum())
    exact = bound <= rounded_up(earliest, 8 * n)
    rule = "earliest rounds of unit columns" if exact else "largest products of unit columns"
    return Sensitivity(rounded_up(bound, 2 * n + k * k), exact, rule)


def fit_banded_inverse(
    participation: Participation,
    bands: int | None,
    objective: Objective,
    workload: Workload = PREFIX,
) -> BandedInverse:
    """Return the best filter r with r_0 = 1 and ``bands`` bands; with two, the best lambda.

    Returns:
        A local optimum found from BISR, or BISR itself where that is better.
    """
    n = participation.rounds
    if bands is None:
        raise ConfigError("bands is missing: a banded inverse needs the draws per round.")
    if checks.count("bands", bands) > 2:
        hint = "That is for fitting a banded inverse; two bands take more rounds."
        checks.count("rounds", n, maximum=_MOST_ROUNDS, hint=hint)
    root = BandedInverse.square_root(n, bands)
    if len(root.coefficients) == 1:
        return root
    shares = -np.array(root.coefficients[1:])
    start = np.log(shares / (1 - shares.sum()))
    loss = _inverse_loss(participation, objective, workload.constant("banded-inverse"))

    def from_logs(logs: Array) -> tuple[float, Array]:
        odds = np.exp(logs)
        shares = odds / (1 + odds.sum())
        column = np.zeros(n)
        column[0], column[1 : len(shares) + 1] = 1.0, -shares
        value, gradient = loss(column)
        by_share = -gradient[1 : len(shares) + 1]
        return value, shares * (by_share - shares @ by_share)

    logs, _ = minimized(f"banded inverse, {bands}", from_logs, start, [(-25.0, 25.0)] * len(start))
    odds = np.exp(logs)
    fitted = BandedInverse(n, (1.0, *(-odds / (1 + odds.sum()))))

    def true_loss(candidate: BandedInverse) -> float:
        column = np.zeros(n)
        column[: len(candidate.coefficients)] = candidate.coefficients
        variance = np.cumsum(workload.models(column) ** 2)
        worst = variance.mean() if objective == "rmse" else variance.max()
        return float(candidate.sensitivity(participation).squared * worst)

    return min(fitted, root, key=true_loss)


def _inverse_loss(
    participation: Participation, objective: Objective, workload: Workload = PREFIX
) -> Callable[[Array], tuple[float, Array]]:
    """Return the log of sensitivity^2 x error^2, with its gradient in r.

    The sensitivity is that of the earliest pattern, S = sum v^2, and c = 1/r as power series, so
    dS/dr_j = - sum_i (dS/dc_i) (c c)_{i-j}. The models' variance is quadratic in r.
    """
    n = participation.rounds
    weights = (n - np.arange(n)) / n if objective == "rmse" else np.ones(n)

    def loss(column: Array) -> tuple[float, Array]:
        c = _encoder_column(column)
        squared, rise = earliest_with_gradient(c, participation)
        fall = -convolve(rise[::-1], convolve(c, c))[::-1]
        sums = workload.models(column)
        variance = float(weights @ sums**2)
        growth = workload.models((2 * weights * sums)[::-1])[::-1]
        return float(np.log(squared * variance)), fall / squared + growth / variance

    return loss
