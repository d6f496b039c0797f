r"""Private selection: what it costs to release the best of K runs, and nothing of the others.

The base Q trains one candidate and releases it with its score. The selection A draws K >= 1 from a
public distribution with generating function f, runs Q K times with independent noise, and releases
the run with the highest score: not K, and no other run (Liu and Talwar 2019). Counting all runs
would cost sqrt(K) mu; hiding K makes the price nearly independent of it.

The bound holds for every base. Let l be the likelihood ratio of an outcome between the neighbouring
inputs, Y the base's trade-off, Y(x) = sup{Q'(S): Q(S) <= x}, and x the probability of a better
score. The winner has density l f'(1 - x) against f'(1 - x'), with x' <= Y(x), and f' rises, so

    delta_A(e)  <=  integral over Q' of  max over x of (A(x) l - exp(e) B(x))_+,
    A(x) = f'(1 - x),    B(x) = f'(1 - Y(x)).

The maximum over lines in l depends on the lower convex hull of the points (A, B) and (0, 0) only.
Along an edge of the hull that spans dA with slope s, it gains dA (l - exp(e) s)_+, so that

    delta_A(e)  <=  sum over edges of  dA * delta_Q(e + log s).

A cell [x1, x2] of positions counts with A(x1) and B(x2), which rounds against us. An adversary who
chooses the scores comes within 0.4 % of this epsilon for a Gaussian base.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from accounting import checks, gaussian
from accounting.checks import ConfigError
from accounting.guarantee import Guarantee

Array = NDArray[np.float64]
MOST_RUNS = 1_000
"""Expected trainings of a selection; more are a mistake of typing."""
_EXACT = Context(prec=60)
"""Digits of the distribution of K, so that a draw of it is not told from the stated one."""
_BITS = 192
"""Bits of the uniform number that K is drawn by: 57 digits."""
_LOGITS = (-700.0, 36.0)
"""Positions, as log(x / (1 - x)): beyond them x and 1 - x are no floats any more."""
_ROUNDED = 1e-12
"""Relative error of a slope: about twenty operations."""


class Base(Protocol):
    """What one run of the selection promises, in both directions of its adjacency."""

    def delta(self, epsilon: float) -> float:
        """Return the least delta at ``epsilon`` >= 0, rounded up."""

    def tpr_at_fpr(self, fpr: float) -> float:
        """Return the greatest true-positive rate of any test at ``fpr``, rounded up."""


class Repetitions(Protocol):
    """A distribution of the number of runs K, at least 1."""

    @property
    def expected(self) -> float:
        """Mean of K."""

    def slope(self, tail: Array) -> Array:
        """Return f'(1 - tail) of the generating function f, for ``tail`` in [0, 1]."""

    def probabilities(self) -> Iterator[Decimal]:
        """Yield Pr[K = 1], Pr[K = 2], ... to 50 digits; they end only if K is bounded."""


