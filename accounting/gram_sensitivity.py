"""Gram sensitivity: max over participations of sum_{i,j in u} |X_ij|, from X = C^T C alone.

Exact where the maximum can be found and is attained: one participation (largest diagonal entry);
columns ``min_separation`` apart that are orthogonal (a weighted choice of rounds: Choquette-Choo et
al. 2023, "(Amplified) Banded Matrix Factorization"); X without negative entries, and either a
client that may be in every round, or few enough patterns to try them all. Otherwise an upper bound:
the best sum of row maxima.
"""

from math import comb

import numpy as np
from numpy.typing import NDArray

from accounting.participation import Participation
from accounting.sensitivity import Sensitivity, rounded_up

_MOST_PATTERNS = 50_000
_ROUNDING = 1e-12
"""Negative entries this small, relative to the largest diagonal one, are the rounding of a zero."""

Array = NDArray[np.float64]


def gram_sensitivity(gram: Array, participation: Participation) -> Sensitivity:
    """Return the squared sensitivity of any encoder with C^T C = ``gram``.

    Args:
        gram: X = C^T C, shape (n, n).
        participation: who may take part; its ``rounds`` is n.

    Returns:
        The exact value where one of the rules in this file's docstring gives it, else an upper
        bound labelled as one.
    """
    size = len(gram)
    k, b = participation.max_participations, participation.min_separation
    terms = (size + k) * k  # entries that nearly cancel are off by as much as the diagonal
    if k == 1:
        worst = float(np.diag(gram).max())
        return Sensitivity(rounded_up(worst, terms), exact=True, rule="largest column norm")
    apart = np.abs(np.subtract.outer(np.arange(size), np.arange(size))) >= b
    admissible = np.where(apart, gram, 0.0)
    if not admissible.any():
        worst = float(_heaviest(np.diag(gram), k, b))
        return Sensitivity(rounded_up(worst, terms), exact=True, rule="orthogonal participations")
    magnitude = np.abs(admissible)
    attained = admissible.min() >= -_ROUNDING * np.diag(gram).max()
    if attained and _everybody_always(participation):
        worst = float(np.trace(gram) + magnitude.sum())
        return Sensitivity(rounded_up(worst, terms), exact=True, rule="every round")
    if attained and _patterns(participation) <= _MOST_PATTERNS:
        worst, _ = _try_all(magnitude, np.diag(gram), participation)
        return Sensitivity(rounded_up(worst, terms), exact=True, rule="all patterns tried")
    worst = row_bound(magnitude, np.diag(gram), participation)
    return Sensitivity(rounded_up(worst, terms), exact=False, rule="sum of row maxima")


def row_bound(magnitude: Array, diagonal: Array, participation: Participation) -> float:
    """Return an upper bound on max_u sum_{i in u} (X_ii + sum_{j in u, j != i} |X_ij|).

    Each row is worth at most its diagonal entry plus its best k - 1 others; a pattern is worth at
    most the sum of its rows. ``magnitude`` is |X| with zeros less than b off the diagonal.
    """
    k, b = participation.max_participations, participation.min_separation
    others = _heaviest(magnitude, k - 1, b)
    return float(_heaviest(diagonal + others, k, b))


def _heaviest(weights: Array, most: int, separation: int) -> Array:
    """Most that ``most`` rounds weigh: F_m[i] = max(F_m[i-1], w_i + F_{m-1}[i-b]), last axis."""
    best = np.zeros_like(weights)
    for _ in range(most):
        total = weights.copy()
        total[..., separation:] += best[..., :-separation]
        best = np.maximum(np.maximum.accumulate(total, axis=-1), 0.0)
    return np.asarray(best[..., -1])


def worst_pattern(gram: Array, participation: Participation) -> tuple[int, ...]:
    """Return the rounds of an admissible pattern u with the largest sum_{i,j in u} |X_ij|.

    Tries all of them: for Gram matrices that ``gram_sensitivity`` calls exact.
    """
    if _everybody_always(participation):
        return tuple(range(participation.rounds))
    return _try_all(np.abs(gram), np.diag(gram), participation)[1]


def _everybody_always(participation: Participation) -> bool:
    return participation.max_participations == participation.rounds


def _patterns(participation: Participation) -> int:
    """Number of patterns with fewer participations than the most: what ``_try_all`` visits."""
    n, b = participation.rounds, participation.min_separation
    sizes = range(participation.max_participations)
    return sum(comb(n - max(0, size - 1) * (b - 1), size) for size in sizes)


def _try_all(
    magnitude: Array, diagonal: Array, participation: Participation
) -> tuple[float, tuple[int, ...]]:
    """Depth first over patterns; the last participation is chosen for all rounds at once."""
    b = participation.min_separation

    def best(inside: float, cross: Array, first: int, left: int) -> tuple[float, tuple[int, ...]]:
        if first >= len(diagonal):
            return inside, ()
        values = inside + diagonal[first:] + 2 * cross[first:]
        if left == 1:
            last = int(values.argmax())
            return float(values[last]), (first + last,)
        worst: tuple[float, tuple[int, ...]] = inside, ()
        for i in range(first, len(diagonal)):
            value, rest = best(float(values[i - first]), cross + magnitude[i], i + b, left - 1)
            if value > worst[0]:
                worst = value, (i, *rest)
        return worst

    return best(0.0, np.zeros(len(diagonal)), 0, participation.max_participations)
