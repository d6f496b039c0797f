"""Toeplitz: C_ij = c_{i-j}, the same filter in every round (Fichtenberger et al. 2023).

With p coefficients C is p-banded. Noise is the recurrence that inverts the filter, so its cost is
p - 1 past vectors: y_t = (z_t - sum_{j=1}^{p-1} c_j y_{t-j}) / c_0.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import record
from accounting.mechanisms.toeplitz_sensitivity import (
    column_norms,
    normalized_sensitivity,
    toeplitz_sensitivity,
)
from accounting.participation import Participation
from accounting.sensitivity import Sensitivity, same_rounds

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Toeplitz:
    """A lower-triangular Toeplitz encoder, or its column-normalised form.

    Args:
        rounds: number of rounds n, 1 to a million.
        coefficients: c_0 > 0, c_1, ..., at most n of them, finite; the rest are zero.
        normalize_columns: divide each column by its norm, so that every round weighs the same:
            C D with D = diag(1 / norms) (jax_privacy's ColumnNormalizedBanded). Less error.

    Streaming noise of round t (from 0): y_t = (z_t - sum_{1 <= j <= min(t, p-1)} c_j y_{t-j}) / c_0
    in a ring of p - 1 past y; add y_t to the round's sum (times the norm of column t of C if
    ``normalize_columns``, after y_t entered the ring). The running sum is the prefix sum's noise.

    Raises:
        ConfigError: a value is out of range.

    >>> from accounting import Participation
    >>> Toeplitz(6, (1.0, 0.5)).sensitivity(Participation(6, 2, 1))  # doctest: +ELLIPSIS
    Sensitivity(squared=3.50000000000000..., exact=True, rule='non-increasing Toeplitz')
    """

    rounds: int
    coefficients: tuple[float, ...]
    normalize_columns: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", checks.rounds(self.rounds))
        coefficients = checks.reals("coefficients", self.coefficients)
        checks.positive("coefficients[0]", coefficients[0])
        if len(coefficients) > self.rounds:
            raise ConfigError(
                f"coefficients: {len(coefficients)} of them, but rounds={self.rounds}; the encoder "
                "has one per round at most."
            )
        if not isinstance(self.normalize_columns, bool):
            raise ConfigError(f"normalize_columns={self.normalize_columns!r}: True or False.")
        object.__setattr__(self, "coefficients", coefficients)

    @classmethod
    def square_root(
        cls, rounds: int, bands: int | None = None, *, normalize_columns: bool = False
    ) -> "Toeplitz":
        """C with C C = A: c_j = (2j choose j) / 4^j, all of them or the first ``bands``.

        Source: Fichtenberger, Henzinger and Upadhyay 2023; banded: Kalinin and Lampert 2024.

        >>> Toeplitz.square_root(3).coefficients
        (1.0, 0.5, 0.375)
        """
        most = checks.rounds(rounds)
        if bands is not None:
            most = min(most, checks.count("bands", bands))
        ratios = 1 - 0.5 / np.arange(1, most)
        return cls(rounds, (1.0, *np.cumprod(ratios)), normalize_columns)

    @property
    def name(self) -> str:
        """Short name, as on the command line."""
        return "toeplitz"

    @property
    def bands(self) -> int:
        """Number of diagonals up to the last one that is not zero."""
        return 1 + int(np.flatnonzero(self.coefficients)[-1])

    def to_dict(self) -> dict[str, Any]:
        """Every field, for JSON; see ``mechanism_from_dict``."""
        return record(self)

    def column_norms(self) -> Array:
        """Norms of the columns before any normalisation, shape (n,), non-increasing."""
        return column_norms(self._column())

    def encoder(self) -> Array:
        """C, shape (n, n), columns of unit norm if normalised."""
        matrix = lower_toeplitz(self._column())
        return matrix / self.column_norms() if self.normalize_columns else matrix

    def decoder(self) -> Array:
        """B = A C^-1, shape (n, n); noise of the prefix sums that overflows is an error."""
        n = self.rounds
        if self.normalize_columns:
            inverse = lower_toeplitz(
                _invertible(forward_substitution(self._column(), np.eye(1, n)[0]))
            )
            return np.cumsum(self.column_norms()[:, None] * inverse, axis=0)
        return lower_toeplitz(_invertible(forward_substitution(self._column(), np.ones(n))))

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Exact where a theorem gives it, else a labelled upper bound; see its rule."""
        same_rounds(self.rounds, participation)
        rule = normalized_sensitivity if self.normalize_columns else toeplitz_sensitivity
        return rule(self._column(), participation)

    def prefix_variance(self) -> Array:
        """Squared row norms of B, in O(n p) without matrices (O(n^2) if normalised)."""
        if self.normalize_columns:
            return self._normalized_variance()
        step = _invertible(forward_substitution(self._column(), np.ones(self.rounds)))
        return np.cumsum(step**2)

    def _normalized_variance(self) -> Array:
        """Row by row: B_t. = B_{t-1}. + norm_t x (row t of C^-1)."""
        inverse = _invertible(forward_substitution(self._column(), np.eye(1, self.rounds)[0]))
        backwards, row = inverse[::-1], np.zeros(self.rounds)
        variance = np.empty(self.rounds)
        for t, norm in enumerate(self.column_norms()):
            row[: t + 1] += norm * backwards[self.rounds - 1 - t :]
            variance[t] = row @ row
        return variance

    def _column(self) -> Array:
        column = np.zeros(self.rounds)
        column[: len(self.coefficients)] = self.coefficients
        return column


def forward_substitution(column: Array, right: Array) -> Array:
    """Solve C y = right for the lower-triangular Toeplitz C with first column ``column``."""
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
    """The lower-triangular Toeplitz matrix with that first column."""
    lag = np.subtract.outer(np.arange(len(column)), np.arange(len(column)))
    return np.where(lag < 0, 0.0, column[lag])


def _invertible(series: Array) -> Array:
    """Refuse noise that grows beyond float64."""
    if not np.abs(series).max() < 1e150:
        raise ConfigError(
            "coefficients: the inverse of this filter grows without bound, and so would the noise. "
            "Non-increasing, nonnegative coefficients are always safe."
        )
    return series