@dataclass(frozen=True, slots=True)
class NegativeBinomialRuns:
    """Truncated negative binomial K (Papernot and Steinke 2022, Definition 1).

    Args:
        expected: mean of K, in (1, 1000].
        eta: shape, in (-1, 10]: 1 is geometric, 0 logarithmic. A smaller eta costs less epsilon
            and has a longer tail of K, which is the bill in hours.

    >>> round(NegativeBinomialRuns(10, eta=1).gamma, 9)
    0.1
    """

    expected: float
    eta: float = 1.0

    def __post_init__(self) -> None:
        _mean(self.expected)
        if not -1 < checks.finite("eta", self.eta) <= 10:
            raise ConfigError(f"eta={self.eta:g}: must be above -1 and at most 10.")
        if 0 < abs(self.eta) < 1e-6:
            raise ConfigError(
                f"eta={self.eta:g}: is too near 0 for exact chances of K; use 0 itself."
            )
        if not math.isclose(self._mean(self.gamma), self.expected, rel_tol=1e-6):
            raise ConfigError(
                f"eta={self.eta:g}: no K of this shape has a mean of {self.expected:g} that can be "
                "drawn; use a greater eta, or a smaller mean."
            )

    @property
    def gamma(self) -> float:
        """Parameter of the distribution in (0, 1), to the last bit of the mean."""
        excess = lambda log: math.log(self._mean(math.exp(log)) / self.expected)  # noqa: E731
        return math.exp(_falling_root(excess, -60.0, -1e-9))

    def _mean(self, gamma: float) -> float:
        if self.eta == 0:
            return (1 / gamma - 1) / -math.log(gamma)
        return self.eta * (1 - gamma) / (gamma * -math.expm1(self.eta * math.log(gamma)))

    def slope(self, tail: Array) -> Array:
        """Return f'(1 - tail) = E[K] (1 + tail (1 - gamma) / gamma)^-(1 + eta)."""
        gamma = self.gamma
        ratio = np.log1p(tail * (1 - gamma) / gamma)
        return np.asarray(self._mean(gamma) * np.exp(-(1 + self.eta) * ratio))

    def probabilities(self) -> Iterator[Decimal]:
        """Yield Pr[K = k]: each is the one before times (1 - gamma) (k - 1 + eta) / k."""
        gamma, eta = Decimal(self.gamma), Decimal(self.eta)
        other = _EXACT.subtract(Decimal(1), gamma)
        if eta == 0:
            chance = _EXACT.divide(other, -_EXACT.ln(gamma))
        else:
            power = _EXACT.subtract(_EXACT.power(gamma, -eta), Decimal(1))
            chance = _EXACT.divide(_EXACT.multiply(eta, other), power)
        k = 1
        while True:
            yield chance
            k += 1
            growth = _EXACT.divide(_EXACT.add(Decimal(k - 1), eta), Decimal(k))
            chance = _EXACT.multiply(chance, _EXACT.multiply(other, growth))


@dataclass(frozen=True, slots=True)
class PoissonRuns:
    """Poisson K, conditioned on K >= 1: concentrated near its mean, and dearer.

    Args:
        expected: mean of K, in (1, 1000].
    """

    expected: float

    def __post_init__(self) -> None:
        _mean(self.expected)

    @property
    def rate(self) -> float:
        """Mean of the Poisson distribution before the condition."""
        excess = lambda rate: self.expected + rate / math.expm1(-rate)  # noqa: E731
        return _falling_root(excess, 1e-12, 2 * self.expected)

    def slope(self, tail: Array) -> Array:
        """Return f'(1 - tail) = m exp(-m tail) / (1 - exp(-m))."""
        rate = self.rate
        return np.asarray(rate / -math.expm1(-rate) * np.exp(-rate * tail))

    def probabilities(self) -> Iterator[Decimal]:
        """Yield Pr[K = k] = m^k / (k! (exp(m) - 1))."""
        rate = Decimal(self.rate)
        chance = _EXACT.divide(rate, _EXACT.subtract(_EXACT.exp(rate), Decimal(1)))
        k = 1
        while True:
            yield chance
            k += 1
            chance = _EXACT.multiply(chance, _EXACT.divide(rate, Decimal(k)))


@dataclass(frozen=True, slots=True)
class BinomialRuns:
    """Binomial K, conditioned on K >= 1: never more than ``most`` runs.

    Args:
        expected: mean of K, in (1, most).
        most: greatest K, at most 10,000.
    """

    expected: float
    most: int

    def __post_init__(self) -> None:
        _mean(self.expected)
        if not self.expected < checks.count("most", self.most, minimum=2, maximum=10_000):
            raise ConfigError(f"expected={self.expected:g}: must be below most={self.most}.")

    @property
    def chance(self) -> float:
        """Probability of each of the ``most`` runs before the condition."""
        excess = lambda log: self.expected - self._mean(math.exp(log))  # noqa: E731
        return math.exp(_falling_root(excess, -40.0, 0.0))

    def _mean(self, chance: float) -> float:
        missed = self.most * math.log1p(-chance) if chance < 1 else -math.inf
        return self.most * chance / -math.expm1(missed)

    def slope(self, tail: Array) -> Array:
        """Return f'(1 - tail) = E[K] (1 - p tail)^(n - 1)."""
        chance = self.chance
        return np.asarray(self._mean(chance) * (1 - chance * tail) ** (self.most - 1))

    def probabilities(self) -> Iterator[Decimal]:
        """Yield Pr[K = k] for k = 1 ... most."""
        chance = Decimal(self.chance)
        other = _EXACT.subtract(Decimal(1), chance)
        missed = _EXACT.power(other, self.most)
        odds = _EXACT.divide(chance, other)
        mass = _EXACT.divide(missed, _EXACT.subtract(Decimal(1), missed))
        for k in range(1, self.most + 1):
            growth = _EXACT.divide(Decimal(self.most - k + 1), Decimal(k))
            mass = _EXACT.multiply(mass, _EXACT.multiply(odds, growth))
            yield mass


