"""Bounds: what scores of canaries prove about epsilon, from below.

A bound is wrong with probability at most 1 - confidence, if its assumption holds; each carries its
assumption. It is rounded down, and is 0 where nothing is proved.

All take the scores of m canaries, (m,), and ``present``, the coins that decided who took part, (m,)
truth values. Scores are larger for those who did. ``delta`` and ``confidence`` are in (0, 1).

"GDP": the run is mu-GDP for some mu, as every run without amplification is said to be, so that a
bound on mu is one on epsilon. "Independent": given all coins, the scores are independent of each
other, and each depends on the canary's own coin only, as with orthogonal directions and Gaussian
noise. A server that now and then releases everything breaks it.

``guesses``. A mu-GDP pair of distributions is a randomised function of N(-mu/2, 1) and
N(mu/2, 1) (Dong, Roth and Su 2022, Theorem 2.10), so that a fair coin is guessed right with
probability at most Phi(mu/2), whatever is guessed. Right guesses of independent canaries are then
at most Binomial(m, Phi(mu/2)), and Clopper and Pearson's lower end p of their rate gives
mu >= 2 Phi^-1(p). One test of one hypothesis, it beats nine thresholds.

``one_run_gdp``. Let p_i be the probability of i right guesses out of k, about m fair coins. For a
random canary, "guessed right, and i or more right in all" becomes "guessed wrong, and i - 1 or more
right in all" when its coin is turned. As the trade-off function is convex, with
R_i = sum_{l >= i} l/m p_l and H_i = sum_{l >= i} (k - l)/m p_l,

    Phi^-1(R_i) <= Phi^-1(H_{i-1}) + mu.

If c or more right guesses had probability alpha, this forces probability on c - 1, c - 2, ...; a
total above 1 refutes mu. Guesses may depend on each other in any way.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.special import bdtrc

from accounting import Guarantee, checks
from accounting.checks import ConfigError

Array = NDArray[np.float64]
NONE = "none"
GDP = "GDP"
GDP_INDEPENDENT = "GDP, independent canaries"
GAUSSIAN = "independent Gaussian scores"
_THRESHOLDS = np.linspace(-1.0, 3.0, 9)  # scores of those who did not take part are N(0, 1)
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)  # of the canaries, about which ``one_run`` guesses
_SHARE = 0.15  # of the canaries, about which ``one_run_gdp`` guesses
_NORMAL = NormalDist()
_MOST = 128.0  # greatest epsilon, or mu, that is tried; no number of canaries proves more
_LEAST_MU = 1e-3  # below it a bound is 0: floating point cannot tell its epsilon to nine digits


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on what a run costs."""

    method: str
    assumption: str  # what must hold beside the coins being fair and secret
    mu: float | None  # the run is not mu'-GDP for any mu' below; None says nothing
    epsilon: float  # the run is not (epsilon', delta)-DP for any epsilon' below; 0 proves nothing
    delta: float
    confidence: float

    def __str__(self) -> str:
        """One line.

        >>> print(Bound("pooled t", "independent Gaussian scores", 0.9, 3.87519, 1e-5, 0.95))
        epsilon at least 3.875 at delta 1e-05 (pooled t, 95 %; assumes independent Gaussian scores)
        """
        assumed = "no assumption" if self.assumption == NONE else f"assumes {self.assumption}"
        return (
            f"epsilon at least {self.least} at delta {self.delta:g} "
            f"({self.method}, {percent(self.confidence)}; {assumed})"
        )

    @property
    def least(self) -> str:
        """Epsilon with three decimals, rounded down."""
        return str(Decimal(repr(self.epsilon)).quantize(Decimal("0.001"), ROUND_FLOOR))


def percent(confidence: float) -> str:
    """Return a confidence in percent, rounded down.

    >>> percent(0.95), percent(1 - 1e-12)
    ('95 %', '99.999999 %')
    """
    down = (100 * Decimal(repr(confidence))).quantize(Decimal("1e-6"), ROUND_FLOOR)
    return f"{down.normalize():f} %"


def epsilon_below(mu: float, delta: float) -> float:
    """Return the epsilon of a mu-GDP run at ``delta``, rounded down.

    >>> 0 < Guarantee(1.0).epsilon(1e-5) - epsilon_below(1.0, 1e-5) < 1e-8
    True
    """
    delta = checks.probability("delta", delta)
    if not checks.nonnegative("mu", mu) >= _LEAST_MU:
        return 0.0
    # The accountant's delta(epsilon) is high by a relative error far below this margin.
    high = Guarantee(mu).epsilon(min(delta * (1 + 1e-8), math.nextafter(1.0, 0.0)))
    return high * (1 - 1e-9)


