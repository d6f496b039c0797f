"""Poisson sampling: baselines amplified by sampling, accounted for by dp-accounting.

Hiding who took part reduces epsilon, but only if every step samples each member independently with
the stated probability, hidden from the adversary. Federated systems rarely can, so the caller must
state the sampling as a ``PoissonSampling``; it is never a default.

Adjacency here is add-or-remove: a member is in the population or not. It is not the zero-out of
``Guarantee``, with which a run composes by the pair that dominates it (``ComposedGuarantee``).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from accounting import accountants, checks
from accounting.checks import ConfigError
from accounting.guarantee import mu_upper
from accounting.mechanisms import Mechanism
from accounting.participation import Participation
from accounting.report import Assumption
from accounting.sensitivity import Array

if TYPE_CHECKING:
    from dp_accounting import PrivacyAccountant

SampledMethod = Literal["pld", "rdp"]
MOST_ENCODED = 4096
"""Rounds above which an encoder is too large to be written out."""


def sampling_assumptions(
    key: str, how: str, *, sees: str, public: str = "the divisor is a public constant"
) -> tuple[Assumption, ...]:
    """Return what every amplification by sampling needs, besides clipping and secret noise."""
    plain = "no amplification: account for the unsampled mechanism instead"
    hidden = f"nobody who sees the release learns {sees}"
    leak = "the size of the batch leaks, and one member counts for more than assumed"
    return (
        Assumption(key, how, "asserted", plain),
        Assumption("hidden-sample", hidden, "asserted", plain),
        Assumption("public-constants", f"{public}, not the realised batch", "asserted", leak),
    )


@dataclass(frozen=True, slots=True)
class PoissonSampling:
    """Each member joins a step independently, with one probability, hidden from the adversary.

    Args:
        expected_batch: expected number of members per step, > 0 and at most ``population``; the
            public constant that sums are divided by.
        population: number of members to sample from, >= 1; public.
        groups: parts that the population is divided into, independently of the data, and that
            take turns: round i samples from group i mod groups only, each of its members with
            probability expected_batch * groups / population.
    """

    expected_batch: float
    population: int
    groups: int = 1

    def __post_init__(self) -> None:
        checks.positive("expected_batch", self.expected_batch)
        checks.count("population", self.population)
        group = self.population / checks.count("groups", self.groups)
        if not self.expected_batch <= group:
            raise ConfigError(
                f"expected_batch={self.expected_batch:g}: a group has only {group:g} members "
                f"(population / groups). Use expected_batch of {group:g} or less."
            )

    @property
    def probability(self) -> float:
        """Probability that a member joins a round of its group, rounded up."""
        exact = self.expected_batch * self.groups / self.population
        return min(1.0, math.nextafter(exact, 1.0))


@dataclass(frozen=True, slots=True)
class SampledGuarantee:
    """The guarantee of ``steps`` Gaussian steps on Poisson samples, under add-or-remove adjacency.

    Epsilon and delta are upper bounds in real arithmetic. dp-accounting does not round in one
    direction: of "pld", 1e-14 and 1e-16 per step are added to delta for what its transforms lose,
    and a relative 1e-9 or so remains.

    Args:
        noise_multiplier: noise standard deviation / sensitivity of one step, 1e-3 to 1e5.
        probability: probability that a step samples a given member, in (0, 1].
        steps: number of steps in which one member may be sampled, 1 to a million.
        method: "pld", or "rdp" (looser).
        groups: parts of the population that take turns; a step is one round of each.

    >>> run = SampledGuarantee(3.0, PoissonSampling(100, 1000).probability, steps=512)
    >>> round(run.epsilon(delta=1e-6), 2)
    3.77
    """

    noise_multiplier: float
    probability: float
    steps: int
    method: SampledMethod = "pld"
    groups: int = 1

    def __post_init__(self) -> None:
        reliable = "dp-accounting's sampled Gaussian is reliable from 1e-3 to 1e5"
        checks.between("noise_multiplier", self.noise_multiplier, 1e-3, 1e5, reliable)
        checks.rate("probability", self.probability)
        checks.count("steps", self.steps, maximum=checks.MOST_ROUNDS)
        checks.choice("method", self.method, ("pld", "rdp"))
        checks.count("groups", self.groups)

    @property
    def mu(self) -> float:
        """If it is known who was sampled, rounded up."""
        return mu_upper(float(self.steps), self.noise_multiplier)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The conditions of the amplification, besides clipping and secret noise."""
        how = f"samples each member on its own with probability {self.probability:g}"
        turns = (
            f"the members are in {self.groups} groups that no data decided and that take turns; "
            f"every round {how}, of its group only"
        )
        return sampling_assumptions(
            "poisson-sampling",
            f"every step {how}" if self.groups == 1 else turns,
            sees="who was sampled",
            public="the probability and the divisor are public constants",
        )

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` in (0, 1).

        Raises:
            ConfigError: delta is not above what the transforms of so many steps may lose.
        """
        delta = checks.probability("delta", delta)
        if not delta > self._lost:
            raise ConfigError(
                f"delta={delta:g}: must be above {self._lost:.2g}, which {self.steps:,} steps lose "
                'to rounding; or use method="rdp".'
            )
        return accountants.epsilon(self._accountant(), delta - self._lost)

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at ``epsilon`` >= 0."""
        delta = accountants.delta(self._accountant(), checks.nonnegative("epsilon", epsilon))
        return min(1.0, delta + self._lost)

    @property
    def _lost(self) -> float:
        return 0.0 if self.method == "rdp" else 1e-14 + accountants.transforms_lose(self.steps)

    def _accountant(self) -> "PrivacyAccountant":
        return accountants.sampled_gaussians(
            self.method, self.noise_multiplier, self.probability, self.steps
        )


def poisson_guarantee(
    mechanism: Mechanism,
    sampling: PoissonSampling,
    *,
    noise_multiplier: float,
    method: SampledMethod = "pld",
) -> SampledGuarantee:
    """Return the guarantee of a banded mechanism whose groups of members take turns.

    With at least as many groups as bands a member's rounds never share noise, and the run is DP-SGD
    with ceil(rounds / groups) steps (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix
    Factorization", Theorem 4). Independent noise in one group is DP-SGD itself, or DP-FedAvg with
    sampled clients (Abadi et al. 2016).
    """
    z, groups = checks.positive("noise_multiplier", noise_multiplier), sampling.groups
    steps = -(-mechanism.rounds // groups)
    if mechanism.name == "independent" and groups == 1:
        return SampledGuarantee(z, sampling.probability, steps, method)
    if bands_of(mechanism) > groups:
        raise ConfigError(
            f"groups={groups}: the encoder of {mechanism.name} reaches further back than that; use "
            "as many groups as it has bands."
        )
    column = math.sqrt(mechanism.sensitivity(Participation(mechanism.rounds)).squared)
    relative = math.nextafter(math.nextafter(z / column, 0.0), 0.0)
    return SampledGuarantee(relative, sampling.probability, steps, method, groups)


def magnitudes(mechanism: Mechanism) -> Array:
    """Return |C|, the encoder without signs, one column per round."""
    if mechanism.groups is not None:
        raise ConfigError("grouped: no amplification is known here for groups; use guarantee().")
    if mechanism.rounds > MOST_ENCODED:
        raise ConfigError(
            f"rounds={mechanism.rounds}: at most {MOST_ENCODED} with correlated noise and a "
            "sampler; the encoder is written out."
        )
    return np.abs(mechanism.encoder())


def bands_of(mechanism: Mechanism) -> int:
    """Return the number of diagonals of the encoder, up to the last that is not zero."""
    encoder = magnitudes(mechanism)
    if encoder.shape != (mechanism.rounds,) * 2 or np.triu(encoder, 1).any():
        raise ConfigError(f"{mechanism.name}: only a square lower-triangular encoder has bands.")
    return 1 + max(lag for lag in range(len(encoder)) if np.diagonal(encoder, -lag).any())