def draw(repetitions: Repetitions, random_bits: Callable[[int], int]) -> int:
    """Return K, drawn by inversion to 50 digits.

    Args:
        repetitions: the distribution.
        random_bits: returns a number of that many secret, uniform bits (``secrets.randbits``).
    """
    uniform = _EXACT.divide(Decimal(random_bits(_BITS)), Decimal(2**_BITS))
    total, runs = Decimal(0), 0
    for probability in repetitions.probabilities():
        total, runs = _EXACT.add(total, probability), runs + 1
        if uniform < total or probability.is_zero():
            break
    return runs


def quantile(repetitions: Repetitions, share: float) -> int:
    """Return the least k with Pr[K <= k] >= ``share`` in (0, 1): what to plan hours for.

    >>> quantile(NegativeBinomialRuns(10, eta=1), 0.95)
    29
    """
    share = checks.probability("share", share)
    return draw(repetitions, lambda bits: int(share * (1 - 1e-15) * 2**53) << (bits - 53))


@dataclass(frozen=True)
class SelectedGuarantee:
    """What releasing the best of K runs costs, and nothing else of them.

    Args:
        base: guarantee of one run, its score included. If candidates differ, the greatest.
        repetitions: the distribution that K is drawn from, before the first run.
        fineness: greatest step of log A and log B between two positions; smaller is nearer.

    It holds only if the score is a function of the released model and of public data, or is noised
    within the base; if K and the losing runs stay secret; and if each run has its own noise.

    >>> ten = SelectedGuarantee(Guarantee(mu=0.5), NegativeBinomialRuns(10, eta=1))
    >>> round(ten.epsilon(1e-6), 2)
    3.26
    """

    base: Base
    repetitions: Repetitions
    fineness: float = 0.004

    def __post_init__(self) -> None:
        checks.positive("fineness", self.fineness)

    def delta(self, epsilon: float) -> float:
        """Return a delta that holds with ``epsilon`` >= 0, rounded up; at most 1."""
        epsilon = checks.nonnegative("epsilon", epsilon)
        spans, logs = self._edges
        terms = [
            span * _profile(self.base, epsilon + log)
            for span, log in zip(spans.tolist(), logs.tolist(), strict=True)
        ]
        return min(1.0, math.nextafter(math.fsum(terms) * (1 + _ROUNDED), 2.0))

    def epsilon(self, delta: float) -> float:
        """Return an epsilon that holds with ``delta`` in (0, 1), rounded up by at most 1e-6 of it.

        Raises:
            ConfigError: no epsilon up to 10,000 has this delta: the base has a failure probability.
        """
        delta = checks.probability("delta", delta)
        low, high = 0.0, 1.0
        if self.delta(0.0) <= delta:
            return 0.0
        while self.delta(high) > delta:
            low, high = high, 2 * high
            if high > 1e4:
                raise ConfigError(
                    f"delta={delta:g}: is reached by no epsilon up to 10,000; use a greater one, "
                    "more noise or fewer runs."
                )
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high

    @cached_property
    def _edges(self) -> tuple[Array, Array]:
        """Spans dA and log slopes of the hull's edges, from (0, 0) to its greatest A."""
        first, second = self._points()
        hull = _lower_hull(first, second)
        spans = np.diff(np.array([a for a, _ in hull]))
        rises = np.diff(np.array([b for _, b in hull]))
        # Down: a smaller slope s gives a greater delta_Q(e + log s), at most 1 where B underflows.
        with np.errstate(divide="ignore"):
            return spans * (1 + _ROUNDED), np.log(rises / spans) - _ROUNDED

    def _points(self) -> tuple[Array, Array]:
        """Points (A, B) of cells of positions that cover [0, 1], each rounded against us."""
        logits = np.linspace(*_LOGITS, 65)
        while True:
            # x and 1 - x by the smaller, so that neither is rounded away.
            x = np.exp(-np.logaddexp(0.0, -logits))
            rates = np.array([self.base.tpr_at_fpr(float(fpr)) for fpr in x])
            first = self.repetitions.slope(np.concatenate(([0.0], x)))
            second = self.repetitions.slope(np.concatenate((rates, [1.0])))
            with np.errstate(divide="ignore", invalid="ignore"):
                widths = -np.diff(np.log(first))[1:], -np.diff(np.log(second))[:-1]
            # Cells whose slopes underflow are not refined: there is nothing to tell them apart.
            wide = np.fmax(*(np.where(np.isfinite(w), w, 0.0) for w in widths))
            coarse = np.flatnonzero(wide > self.fineness)
            if coarse.size == 0 or logits.size > 200_000:
                return first * (1 + _ROUNDED), second * (1 - _ROUNDED)
            middles = (logits[coarse] + logits[coarse + 1]) / 2
            logits = np.sort(np.concatenate((logits, middles)))


