r"""Samples of bounded size: truncated Poisson sampling, sampling without and with replacement.

**Truncated.** Each member joins a round with probability q. If more than B did, a uniformly random
B of them stay (arXiv 2508.15089). With q = 1 this draws B members of n without replacement. A round
has a fixed shape, but members are not drawn independently: a member that stays takes somebody
else's place.

Adjacency is zero-out: the member is drawn as always, and what it contributes is u or 0. Let N be
how many others joined. Whether N >= B depends on nothing that is released before, so telling it can
only raise delta. If N < B nobody is cut, and the round is Poisson sampling of the member. If
N >= B, the others in the round are a uniformly random set: of B without the member, of B - 1 with
it, whatever N is. Draw the smaller set A and one more other b; then with w = P(N >= B), k the
probability that N >= B and the member stays, and p = k / w,

    with       (1 - p) N(a + b, z^2) + p N(a + u, z^2),    |u|, |b| <= 1,
    without    (1 - p) N(a + b, z^2) + p N(a, z^2).

By advanced joint convexity (Balle, Barthe and Gaboardi 2018, Theorem 2), for epsilon >= 0 and with
alpha = 1 + (e^epsilon - 1) / p, beta = e^epsilon / alpha, and G_m(alpha) the delta of a Gaussian
release of mu = m / z at log alpha,

    delta_remove <= p ((1 - beta) G_2(alpha) + beta G_1(alpha)),    delta_add <= p G_1(alpha).

For epsilon < 0 delta_remove(epsilon) = 1 - e^epsilon + e^epsilon delta_add(-epsilon), and the other
way round. So upper bounds are known at every epsilon, whose convex hull is the profile of a pair
that dominates the round (``accounting.composed``); rounds are composed as such pairs. Bounds for
epsilon >= 0 alone would not do: the worst neighbours for small and for large epsilons differ
(Lebeda et al. 2024, arXiv 2405.20769).

**With replacement.** Each of the B places of a round is drawn on its own among all n members.
Of the B places of a round j are the member's, j ~ Binomial(B, 1 / n) of n members, and it counts j
times. Adjacency is zero-out: it is drawn as always, and what it sends is u or 0. Draw another
member for every place; the member takes j of these places, whose contributions sum to c_j. With w_j
the chance of j, p that of j >= 1, and what the B others send in sum taken as zero,

    with       w_0 N(0, z^2) + sum_j w_j N(j u - c_j, z^2),    |j u - c_j| <= 2 j,
    without    w_0 N(0, z^2) + sum_j w_j N(-c_j, z^2),         |c_j| <= j.

By advanced joint convexity, as above, and joint convexity in j, for epsilon >= 0

    delta_remove <= sum_j w_j ((1 - beta) G_2j(alpha) + beta G_j(alpha)),
    delta_add    <= sum_j w_j G_j(alpha).

So many places that their chance is far below every delta count in full.

Composition needs that what others send in a round depends on the model and on their data, not on
the rounds that they were in before, because these depend on the member.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from accounting import accountants, checks
from accounting.checks import ConfigError
from accounting.composed import BEYOND, Amplified, Bounds, reach_of
from accounting.guarantee import mu_upper
from accounting.report import Assumption
from accounting.sensitivity import Array
from accounting.subsampled import sampling_assumptions

_MOST_MEMBERS = 10**9
_COVERED = "samples of bounded size are accounted for from 0.01 to 10000"
_STATELESS = Assumption(
    "stateless-members",
    "what a member sends in a step depends on the model and on its own data, not on the steps that "
    "it was in before",
    "asserted",
    "no amplification: who is in a step depends on who else was drawn",
)


@dataclass(frozen=True, slots=True)
class TruncatedPoissonSampling:
    """Each member joins a round on its own; of more than ``most``, a random ``most`` stay.

    Args:
        expected_batch: expected number of members per round before the cut, > 0 and at most
            ``population``.
        population: number of members to sample from, 2 to 10^9; public.
        most: of one round, >= 1 and below ``population``.
    """

    expected_batch: float
    population: int
    most: int

    def __post_init__(self) -> None:
        checks.positive("expected_batch", self.expected_batch)
        checks.count("population", self.population, minimum=2, maximum=_MOST_MEMBERS)
        if not self.expected_batch <= self.population:
            raise ConfigError(
                f"expected_batch={self.expected_batch:g}: at most the population, "
                f"{self.population}, can join a round."
            )
        if checks.count("most", self.most) >= self.population:
            raise ConfigError(
                f"most={self.most}: cuts no round of a population of {self.population}; use "
                "'poisson', which costs the same."
            )

    @property
    def probability(self) -> float:
        """Probability that a member joins before the cut, rounded up to a multiple of 2^-53."""
        # Members are drawn with it exactly: where cuts are rarer, a member stays more often.
        return min(1.0, math.ceil(self.expected_batch / self.population * 2.0**53) / 2.0**53)


@dataclass(frozen=True, slots=True)
class WithoutReplacementSampling:
    """Every round has ``batch`` members, each set of so many as likely as any other.

    Args:
        batch: members of a round, >= 1 and at most ``population``.
        population: number of members to sample from, 2 to 10^9; public.
    """

    batch: int
    population: int

    def __post_init__(self) -> None:
        checks.count("population", self.population, minimum=2, maximum=_MOST_MEMBERS)
        if checks.count("batch", self.batch) > self.population:
            raise ConfigError(
                f"batch={self.batch}: a population of {self.population} has fewer members."
            )


@dataclass(frozen=True, slots=True)
class WithReplacementSampling:
    """Every round has ``batch`` places, each drawn on its own among all members.

    Args:
        batch: places of a round, 1 to ``population``; a member may have several.
        population: number of members to sample from, 2 to 10^9; public.
    """

    batch: int
    population: int

    def __post_init__(self) -> None:
        checks.count("population", self.population, minimum=2, maximum=_MOST_MEMBERS)
        checks.count("batch", self.batch, maximum=self.population)


class AlikeSteps(Amplified):
    """Alike Gaussian steps, of one of which bounds are known at epsilons of zero and above."""

    noise_multiplier: float
    population: int
    steps: int

    def removed(self, epsilons: Array) -> Array:
        """Return upper bounds on delta_remove of one step, at epsilons of any sign."""
        return _of_any_sign(epsilons, self._removed, self._added)

    def added(self, epsilons: Array) -> Array:
        """Return upper bounds on delta_add of one step, at epsilons of any sign."""
        return _of_any_sign(epsilons, self._added, self._removed)

    @cached_property
    def reach(self) -> float:
        """Loss of one step beyond which it counts as infinite, as there is hardly any mass."""
        bounds = self._removed, self._added
        return reach_of(bounds, 1e-3 / self.noise_multiplier, BEYOND / self.steps)

    @property
    def _room(self) -> float:
        """Room for the rounding of binomial tails: scipy's were off by 3e-17 per member."""
        return 1 + 1e-9 + 4e-16 * self.population

    def _gaussian(self, shift: int, epsilons: Array, p: float) -> Array:
        return gaussian_delta(shift / self.noise_multiplier, epsilons, p)

    def _between(self, far: Array, near: Array, epsilons: Array, p: float) -> Array:
        """Return (1 - beta) far + beta near."""
        least = p / self._room**2  # a smaller beta is safer
        beta = least / (least * np.exp(-epsilons) - np.expm1(-epsilons))
        return np.asarray((1 - beta) * far + beta * near)

    @abstractmethod
    def _removed(self, epsilons: Array) -> Array:
        """Return upper bounds on delta_remove of one step, at epsilons >= 0."""

    @abstractmethod
    def _added(self, epsilons: Array) -> Array:
        """Return upper bounds on delta_add of one step, at epsilons >= 0."""


