r"""Gaussian mechanism: the exact trade-off between epsilon and delta at a given mu.

One release of a query of sensitivity s with noise N(0, sigma^2) is mu-GDP with mu = s / sigma, and

    delta(epsilon) = Phi(-x) - e^epsilon Phi(-y),    x = epsilon/mu - mu/2,   y = epsilon/mu + mu/2

(Balle and Wang 2018, Theorem 8; Dong, Roth and Su 2022, Corollary 2.13). Since y^2 - x^2 is
2 epsilon, both terms carry the factor exp(-x^2/2). With erfcx(t) = e^(t^2) erfc(t) it can be taken
out, so that no exponential overflows and the difference itself is the only cancellation:

    delta(epsilon) = exp(-x^2/2) / 2 * (erfcx(x / sqrt 2) - erfcx(y / sqrt 2)).

Rounding goes against us: ``log_delta`` adds a bound on its own floating-point error, so epsilon
and delta come out high and mu comes out low.

The special functions are made from ``math.erfc``: to load scipy.special takes longer than
everything else that a command does.
"""

import math

from accounting.roots import safe_root

_UNIT_ROUNDOFF = 2.0**-53
_SQRT2 = math.sqrt(2.0)
_INVERSE_SQRT_PI = 1 / math.sqrt(math.pi)
_TERMS = 40  # terms of the continued fraction: at 3, where most are needed, 32 give 16 digits
_FAR = 1e6  # standard deviations beyond which the mass of the tail is smaller than any float


def log_delta(mu: float, epsilon: float) -> float:
    """Return an upper bound on log delta(epsilon), tight to floating-point error."""
    x = epsilon / mu - mu / 2
    if x > _FAR:
        return -x * x / 2 * (1 - 1e-9)  # Phi(-x) <= e^(-x^2/2)
    y = epsilon / mu + mu / 2
    log_first = (
        math.log(_erfcx(x / _SQRT2) / 2) - x * x / 2
        if x > -1
        else math.log1p(-math.erfc(-x / _SQRT2) / 2)
    )
    log_second = math.log(_erfcx(y / _SQRT2) / 2) - x * x / 2
    ratio = math.exp(log_second - log_first)
    # The relative error of each term is at most `each`: rounding of x enters through x^2/2 (|x| y)
    # and through erfcx (y / |x|), and the functions themselves are accurate to a few units.
    error = 16 * _UNIT_ROUNDOFF * (4 + abs(x) * y + y / max(abs(x), 1.0))
    difference = -math.expm1(log_second - log_first)
    return log_first + math.log(difference + error * (1 + ratio))


def delta(mu: float, epsilon: float) -> float:
    """Return the privacy profile, delta at this epsilon, rounded up; in (0, 1]."""
    # nextafter also covers results below 1e-308, where a float has few digits.
    return min(1.0, math.nextafter(math.exp(log_delta(mu, epsilon)) * (1 + 1e-15), 1.0))


def epsilon(mu: float, delta: float) -> float:
    """Return the least epsilon >= 0 with delta(epsilon) <= delta, rounded up."""
    target = _log_down(delta)

    def excess(candidate: float) -> float:
        return log_delta(mu, candidate) - target

    if excess(0.0) <= 0:
        return 0.0
    # zCDP gives an epsilon that is always sufficient (Bun and Steinke 2016, Proposition 1.3).
    enough = mu * mu / 2 + mu * math.sqrt(-2 * target)
    return safe_root(excess, infeasible=0.0, feasible=enough * (1 + 1e-9))


def mu(epsilon: float, delta: float) -> float:
    """Return the greatest mu whose delta(epsilon) is at most delta, rounded down."""
    target = _log_down(delta)

    def excess(candidate: float) -> float:
        return log_delta(candidate, epsilon) - target

    feasible = delta  # since delta(epsilon) <= delta(0) < 0.4 mu
    while excess(feasible) > 0:  # only because of the rounding that log_delta allows for
        feasible /= 2
    infeasible = 2 * feasible
    while excess(infeasible) <= 0:
        feasible, infeasible = infeasible, 2 * infeasible
    return safe_root(excess, infeasible=infeasible, feasible=feasible)


def true_positive_rate(mu: float, false_positive_rate: float) -> float:
    """Return the highest true-positive rate at this false-positive rate, rounded up; in (0, 1].

    Phi(Phi^-1(fpr) + mu) (Dong, Roth and Su 2022, Definition 2.6).
    """
    from statistics import NormalDist

    threshold = NormalDist().inv_cdf(false_positive_rate)
    shifted = threshold + mu
    shifted += 16 * _UNIT_ROUNDOFF * (1 + abs(threshold) + mu)
    # log Phi has slope up to |x|, so rounding of x and of Phi's own x^2 costs x^2 units.
    error = 16 * _UNIT_ROUNDOFF * (4 + min(shifted, 0.0) ** 2)
    return min(1.0, math.nextafter(math.erfc(-shifted / _SQRT2) / 2 * (1 + error), 1.0))


def _erfcx(t: float) -> float:
    """Return e^(t^2) erfc(t) for t above -1, to a few units in the last place.

    From 3 on by Laplace's continued fraction 1 / (t + (1/2) / (t + 1 / (t + (3/2) / (t + ...)))).
    """
    if t < 3:
        return math.exp(t * t) * math.erfc(t)
    fraction = t
    for doubled in range(_TERMS, 0, -1):
        fraction = t + doubled / 2 / fraction
    return _INVERSE_SQRT_PI / fraction


def _log_down(delta: float) -> float:
    return math.log(delta) * (1 + 2.0**-51)
