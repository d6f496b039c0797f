"""Sampler: whether secret cohorts are drawn as the accountant assumes.

Cohorts of several keys are compared with the sampler's stated probability: how many come in all, in
each round and of each member; whether the same come in two consecutive rounds, or members in pairs;
and whether two keys draw the same. Every count is a sum of independent draws, or of draws that
exclude each other, so that its variance is at most its mean.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from attacks.lower_bounds.checks import Check

Array = NDArray[np.float64]
Cohort = NDArray[np.int64]
"""Numbers of the members of a round, from 0."""
_LEAST = 100  # expected members of a count that is tested


def sampler(
    draws: Sequence[Sequence[Cohort]],
    *,
    expected: Sequence[float],
    population: int,
    independent: bool,
    apart: int,
    groups: int = 1,
    false_alarm: float,
) -> Check:
    """Return whether cohorts are those of the sampler.

    Args:
        draws: per key, the cohorts of all rounds.
        expected: members of each round, on average.
        population: number of members that cohorts are drawn from.
        independent: whether rounds are drawn independently of each other.
        apart: first rounds, in which a member comes at most once, or independently.
        groups: of members that take turns by the remainder of their number.
        false_alarm: probability, at most, that a sound sampler fails.
    """
    counts = np.array([[len(cohort) for cohort in rounds] for rounds in draws], dtype=np.float64)
    keys = len(draws)
    mean = np.asarray(expected, dtype=np.float64)
    tests: list[tuple[str, float, float]] = [
        ("members in all", float(counts.sum()), keys * float(mean.sum()))
    ]
    tests += [
        (f"members in round {t}", float(counts[:, t].sum()), keys * float(mean[t]))
        for t in range(len(mean))
    ]
    if independent:
        both = sum(
            len(np.intersect1d(one, other)) for rounds in draws for one, other in pairwise(rounds)
        )
        at = keys * float((mean[1:] * mean[:-1]).sum()) / population
        tests.append(("members that come in two consecutive rounds", float(both), at))
    shared = sum(
        len(np.intersect1d(one, other))
        for first, second in pairwise(draws)
        for one, other in zip(first[:apart], second[:apart], strict=True)
    )
    at = (keys - 1) * float(np.square(mean[:apart]).sum()) / population
    tests.append(("members that two keys draw for the same round", float(shared), at))
    # The accountant takes a probability that is rounded; a hundredth of a deviation is not a fault.
    tests = [test for test in tests if test[2] >= _LEAST]
    limit = float(stats.norm.isf(false_alarm / 2 / (len(tests) + 3))) * 1.1
    faults = [
        f"The sampler draws {int(came):,} {name}; the plan expects {at:,.0f}."
        for name, came, at in tests
        if abs(came - at) > limit * math.sqrt(at) + 1
    ]
    total = max(1.0, keys * float(mean.sum()))
    faults += _by_member(draws, population, groups, limit)
    faults += _in_pairs(draws, mean, population, groups, limit)
    sees = f"a probability that is off by {limit / math.sqrt(total):.1%} of itself"
    return Check("sampler", int(total), false_alarm, sees, tuple(faults[-3:]))


def _by_member(
    draws: Sequence[Sequence[Cohort]], population: int, groups: int, limit: float
) -> list[str]:
    """Say that some members come more often than others, by the spread of all their counts."""
    everyone = np.concatenate([cohort for rounds in draws for cohort in rounds])
    counts = np.bincount(everyone, minlength=population).astype(np.float64)
    means = np.array([counts[g::groups].mean() for g in range(groups)])[
        np.arange(population) % groups
    ]
    if means.min() < _LEAST / 10:
        return []
    # Each term of Poisson counts has mean 1 and variance 2 + 1 / mean; draws that exclude each
    # other have less.
    spread = float((np.square(counts - means) / means).mean())
    most = 1 + limit * math.sqrt((2 + 1 / float(means.min())) / population)
    if spread <= most:
        return []
    return [
        f"The counts of single members spread {spread:.3g} times as much as by chance, where sound "
        f"ones stay below {most:.3g}: some members come more often."
    ]


def _in_pairs(
    draws: Sequence[Sequence[Cohort]], mean: Array, population: int, groups: int, limit: float
) -> list[str]:
    """Say that members come together more often than independent ones."""
    faults = []
    for distance in sorted({groups, population // 2 // groups * groups} - {0}):
        pairs = sum(
            len(np.intersect1d(cohort + distance, cohort)) for rounds in draws for cohort in rounds
        )
        share = (population - distance) / population
        at = len(draws) * float(np.square(mean).sum()) * groups / population * share
        # Two pairs that share a member depend on each other.
        deviation = math.sqrt(at * (1 + 2 * float(mean.max()) * groups / population))
        if at >= _LEAST and pairs > at + limit * deviation:
            faults.append(
                f"The sampler draws {pairs:,} pairs of members {distance} apart for one round; of "
                f"independent ones, {at:,.0f} are expected."
            )
    return faults


def least_rate(came: float, expected: float, error: float) -> float:
    """Return the share of the expected members that is drawn, at least, with this error.

    It is at most 1: more members than stated are a fault of their own.
    """
    # A sum of independent draws is more concentrated than a Poisson variable of its mean.
    least = float(stats.chi2.ppf(error, 2 * came)) / 2 if came else 0.0
    return min(1.0, least / expected)
