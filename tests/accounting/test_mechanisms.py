"""Encoders, decoders and sensitivities of every mechanism, judged by brute force."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import BinaryTree, ConfigError, Independent, Participation, brute_force
from accounting.mechanisms.mechanism import prefix_sums

SMALL = [
    *(Independent(n) for n in (1, 5, 12)),
    *(BinaryTree(n) for n in range(1, 13)),
    *(BinaryTree(n, restart_every=r) for n, r in ((8, 3), (12, 4), (11, 4), (5, 1), (6, 9))),
]


@pytest.mark.parametrize("mechanism", SMALL, ids=repr)
def test_decoder_times_encoder_is_the_prefix_sum(mechanism):
    product = mechanism.decoder() @ mechanism.encoder()
    np.testing.assert_allclose(product, prefix_sums(mechanism.rounds), atol=1e-12)


@pytest.mark.parametrize("mechanism", SMALL, ids=repr)
def test_prefix_variance_is_the_diagonal_of_the_noise_covariance(mechanism):
    decoder = mechanism.decoder()
    np.testing.assert_allclose(mechanism.prefix_variance(), (decoder**2).sum(axis=1), atol=1e-12)


@st.composite
def small_runs(draw):
    n = draw(st.integers(1, 12))
    b = draw(st.integers(1, n))
    k = draw(st.integers(1, -(-n // b)))
    restart = draw(st.none() | st.integers(1, n))
    mechanism = draw(st.sampled_from([Independent(n), BinaryTree(n, restart)]))
    return mechanism, Participation(n, k, b)


@given(small_runs())
def test_sensitivity_is_brute_force(run):
    mechanism, participation = run
    claimed = mechanism.sensitivity(participation)
    judged = brute_force(mechanism.encoder(), participation)
    assert claimed.exact
    assert claimed.squared == pytest.approx(judged, rel=1e-12)


@pytest.mark.parametrize(
    ("n", "b", "k", "squared"),
    [
        # TF-Privacy, tree_aggregation_accountant_test.py (its separation plus one)
        (8, 8, 1, 4),
        (9, 4, 3, 11),
        (8, 1, 8, 120),
        (1600, 1, 1, 11),
        (1600, 320, 5, 70),
        # beyond what can be enumerated: the recursion of TF-Privacy takes minutes here
        (2000, 314, 6, 79),
    ],
)
def test_published_tree_sensitivities(n, b, k, squared):
    assert BinaryTree(n).sensitivity(Participation(n, k, b)).squared == squared


def test_a_full_level_appears_only_when_it_is_complete():
    levels = [BinaryTree(n).sensitivity(Participation(n)).squared for n in (2047, 2048)]
    assert levels == [11, 12]


def test_restarts_cost_a_tree_per_participation():
    once = BinaryTree(64, restart_every=16).sensitivity(Participation(64)).squared
    each = BinaryTree(64, restart_every=16).sensitivity(Participation(64, 4, 16)).squared
    assert (once, each) == (5, 20)


def test_large_participations_stay_fast():
    start = time.process_time()
    BinaryTree(2048).sensitivity(Participation(2048, 5, 410))
    BinaryTree(2048).sensitivity(Participation(2048, 2048))
    BinaryTree(10_000).sensitivity(Participation(10_000, 200, 37))
    assert time.process_time() - start < 5  # milliseconds each; minutes if the recursion breaks


def test_rounds_must_agree():
    with pytest.raises(ConfigError, match="rounds=9 but the mechanism has rounds=8"):
        BinaryTree(8).sensitivity(Participation(9))


@pytest.mark.parametrize("value", [0, -3, 2.0, float("nan"), True])
def test_tree_rejects_bad_lengths(value):
    with pytest.raises(ConfigError, match="rounds"):
        BinaryTree(value)
    with pytest.raises(ConfigError, match="restart_every"):
        BinaryTree(8, restart_every=value)
