"""Keys: what each strategy may choose, that public ones are public, and what decoys hide."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import ConfigError
from privpart.select import (
    IndependentKeys,
    SharedKeys,
    StructuredKeys,
    random,
    random_top,
    top,
)

COUNTS = np.array([3, 0, 9, 1, 9, 0, 2, 5])
"""By frequency: 2 and 4 (9 each), 7, 0, 6, 3."""


def draws(strategy, m, repeats=200):
    return {strategy(COUNTS, m, np.random.default_rng(seed)) for seed in range(repeats)}


def test_top_takes_the_most_frequent_and_never_what_does_not_occur():
    assert draws(top, 1) == {(2,)}
    assert draws(top, 3) == {(2, 4, 7)}
    assert draws(top, 99) == {(0, 2, 3, 4, 6, 7)}


def test_random_top_draws_from_twice_as_many_and_random_from_all_that_occur():
    assert draws(random_top, 1) == {(2,), (4,)}
    assert {key for keys in draws(random_top, 2) for key in keys} == {2, 4, 7, 0}
    assert draws(random, 1) == {(0,), (2,), (3,), (4,), (6,), (7,)}


def structured(m, strategy=top, counts=COUNTS, **options):
    return StructuredKeys(lambda client: counts, m, strategy, data_seed=0, **options)


@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=12),
    st.data(),
    st.sampled_from([top, random, random_top]),
)
def test_every_client_sends_exactly_m_distinct_ascending_keys(counts, data, strategy):
    m = data.draw(st.integers(2, len(counts)))
    chooser = structured(m, strategy, np.array(counts), always=(0, 2))
    keys = chooser(0, 5).for_training()
    assert len(keys) == m
    assert list(keys) == sorted(set(keys))
    assert {0, 2} <= set(keys) <= set(range(len(counts)))
    # own keys come before decoys
    occurring = {k for k in range(len(counts)) if counts[k]} | {0, 2}
    own = occurring & set(keys)
    assert len(own) == min(m, len(occurring)) or strategy is random_top


def test_decoys_do_not_change_between_rounds():
    """If they did, whoever sees the keys of two rounds would strike them out."""
    chooser = structured(7)
    assert {chooser(r, 1).for_training() for r in range(20)} == {chooser(0, 1).for_training()}
    others = {chooser(0, client).for_training() for client in range(20)}
    assert len(others) == 2  # one of the two absent keys is left out


def test_independent_keys_differ_between_clients_and_rounds_and_repeat_with_the_seed():
    chooser = IndependentKeys(64, 16, data_seed=0)
    keys = [chooser(r, c).for_training() for r in range(5) for c in range(5)]
    assert len(set(keys)) == 25
    assert keys == [chooser(r, c).for_training() for r in range(5) for c in range(5)]


def test_shared_keys_are_public_equal_for_all_and_new_each_round():
    chooser = SharedKeys(64, 16, seed=0)
    assert {chooser(4, client) for client in range(9)} == {chooser(4, 0)}
    assert len({chooser(r, 0) for r in range(9)}) == 9


def test_shared_keys_are_the_same_on_every_machine():
    assert SharedKeys(8, 3, seed=5)(2, 0) == (0, 3, 7)
    assert SharedKeys(8, 3, seed=6)(2, 0) != (0, 3, 7)


def test_shared_keys_are_drawn_evenly():
    """Chi-square over 64 keys in 3,000 rounds; the variance of a draw without replacement."""
    chooser = SharedKeys(64, 16, seed=0)
    rounds = chooser.rounds_of_keys(3000)
    assert [key for key in range(64) if 7 in rounds[key]] == list(chooser(7, 0))
    lengths = np.array(list(map(len, rounds)))
    statistic = ((lengths - 750) ** 2).sum() / (3000 * 0.25 * 0.75) * 63 / 64
    assert abs(statistic - 63) < 5 * np.sqrt(2 * 63)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SharedKeys(4, 5, seed=0),
        lambda: SharedKeys(4, 0, seed=0),
        lambda: SharedKeys(4, 2, seed=-1),
        lambda: SharedKeys(4, 2, seed=0)(-1, 0),
        lambda: IndependentKeys(4, 5, data_seed=0),
        lambda: IndependentKeys(4, 0, data_seed=0),
        lambda: IndependentKeys(np.inf, 2, data_seed=0),
        lambda: IndependentKeys(4, None, data_seed=0),
        lambda: structured(9)(0, 0),
        lambda: structured(1, always=(0, 1))(0, 0),
        lambda: structured(2, counts=np.array([1, -1, 2]))(0, 0),
        lambda: structured(2, counts=np.ones((2, 2)))(0, 0),
    ],
)
def test_impossible_numbers_of_keys_are_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()
