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

At small epsilons the sum is above what it would cost to count all runs and to release K, too, which
is more: sum over k of Pr[K = k] delta(e; sqrt(k) mu). The smaller of the two holds.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from decimal import Context, Decimal
from functools import cached_property, lru_cache
from typing import ClassVar, Protocol

import numpy as np

from accounting import checks, gaussian
from accounting.checks import ConfigError
from accounting.guarantee import Cost, Guarantee
from accounting.hull import least_epsilon, log_excess, lower_hull, most_detected
from accounting.roots import safe_root
from accounting.sensitivity import Array
from accounting.typed import split_text, typed_values

MOST_RUNS = 1_000
"""Expected trainings of a selection; more are a mistake of typing."""
_EXACT = Context(prec=60)
"""Digits of the distribution of K, so that a draw of it is not told from the stated one."""
_BITS = 192  # bits of the uniform number that K is drawn by: 57 digits
_LOGITS = (-700.0, 36.0)
"""Positions, as log(x / (1 - x)): beyond them x and 1 - x are no floats any more."""
_LEAST_SLOPE = 1e-290
"""Smaller slopes, of which floats have few digits, count as this in A, and as 0 in B."""
_ROUNDED = 1e-12  # relative error of a slope: about twenty operations
_COUNTED_FROM = 1e-4
"""Deltas below which counting all runs is rarely cheaper, so that it is not computed."""
_MOST_COUNTED = 100_000  # runs up to which K is told apart where all of them are counted
LEAST_DELTA = 1e-100
"""Deltas from which on ``SelectedGuarantee.mu`` is proven."""


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

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
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

    @cached_property
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


@dataclass(frozen=True)
class PoissonRuns:
    """Poisson K, conditioned on K >= 1: concentrated near its mean, and dearer.

    Args:
        expected: mean of K, in (1, 1000].
    """

    expected: float

    def __post_init__(self) -> None:
        _mean(self.expected)

    @cached_property
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


@dataclass(frozen=True)
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

    @cached_property
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


Kind = type[NegativeBinomialRuns] | type[PoissonRuns] | type[BinomialRuns]
_KINDS: dict[str, tuple[Kind, set[str]]] = {
    "negative-binomial": (NegativeBinomialRuns, {"expected", "eta"}),
    "poisson": (PoissonRuns, {"expected"}),
    "binomial": (BinomialRuns, {"expected", "most"}),
}


