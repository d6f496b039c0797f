"""Poisson steps that differ: noise, or the rate of sampling, changes in rounds fixed beforehand.

Each step is dominated by its own pair of mixtures, whatever the steps before it released, and the
run by the product of the pairs (``accounting.composed``). The schedule is public and depends on no
data; a rate that followed the training would be a release of its own.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, cast

import numpy as np

from accounting import checks, piecewise
from accounting.checks import ConfigError
from accounting.composed import Amplified, ComposedGuarantee
from accounting.guarantee import Guarantee
from accounting.mechanisms import Mechanism
from accounting.report import Assumption
from accounting.sensitivity import Array
from accounting.subsampled import PoissonSampling, SampledGuarantee, sampling_assumptions

if TYPE_CHECKING:
    from accounting.mechanisms import Scheduled

MOST_KINDS = 100
"""Steps that differ; each kind takes a transform."""


@dataclass(frozen=True, slots=True)
class ScheduledPoissonSampling:
    """Each member joins a round on its own, with a probability that changes at given rounds.

    Args:
        from_round: rounds at which an expected batch begins to hold, ascending; the first is 0.
        expected_batches: per such round, the expected number of members, > 0 and at most
            ``population``.
        population: number of members to sample from, >= 1; public.

    >>> ScheduledPoissonSampling((0, 2), (10, 20), population=100).probabilities(3).round(6)
    array([0.1, 0.1, 0.2])
    """

    from_round: tuple[int, ...]
    expected_batches: tuple[float, ...]
    population: int

    def __post_init__(self) -> None:
        checks.count("population", self.population)
        starts, batches = piecewise.checked(
            "expected_batches", self.from_round, self.expected_batches
        )
        if not max(batches) <= self.population:
            raise ConfigError(
                f"expected_batches={max(batches):g}: at most the population, {self.population}, "
                "can join a round."
            )
        object.__setattr__(self, "from_round", starts)
        object.__setattr__(self, "expected_batches", batches)

    def probabilities(self, rounds: int) -> Array:
        """Return the probability that a member joins, by round, rounded up, shape (rounds,)."""
        batches = piecewise.over(self.from_round, self.expected_batches, checks.rounds(rounds))
        return np.minimum(1.0, np.nextafter(batches / self.population, 1.0))


@dataclass(frozen=True)
class ScheduledGuarantee(Amplified):
    """The guarantee of Poisson steps that differ, under add-or-remove adjacency.

    Args:
        steps: those of each kind, at least one and at most 100 kinds.

    >>> kinds = (SampledGuarantee(1.0, 0.01, 500), SampledGuarantee(2.0, 0.02, 500))
    >>> both = ScheduledGuarantee(kinds).epsilon(1e-6)
    >>> kinds[0].epsilon(1e-6) < both < SampledGuarantee(1.0, 0.02, 1000).epsilon(1e-6)
    True
    """

    steps: tuple[SampledGuarantee, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.steps) <= MOST_KINDS:
            raise ConfigError(
                f"a schedule of {len(self.steps)} kinds of Poisson steps: 1 to {MOST_KINDS} are "
                "composed. Let noise or rate change in fewer rounds."
            )

    @property
    def mu(self) -> float:
        """If it is known who was sampled, rounded up."""
        return reduce(Guarantee.compose, (Guarantee(step.mu) for step in self.steps)).mu

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The conditions of the amplification, besides clipping and secret noise."""
        rates = sorted({step.probability for step in self.steps})
        often = f"with probability {rates[0]:g}"
        if len(rates) > 1:
            often = f"with the probability of its round, {rates[0]:g} to {rates[-1]:g}"
        return sampling_assumptions(
            "poisson-sampling",
            f"every step samples each member on its own {often}",
            sees="who was sampled",
            public="the schedule and the divisors are public constants",
        )

    @cached_property
    def _composed(self) -> ComposedGuarantee:
        return ComposedGuarantee(self.steps)


def scheduled_guarantee(
    mechanism: Mechanism,
    sampling: PoissonSampling | ScheduledPoissonSampling,
    *,
    noise_multiplier: float,
) -> ScheduledGuarantee:
    """Return the guarantee of independent noise, with a schedule of noise, of rates, or of both."""
    z, rounds = checks.positive("noise_multiplier", noise_multiplier), mechanism.rounds
    if mechanism.name == "scheduled":
        factors = cast("Scheduled", mechanism).noise_per_round()
        noise = np.nextafter(z * factors, 0.0)
    elif mechanism.name == "independent":
        noise = np.full(rounds, z)
    else:
        raise ConfigError(
            f"{mechanism.name}: no proof covers correlated noise with a rate of sampling that "
            "changes; use independent or scheduled noise."
        )
    if isinstance(sampling, ScheduledPoissonSampling):
        rates = sampling.probabilities(rounds)
    elif sampling.groups == 1:
        rates = np.full(rounds, sampling.probability)
    else:
        raise ConfigError(f"groups={sampling.groups}: scheduled noise is sampled from one group.")
    kinds = Counter(zip(noise.tolist(), rates.tolist(), strict=True))
    return ScheduledGuarantee(
        tuple(SampledGuarantee(z_t, q, steps) for (z_t, q), steps in kinds.items())
    )