@dataclass(frozen=True)
class TruncatedGuarantee(AlikeSteps):
    """The guarantee of Gaussian steps on samples of bounded size, under zero-out adjacency.

    Args:
        noise_multiplier: noise standard deviation on the sum / clip norm, 1e-2 to 1e4.
        probability: probability that a member joins a step before the cut, in (0, 1]; 1 is sampling
            of ``most`` members without replacement.
        population: number of members, 2 to 10^9.
        most: members of one step, 1 to ``population``.
        steps: number of steps, 1 to a million.

    >>> run = TruncatedGuarantee(1.0, probability=0.01, population=10_000, most=180, steps=10)
    >>> 0 < run.epsilon(1e-6) < 1
    True
    """

    noise_multiplier: float
    probability: float
    population: int
    most: int
    steps: int

    def __post_init__(self) -> None:
        checks.between("noise_multiplier", self.noise_multiplier, 1e-2, 1e4, _COVERED)
        checks.rate("probability", self.probability)
        checks.count("population", self.population, minimum=2, maximum=_MOST_MEMBERS)
        checks.count("most", self.most, maximum=self.population)
        checks.count("steps", self.steps, maximum=checks.MOST_ROUNDS)

    @property
    def mu(self) -> float:
        """Without the draws being hidden, rounded up."""
        return mu_upper(float(self.steps), self.noise_multiplier)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The conditions of the amplification, besides clipping and secret noise."""
        how = (
            f"every step has a uniformly random {self.most} of {self.population} members"
            if self.probability == 1
            else f"every step samples each member on its own with probability {self.probability:g} "
            f"and, of more than {self.most}, drops a uniformly random rest"
        )
        drawn = sampling_assumptions("sampling", how, sees="who was sampled")
        return (*drawn, _STATELESS)

    @property
    def spread(self) -> float:
        """About one standard deviation of the loss of all steps, or more if one reaches far."""
        free, cut, stays = self._odds
        variance = free * self.probability**2 + cut * (2 * stays) ** 2
        return max(math.sqrt(self.steps * variance) / self.noise_multiplier, self.reach / 10)

    @cached_property
    def _odds(self) -> tuple[float, float, float]:
        """P(N < B), P(N >= B), and the member's probability to stay if N >= B; rounded up."""
        n, most, q = self.population, self.most, self.probability
        free = 1.0 - above(most - 1, n - 1, q) if q < 1 else float(most == n)
        cut = above(most - 1, n - 1, q)
        # Of n who are drawn alike, most stay whenever more than most joined.
        stays = above(most, n, q) * most / n / cut if cut else 0.0
        free = min(1.0, free * self._room + 1e-15 * (q < 1))
        if not stays:  # below every float
            return free, 0.0, 0.0
        return free, min(1.0, cut * self._room), min(1.0, stays * self._room)

    def _removed(self, epsilons: Array) -> Array:
        free, cut, stays = self._odds
        uncut = self.probability * self._gaussian(1, epsilons, self.probability)
        if not cut:
            return free * uncut
        far, near = (self._gaussian(shift, epsilons, stays) for shift in (2, 1))
        return free * uncut + cut * stays * self._between(far, near, epsilons, stays)

    def _added(self, epsilons: Array) -> Array:
        free, cut, stays = self._odds
        q, z = self.probability, self.noise_multiplier
        # (1 - e^epsilon (1 - q + q l))_+ of a lognormal l, the price of an option
        weight = q - np.expm1(epsilons) * (1 - q) + 1e-15 * q
        some = np.maximum(weight, 1e-300)
        uncut = np.where(
            weight > 0, some * _gaussian(1 / z, epsilons + math.log(q) - np.log(some)), 0.0
        )
        if not cut:
            return free * uncut
        return free * uncut + cut * stays * self._gaussian(1, epsilons, stays)