def most_mu(repetitions: Repetitions, *, target_epsilon: float, delta: float) -> float:
    """Return the greatest mu of one run for which the selection costs at most the target.

    Within 1e-4 of it, relatively, rounded down: the base noise of a tune under a total budget.

    >>> mu = most_mu(NegativeBinomialRuns(10, eta=1), target_epsilon=3.26, delta=1e-6)
    >>> round(mu, 2)
    0.5
    """
    target = checks.positive("target_epsilon", target_epsilon)
    # One run costs less than a selection of it, so its mu is too great.
    low, high = 0.0, gaussian.mu(target, checks.probability("delta", delta))
    least = high / 1000
    while high - low > 3e-5 * high:
        if high < least:
            raise ConfigError(
                f"target_epsilon={target:g}: is below what a selection can be accounted for, with "
                "slopes told apart by 0.4 %; use a greater target."
            )
        middle = (low + high) / 2
        cost = SelectedGuarantee(Guarantee(middle), repetitions).delta(target)
        low, high = (middle, high) if cost <= delta else (low, middle)
    return low


def _profile(base: Base, epsilon: float) -> float:
    """Return the base's delta at any real ``epsilon``: below 0 by the other direction."""
    if epsilon < -700:  # at least 1 - e^epsilon, which is 1 as a float
        return 1.0
    if epsilon >= 0:
        return base.delta(epsilon)
    other = math.exp(epsilon) * base.delta(-epsilon)
    return min(1.0, (other - math.expm1(epsilon)) * (1 + _ROUNDED))


def _lower_hull(first: Array, second: Array) -> list[tuple[float, float]]:
    """Return the lower convex hull of (0, 0) and the points, by rising A."""
    hull = [(0.0, 0.0)]
    order = np.lexsort((second, first))
    for a, b in zip(first[order].tolist(), second[order].tolist(), strict=True):
        if a == hull[-1][0]:
            continue
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], (a, b)):
            hull.pop()
        hull.append((a, b))
    return hull


def _turns_down(
    start: tuple[float, float], middle: tuple[float, float], end: tuple[float, float]
) -> bool:
    before = (middle[1] - start[1]) * (end[0] - start[0])
    return before >= (end[1] - start[1]) * (middle[0] - start[0])


def _mean(expected: float) -> None:
    if not 1 < checks.positive("expected", expected) <= MOST_RUNS:
        raise ConfigError(
            f"expected={expected:g}: the mean number of runs must be above 1 and at most "
            f"{MOST_RUNS:,}."
        )


def _falling_root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of a falling function by bisection to the last bit."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low
