"""Cohorts from a key: their distribution, with twins that the same tests reject."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from mixtures import bin_rows, chosen_rows, separated_rows
from scipy.stats import chisquare

from accounting import (
    BallsInBins,
    BMinSep,
    ConfigError,
    Independent,
    Participation,
    PoissonSampling,
    ScheduledPoissonSampling,
    TruncatedPoissonSampling,
    WithoutReplacementSampling,
    cohorts,
    participation_of,
    sampled_guarantee,
)
from accounting.cohorts import sampling_from_dict, sampling_to_dict

KEY = bytes(range(32))
MEMBERS = 40_000
ROUNDS = 5


def joined(sampling, key=KEY):
    """Return a table of members and rounds, 1 where a member joined."""
    table = np.zeros((MEMBERS, ROUNDS), dtype=int)
    drawn = cohorts(sampling, members=MEMBERS, rounds=ROUNDS, key=key)
    for t, cohort in enumerate(drawn):
        assert (np.diff(cohort) > 0).all()
        table[cohort, t] = 1
    return table


def p_value(table, rows):
    """Return the p-value of the rounds that members joined, against their probabilities."""
    seen = Counter(map(tuple, table.tolist()))
    assert seen.keys() <= rows.keys()
    order = sorted(rows)
    found = [seen[row] for row in order]
    return chisquare(found, [rows[row] * len(table) for row in order]).pvalue


def skewed_bins(weight):
    """Three bins, of which the first is the likelier one unless its weight is a third."""
    return {row: weight if row[0] else (1 - weight) / 2 for row in bin_rows(ROUNDS, 3)}


def skewed_pairs(weight):
    """Two of four bins, of which the first is the likelier one unless its weight is a half."""
    rows = chosen_rows(ROUNDS, 4, 2)
    return {row: weight / 3 if row[0] else (1 - weight) / 3 for row in rows}


def poisson_rows(probability, times=(1,) * ROUNDS):
    rows = {}
    for code in range(2**ROUNDS):
        row = tuple(code >> t & 1 for t in range(ROUNDS))
        rates = [probability * each for each in times]
        each = [q if joins else 1 - q for joins, q in zip(row, rates, strict=True)]
        rows[row] = math.prod(each)
    return rows


def scheduled_rows(probability):
    return poisson_rows(probability, (1, 1, 2, 2, 2))


SAMPLERS = [
    (WithoutReplacementSampling(8000, MEMBERS), poisson_rows, 0.2),
    (TruncatedPoissonSampling(12_000, MEMBERS, 8000), poisson_rows, 0.2),
    (PoissonSampling(8000, MEMBERS), poisson_rows, 0.2),
    (ScheduledPoissonSampling((0, 2), (8000, 16_000), MEMBERS), scheduled_rows, 0.2),
    (BMinSep(8000, MEMBERS, 3), lambda p: separated_rows(ROUNDS, 3, p), 1 / 3),
    (BMinSep(8000, MEMBERS, 1), poisson_rows, 0.2),
    (BMinSep(10_000, MEMBERS, 4), lambda p: separated_rows(ROUNDS, 4, p), 1.0),
    (BallsInBins(3, ROUNDS), skewed_bins, 1 / 3),
    (BallsInBins(4, ROUNDS, chosen=2), skewed_pairs, 1 / 2),
    (BallsInBins(5, ROUNDS, redraw=True, chosen=3), lambda _: chosen_rows(ROUNDS, 5, 3), 1.0),
]


@pytest.mark.parametrize(("sampling", "rows", "probability"), SAMPLERS)
def test_members_join_as_the_accountant_assumes(sampling, rows, probability):
    """Over all patterns of five rounds; a sampler that joins 5 % more often is told apart."""
    if isinstance(sampling, BMinSep):
        assert sampling.probability == pytest.approx(probability, abs=1e-15)
    table = joined(sampling)
    assert p_value(table, rows(probability)) > 1e-4
    if probability < 1:
        assert p_value(table, rows(probability / 1.05)) < 1e-6


def test_members_and_rounds_are_independent():
    """Neighbours join together as often as strangers; the twin shares words between neighbours."""
    table = joined(PoissonSampling(8000, MEMBERS))
    pairs = MEMBERS // 2

    def together(left, right):
        return abs((left & right).sum() - pairs * 0.04) / math.sqrt(pairs * 0.04 * 0.96)

    for t in range(ROUNDS):
        assert together(table[::2, t], table[1::2, t]) < 4.5
        assert together(table[::2, t], table[::2, t]) > 100


def test_groups_take_turns():
    sampling = PoissonSampling(8000, MEMBERS, groups=2)
    assert sampled_guarantee(Independent(ROUNDS), sampling, noise_multiplier=4.0).groups == 2
    table = joined(sampling)
    for t in range(ROUNDS):
        assert not table[(t + 1) % 2 :: 2, t].any()
        assert abs(table[:, t].sum() - 8000) < 5 * math.sqrt(8000 * 0.6)


@pytest.mark.parametrize(
    "sampling", [PoissonSampling(8000, MEMBERS), BMinSep(8000, MEMBERS, 3), BallsInBins(3, ROUNDS)]
)
def test_a_key_repeats_and_another_one_does_not(sampling):
    table = joined(sampling)
    assert (table == joined(sampling)).all()
    assert 0.1 < (table != joined(sampling, key=bytes(32))).mean() < 0.6


def test_what_the_guarantee_does_not_say_is_refused():
    poisson, bins = PoissonSampling(1, 5), BallsInBins(2, 8)
    with pytest.raises(ConfigError, match="members=6: the sampler has population=5"):
        cohorts(poisson, members=6, rounds=8, key=KEY)
    with pytest.raises(ConfigError, match="key: must be 32 secret bytes"):
        cohorts(poisson, members=5, rounds=8, key=b"short")
    with pytest.raises(ConfigError, match="the bins are for 8 rounds"):
        cohorts(bins, members=5, rounds=9, key=KEY)
    with pytest.raises(ConfigError, match="must be a sampler of this package"):
        cohorts(SimpleNamespace(population=5), members=5, rounds=9, key=KEY)


def test_redrawn_bins_deal_everybody_once_per_pass_and_anew():
    sampler = BallsInBins(5, 12, redraw=True)
    drawn = list(cohorts(sampler, members=400, rounds=12, key=bytes(range(32))))
    for start in (0, 5):
        dealt = np.concatenate(drawn[start : start + 5])
        assert sorted(dealt.tolist()) == list(range(400))
    same = len(np.intersect1d(drawn[0], drawn[5])) / len(drawn[0])
    assert 0.05 < same < 0.4  # a fifth, if the passes are independent; all, with one draw
    assert len(drawn) == 12
    assert participation_of(sampler, 12) == Participation(12, 3, 1)
    assert sampling_from_dict(sampling_to_dict(sampler)) == sampler
    assert "redraw" not in sampling_to_dict(BallsInBins(5, 12))
