"""Calibration: the least noise that meets a target, never less than that."""

import math
from collections.abc import Callable

from scipy.optimize import brentq

from accounting import checks, gaussian
from accounting.checks import ConfigError
from accounting.guarantee import METHODS, Guarantee, Method, mu_upper
from accounting.mechanisms import Mechanism
from accounting.participation import Participation


def calibrate(
    mechanism: Mechanism,
    participation: Participation,
    *,
    target_epsilon: float,
    delta: float,
    method: Method = "exact",
) -> float:
    """Return the least noise multiplier whose guarantee is at most (target_epsilon, delta).

    Args:
        mechanism: the encoder whose noise the server adds.
        participation: how often one client may take part.
        target_epsilon: the budget, > 0.
        delta: in (0, 1).
        method: how epsilon is computed, see ``Guarantee``.

    Guarantees:
        ``guarantee(..., noise_multiplier=result).epsilon(delta) <= target_epsilon``, and within
        1e-4 of it, relatively.

    Raises:
        ConfigError: a value out of range, or a target that ``method`` cannot reach.

    >>> from accounting import BinaryTree
    >>> run = Participation(1000)
    >>> round(calibrate(BinaryTree(1000), run, target_epsilon=2.0, delta=1e-6), 4)
    7.0534
    """
    target = checks.positive("target_epsilon", target_epsilon)
    delta = checks.probability("delta", delta)
    checks.choice("method", method, METHODS)
    squared = mechanism.sensitivity(participation).squared

    def epsilon(noise_multiplier: float) -> float:
        return Guarantee(mu_upper(squared, noise_multiplier), method).epsilon(delta)

    # Exact by inversion; the other methods are never tighter, so that is where to start.
    noise = math.sqrt(squared) / gaussian.mu(target, delta)
    if method != "exact":
        noise = _search(epsilon, target, start=noise)
    step = noise * 2.0**-48
    while epsilon(noise) > target:  # the last roundings
        noise, step = noise + step, 2 * step
    return noise


def _search(epsilon: Callable[[float], float], target: float, *, start: float) -> float:
    """Return where the decreasing ``epsilon`` crosses ``target``, from ``start`` upwards."""
    low, high = start * (1 - 1e-6), start
    while epsilon(high) > target:
        low, high = high, 2 * high
        if high > 16 * start:  # its orders end there: epsilon stops falling
            raise ConfigError(
                f"target_epsilon={target:g}: this method cannot go that low at this delta. "
                'Use method="exact".'
            )
    return float(brentq(lambda z: epsilon(z) - target, low, high, rtol=1e-10))
