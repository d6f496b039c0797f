r"""Quadrature: delta of the Gaussian mechanism by numerical integration, to check the closed form.

It starts from the definition, delta(epsilon) = integral of max(0, p - e^epsilon q) over outputs,
with p = N(mu, 1) and q = N(0, 1), and shares no code with ``gaussian``: no error function, no
asymptotics, no directed rounding. The integrand is positive for outputs x above
x0 = epsilon/mu + mu/2; with x = x0 + t and a = x0 - mu,

    delta(epsilon) = integral over t > 0 of  exp(-(a + t)^2 / 2) / sqrt(2 pi) * (1 - exp(-mu t)).
"""

import math

import numpy as np

_POINTS = 4001
_SIMPSON = np.ones(_POINTS)
_SIMPSON[1:-1:2] = 4
_SIMPSON[2:-1:2] = 2
_WIDEST = 12.0
"""Standard deviations, or e-folds, beyond which the integrand is negligible against its peak."""


def log_delta(mu: float, epsilon: float) -> float:
    """Return log delta(epsilon) to within about 1e-9, for mu > 0 and epsilon >= 0."""
    a = epsilon / mu - mu / 2
    peak = max(0.0, -a)
    reach = min(_WIDEST, 4 * _WIDEST / a) if a > 0 else _WIDEST
    s = np.linspace(max(-peak, -_WIDEST), reach, _POINTS)
    # divided by exp(-max(a, 0)^2 / 2), its greatest factor, so that it never underflows to zeros
    shape = np.exp(-max(a, 0.0) * s - s * s / 2) * -np.expm1(-mu * (peak + s))
    # Simpson's rule by hand: loading scipy.integrate would slow the start of the command line
    mass = float(_SIMPSON @ shape) * (s[1] - s[0]) / 3
    return math.log(mass) - max(a, 0.0) ** 2 / 2 - math.log(2 * math.pi) / 2


def epsilon(mu: float, delta: float) -> float:
    """Return the least epsilon >= 0 for ``delta`` in (0, 1), without directed rounding."""
    target = math.log(delta)
    if log_delta(mu, 0.0) <= target:
        return 0.0
    enough = mu * mu / 2 + mu * math.sqrt(-2 * target)  # Bun and Steinke 2016, Proposition 1.3
    low, high = 0.0, enough * 1.01
    above, below = log_delta(mu, low) - target, log_delta(mu, high) - target
    while high - low > 1e-12 * high:  # false position, halving the end that stays (Illinois)
        middle = low + (high - low) * above / (above - below)
        excess = log_delta(mu, middle) - target
        if abs(excess) < 1e-13:
            return middle
        if excess > 0:
            low, above, below = middle, excess, below / 2
        else:
            high, below, above = middle, excess, above / 2
    return high
