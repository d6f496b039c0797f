"""Sensitivity: how far one client can move the encoded stream of a mechanism.

A client adds a vector of length at most 1 in each round of its pattern u, so the encoded stream
moves by C x and, with X = C^T C, squared sensitivity = max over admissible u, |g_i| <= 1 of
sum_{i,j in u} X_ij <g_i, g_j>. If X_ij >= 0 that is max_u u^T X u, exactly.

``gram_sensitivity`` is the rule for any encoder; mechanisms with a better rule have it in their own
files. It is exact where it can find the maximum and the maximum is attained: one participation
(largest diagonal entry); columns ``min_separation`` apart that are orthogonal (a weighted choice of
rounds: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization"); X without negative
entries, and either a client that may take part in every round, or few enough patterns to try them
all. Otherwise it is an upper bound: the best sum of row maxima.
"""

import sys
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from accounting.participation import FixedOrder, Participation

Array = NDArray[np.float64]
"""Numbers of any shape."""

_MOST_PATTERNS = 50_000
_ROUNDING = 1e-12
"""Negative entries this small, relative to the largest diagonal one, are the rounding of a zero."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Squared L2 sensitivity at clip norm 1, and the rule that gives it.

    Attributes:
        squared: max over participations of ||C x||^2.
        exact: False if ``squared`` is only an upper bound.
        rule: the theorem or algorithm behind it, in a few words.
    """

    squared: float
    exact: bool
    rule: str

    def __post_init__(self) -> None:
        if not checks.positive("sensitivity squared", self.squared) >= 1e-200:
            raise ConfigError(
                f"sensitivity squared={self.squared:g}: must be at least 1e-200; floats below that "
                "cannot be rounded up."
            )


def brute_force(encoder: Array, participation: Participation) -> float:
    """Return max_u u^T abs(X) u by trying every admissible pattern: the fast rules' reference.

    Exact where X = C^T C has no negative entry; an upper bound otherwise. Takes exponential time.
    """
    if encoder.ndim != 2 or encoder.shape[1] != participation.rounds:
        raise ConfigError(
            f"encoder has shape {encoder.shape}: must have {participation.rounds} columns, one "
            "for each round of the participation."
        )
    if not np.isfinite(encoder).all():
        raise ConfigError("encoder has entries that are not finite.")
    gram = np.abs(encoder.T @ encoder)
    # take, because indexing with np.ix_ takes three times as long
    return max(float(gram.take(u, 0).take(u, 1).sum()) for u in participation.patterns())


def gram_sensitivity(gram: Array, participation: Participation) -> Sensitivity:
    """Return the squared sensitivity of any encoder with C^T C = ``gram``.

    Returns:
        The exact value where a rule of the module's docstring gives it, else an upper bound with
        ``exact=False``.
    """
    size = len(gram)
    k, b = participation.max_participations, participation.min_separation
    if isinstance(participation, FixedOrder):
        return _by_place(gram, participation)
    terms = (size + k) * k  # entries that nearly cancel are off by as much as the diagonal
    if k == 1:
        worst = float(np.diag(gram).max())
        return Sensitivity(rounded_up(worst, terms), exact=True, rule="largest column norm")
    apart = np.abs(np.subtract.outer(np.arange(size), np.arange(size))) >= b
    admissible = np.where(apart, gram, 0.0)
    if not admissible.any():
        worst = float(heaviest(np.diag(gram), k, b))
        return Sensitivity(rounded_up(worst, terms), exact=True, rule="orthogonal participations")
    magnitude = np.abs(admissible)
    attained = admissible.min() >= -_ROUNDING * np.diag(gram).max()
    if attained and k == participation.rounds:
        worst = float(np.trace(gram) + magnitude.sum())
        return Sensitivity(rounded_up(worst, terms), exact=True, rule="every round")
    if attained and _pattern_count(participation) <= _MOST_PATTERNS:
        worst = _try_all(magnitude, np.diag(gram), participation)
        return Sensitivity(rounded_up(worst, terms), exact=True, rule="all patterns tried")
    worst = row_bound(magnitude, np.diag(gram), participation)
    return Sensitivity(rounded_up(worst, terms), exact=False, rule="sum of row maxima")


def _by_place(gram: Array, participation: FixedOrder) -> Sensitivity:
    """Return the sensitivity of passes in a fixed order: of the worst place, in all its rounds."""
    worst = Sensitivity(1e-200, exact=True, rule="")
    for rounds in participation.places():
        inside = slice(rounds.start, rounds.stop, rounds.step)
        every = Participation(len(rounds), len(rounds))
        sensitivity = gram_sensitivity(gram[inside, inside], every)
        worst = max(worst, sensitivity, key=lambda s: s.squared)
    return Sensitivity(worst.squared, worst.exact, f"fixed order, {worst.rule}")


def row_bound(magnitude: Array, diagonal: Array, participation: Participation) -> float:
    """Return an upper bound on max_u sum_{i in u} (X_ii + sum_{j in u, j != i} |X_ij|).

    Each row is worth at most its diagonal entry plus its best k - 1 others; a pattern is worth at
    most the sum of its rows. ``magnitude`` is |X|, with zeros where |i - j| < b.
    """
    k, b = participation.max_participations, participation.min_separation
    cross = heaviest(magnitude, k - 1, b)
    return float(heaviest(diagonal + cross, k, b))


def rounded_up(value: float, terms: int) -> float:
    """Return ``value``, a float64 sum of ``terms`` products of nonnegative numbers, rounded up.

    Each addition and each multiplication lost at most half a unit in the last place.
    """
    return value * (1 + (terms + 4) * sys.float_info.epsilon)


def same_rounds(mechanism_rounds: int, participation: Participation) -> None:
    """Raise ``ConfigError`` if mechanism and participation differ in their number of rounds."""
    if mechanism_rounds != participation.rounds:
        raise ConfigError(
            f"participation has rounds={participation.rounds} but the mechanism has "
            f"rounds={mechanism_rounds}: both must describe the same run."
        )


def heaviest(weights: Array, count: int, separation: int) -> Array:
    """Return the greatest weight of at most ``count`` rounds, ``separation`` apart (last axis).

    F_m[i] = max(F_m[i-1], w_i + F_{m-1}[i-b]) over the first i rounds.
    """
    best = np.zeros_like(weights)
    for _ in range(count):
        total = weights.copy()
        total[..., separation:] += best[..., :-separation]
        best = np.maximum(np.maximum.accumulate(total, axis=-1), 0.0)
    return np.asarray(best[..., -1])


def _pattern_count(participation: Participation) -> int:
    """Return how many patterns ``_try_all`` visits: those with fewer than k participations."""
    n, b = participation.rounds, participation.min_separation
    sizes = range(participation.max_participations)
    return sum(comb(n - max(0, size - 1) * (b - 1), size) for size in sizes)


def _try_all(magnitude: Array, diagonal: Array, participation: Participation) -> float:
    """Return the greatest sum, depth first; one max chooses the last round."""
    b = participation.min_separation

    def best(inside: float, cross: Array, first: int, remaining: int) -> float:
        if first >= len(diagonal):
            return inside
        values = inside + diagonal[first:] + 2 * cross[first:]
        if remaining == 1:
            return float(values.max())
        later = (
            best(float(value), cross + magnitude[i], i + b, remaining - 1)
            for i, value in enumerate(values, start=first)
        )
        return max(inside, *later)

    return best(0.0, np.zeros(len(diagonal)), 0, participation.max_participations)