def repetitions_of(text: str, name: str = "best_of") -> Repetitions:
    """Return the distribution of K that was typed.

    Args:
        text: a mean, of a geometric K, or a distribution: "binomial:expected=3,most=5".
        name: what the text was typed for, for messages.
    """
    try:
        return NegativeBinomialRuns(float(text))
    except ConfigError:
        raise
    except ValueError:
        kind_name, options = split_text(text)
    if kind_name not in _KINDS:
        raise ConfigError(f"{name}={text}: must be a mean number of runs, or {', '.join(_KINDS)}.")
    kind, allowed = _KINDS[kind_name]
    values = typed_values(kind, kind_name, options, allowed)
    if missing := {"expected", "most"} & allowed - values.keys():
        raise ConfigError(f"{name}={text}: {', '.join(sorted(missing))} is missing.")
    return kind(**values)


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
class SelectedGuarantee(Cost):
    """What releasing the best of K runs costs, and nothing else of them.

    Args:
        base: guarantee of one run, its score included. If candidates differ, one that is not below
            any of theirs at any epsilon; of Gaussians, the one of the greatest mu.
        repetitions: the distribution that K is drawn from, before the first run.
        fineness: greatest step of log A and log B between two positions; smaller is nearer.

    It holds only if the score is a function of the released model and of public data, or is noised
    within the base; if K and the losing runs stay secret; if each run has its own noise; and if
    each draws its candidate anew from one fixed list. Candidates tried in turn, each once, are
    another mechanism. The result is an upper bound, nearly the least for Gaussian runs.

    >>> ten = SelectedGuarantee(Guarantee(mu=0.5), NegativeBinomialRuns(10, eta=1))
    >>> round(ten.epsilon(1e-6), 2)
    3.26
    """

    base: Base
    repetitions: Repetitions
    fineness: float = 0.004

    steps: ClassVar[int] = 1
    """As a release that composes with others (``composed.Profiled``)."""

    def __post_init__(self) -> None:
        checks.positive("fineness", self.fineness)

    def delta(self, epsilon: float) -> float:
        """Return a delta that holds with ``epsilon`` >= 0, rounded up; at most 1."""
        epsilon = checks.nonnegative("epsilon", epsilon)
        bound = self._nearer(epsilon)
        return bound if bound < _COUNTED_FROM else min(bound, self._counted(epsilon))

    def _nearer(self, epsilon: float) -> float:
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
        least = _least_epsilon(self, delta)
        if least is None:
            raise ConfigError(
                f"delta={delta:g}: is reached by no epsilon up to 10,000; use a greater one, more "
                "noise or fewer runs."
            )
        return least

    @cached_property
    def mu(self) -> float:
        """The mu of one Gaussian that costs no less than the selection at any delta >= 1e-100.

        It is far from tight: use it where only a mu can be added.
        """
        epsilons, deltas = self.profile
        # Between two epsilons the selection has at most the first one's delta.
        cells = zip(epsilons[1:].tolist(), deltas[:-1].tolist(), strict=True)
        return max(gaussian.mu(e, min(d, 1 - 1e-12)) for e, d in cells) * (1 + 1e-6)

    @cached_property
    def profile(self) -> tuple[Array, Array]:
        """Epsilons from 0, and the deltas that hold with them, down to 1e-100."""
        epsilons, deltas = [0.0], [self.delta(0.0)]
        while deltas[-1] >= LEAST_DELTA:
            epsilons.append(epsilons[-1] + max(0.02, 0.02 * epsilons[-1]))
            deltas.append(min(deltas[-1], self.delta(epsilons[-1])))
            if epsilons[-1] > 1e4:
                raise ConfigError("delta: that of this selection does not fall to 1e-100.")
        return np.array(epsilons), np.array(deltas)

    def coarse_epsilon(self, delta: float) -> float:
        """Return what ``epsilon`` returns, or up to 0.02 or 2 % more, at once: for curves."""
        epsilons, deltas = self.profile
        place = int(np.searchsorted(-deltas, -checks.probability("delta", delta)))
        return float(epsilons[place]) if place < len(epsilons) else self.epsilon(delta)

    @cached_property
    def reach(self) -> float:
        """Greatest loss that is told from an infinite one: beyond it, delta is below 1e-13."""
        epsilons, deltas = self.profile
        return float(epsilons[np.searchsorted(-deltas, -1e-13)])

    @property
    def spread(self) -> float:
        """About one standard deviation of the loss, or more."""
        return self.mu

    def removed(self, epsilons: Array) -> Array:
        """Return upper bounds on delta at epsilons of any sign, in either direction."""
        grid, deltas = self.profile
        # delta is convex in e^epsilon, so that a chord lies above it.
        chord = np.interp(np.expm1(np.abs(epsilons)), np.expm1(np.minimum(grid, 700.0)), deltas)
        below = np.minimum(epsilons, 0.0)
        return np.minimum(1.0, np.exp(below) * chord - np.expm1(below))

    def added(self, epsilons: Array) -> Array:
        """Return the same: the bound is on both directions."""
        return self.removed(epsilons)

    def advantage(self) -> float:
        """Return an upper bound on any membership test's true minus false-positive rate."""
        return self.delta(0.0)

    def tpr_at_fpr(self, fpr: float) -> float:
        """Return an upper bound on the true-positive rate of any membership test at ``fpr``."""
        return most_detected(*self.profile, fpr)

    def _counted(self, epsilon: float) -> float:
        """Return the delta of releasing K and all runs, of a Gaussian base; else 1."""
        if not isinstance(self.base, Guarantee):
            return 1.0
        mu = self.base.mu
        terms = [p * gaussian.delta(mu * math.sqrt(k), epsilon) for k, p in self._groups]
        beyond = max(0.0, 1 - math.fsum(p for _, p in self._groups)) + _ROUNDED
        return min(1.0, (math.fsum(terms) + beyond) * (1 + _ROUNDED))

    @cached_property
    def _groups(self) -> list[tuple[int, float]]:
        """Pairs of the greatest K of a group and its probability; groups are 5 % wide."""
        groups: list[tuple[int, float]] = []
        mass, last = 0.0, 1
        for k, probability in enumerate(self.repetitions.probabilities(), start=1):
            mass += float(probability)
            if k >= last:
                groups.append((k, mass))
                mass, last = 0.0, max(k + 1, int(1.05 * k))
            if k >= _MOST_COUNTED or (k > self.repetitions.expected and probability < 1e-20):
                break
        return [*groups, (last, mass)]

    @cached_property
    def _edges(self) -> tuple[Array, Array]:
        """Spans dA and log slopes of the hull's edges, from (0, 0) to its greatest A."""
        first, second = self._points()
        order = np.lexsort((second, first))
        a, indices = np.unique(np.append(0.0, first[order]), return_index=True)
        b = np.append(0.0, second[order])[indices]
        hull = lower_hull(a, b)
        spans, rises = np.diff(a[hull]), np.diff(b[hull])
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
            first, last = np.maximum(first, _LEAST_SLOPE), np.maximum(second, _LEAST_SLOPE)
            wide = np.fmax(-np.diff(np.log(first))[1:], -np.diff(np.log(last))[:-1])
            coarse = np.flatnonzero(wide > self.fineness)
            if coarse.size == 0 or logits.size > 200_000:
                last[second < _LEAST_SLOPE] = 0.0
                return first * (1 + _ROUNDED), last * (1 - _ROUNDED)
            middles = (logits[coarse] + logits[coarse + 1]) / 2
            logits = np.sort(np.concatenate((logits, middles)))


