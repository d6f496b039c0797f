r"""Batches with replacement: every place of a round is drawn on its own among all members.

Of the B places of a round j are the member's, j ~ Binomial(B, 1 / n) of n members, and it counts j
times. Adjacency is zero-out: it is drawn as always, and what it sends is u or 0. Draw another
member for every place; the member takes j of these places, whose contributions sum to c_j. With w_j
the chance of j, p that of j >= 1, and what the B others send in sum taken as zero,

    with       w_0 N(0, z^2) + sum_j w_j N(j u - c_j, z^2),    |j u - c_j| <= 2 j,
    without    w_0 N(0, z^2) + sum_j w_j N(-c_j, z^2),         |c_j| <= j.

By advanced joint convexity (as in ``accounting.truncated``) and joint convexity in j, for
epsilon >= 0 and with alpha = 1 + (e^epsilon - 1) / p, beta = e^epsilon / alpha, and G_m(alpha) the
delta of a Gaussian release of mu = m / z at log alpha,

    delta_remove <= sum_j w_j ((1 - beta) G_2j(alpha) + beta G_j(alpha)),
    delta_add    <= sum_j w_j G_j(alpha).

So many places that their chance is far below every delta count in full. Composition
needs what it needs there: what others send does not depend on the rounds that they were in before.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.guarantee import mu_upper
from accounting.report import Assumption
from accounting.sensitivity import Array
from accounting.subsampled import sampling_assumptions
from accounting.truncated import BEYOND, STATELESS, AlikeSteps, above, gaussian_delta

_MOST_MEMBERS = 10**9


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

    adjacency: ClassVar[str] = "add-or-remove"

    def __post_init__(self) -> None:
        if not 1e-2 <= checks.positive("noise_multiplier", self.noise_multiplier) <= 1e4:
            raise ConfigError(
                f"noise_multiplier={self.noise_multiplier:g}: batches with replacement are "
                "accounted for from 0.01 to 10000."
            )
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
        return (*sampling_assumptions("sampling", how, sees="who was sampled"), STATELESS)

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

    @property
    def _room(self) -> float:
        """Room for the rounding of binomial chances and tails, as in ``accounting.truncated``."""
        return 1 + 1e-9 + 4e-16 * self.population

    def _removed(self, epsilons: Array) -> Array:
        taken, rest = self._taken
        p = self._some
        least = p / self._room**2  # a smaller beta is safer
        beta = least / (least * np.exp(-epsilons) - np.expm1(-epsilons))
        far = sum(w * self._gaussian(2 * j, epsilons) for j, w in taken)
        near = sum(w * self._gaussian(j, epsilons) for j, w in taken)
        return np.asarray((1 - beta) * far + beta * near + rest)

    def _added(self, epsilons: Array) -> Array:
        taken, rest = self._taken
        return np.asarray(sum(w * self._gaussian(j, epsilons) for j, w in taken) + rest)

    @property
    def _some(self) -> float:
        """Probability that the member has a place, rounded up."""
        return min(1.0, -math.expm1(self.batch * math.log1p(-1 / self.population)) * self._room)

    def _gaussian(self, shift: int, epsilons: Array) -> Array:
        return gaussian_delta(shift / self.noise_multiplier, epsilons, self._some)
