"""Profiles as points: their convex hull, their inverse, and what a test can detect under them."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.roots import safe_root
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


def least_epsilon(delta_at: Callable[[float], float], delta: float, most: float) -> float | None:
    """Return the least epsilon whose delta is at most ``delta``; None if above ``most``.

    It is rounded up by at most 1e-6 of it.

    Args:
        delta_at: the delta of a profile at an epsilon >= 0; falling.
        delta: in (0, 1).
        most: where the search ends that begins at 0, 1, 2, 4, ...
    """

    def excess(epsilon: float) -> float:
        return log_excess(delta_at(epsilon), delta)

    low, high = 0.0, 1.0
    if excess(0.0) <= 0:
        return 0.0
    while excess(high) > 0:
        low, high = high, 2 * high
        if high > most:
            return None
    return safe_root(excess, infeasible=low, feasible=high, close=4e-7)


def log_excess(reached: float, delta: float) -> float:
    """Return log(reached / delta): near its root it is nearly a line in epsilon and in mu."""
    if reached == delta:
        return 0.0
    distance = abs(math.log(max(reached, 5e-324)) - math.log(delta)) or 1e-300
    return math.copysign(distance, reached - delta)


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
