"""Profiles as points: their convex hull, their inverse, and what a test can detect under them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.sensitivity import Array


def lower_hull(x: Array, y: Array) -> NDArray[np.int64]:
    """Return the indices of the points on the greatest convex function that is above none.

    It takes one pass (Andrew 1979).

    Args:
        x: ascending, each once, shape (n,).
        y: shape (n,).

    >>> lower_hull(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 0.9, 0.2, 0.0])).tolist()
    [0, 2, 3]
    """
    # Slopes are compared, because products of small differences would underflow.
    corners: list[int] = []
    slopes: list[float] = []
    across, up = x.tolist(), y.tolist()
    for i in range(len(across)):
        while corners:
            slope = (up[i] - up[corners[-1]]) / (across[i] - across[corners[-1]])
            if not slopes or slope > slopes[-1]:
                slopes.append(slope)
                break
            corners.pop()
            slopes.pop()
        corners.append(i)
    return np.array(corners)


def lowest(meets: Callable[[float], bool], low: float, high: float, *, close: float) -> float:
    """Return where ``meets`` becomes true, rounded up to ``high`` or a number that was tried."""
    while high - low > close * high:
        middle = (low + high) / 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def least_epsilon(meets: Callable[[float], bool], most: float) -> float | None:
    """Return the least epsilon that ``meets``, rounded up by at most 1e-6; None if above ``most``.

    The first ones that are tried are 0, 1, 2, 4, ...
    """
    low, high = 0.0, 1.0
    if meets(0.0):
        return 0.0
    while not meets(high):
        low, high = high, 2 * high
        if high > most:
            return None
    return lowest(meets, low, high, close=1e-6)


def most_detected(epsilons: Array, deltas: Array, fpr: float) -> float:
    """Return an upper bound on the true-positive rate of any membership test at ``fpr``.

    Every (epsilon, delta) of a profile is such a bound: tpr <= e^epsilon fpr + delta, and
    1 - fpr <= e^epsilon (1 - tpr) + delta.
    """
    fpr = checks.probability("fpr", fpr)
    rates = np.minimum(
        np.exp(np.minimum(epsilons, 700.0)) * fpr + deltas,
        1 - np.exp(-epsilons) * (1 - fpr - deltas),
    )
    return min(1.0, float(rates.min()) * (1 + 1e-9))
