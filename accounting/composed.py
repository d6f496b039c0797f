"""Composition of releases that are not all Gaussian: one privacy profile for all of them.

A Gaussian release, a run on Poisson samples or in bins, and somebody else's (epsilon, delta)
compose because all speak of the same two inputs: the member's contributions are there, or are zero.
Each is dominated by a pair of distributions, with the member and without; the pair of a composition
is the product of the pairs (Dong, Roth and Su 2022, Theorem 3.2; Zhu, Dong and Wang 2022, Theorem
10), whichever order the releases come in and however one depends on those before it. Both
directions are composed, each with its own, and the larger delta counts.

    release                    dominating pair, with the member and without       computed by
    Guarantee(mu)              N(mu, 1), N(0, 1)                                  the exact mu
    SampledGuarantee           (1 - q) N(0, 1) + q N(1/z, 1), N(0, 1), T times    PLD
    Profiled                   by bounds on both profiles of a step, T times      PLD of its profile
    Dominated                  several of these together                          as each of them
    StatedGuarantee            randomised response with failure delta             PLD
    SelectedGuarantee          by the bound on its profile, in both directions    PLD of its profile

Of bins, and of samples of bounded size, upper bounds on delta(epsilon) are known, in both
directions. The true profile is convex in e^epsilon, so it lies below the greatest convex function
that does not exceed these bounds at any point of a grid; a line through its values is the profile
of a pair that dominates (Connect the Dots: Doroshenko et al. 2022, Algorithm 1).

Gaussian releases alone stay one exact mu. Else the losses are rounded up to a grid whose step is a
ten-thousandth of the spread of the whole loss, by dp-accounting (Doroshenko et al. 2022).
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from accounting import accountants, checks
from accounting.checks import ConfigError
from accounting.guarantee import Cost, Guarantee
from accounting.hull import least_epsilon, lower_hull, most_detected
from accounting.selection import SelectedGuarantee
from accounting.sensitivity import Array
from accounting.subsampled import SampledGuarantee

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_LEAST_DELTA = 1e-11  # below it the masses that dp-accounting cuts off are no longer small
_CUT = 1e-13  # mass that dp-accounting may lose per release; added to each delta
_MOST_EPSILON = 500.0  # up to it exp(epsilon) is a float; a greater epsilon promises nothing
MOST_LOSS = 350.0
"""Of one release, that is told from an infinite one: up to it ratios of e^loss are floats."""
BEYOND = 1e-15
"""Mass of all steps beyond the greatest loss that is told from an infinite one."""
_LEAST_SPREAD = 1e-6  # of releases that cost a delta alone, whose losses have no spread
_POINTS = 2_001  # epsilons of a profile; between two of them its chord is at most 0.2 % above it
_ROUNDING = 1e-9
"""Relative error of the sums and transforms of dp-accounting, which do not round up."""


Bounds = Callable[[Array], Array]
"""Upper bounds on the deltas of some epsilons."""


@dataclass(frozen=True, slots=True)
class StatedGuarantee:
    """An (epsilon, delta) that somebody states of a release, under zero-out adjacency.

    Args:
        epsilon: zero or more.
        delta: in [0, 1).
    """

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        checks.nonnegative("epsilon", self.epsilon)
        if not checks.nonnegative("delta", self.delta) < 1:
            raise ConfigError(f"delta={self.delta:g}: must be below 1.")


@runtime_checkable
class Profiled(Protocol):
    """Alike steps, of one of which upper bounds on both profiles are known."""

    @property
    def steps(self) -> int:
        """Number of steps."""

    @property
    def reach(self) -> float:
        """Greatest loss of one step that is told from an infinite one."""

    @property
    def spread(self) -> float:
        """About one standard deviation of the loss of all steps, or more if one reaches far."""

    def removed(self, epsilons: Array) -> Array:
        """Return upper bounds on delta_remove of one step, at epsilons of any sign."""

    def added(self, epsilons: Array) -> Array:
        """Return upper bounds on delta_add of one step, at epsilons of any sign."""


Part = Guarantee | SampledGuarantee | StatedGuarantee | Profiled


@runtime_checkable
class Dominated(Protocol):
    """A run that several releases dominate together, as of members in bins."""

    def parts(self) -> Mapping[Part, int]:
        """Return these releases, and how often each is made."""


Release = Part | Dominated


@dataclass(frozen=True)
class ComposedGuarantee(Cost):
    """What several releases about the same people cost together.

    Args:
        releases: their guarantees, at least one, in any order.
        unhidden: what they cost together if it is known who was sampled, which counts where it is
            less; None compares with nothing.

    Raises:
        ConfigError: a guarantee has no proof that it composes with others: estimates by Monte
            Carlo are bounds at single deltas of one run.

    >>> poisson = SampledGuarantee(1.0, probability=0.01, steps=1000)
    >>> both = ComposedGuarantee((poisson, Guarantee(mu=0.5), StatedGuarantee(1.0, 1e-6)))
    >>> round(both.epsilon(delta=1e-5), 2)
    3.73
    """

    releases: tuple[Release, ...]
    unhidden: Guarantee | None = None

    def __post_init__(self) -> None:
        if not self.releases:
            raise ConfigError("releases: at least one must be given.")
        for release in self.releases:
            if not isinstance(release, Release):
                raise ConfigError(
                    f"{type(release).__name__}: has no proof here that it composes with other "
                    "releases. Use guarantee(), which holds without amplification."
                )
            if isinstance(release, StatedGuarantee) and release.epsilon > _MOST_EPSILON:
                raise ConfigError(
                    f"epsilon={release.epsilon:g}: of one release, promises nothing; at most "
                    f"{_MOST_EPSILON:g} composes with others."
                )

    @cached_property
    def mu(self) -> float | None:
        """The exact mu, if every release is one Gaussian; else None."""
        gaussians = [release for release in self.releases if isinstance(release, Guarantee)]
        alone = len(gaussians) == len(self.releases)
        return reduce(Guarantee.compose, gaussians).mu if alone else None

    def epsilon(self, delta: float) -> float:
        """Return an epsilon that holds with ``delta``, rounded up by at most 1e-6 of it.

        Raises:
            ConfigError: delta is not above what the stated releases fail with together, or is
                below 1e-11 although a release is not Gaussian.
        """
        delta = checks.probability("delta", delta)
        if self.mu is not None:
            return Guarantee(self.mu).epsilon(delta)
        if self._alone:
            return self._alone.epsilon(delta)
        stated = math.fsum(r.delta for r in self.releases if isinstance(r, StatedGuarantee))
        floor = max(stated, _LEAST_DELTA)
        if delta > floor:
            return self._least_epsilon(delta)
        if self.unhidden is None or not delta > _LEAST_DELTA:
            rounding = "below which rounding would count"
            why = "what these releases fail with together" if stated >= _LEAST_DELTA else rounding
            raise ConfigError(f"delta={delta:g}: must be above {floor:g}, {why}.")
        return self.unhidden.epsilon(delta)

    def coarse_epsilon(self, delta: float) -> float:
        """Return the same; of a selection alone, up to 0.02 or 2 % more, at once: for curves."""
        return self._alone.coarse_epsilon(delta) if self._alone else self.epsilon(delta)

    @property
    def _alone(self) -> SelectedGuarantee | None:
        first = self.releases[0]
        return first if isinstance(first, SelectedGuarantee) and len(self.releases) == 1 else None

    def _least_epsilon(self, delta: float) -> float:
        least = least_epsilon(self.delta, delta, 2 * _MOST_EPSILON)
        if least is None:
            raise ConfigError(f"delta={delta:g}: is reached by no epsilon of this profile.")
        return least

    def delta(self, epsilon: float) -> float:
        """Return a delta that holds with ``epsilon`` >= 0, rounded up."""
        epsilon = checks.nonnegative("epsilon", epsilon)
        if self.mu is not None:
            return Guarantee(self.mu).delta(epsilon)
        epsilons, deltas = self._profile
        # delta is convex in e^epsilon, so that a chord lies above it.
        at = math.expm1(min(epsilon, _MOST_EPSILON))
        hidden = float(np.interp(at, np.expm1(epsilons), deltas))
        return hidden if self.unhidden is None else min(hidden, self.unhidden.delta(epsilon))

    def advantage(self) -> float:
        """Return an upper bound on any membership test's true minus false-positive rate."""
        return self.delta(0.0)

    def tpr_at_fpr(self, fpr: float) -> float:
        """Return an upper bound on the true-positive rate of any membership test."""
        if self.mu is not None:
            return Guarantee(self.mu).tpr_at_fpr(fpr)
        hidden = most_detected(*self._profile, fpr)
        return hidden if self.unhidden is None else min(hidden, self.unhidden.tpr_at_fpr(fpr))

    @cached_property
    def _profile(self) -> tuple[Array, Array]:
        """Epsilons, and the deltas that hold with them; the last holds from there on."""
        try:
            return _profile(frozenset(self._parts.items()), len(self.releases))
        except (OverflowError, ValueError) as fault:  # of which ConfigError is one
            if self.unhidden is None:
                ours = isinstance(fault, ConfigError)
                none = "dp-accounting has no finite profile of these releases."
                raise ConfigError(str(fault) if ours else none) from None
            return np.zeros(1), np.ones(1)  # a delta of 1 always holds, and no better one is known

    @cached_property
    def _parts(self) -> "Counter[Part]":
        """How many there are of each release, with all that is Gaussian as one."""
        parts: Counter[Part] = Counter()
        for release in self.releases:
            parts.update(release.parts() if isinstance(release, Dominated) else {release: 1})
        gaussians = [g for g, n in parts.items() if isinstance(g, Guarantee) for _ in range(n)]
        parts = Counter({part: n for part, n in parts.items() if part not in gaussians})
        if gaussians:
            parts[reduce(Guarantee.compose, gaussians)] += 1
        return parts