@dataclass(frozen=True)
class ReplacedGuarantee(AlikeSteps):
    """The guarantee of Gaussian steps on batches with replacement, under zero-out adjacency.

    Args:
        noise_multiplier: noise standard deviation on the sum / clip norm, 1e-2 to 1e4.
        batch: places of a step, 1 to ``population``.
        population: number of members, 2 to 10^9.
        steps: number of steps, 1 to a million.

    >>> run = ReplacedGuarantee(4.0, batch=100, population=10_000, steps=10)
    >>> round(run.epsilon(1e-6), 2)
    0.16
    """

    noise_multiplier: float
    batch: int
    population: int
    steps: int

    def __post_init__(self) -> None:
        checks.between("noise_multiplier", self.noise_multiplier, 1e-2, 1e4, _COVERED)
        WithReplacementSampling(self.batch, self.population)  # which refuses what is out of range
        checks.count("steps", self.steps, maximum=checks.MOST_ROUNDS)

    @property
    def mu(self) -> float:
        """If it is known who was sampled, who may have every place; rounded up."""
        return mu_upper(float(self.steps * self.batch**2), self.noise_multiplier)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The conditions of the amplification, besides clipping and secret noise."""
        how = (
            f"each of the {self.batch} places of a step is drawn on its own, uniformly among "
            f"{self.population} members"
        )
        return (*sampling_assumptions("sampling", how, sees="who was sampled"), _STATELESS)

    @property
    def spread(self) -> float:
        """About one standard deviation of the loss of all steps, or more if one reaches far."""
        one = 2 * self.batch / self.population / self.noise_multiplier
        return max(math.sqrt(self.steps) * one, self.reach / 10)

    @cached_property
    def _taken(self) -> tuple[list[tuple[int, float]], float]:
        """How many places the member may have with what chance, and the chance of more of them."""
        places, rate = self.batch, 1 / self.population
        chance = math.exp(places * math.log1p(-rate))
        taken: list[tuple[int, float]] = []
        rest = 1.0
        while rest > 0.01 * BEYOND / self.steps and len(taken) < places:
            j = len(taken) + 1
            chance *= (places - j + 1) / j / (self.population - 1)
            taken.append((j, chance * self._room))
            rest = above(j, places, rate) * self._room
        return taken, rest

    def _removed(self, epsilons: Array) -> Array:
        taken, rest = self._taken
        p = self._some
        far = sum(w * self._gaussian(2 * j, epsilons, p) for j, w in taken)
        near = sum(w * self._gaussian(j, epsilons, p) for j, w in taken)
        return self._between(np.asarray(far), np.asarray(near), epsilons, p) + rest

    def _added(self, epsilons: Array) -> Array:
        taken, rest = self._taken
        p = self._some
        return np.asarray(sum(w * self._gaussian(j, epsilons, p) for j, w in taken) + rest)

    @property
    def _some(self) -> float:
        """Probability that the member has a place, rounded up."""
        return min(1.0, -math.expm1(self.batch * math.log1p(-1 / self.population)) * self._room)


def gaussian_delta(mu: float, epsilons: Array, p: float) -> Array:
    """Return the delta of a Gaussian release at log(1 + (e^epsilon - 1) / p), epsilons >= 0."""
    p = max(p, 1e-40)  # which can only raise delta, and overflows nowhere below 600
    # Beyond 600 the exponential might overflow, and the logarithm is this to all digits.
    near = np.log1p(np.expm1(np.minimum(epsilons, 600.0)) / p)
    at = np.where(epsilons > 600, epsilons - math.log(p), near)
    return _gaussian(mu, at)


def _of_any_sign(epsilons: Array, own: Bounds, other: Bounds) -> Array:
    """Return upper bounds at epsilons of any sign, of those of both directions at 0 and more."""
    size = np.abs(epsilons)
    negative = -np.expm1(-size) + np.exp(-size) * other(size)
    lost = accountants.transforms_lose(1)
    return np.minimum(np.where(epsilons < 0, negative, own(size)) + lost, 1.0)


def _gaussian(mu: float, epsilons: Array) -> Array:
    """Return delta of a Gaussian release at epsilons >= 0, rounded up (``accounting.gaussian``)."""
    from scipy.special import erfcx, ndtr

    x = np.maximum(epsilons, 0.0) / mu - mu / 2
    y = x + mu
    density = np.exp(-x * x / 2) / 2
    first = np.where(x > -1, density * erfcx(np.maximum(x, -1) / math.sqrt(2)), ndtr(-x))
    second = density * erfcx(y / math.sqrt(2))
    error = 2.0**-49 * (4 + np.abs(x) * y + y / np.maximum(np.abs(x), 1.0))
    rounded: Array = np.maximum(first - second, 0.0) + error * (first + second)
    return np.minimum(rounded, 1.0)


def above(k: int, n: int, q: float) -> float:
    """Return P(Binomial(n, q) > k)."""
    from scipy.special import betainc

    return float(betainc(k + 1, n - k, q)) if k < n else 0.0
