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
    Grouped,
    Independent,
    Participation,
    PrefixError,
    Scheduled,
    Toeplitz,
    brute_force,
    calibrate,
    error,
)
from accounting.mechanisms import tree
from accounting.mechanisms.mechanism import prefix_sums
from accounting.sensitivity import gram_sensitivity


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


@st.composite
def scheduleds(draw, n):
    starts = draw(st.sets(st.integers(1, n - 1))) if n > 1 else set()
    factors = [draw(st.floats(0.1, 10)) for _ in range(len(starts) + 1)]
    return Scheduled(n, (0, *sorted(starts)), tuple(factors))


def mechanisms(n):
    return st.one_of(
        st.just(Independent(n)), trees(n), toeplitzes(n), buffereds(n), denses(n),
        banded_inverses(n), scheduleds(n),
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
def test_the_decoder_is_the_prefix_sum_and_has_the_prefix_variance(mechanism):
    product = mechanism.decoder() @ mechanism.encoder()
    np.testing.assert_allclose(product, prefix_sums(mechanism.rounds), atol=1e-10)
    covariance = (mechanism.decoder() ** 2).sum(axis=1)
    np.testing.assert_allclose(mechanism.prefix_variance(), covariance, rtol=1e-10)


@given(runs(12))
@settings(max_examples=400)
def test_sensitivity_is_brute_force_or_an_upper_bound(run):
    mechanism, participation = run
    claimed = mechanism.sensitivity(participation)
    judged = brute_force(mechanism.encoder(), participation)
    assert claimed.squared >= judged * (1 - 1e-14)
    assert claimed.exact or not isinstance(mechanism, BinaryTree)
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
    Grouped([(0,)] * 6, [BinaryTree(6)], [5]),
]


@pytest.mark.parametrize("mechanism", SIXES, ids=lambda m: m.name)
def test_rounds_must_agree(mechanism):
    with pytest.raises(ConfigError, match="rounds=9 but the mechanism has rounds=6"):
        mechanism.sensitivity(Participation(9))


def test_the_error_is_at_equal_cost():
    """It is the scale that the encoder does not have; and one round has one error."""
    participation = Participation(20, 3, 4)
    once, twice = (Toeplitz(20, (scale, scale / 2)) for scale in (1, 2))
    assert error(once, participation).rmse == pytest.approx(error(twice, participation).rmse)
    assert error(BinaryTree(1), Participation(1)) == PrefixError(rmse=1.0, max_error=1.0)


ONCE, TWICE, APART = Participation(6), Participation(6, 2, 1), Participation(6, 2, 3)
FALLING, RISING, NEGATIVE = (1.0, 0.5, 0.25), (1.0, 0.25, 0.5), (1.0, 0.5, -0.25)

CASES = [
    (Independent(6), TWICE, True, "one unit per participation"),
    (BinaryTree(6), ONCE, True, "binary tree: levels of the tree"),
    (BinaryTree(6), TWICE, True, "binary tree: exact recursion"),
    (Toeplitz(6, RISING), ONCE, True, "largest column norm"),
    (Toeplitz(6, NEGATIVE), APART, True, "bands within separation"),
    (Toeplitz(6, FALLING), TWICE, True, "non-increasing Toeplitz"),
    (Toeplitz(6, RISING), TWICE, False, "sum of row maxima"),
    (Toeplitz(6, NEGATIVE), TWICE, False, "sum of row maxima"),
    (Toeplitz(6, (*FALLING, 0, 0, -0.1)), TWICE, False, "sum of row maxima"),
    (Toeplitz(6, FALLING, normalize_columns=True), APART, True,
     "unit columns, bands within separation"),
    (Toeplitz(6, RISING, normalize_columns=True), TWICE, False, "sum of row maxima"),
    (BandedInverse(6, (1.0, -0.5)), TWICE, True, "non-increasing Toeplitz"),
    (BandedInverse(6, (1.0, -0.5), True), ONCE, True, "unit columns, orthogonal"),
    (BandedInverse(6, (1.0, -0.5), True), TWICE, True,
     "earliest rounds of unit geometric columns"),
    (BandedInverse.square_root(6, 3, normalize_columns=True), TWICE, True,
     "earliest rounds of unit columns"),
    (BandedInverse(6, (1.0, 0.0, -1.0), True), TWICE, False, "largest products of unit columns"),
    (BufferedToeplitz(6, (0.9,), (0.3,)), TWICE, True, "non-increasing Toeplitz"),
    (Dense([[1.0, 0.0], [0.5, 1.0]]), Participation(2), True, "largest column norm"),
]  # fmt: skip


