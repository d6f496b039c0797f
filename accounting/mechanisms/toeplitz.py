"""Toeplitz: C_ij = c_{i-j}, the same filter in every round (Fichtenberger et al. 2023).

With p coefficients C is p-banded, and its noise keeps p - 1 past vectors; for p = 3:

        c_0
    C = c_1 c_0
        c_2 c_1 c_0
         0  c_2 c_1 c_0
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import OneStream
from accounting.mechanisms.program import OUT, NoiseProgram, Op
from accounting.participation import Participation
from accounting.sensitivity import (
    Array,
    Sensitivity,
    gram_sensitivity,
    rounded_up,
    row_bound,
    same_rounds,
)
from accounting.workload import PREFIX, Workload

Objective = Literal["rmse", "max"]
Loss = Callable[[Array], tuple[float, Array]]
"""Parameters -> log of the squared error, and its gradient."""


_MOST_GRAM_WORK = 500_000_000
_MOST_ROUNDS = 32_768


@dataclass(frozen=True, slots=True)
class Filter(OneStream):
    """What ``Toeplitz`` and ``BandedInverse`` share: one filter for all rounds, by coefficients."""

    rounds: int
    coefficients: tuple[float, ...]
    normalize_columns: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", checks.rounds(self.rounds))
        coefficients = checks.reals("coefficients", self.coefficients)
        checks.positive("coefficients[0]", coefficients[0])
        if len(coefficients) > self.rounds:
            raise ConfigError(
                f"coefficients: {len(coefficients)} of them, but rounds={self.rounds}; there is "
                "one per round at most."
            )
        self._check_later(coefficients)
        if not isinstance(self.normalize_columns, bool):
            raise ConfigError(f"normalize_columns={self.normalize_columns!r}: True or False.")
        object.__setattr__(self, "coefficients", coefficients)

    @classmethod
    def from_options(
        cls,
        participation: Participation,
        *,
        bands: int | None = None,
        coefficients: tuple[float, ...] | None = None,
        normalize_columns: bool = False,
        fit: bool = False,
        objective: Objective | None = None,
        momentum: float | None = None,
    ) -> Self:
        """Return the square-root filter, a fitted one, or one by its coefficients.

        Args:
            participation: rounds, and what ``fit`` is for.
            bands: of the square root or the fit; None is all of them, for "toeplitz" only.
            coefficients: instead of the square root.
            normalize_columns: as for the class; after the fit, if there is one.
            fit: fit the coefficients, see ``optimize``.
            objective: of the fit; None is "rmse".
            momentum: of the server's optimiser, for whose models it is fitted; None is 0.
        """
        n = participation.rounds
        for name, value in (("objective", objective), ("momentum", momentum)):
            if value is not None and not fit:
                raise ConfigError(f"{name}={value}: is for a fit; say fit as well.")
        if coefficients is not None:
            if bands is not None:
                raise ConfigError(f"bands={bands}: the coefficients already say how many.")
            if fit:
                raise ConfigError("fit=True: the coefficients are given; leave one of both out.")
            return cls(n, coefficients, normalize_columns)
        cls._check_bands(bands, n)
        if not fit:
            return cls(n, cls._root(n if bands is None else bands), normalize_columns)
        workload = Workload(momentum or 0.0)
        best = cls._fit()(participation, bands, objective or "rmse", workload)
        return cls(n, best.coefficients, normalize_columns)

    @classmethod
    def square_root(
        cls, rounds: int, bands: int | None = None, *, normalize_columns: bool = False
    ) -> Self:
        """Return the filter of the square root of A, the prefix sums: all of it, or first bands."""
        width = checks.rounds(rounds)
        if bands is not None:
            width = min(width, checks.count("bands", bands))
        return cls(rounds, cls._root(width), normalize_columns)

    @property
    def bands(self) -> int:
        """Number of diagonals up to the last one that is not zero."""
        return next(p for p in range(len(self.coefficients), 0, -1) if self.coefficients[p - 1])

    def _column(self) -> Array:
        column = np.zeros(self.rounds)
        column[: len(self.coefficients)] = self.coefficients
        return column

    def _check_later(self, coefficients: tuple[float, ...]) -> None:
        """Refuse coefficients after the first that the sensitivity does not cover."""

    @staticmethod
    def _check_bands(bands: int | None, rounds: int) -> None:
        if bands is not None:
            checks.count("bands", bands, maximum=rounds, hint=f"There are {rounds} rounds.")

    @staticmethod
    def _root(bands: int) -> tuple[float, ...]:
        """Return the first coefficients of (1 - x)^(-1/2), the square root of the prefix sums."""
        return (1.0, *np.cumprod(1 - 0.5 / np.arange(1, bands)))

    @staticmethod
    def _fit() -> "Callable[[Participation, int | None, Objective, Workload], Filter]":
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Toeplitz(Filter):
    """A lower-triangular Toeplitz encoder, or its column-normalised form.

    Args:
        rounds: number of rounds n, 1 to a million.
        coefficients: c_0 > 0, c_1, ..., at most n of them, finite; the rest are zero.
        normalize_columns: divide each column by its norm, so that every round weighs the same:
            C D with D = diag(1 / norms) (jax_privacy's ColumnNormalizedBanded). Less error.

    ``square_root`` is C C = A, c_j = (2j choose j) / 4^j (Fichtenberger, Henzinger and Upadhyay
    2023; banded: Kalinin and Lampert 2024).

    >>> Toeplitz.square_root(3).coefficients
    (1.0, 0.5, 0.375)
    >>> from accounting import Participation
    >>> Toeplitz(6, (1.0, 0.5)).sensitivity(Participation(6, 2, 1))  # doctest: +ELLIPSIS
    Sensitivity(squared=3.50000000000000..., exact=True, rule='non-increasing Toeplitz')
    """

    name = "toeplitz"

    @staticmethod
    def _fit() -> "Callable[[Participation, int | None, Objective, Workload], Toeplitz]":
        return fit_toeplitz

    def column_norms(self) -> Array:
        """Norms of the columns before any normalisation, shape (n,), non-increasing."""
        return column_norms(self._column())

    def encoder(self) -> Array:
        """C, shape (n, n), columns of unit norm if normalised."""
        matrix = lower_toeplitz(self._column())
        return matrix / self.column_norms() if self.normalize_columns else matrix

    def decoder(self) -> Array:
        """B = A C^-1, shape (n, n); noise of the prefix sums that overflows is an error."""
        if self.normalize_columns:
            return np.cumsum(self.column_norms()[:, None] * lower_toeplitz(self._inverse()), axis=0)
        return lower_toeplitz(self._response())

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Exact where a theorem gives it, else a labelled upper bound; see its rule."""
        same_rounds(self.rounds, participation)
        rule = normalized_sensitivity if self.normalize_columns else toeplitz_sensitivity
        return rule(self._column(), participation)

    def noise_program(self) -> NoiseProgram:
        """y_t = (w_t / c_0) (z_t - sum_{j=1}^{p-1} c_j y_{t-j} / w_{t-j}).

        w_t is the norm of column t of C if ``normalize_columns``, else 1. The last p - 1 vectors y
        are kept in a ring.
        """
        first, ring = self.coefficients[0], self.bands - 1
        past = [-c / first for c in self.coefficients[1 : self.bands]]
        norms = (self.column_norms() if self.normalize_columns else np.ones(self.rounds)).tolist()
        # norms sum a square per band, rounded as often; more noise in a round costs nothing
        up = 1 + (self.bands + 4) * 2.0**-52

        def ops(t: int) -> list[Op]:
            norm = norms[t]
            lags = (((t - j) % ring, c * (norm / norms[t - j])) for j, c in enumerate(past[:t], 1))
            weight = 1.0 if norm == first else norm / first * up
            noise = Op(OUT, lags, [(t, weight)])
            return [noise, Op(t % ring, [(OUT, 1.0)])] if ring else [noise]

        def spread() -> float:
            return float(max(norms) * np.linalg.norm(self._inverse()))

        return NoiseProgram(
            self.rounds,
            ops,
            rows=lambda rounds: min(rounds, ring),
            spread=spread,
            # norms do not rise, so no lag has a coefficient above |c_j / c_0|
            filter_error=lambda: (2 * ring + 8) * math.fsum(map(abs, past)),
        )

    def prefix_variance(self) -> Array:
        """Squared row norms of B, in O(n p) without matrices (O(n^2) if normalised)."""
        if not self.normalize_columns:
            return np.cumsum(self._response() ** 2)
        backwards, row = self._inverse()[::-1], np.zeros(self.rounds)
        variance = np.empty(self.rounds)
        # row by row: B_t. = B_{t-1}. + norm_t x (row t of C^-1)
        for t, norm in enumerate(self.column_norms()):
            row[: t + 1] += norm * backwards[self.rounds - 1 - t :]
            variance[t] = row @ row
        return variance

    def _inverse(self) -> Array:
        """First column of the inverse filter."""
        return invertible(forward_substitution(self._column(), np.eye(1, self.rounds)[0]))

    def _response(self) -> Array:
        """First column of its prefix sums."""
        return invertible(forward_substitution(self._column(), np.ones(self.rounds)))


def column_norms(column: Array) -> Array:
    """Return the norms of the columns of C; column t holds the first n - t coefficients."""
    return np.sqrt(np.cumsum(column**2))[::-1]


@np.errstate(over="ignore", invalid="ignore")  # ``Sensitivity`` refuses what is not finite
def toeplitz_sensitivity(column: Array, participation: Participation) -> Sensitivity:
    """Return the squared sensitivity of the Toeplitz C with first column ``column``, shape (n,).

        exact        k = 1: the first column is the longest
        exact        bands <= b: participations are orthogonal, the earliest are the longest
        exact        c >= 0 and non-increasing: ||v||^2 with v_t = sum_{j<k} c_{t-jb}
        upper bound  otherwise: row maxima of |X|, or the line above for the smallest non-increasing
                     majorant of |c|

    Sources, in order: any matrix; Choquette-Choo et al. 2023, "(Amplified) Banded Matrix
    Factorization"; Kalinin and Lampert 2024 (arXiv 2405.13763), Theorem 2; as for any Gram matrix.
    A filter that rises or changes sign is never called exact beyond the first two lines: the worst
    pattern need not be the earliest.
    """
    n, k, b = len(column), participation.max_participations, participation.min_separation
    if k == 1:
        squared = rounded_up(float(column @ column), n)
        return Sensitivity(squared, exact=True, rule="largest column norm")
    if not column[b:].any():
        disjoint = float((column_norms(column)[: k * b : b] ** 2).sum())
        return Sensitivity(rounded_up(disjoint, n + k), exact=True, rule="bands within separation")
    if non_increasing(column):
        earliest = earliest_pattern(column, participation)
        return Sensitivity(rounded_up(earliest, n + k), exact=True, rule="non-increasing Toeplitz")
    magnitude = np.abs(column)
    majorant = np.maximum.accumulate(magnitude[::-1])[::-1]
    bound, rule = earliest_pattern(majorant, participation), "non-increasing majorant"
    if n * n * k <= _MOST_GRAM_WORK:
        rows = _bound_of(_gram(column), participation)
        bound, rule = min((bound, rule), (rows, "sum of row maxima"))
    return Sensitivity(rounded_up(bound, (n + k) * k), exact=False, rule=rule)


def normalized_sensitivity(column: Array, participation: Participation) -> Sensitivity:
    """Return the squared sensitivity after every column is divided by its norm.

    Each participation is worth 1, and if the bands fit into the separation they are orthogonal:
    exactly k (jax_privacy, ColumnNormalizedBanded). Overlapping ones: the rules for any Gram
    matrix, exact only for filters that neither rise nor change sign.
    """
    k, b = participation.max_participations, participation.min_separation
    if k == 1 or not column[b:].any():
        return Sensitivity(float(k), exact=True, rule="unit columns, bands within separation")
    gram = _gram(column) / np.outer(column_norms(column), column_norms(column))
    if non_increasing(column):
        return gram_sensitivity(gram, participation)
    bound = rounded_up(_bound_of(gram, participation), 2 * len(column) * k)
    return Sensitivity(bound, exact=False, rule="sum of row maxima")


def non_increasing(column: Array) -> bool:
    """Return whether c_0 >= c_1 >= ... >= 0."""
    return bool((column[1:] <= column[:-1]).all() and column[-1] >= 0)


def earliest_pattern(column: Array, participation: Participation) -> float:
    """Return ||v||^2 for participation in rounds 0, b, 2b, ..., (k-1) b."""
    n, b = len(column), participation.min_separation
    if participation.max_participations == -(-n // b):  # in every pass: sums with stride b
        passes = np.zeros((-(-n // b), b))
        passes.reshape(-1)[:n] = column
        sums = np.cumsum(passes, axis=0).reshape(-1)[:n]
        return float(sums @ sums)
    return earliest_with_gradient(column, participation)[0]


def _gram(column: Array) -> Array:
    """X = C^T C in O(n^2): X_ij = sum of c_t c_{t+|i-j|} while both stay inside the run."""
    n = len(column)
    gram = np.empty((n, n))
    for lag in range(n):
        diagonal = np.cumsum(column[: n - lag] * column[lag:])[::-1]
        index = np.arange(n - lag)
        gram[index, index + lag] = gram[index + lag, index] = diagonal
    return gram


def _bound_of(gram: Array, participation: Participation) -> float:
    index = np.arange(len(gram))
    apart = np.abs(np.subtract.outer(index, index)) >= participation.min_separation
    return row_bound(np.where(apart, np.abs(gram), 0.0), np.diag(gram), participation)


def forward_substitution(column: Array, right: Array) -> Array:
    """Return y with C y = right, C lower-triangular Toeplitz with first column ``column``."""
    bands = 1 + int(np.flatnonzero(column)[-1])
    solution = np.zeros(len(right))
    backwards = column[bands - 1 : 0 : -1]
    with np.errstate(over="ignore", invalid="ignore"):
        for t, value in enumerate(right):
            past = min(t, bands - 1)
            carried = backwards[bands - 1 - past :] @ solution[t - past : t]
            solution[t] = (value - carried) / column[0]
    return solution


def lower_toeplitz(column: Array) -> Array:
    """Return the lower-triangular Toeplitz matrix with that first column."""
    lag = np.subtract.outer(np.arange(len(column)), np.arange(len(column)))
    return np.where(lag < 0, 0.0, column[lag])


def invertible(series: Array) -> Array:
    """Refuse noise that grows beyond float64."""
    if not np.abs(series).max() < 1e150:
        raise ConfigError(
            "coefficients: the inverse of this filter grows without bound, and so would the noise. "
            "Non-increasing, nonnegative coefficients are always safe."
        )
    return series


def fit_toeplitz(
    participation: Participation,
    bands: int | None,
    objective: Objective,
    workload: Workload = PREFIX,
) -> Toeplitz:
    """Return the best non-increasing Toeplitz encoder, with log c_j = -sum_{i<=j} exp(p_i).

    Returns:
        A local optimum, found from the square-root filter; seconds for 2048 rounds.
    """
    hint = "That is for fitting a Toeplitz encoder; its square root takes more."
    n = checks.count("rounds", participation.rounds, maximum=_MOST_ROUNDS, hint=hint)
    width = n if bands is None else checks.count("bands", bands)
    if width > n:
        raise ConfigError(f"bands={width}: must be at most rounds={n}.")
    loss = coefficient_loss(participation, objective, workload.constant("toeplitz"))

    def from_logs(logs: Array) -> tuple[float, Array]:
        drops = np.exp(logs)
        column = np.zeros(n)
        column[:width] = np.exp(-np.concatenate([[0.0], np.cumsum(drops)]))
        value, gradient = loss(column)
        tails = np.cumsum((column * gradient)[:width][::-1])[::-1]
        return value, -drops * tails[1:]

    start = np.log(-np.log1p(-0.5 / np.arange(1, width)))
    logs, _ = minimized(f"toeplitz, {width} bands", from_logs, start, [(-25.0, 3.0)] * (width - 1))
    coefficients = np.exp(-np.concatenate([[0.0], np.cumsum(np.exp(logs))]))
    return Toeplitz(n, tuple(coefficients))


def coefficient_loss(
    participation: Participation, objective: Objective, workload: Workload = PREFIX
) -> Loss:
    """Return the log of sensitivity^2 x error^2, with gradient, for non-increasing c with c_0 = 1.

    The product is the square of ``accounting.error``. Let r be the coefficients of
    1/((1-x) (1-mx) c(x)), m the momentum. Model t has variance sum_{j<=t} r_j^2, so both errors are
    sums w_j r_j^2: w_j = (n-j)/n for the mean, 1 for the largest. With q = r / c, as power series,
    the gradient is

        d/dc_i sum_j w_j r_j^2 = -2 sum_{j>=i} w_j r_j q_{j-i}.

    The sensitivity is that of the earliest pattern, exact for coefficients that are nonnegative and
    do not rise (Kalinin and Lampert 2024, Theorem 2); the fits are parametrised to stay there.
    """
    n = participation.rounds
    weights = (n - np.arange(n)) / n if objective == "rmse" else np.ones(n)
    response = workload.response(np.arange(float(n)))

    def loss(column: Array) -> tuple[float, Array]:
        squared, rise = earliest_with_gradient(column, participation)
        r = forward_substitution(column, response)
        variance = float(weights @ r**2)
        inverse = np.diff(r, prepend=0.0)
        inverse[1:] -= workload.momentum * inverse[:-1].copy()
        q = convolve(r, inverse)
        fall = -2 * convolve((weights * r)[::-1], q)[::-1]
        return float(np.log(squared * variance)), rise / squared + fall / variance

    return loss


def earliest_with_gradient(column: Array, participation: Participation) -> tuple[float, Array]:
    """Return ``earliest_pattern``, and its gradient in the coefficients."""
    n, b = len(column), participation.min_separation
    starts = range(0, participation.max_participations * b, b)
    v, rise = np.zeros(n), np.zeros(n)
    for start in starts:
        v[start:] += column[: n - start]
    for start in starts:
        rise[: n - start] += 2 * v[start:]
    return float(v @ v), rise


def convolve(left: Array, right: Array) -> Array:
    """Return the first n coefficients of the product of two power series of length n."""
    size = 2 * len(left)
    product = np.fft.irfft(np.fft.rfft(left, size) * np.fft.rfft(right, size), size)
    return np.asarray(product[: len(left)], dtype=np.float64)


def minimized(
    what: str, loss: Loss, start: Array, bounds: Sequence[tuple[float, float]]
) -> tuple[Array, float]:
    """Return the minimum that L-BFGS-B finds from ``start``, and the loss there.

    Logs every step of fitting ``what`` to "accounting.fit".
    """
    import logging

    from scipy.optimize import minimize

    if not len(start):
        return start, loss(start)[0]  # nothing to fit
    log = logging.getLogger("accounting.fit")
    steps = 0

    def log_step(intermediate_result: Any) -> None:  # noqa: ANN401  scipy asks for this name
        nonlocal steps
        steps += 1
        reached = float(np.exp(intermediate_result.fun / 2))
        log.info("fitting %s: step %d, error %.5g", what, steps, reached)

    options = {"maxiter": 1000, "maxfun": 2000, "ftol": 1e-9, "gtol": 1e-7, "maxcor": 20}
    optimum = minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options, callback=log_step
    )
    return np.asarray(optimum.x, dtype=np.float64), float(optimum.fun)