def fields_of(selected: SelectedGuarantee) -> dict[str, int | float]:
    """Return the numbers that name a selection of Gaussian runs, for ``selected_of``."""
    if not isinstance(selected.base, Guarantee):
        raise ConfigError("base: must be a Guarantee; only mu names a base by a number.")
    return {"mu": selected.base.mu, **asdict(selected.repetitions)}  # type: ignore[call-overload]


@lru_cache(maxsize=16)
def _selected(mu: float, fields: frozenset[tuple[str, int | float]]) -> SelectedGuarantee:
    for kind, names in _KINDS.values():
        if names == {name for name, _ in fields}:
            return SelectedGuarantee(Guarantee(mu), kind(**dict(fields)))  # type: ignore[arg-type]
    raise ConfigError("selection: has not the numbers of a known distribution of K.")


def selected_of(fields: Mapping[str, int | float]) -> SelectedGuarantee:
    """Return the selection that these numbers name."""
    others = {name: value for name, value in fields.items() if name != "mu"}
    return _selected(fields["mu"], frozenset(others.items()))


def most_mu(repetitions: Repetitions, *, target_epsilon: float, delta: float) -> float:
    """Return the greatest mu of one run for which the selection costs at most the target.

    Within 1e-4 of it, relatively, rounded down: the base noise of a tune under a total budget.

    >>> mu = most_mu(NegativeBinomialRuns(10, eta=1), target_epsilon=3.26, delta=1e-6)
    >>> round(mu, 2)
    0.5
    """
    target = checks.positive("target_epsilon", target_epsilon)
    return _most_mu(repetitions, target, checks.probability("delta", delta))


@lru_cache(maxsize=16)
def _most_mu(repetitions: Repetitions, target: float, delta: float) -> float:
    def excess(mu: float) -> float:
        return log_excess(SelectedGuarantee(Guarantee(mu), repetitions).delta(target), delta)

    # One run costs less than a selection of it, so its mu is too great.
    infeasible = gaussian.mu(target, delta)
    floor, feasible = infeasible / 1000, infeasible / 2
    while excess(feasible) > 0:
        if feasible < floor:
            raise ConfigError(
                f"target_epsilon={target:g}: is below what a selection can be accounted for, with "
                "slopes told apart by 0.4 %; use a greater target."
            )
        infeasible, feasible = feasible, feasible / 2
    return safe_root(excess, infeasible=infeasible, feasible=feasible, close=1e-5)


@lru_cache(maxsize=64)
def _least_epsilon(selected: SelectedGuarantee, delta: float) -> float | None:
    return least_epsilon(selected.delta, delta, 1e4)


def _profile(base: Base, epsilon: float) -> float:
    """Return the base's delta at any real ``epsilon``: below 0 by the other direction."""
    if epsilon < -700:  # at least 1 - e^epsilon, which is 1 as a float
        return 1.0
    if epsilon >= 0:
        return base.delta(epsilon)
    other = math.exp(epsilon) * base.delta(-epsilon)
    return min(1.0, (other - math.expm1(epsilon)) * (1 + _ROUNDED))


def _mean(expected: float) -> None:
    fault = f"the mean number of runs must be above 1 and at most {MOST_RUNS:,}"
    checks.between("expected", expected, math.nextafter(1.0, 2.0), MOST_RUNS, fault)


def _falling_root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of a falling function by bisection to the last bit."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low
