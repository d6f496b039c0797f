"""Toeplitz sensitivity under (k, b): exact where a theorem gives it, else an upper bound.

    exact        k = 1: the first column is the longest
    exact        bands <= b: participations are orthogonal, the earliest are the longest
    exact        c >= 0 and non-increasing: ||v||^2 with v_t = sum_{j<k} c_{t-jb}
    upper bound  otherwise: row maxima of |X|, or the line above for the smallest non-increasing
                 majorant of |c|

Sources, in order: any matrix; Choquette-Choo et al. 2023, "(Amplified) Banded Matrix
Factorization"; Kalinin and Lampert 2024 (arXiv 2405.13763), Theorem 2; as for any Gram
matrix. A filter that rises or changes sign is never called exact beyond the first two lines: the
worst pattern need not be the earliest.
"""

import numpy as np
from numpy.typing import NDArray

from accounting.participation import Participation
from accounting.sensitivity import Sensitivity, gram_sensitivity, rounded_up, row_bound

_MOST_GRAM_WORK = 500_000_000

Array = NDArray[np.float64]


def column_norms(column: Array) -> Array:
    """Norms of the columns of C, whose t-th holds the first n - t coefficients."""
    return np.sqrt(np.cumsum(column**2))[::-1]


def toeplitz_sensitivity(column: Array, participation: Participation) -> Sensitivity:
    """Return the squared sensitivity of the Toeplitz C with first column ``column``, shape (n,)."""
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
        rows = _gram_bound(column, participation)
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
    """Is c_0 >= c_1 >= ... >= 0?"""
    return bool((np.diff(column) <= 0).all() and column[-1] >= 0)


def earliest_pattern(column: Array, participation: Participation) -> float:
    """||v||^2 for participation in rounds 0, b, 2b, ..., (k-1) b."""
    v = np.zeros(len(column))
    for j in range(participation.max_participations):
        start = j * participation.min_separation
        v[start:] += column[: len(column) - start]
    return float(v @ v)


def _gram(column: Array) -> Array:
    """X = C^T C in O(n^2): X_ij = sum of c_t c_{t+|i-j|} while both stay inside the run."""
    n = len(column)
    gram = np.empty((n, n))
    for lag in range(n):
        diagonal = np.cumsum(column[: n - lag] * column[lag:])[::-1]
        index = np.arange(n - lag)
        gram[index, index + lag] = gram[index + lag, index] = diagonal
    return gram


def _gram_bound(column: Array, participation: Participation) -> float:
    return _bound_of(_gram(column), participation)


def _bound_of(gram: Array, participation: Participation) -> float:
    index = np.arange(len(gram))
    apart = np.abs(np.subtract.outer(index, index)) >= participation.min_separation
    return row_bound(np.where(apart, np.abs(gram), 0.0), np.diag(gram), participation)