@pytest.mark.parametrize(("mechanism", "participation", "exact", "rule"), CASES)
def test_exactness_and_rule(mechanism, participation, exact, rule):
    claimed = mechanism.sensitivity(participation)
    assert claimed.exact is exact
    assert claimed.rule == rule


def test_errors_name_what_was_passed_and_what_would_do():
    run = Participation(8)
    with pytest.raises(ConfigError, match=r"^target_epsilon=1e\+60: must lie between"):
        calibrate(BinaryTree(8), run, target_epsilon=1e60, delta=1e-6)
    with pytest.raises(ConfigError, match=r"^encoder has shape \(2, 2\): must have 8 columns, one"):
        brute_force(np.eye(2), run)


# Binary trees: published sensitivities, restarts, the recursion.


@pytest.mark.parametrize(
    ("n", "b", "k", "squared"),
    [
        # TF-Privacy, tree_aggregation_accountant_test.py (its separation plus one)
        (8, 8, 1, 4),
        (9, 4, 3, 11),
        (8, 1, 8, 120),
        # reference/mechanisms.md section 3, agreed by two implementations there
        (7, 1, 2, 10),
        (8, 4, 2, 10),
        (8, 3, 3, 20),
        (1600, 1, 1, 11),
        (1600, 320, 5, 70),
        # beyond what can be enumerated: the recursion of TF-Privacy takes minutes here
        (2000, 314, 6, 79),
    ],
)
def test_published_sensitivities(n, b, k, squared):
    assert BinaryTree(n).sensitivity(Participation(n, k, b)).squared == squared


def test_participations_that_leave_no_choice():
    # 14 of 40 rounds that are 3 apart: 0, 3, ..., 39, whatever a subtree would like better
    tree = BinaryTree(40)
    forced = tree.encoder()[:, ::3].sum(axis=1)
    assert tree.sensitivity(Participation(40, 14, 3)).squared == forced @ forced


def test_restarts_cost_a_tree_per_participation():
    # once over all trees (dp-accounting, SingleEpochTreeAggregationDpEvent) or once in each of
    # them (TF-Privacy, compute_rdp_tree_restart): reference/mechanisms.md section 2.1
    tree = BinaryTree(1024, restart_every=256)
    once = tree.sensitivity(Participation(1024)).squared
    each = tree.sensitivity(Participation(1024, 4, 256)).squared
    assert (once, each) == (9, 36)


@given(st.integers(20, 130), st.integers(3, 45), st.integers(2, 4), st.none() | st.integers(9, 70))
def test_recursion_agrees_with_all_patterns_of_longer_runs(n, b, k, every):
    # long enough for a later round of a subtree to be worth the room that it takes
    participation = Participation(n, min(k, -(-n // b)), b)
    tree = BinaryTree(n, every)
    encoder = tree.encoder()
    judged = gram_sensitivity(encoder.T @ encoder, participation)
    claimed = tree.sensitivity(participation).squared
    assert claimed <= judged.squared * (1 + 1e-9)
    if judged.exact:
        assert claimed == pytest.approx(judged.squared, rel=1e-9)


def test_large_participations_take_few_steps_of_the_recursion(monkeypatch):
    steps, plain = [], tree._max_plus
    monkeypatch.setattr(tree, "_max_plus", lambda *both: steps.append(1) or plain(*both))
    BinaryTree(2048).sensitivity(Participation(2048, 5, 410))
    BinaryTree(2048).sensitivity(Participation(2048, 2048))
    BinaryTree(10_000).sensitivity(Participation(10_000, 200, 37))
    assert 0 < len(steps) < 10_000  # billions if the recursion breaks


@pytest.mark.parametrize(
    ("field", "value"),
    [("estimator", "full"), ("release", "prefix"), ("completed", True), ("completed", None)],
)
def test_unknown_options(field, value):
    with pytest.raises(ConfigError, match=field):
        BinaryTree(8, **{field: value})