def error_of(confidence: float) -> float:
    """Return the probability with which a bound may be wrong, above 0 and below 1."""
    return min(1 - checks.probability("confidence", confidence), math.nextafter(1.0, 0.0))


def from_mu(
    method: str, assumption: str, mu: float, *, delta: float, confidence: float = 0.95
) -> Bound:
    """Return the bound that a lower bound on mu gives; a negative one proves nothing."""
    confidence = checks.probability("confidence", confidence)
    if not math.isfinite(mu):
        raise ConfigError(f"mu={mu}: must be finite.")
    low = max(0.0, mu * (1 - 1e-9))
    low = low if low >= _LEAST_MU else 0.0
    return Bound(method, assumption, low, epsilon_below(low, delta), delta, confidence)


def one_run(
    scores: ArrayLike, present: ArrayLike, *, delta: float, confidence: float = 0.95
) -> Bound:
    """Return the bound of Steinke, Nasr and Jagielski 2023: no assumption about the run.

    The canaries with the highest and lowest scores are guessed, each share in turn, and the best
    result kept; the confidence pays for the choice. It never passes about half of a large epsilon.
    """
    values, took_part = _scored(scores, present)
    delta = checks.probability("delta", delta)
    alpha = error_of(confidence) / len(_SHARES)
    m = len(values)
    counts = [_surest(values, took_part, share) for share in _SHARES]

    def refuted(epsilon: float) -> bool:
        return any(one_run_p_value(m, g, right, epsilon, delta) <= alpha for g, right in counts)

    return Bound("one run", NONE, None, _largest(refuted), delta, confidence)


def _surest(values: Array, took_part: NDArray[np.bool_], share: float) -> tuple[int, int]:
    """Return how many canaries are guessed, the highest and lowest scores, and how many right."""
    m = len(values)
    half = max(1, int(share * m / 2)) if m > 1 else 0
    order = np.argsort(-values, kind="stable")
    right = took_part[order[:half]].sum() + (~took_part[order[m - half :]]).sum()
    return 2 * half, int(right)


