"""Every mechanism and option, judged by brute force and by linear algebra."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import (
    BandedInverse,
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Dense,
    FixedOrder,
    Independent,
    Participation,
    Toeplitz,
    brute_force,
)
from accounting.mechanisms.mechanism import prefix_sums


def trees(n):
    return st.builds(
        BinaryTree,
        st.just(n),
        st.none() | st.integers(1, n + 1),
        estimator=st.sampled_from(["vanilla", "online"]),
    )


def non_increasing(n):
    drops = st.lists(st.floats(0, 1), max_size=n - 1)
    return drops.map(lambda ratios: tuple(np.cumprod([1.0, *ratios])))


def signed(n):
    return st.lists(st.floats(-0.5, 0.5), max_size=n - 1).map(lambda tail: (1.0, *tail))


def toeplitzes(n):
    coefficients = non_increasing(n) | signed(n)
    return st.builds(Toeplitz, st.just(n), coefficients, st.booleans()) | st.builds(
        Toeplitz.square_root, st.just(n), st.integers(1, n), normalize_columns=st.booleans()
    )


@st.composite
def buffereds(draw, n):
    buffers = draw(st.integers(1, 3))
    unit = st.lists(st.floats(0, 1), min_size=buffers, max_size=buffers)
    return BufferedToeplitz(n, draw(unit), draw(unit))


@st.composite
def denses(draw, n):
    seed, signs = draw(st.integers(0, 999)), draw(st.booleans())
    below = np.random.default_rng(seed).uniform(-0.5 if signs else 0.0, 0.5, (n, n))
    return Dense(np.tril(below, -1) + np.eye(n))


@st.composite
def banded_inverses(draw, n):
    normalized = draw(st.booleans())
    if draw(st.booleans()):
        bands = draw(st.integers(1, n))
        return BandedInverse.square_root(n, bands, normalize_columns=normalized)
    shares = np.array(draw(st.lists(st.floats(0, 1), max_size=n - 1)))
    total = draw(st.floats(0, 1))
    later = -total * shares / max(shares.sum(), 1.0) if len(shares) else shares
    return BandedInverse(n, (1.0, *later), normalized)


def mechanisms(n):
    return st.one_of(
        st.just(Independent(n)), trees(n), toeplitzes(n), buffereds(n), denses(n),
        banded_inverses(n),
    )  # fmt: skip


@st.composite
def participations(draw, n):
    b = draw(st.integers(1, n))
    kind = draw(st.sampled_from([Participation, FixedOrder]))
    return kind(n, draw(st.integers(1, -(-n // b))), b)


def runs(most):
    return st.integers(1, most).flatmap(lambda n: st.tuples(mechanisms(n), participations(n)))


@given(st.integers(1, 12).flatmap(mechanisms))
@settings(max_examples=150)
def test_decoder_times_encoder_is_the_prefix_sum(mechanism):
    product = mechanism.decoder() @ mechanism.encoder()
    np.testing.assert_allclose(product, prefix_sums(mechanism.rounds), atol=1e-10)


@given(st.integers(1, 12).flatmap(mechanisms))
@settings(max_examples=150)
def test_prefix_variance_is_the_diagonal_of_the_noise_covariance(mechanism):
    covariance = (mechanism.decoder() ** 2).sum(axis=1)
    np.testing.assert_allclose(mechanism.prefix_variance(), covariance, rtol=1e-10)


@given(runs(12))
@settings(max_examples=400)
def test_sensitivity_is_brute_force_or_an_upper_bound(run):
    mechanism, participation = run
    claimed = mechanism.sensitivity(participation)
    judged = brute_force(mechanism.encoder(), participation)
    assert claimed.squared >= judged * (1 - 1e-14)
    if claimed.exact:
        assert claimed.squared == pytest.approx(judged, rel=1e-10)


def signed_brute_force(encoder, participation):
    """Most that clients who may send +1 or -1 can do: never more than the truth."""
    gram = encoder.T @ encoder
    return max(
        float(np.array(signs) @ gram[np.ix_(u, u)] @ np.array(signs))
        for u in participation.patterns()
        for signs in itertools.product((1.0, -1.0), repeat=len(u))
    )


@given(runs(6))
@settings(max_examples=200)
def test_exact_sensitivity_is_attained_by_some_signs(run):
    mechanism, participation = run
    claimed = mechanism.sensitivity(participation)
    attained = signed_brute_force(mechanism.encoder(), participation)
    assert claimed.squared >= attained * (1 - 1e-14)
    if claimed.exact:
        assert claimed.squared == pytest.approx(attained, rel=1e-10)


@pytest.mark.parametrize("estimator", ["vanilla", "online"])
def test_every_small_tree(estimator):
    for n, every in itertools.product(range(1, 13), (None, 1, 2, 3, 5, 6, 7)):
        tree = BinaryTree(n, every, estimator=estimator)
        for k, b in ((1, 1), (2, 1), (2, 3), (3, 2), (n, 1)):
            if k <= -(-n // b):
                for kind in (Participation, FixedOrder):
                    participation = kind(n, k, b)
                    judged = brute_force(tree.encoder(), participation)
                    claimed = tree.sensitivity(participation)
                    assert claimed.exact, (tree, participation)
                    assert claimed.squared == pytest.approx(judged, rel=1e-10), (tree, kind)


def test_a_client_in_every_round_of_a_long_run_is_exact_at_once():
    """Not by 2^60 patterns: with no negative entry, all rounds are the worst ones."""
    dense = Dense(np.tril(np.ones((60, 60))))
    claimed = dense.sensitivity(Participation(60, 60, 1))
    assert claimed.exact
    assert claimed.squared == pytest.approx(sum((t + 1) ** 2 for t in range(60)), rel=1e-9)
    nearly = dense.sensitivity(Participation(60, 59, 1))
    assert not nearly.exact
    assert sum((t + 1) ** 2 for t in range(59)) <= nearly.squared <= claimed.squared


SIXES = [
    Independent(6),
    BinaryTree(6),
    Toeplitz(6, (1.0, 0.5)),
    BufferedToeplitz(6, (0.5,), (0.2,)),
    BandedInverse(6, (1.0, -0.5)),
    Dense(np.eye(6)),
]


@pytest.mark.parametrize("mechanism", SIXES, ids=lambda m: m.name)
def test_rounds_must_agree(mechanism):
    with pytest.raises(ConfigError, match="rounds=9 but the mechanism has rounds=6"):
        mechanism.sensitivity(Participation(9))
