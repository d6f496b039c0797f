"""Sampled path: replayed cohorts of a plan that samples, and the bound that they give.

The run samples a smaller population with the same probability, so that it costs a member the same.
 The bound on epsilon is the accountant's function of what was measured: the least noise that
the draws leave possible, in units of the length that updates had in the released models, and the
least probability with which fresh keys draw members. That the draws of members are independent is
tested (``attacks.lower_bounds.sampler``), and that the function is right is not.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

from accounting.bounded import TruncatedPoissonSampling, WithoutReplacementSampling
from accounting.cohorts import Sampling, sampled_guarantee
from accounting.monte_carlo import BMinSep
from accounting.random_allocation import BallsInBins
from accounting.scheduled_steps import ScheduledPoissonSampling
from accounting.subsampled import PoissonSampling
from attacks.lower_bounds.bounds import Bound, error_of
from attacks.lower_bounds.checks import Check
from attacks.lower_bounds.replay import METHOD, Replay
from attacks.lower_bounds.sampler import Cohort, least_rate, sampler
from privpart.noise.cohorts import SampledCohorts
from privpart.noise.source import SecretSource
from privpart.plan import PrivacyPlan

ASSUMPTION = "Gaussian noise and independent members, both tested; the accountant's formula"
_DRAWN = 200_000
"""Members whose draws are compared."""
_MOST_KEYS = 2000
_POPULATION = 2000


def fewer(plan: PrivacyPlan, members: float) -> PrivacyPlan:
    """Return a plan whose rounds have fewer members, each with the same probability."""
    sampling = plan.sampling
    if not isinstance(sampling, PoissonSampling | ScheduledPoissonSampling | BMinSep):
        return plan
    batches = (
        sampling.expected_batches
        if isinstance(sampling, ScheduledPoissonSampling)
        else (sampling.expected_batch,)
    )
    share = min(1.0, members * plan.rounds / (max(batches) * plan.rounds))
    population = min(sampling.population, math.ceil(sampling.population * share))
    if isinstance(sampling, PoissonSampling):
        # Groups of the same size, so that every round expects the same number.
        population = -(-population // sampling.groups) * sampling.groups
    if population >= sampling.population or getattr(sampling, "most", None):
        return plan
    share = population / sampling.population
    smaller: Sampling
    if isinstance(sampling, ScheduledPoissonSampling):
        smaller = replace(
            sampling, expected_batches=tuple(b * share for b in batches), population=population
        )
    else:
        smaller = replace(sampling, expected_batch=batches[0] * share, population=population)
    return replace(plan, sampling=smaller)


def population_of(plan: PrivacyPlan, members: float) -> int:
    """Return how many clients a plan samples from; a plan with bins leaves it open."""
    if isinstance(plan.sampling, BallsInBins):
        return max(plan.sampling.bins, math.ceil(members * plan.sampling.bins))
    return int(plan.sampling.population)  # type: ignore[union-attr]


def expected_members(plan: PrivacyPlan, population: int) -> list[float] | None:
    """Return the members that each round expects; None if no closed form is used here."""
    sampling, rounds = plan.sampling, plan.rounds
    if isinstance(sampling, PoissonSampling):
        groups = [len(range(g, population, sampling.groups)) for g in range(sampling.groups)]
        return [sampling.probability * groups[t % sampling.groups] for t in range(rounds)]
    if isinstance(sampling, ScheduledPoissonSampling):
        return [float(q) * population for q in sampling.probabilities(rounds)]
    if isinstance(sampling, BallsInBins):
        return [population * sampling.chosen / sampling.bins] * rounds
    if isinstance(sampling, WithoutReplacementSampling):
        return [float(sampling.batch)] * rounds
    if isinstance(sampling, TruncatedPoissonSampling):
        k = np.arange(population + 1)
        chances = stats.binom.pmf(k, population, sampling.probability)
        return [float((np.minimum(k, sampling.most) * chances).sum())] * rounds
    if isinstance(sampling, BMinSep) and sampling.most is None:
        return [sampling.expected_batch] * rounds
    return None


def drawn(plan: PrivacyPlan) -> tuple[list[list[Cohort]], int]:
    """Return the cohorts of fresh keys, and the population."""
    plan = fewer(plan, _POPULATION * 0.1)
    population = population_of(plan, 100)
    each = sum(expected_members(plan, population) or [1000.0])
    keys = max(2, min(_MOST_KEYS, math.ceil(_DRAWN / each)))
    draws = []
    for _ in range(keys):
        members = SampledCohorts(plan, range(population), SecretSource())
        draws.append([np.array(cohort, dtype=np.int64) for cohort in members])
    return draws, population


def sampler_check(plan: PrivacyPlan, false_alarm: float) -> tuple[Check, float, float]:
    """Return the row of the sampler, the members drawn, and those expected, over all keys."""
    draws, population = drawn(plan)
    smaller = fewer(plan, _POPULATION * 0.1)
    expected = expected_members(smaller, population)
    p = plan.participation
    faults = [
        f"A key draws client {client} in rounds {rounds[:4]}; the plan says at most "
        f"{p.max_participations}, {p.min_separation} rounds apart."
        for cohorts_ in draws[:4]
        for client, rounds in _rounds_of(cohorts_).items()
        if len(rounds) > p.max_participations
        or any(b - a < p.min_separation for a, b in pairwise(rounds))
    ]
    came = float(sum(len(cohort) for rounds in draws for cohort in rounds))
    if expected is None:
        row = Check("sampler", int(came), 0.0, "one member beside the limits", tuple(faults[:3]))
        return row, came, came
    alone = PoissonSampling | ScheduledPoissonSampling | TruncatedPoissonSampling
    independent = isinstance(plan.sampling, alone) and p.min_separation == 1
    row = sampler(
        draws,
        expected=expected,
        population=population,
        independent=independent,
        apart=plan.rounds if independent else p.min_separation,
        groups=getattr(plan.sampling, "groups", 1),
        false_alarm=false_alarm,
    )
    row = replace(row, faults=(*row.faults, *faults[:3]))
    return row, came, len(draws) * sum(expected)


def _rounds_of(rounds: Sequence[Cohort]) -> dict[int, list[int]]:
    by_client: dict[int, list[int]] = {}
    for t, cohort in enumerate(rounds):
        for client in cohort.tolist():
            by_client.setdefault(client, []).append(t)
    return by_client


def sampled_bound(
    plan: PrivacyPlan, came: float, expected: float, replay: Replay, delta: float, confidence: float
) -> Bound:
    """Return the bound of a replay whose ``signal`` is the length that an update had."""
    error = error_of(confidence) / 2
    quantile = float(stats.chi2.ppf(error, replay.draws))
    high = replay.sigma * math.sqrt(replay.draws / quantile) / replay.signal * (1 + 1e-9)
    rate = least_rate(came, expected, error)
    sampling: Any = plan.sampling
    if isinstance(sampling, ScheduledPoissonSampling):
        batches = tuple(batch * rate for batch in sampling.expected_batches)
        sampling = replace(sampling, expected_batches=batches)
    elif hasattr(sampling, "expected_batch"):
        sampling = replace(sampling, expected_batch=sampling.expected_batch * rate)
    run = sampled_guarantee(plan.mechanism, sampling, noise_multiplier=high, estimate=plan.estimate)
    epsilon = max(0.0, run.epsilon(delta) * (1 - 1e-6))
    return Bound(METHOD, ASSUMPTION, None, epsilon, delta, confidence)