class Amplified(ABC):
    """A run that hides who takes part: it costs no more than its mu, nor than its composition."""

    @property
    @abstractmethod
    def mu(self) -> float:
        """Without anything being hidden, rounded up."""

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` in (0, 1)."""
        plain = Guarantee(self.mu).epsilon(delta)
        if delta > _LEAST_DELTA and self._composed.delta(plain) > delta:
            return plain
        return min(plain, self._composed.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at ``epsilon`` >= 0."""
        return min(Guarantee(self.mu).delta(epsilon), self._composed.delta(epsilon))

    @cached_property
    def _composed(self) -> ComposedGuarantee:
        return ComposedGuarantee((self,))  # type: ignore[arg-type]  # of a class that composes


@lru_cache(maxsize=32)
def _profile(parts: frozenset[tuple[Part, int]], releases: int) -> tuple[Array, Array]:
    """Return epsilons, and deltas that hold with so many of each part, as of so many releases."""
    spread = math.hypot(*(_spread(part) * math.sqrt(n) for part, n in parts))
    spread = max(spread, _LEAST_SPREAD)
    losses = _composed(parts, accountants.GRID * spread * max(1.0, spread / 30))
    delta = losses.get_delta_for_epsilon
    last = 5 * spread
    while last < _MOST_EPSILON and delta(last) - delta(2 * last) > _CUT:
        last *= 2
    epsilons = np.linspace(0.0, min(last, _MOST_EPSILON), _POINTS)
    deltas = _deltas(losses, epsilons)
    # Sums of 1 that lose their last bits leave deltas a little below zero, and others as much.
    below = max(0.0, -float(deltas.min()))
    if not np.isfinite(deltas).all() or below > _LEAST_DELTA:
        raise ConfigError("dp-accounting has no finite profile of these releases.")
    lost = accountants.transforms_lose(sum(n * getattr(part, "steps", 1) for part, n in parts))
    allowance = _CUT * releases + 2 * below + lost
    return epsilons, np.minimum(deltas * (1 + _ROUNDING) + allowance, 1.0)


def _deltas(losses: "PrivacyLossDistribution", epsilons: Array) -> Array:
    """Return ``losses.get_delta_for_epsilon(epsilons)``, of the same sums, in a 60th of the time.

    The library's own loop over the losses is in Python, and took half of every answer.
    """
    deltas = np.full(len(epsilons), -math.inf)
    for pmf in (losses._pmf_remove.to_dense_pmf(), losses._pmf_add.to_dense_pmf()):
        probabilities, size = pmf._probs[::-1], pmf.size
        values = (np.arange(size) + pmf._lower_loss) * pmf._discretization
        # With a loss above epsilon: the mass of each outcome, and of the same outcome without.
        mass = np.cumsum(np.append(pmf._infinity_mass, probabilities))
        # No epsilon is below zero, and exp of a loss far below it is no float.
        ratios = np.exp(-np.maximum(values[::-1], 0.0))
        without = np.cumsum(np.append(0.0, probabilities * ratios))
        above = size - np.searchsorted(values, epsilons, side="right")
        np.maximum(deltas, mass[above] - np.exp(epsilons) * without[above], out=deltas)
    return deltas


def _composed(parts: frozenset[tuple[Part, int]], grid: float) -> "PrivacyLossDistribution":
    losses = [(_losses(part, grid), n) for part, n in sorted(parts, key=repr)]
    try:
        alike = [loss if n == 1 else loss.self_compose(n) for loss, n in losses]
        return reduce(lambda left, right: left.compose(right), alike)
    except IndexError:  # of dp-accounting, where every loss is infinite
        raise ConfigError("releases: one of them promises nothing, so all do.") from None


def _spread(part: Part) -> float:
    if isinstance(part, Guarantee):
        return part.mu
    if isinstance(part, StatedGuarantee):
        return part.epsilon
    if isinstance(part, Profiled):
        return min(part.spread, _MOST_EPSILON)  # beyond it nothing is promised
    z, q = part.noise_multiplier, part.probability
    return accountants.sampled_spread(z, q, part.steps)


def _losses(part: Part, grid: float) -> "PrivacyLossDistribution":
    from dp_accounting.pld import common
    from dp_accounting.pld import privacy_loss_distribution as pld

    if isinstance(part, StatedGuarantee):
        stated = common.DifferentialPrivacyParameters(part.epsilon, part.delta)
        return pld.from_privacy_parameters(stated, value_discretization_interval=grid)
    if isinstance(part, Profiled):
        each = (_dominating(bounds, grid, part.reach) for bounds in (part.removed, part.added))
        one = pld.PrivacyLossDistribution(*each)
        return one if part.steps == 1 else one.self_compose(part.steps)
    if isinstance(part, Guarantee):
        z, q, steps = math.nextafter(1 / part.mu, 0.0), 1.0, 1
    else:
        z, q, steps = part.noise_multiplier, part.probability, part.steps
    step = pld.from_gaussian_mechanism(z, sampling_prob=q, value_discretization_interval=grid)
    return step if steps == 1 else step.self_compose(steps)


def reach_of(bounds: tuple[Bounds, Bounds], first: float, least: float) -> float:
    """Return a loss of one step, ``first`` or more, beyond which at most ``least`` is left."""
    reach = np.array([first])
    while reach[0] < MOST_LOSS and max(bound(reach)[0] for bound in bounds) > least:
        reach *= 1.2
    return float(reach[0])


def _dominating(bounds: Bounds, grid: float, reach: float) -> "PLDPmf":
    """Return losses on the grid whose profile is nowhere below the true one.

    Args:
        bounds: upper bounds of delta at epsilons of any sign.
        grid: step of the losses.
        reach: greatest loss that is told from an infinite one.
    """
    from dp_accounting.pld import pld_pmf

    most = math.ceil(min(reach, MOST_LOSS) / grid)
    points = np.arange(-most, most + 1)
    epsilons: Array = np.asarray(points * grid, dtype=np.float64)
    deltas = np.minimum.accumulate(np.maximum(bounds(epsilons), -np.expm1(epsilons)))
    chosen = _corners(np.exp(epsilons), deltas)
    return pld_pmf.create_pmf_pessimistic_connect_dots(grid, points[chosen], deltas[chosen])


def _corners(x: Array, y: Array) -> NDArray[np.int64]:
    """Return where the greatest convex function with values of at most y touches them."""
    chosen = np.arange(len(x))
    for _ in range(10):
        slopes = np.diff(y[chosen]) / np.diff(x[chosen])
        above = np.flatnonzero(np.diff(slopes) < 0) + 1  # a line between its neighbours is below
        if not len(above):
            return chosen
        chosen = np.delete(chosen, above)
    return np.asarray(chosen[lower_hull(x[chosen], y[chosen])])