def _largest(refuted: Callable[[float], bool]) -> float:
    """Return a number that is refuted, close to the first that is not; 0 if none is."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high) and high < _MOST:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def one_run_p_value(m: int, guessed: int, right: int, epsilon: float, delta: float) -> float:
    """Return the probability, at most, of so many right guesses in an (epsilon, delta)-DP run.

    Steinke, Nasr and Jagielski 2023, Theorem 5.2, for ``guessed`` of m fair coins.
    """
    if not right:
        return 1.0
    q = 1 / (1 + math.exp(-epsilon))
    above = bdtrc(np.arange(right - 1, -2, -1), guessed, q)  # right or more, one fewer, ...
    tail = float(above[0])
    slope = float(np.max((above[1:] - tail) / np.arange(1, right + 1)))
    return min(1.0, (tail + 2 * m * delta * slope) * (1 + 1e-9))


def one_run_gdp(
    scores: ArrayLike, present: ArrayLike, *, delta: float, confidence: float = 0.95
) -> Bound:
    """Return the bound of Mahloujifar, Melis and Chaudhuri 2024, for mu-GDP runs.

    It needs no independence: coins of one canary may move the scores of all.
    """
    values, took_part = _scored(scores, present)
    alpha = error_of(confidence)
    guessed, right = _surest(values, took_part, _SHARE)
    m = len(values)
    mu = _largest(lambda candidate: _gdp_refuted(m, guessed, right, candidate, alpha))
    return from_mu("one run, GDP", GDP, mu, delta=delta, confidence=confidence)


def _gdp_refuted(m: int, guessed: int, right: int, mu: float, alpha: float) -> bool:
    """Return whether so many right guesses have probability below alpha in a mu-GDP run."""
    if not right:
        return False
    r = alpha * right / m
    h = alpha * (guessed - right) / m
    for i in range(right, 0, -1):
        bound = _NORMAL.cdf(_NORMAL.inv_cdf(min(r, 1 - 2.0**-53)) - mu) * (1 - 1e-12)
        if not bound > h:
            return False
        r += (i - 1) * (bound - h) / (guessed - i + 1)
        h = bound
        if r + h > guessed / m * (1 + 1e-12):
            return True
    return False


def guesses(
    scores: ArrayLike,
    present: ArrayLike,
    *,
    delta: float,
    claimed_mu: float,
    confidence: float = 0.95,
) -> Bound:
    """Return the bound of guessing every coin: present if the score is above ``claimed_mu`` / 2.

    ``claimed_mu`` is what the canaries should be visible by (``View.mu``); it places the threshold,
    so it must not depend on the scores. A wrong one lowers the bound.
    """
    values, took_part = _scored(scores, present)
    alpha = error_of(confidence)
    threshold = checks.nonnegative("claimed_mu", claimed_mu) / 2
    right = int(((values > threshold) == took_part).sum())
    low = float(stats.beta.ppf(alpha, right, len(values) - right + 1)) if right else 0.0
    mu = 2 * float(stats.norm.ppf(low)) if low > 0.5 else 0.0
    return from_mu("guesses", GDP_INDEPENDENT, mu, delta=delta, confidence=confidence)


def clopper_pearson(
    scores: ArrayLike, present: ArrayLike, *, delta: float, confidence: float = 0.95
) -> Bound:
    """Return the best bound of error rates at fixed thresholds: mu >= -Phi^-1(a) - Phi^-1(b).

    Both sides must occur. Each threshold costs confidence.
    """
    present_scores, absent_scores = _sides(scores, present)
    error = error_of(confidence) / (2 * len(_THRESHOLDS))
    false_alarms = (absent_scores[:, None] > _THRESHOLDS).sum(0)
    misses = (present_scores[:, None] <= _THRESHOLDS).sum(0)
    a = _rate_at_most(false_alarms, len(absent_scores), error)
    b = _rate_at_most(misses, len(present_scores), error)
    mu = float(np.max(np.where((a < 1) & (b < 1), stats.norm.isf(a) + stats.norm.isf(b), 0.0)))
    return from_mu("Clopper-Pearson", GDP_INDEPENDENT, mu, delta=delta, confidence=confidence)


def pooled_t(
    scores: ArrayLike, present: ArrayLike, *, delta: float, confidence: float = 0.95
) -> Bound:
    """Return the bound of the means' difference, low, over the standard deviation, high.

    Half of the error goes to each (t and chi-square, with both sides' deviation pooled). At least
    two canaries are on either side.
    """
    alpha = error_of(confidence)
    x, y = _sides(scores, present)
    if min(len(x), len(y)) < 2:
        raise ConfigError("present: at least two canaries must be present, and two absent.")
    nu = len(x) + len(y) - 2
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        squares = float(((x - x.mean()) ** 2).sum() + ((y - y.mean()) ** 2).sum())
    deviation = math.sqrt(squares / nu)
    if not 0 < deviation < math.inf:
        raise ConfigError("scores: vary too little or too much for floating point.")
    highest = deviation * math.sqrt(nu / float(stats.chi2.ppf(alpha / 2, nu)))
    wide = float(stats.t.isf(alpha / 2, nu)) * deviation * math.sqrt(1 / len(x) + 1 / len(y))
    mu = (float(x.mean() - y.mean()) - wide) / highest
    return from_mu("pooled t", GAUSSIAN, mu, delta=delta, confidence=confidence)


def _rate_at_most(errors: NDArray[np.int64], trials: int, alpha: float) -> Array:
    """Return Clopper and Pearson's upper end of a rate, each wrong with probability alpha."""
    above = stats.beta.ppf(1 - alpha, errors + 1, np.maximum(trials - errors, 1))
    return np.where(errors == trials, 1.0, above)


def _sides(scores: ArrayLike, present: ArrayLike) -> tuple[Array, Array]:
    values, took_part = _scored(scores, present)
    if took_part.all() or not took_part.any():
        raise ConfigError("present: all coins fell alike; use more canaries.")
    return values[took_part], values[~took_part]


def _scored(scores: ArrayLike, present: ArrayLike) -> tuple[Array, NDArray[np.bool_]]:
    values = np.asarray(scores, dtype=np.float64)
    took_part = np.asarray(present)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ConfigError(f"scores: shape {values.shape}; must be a finite vector.")
    if took_part.shape != values.shape or took_part.dtype != np.bool_:
        raise ConfigError(
            f"present: {took_part.dtype} of shape {took_part.shape}; must be a truth value for "
            f"each of {len(values)} scores."
        )
    return values, took_part
