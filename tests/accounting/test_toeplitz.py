"""Toeplitz, buffered and dense encoders: published values, streams, column norms, bad input."""

import numpy as np
import pytest

from accounting import (
    BufferedToeplitz,
    ConfigError,
    Dense,
    Participation,
    Toeplitz,
    brute_force,
    optimize,
)
from accounting.mechanisms import noise_matrix
from accounting.sensitivity import gram_sensitivity


def test_a_filter_that_rises_is_never_called_exact():
    # reference/mechanisms.md section 3: brute force 6.4375 < row maxima 6.9375 < majorant 8.5
    rising, participation = Toeplitz(8, (1, 0.25, 0.5)), Participation(8, 3, 1)
    found = rising.sensitivity(participation)
    assert not found.exact
    assert brute_force(rising.encoder(), participation) == 6.4375
    assert found.squared == pytest.approx(6.9375)


@pytest.mark.parametrize("normalize_columns", [False, True])
@pytest.mark.parametrize("coefficients", [(1, 0.25, 0.5), (1, -0.5), (1, 0.5, -0.1), (1, 0, 0.1)])
def test_rising_or_negative_filters_that_overlap_are_bounds(coefficients, normalize_columns):
    mechanism = Toeplitz(8, coefficients, normalize_columns)
    assert not mechanism.sensitivity(Participation(8, 2, 1)).exact
    assert mechanism.sensitivity(Participation(8, 2, 3)).exact  # orthogonal: no overlap to judge
    assert mechanism.sensitivity(Participation(8)).exact


def test_long_runs_fall_back_to_the_majorant():
    n = 4000
    rising = np.ones(n)
    rising[1:] = 0.5 / np.arange(1, n) * (1 + 0.1 * (np.arange(1, n) % 2))
    found = Toeplitz(n, rising).sensitivity(Participation(n, 40, 100))
    majorant = np.maximum.accumulate(rising[::-1])[::-1]
    assert found.rule == "non-increasing majorant"
    bound = Toeplitz(n, majorant).sensitivity(Participation(n, 40, 100))
    assert found.squared == pytest.approx(bound.squared, rel=1e-9)
    assert not found.exact


@pytest.mark.parametrize(
    "mechanism",
    [
        Toeplitz.square_root(40, normalize_columns=True),
        Toeplitz.square_root(40, bands=7, normalize_columns=True),
        optimize("dense", Participation(40)),
    ],
)
def test_columns_have_unit_norm_in_the_matrix_whose_inverse_makes_the_noise(mechanism):
    # a factor with unit rows instead of columns passes a look at X = C^T C, not this
    encoder = np.linalg.inv(noise_matrix(mechanism))
    np.testing.assert_allclose(np.linalg.norm(encoder, axis=0), 1.0, atol=1e-9)
    assert not np.triu(encoder, 1).max() > 1e-9
    wrong = np.linalg.cholesky(encoder.T @ encoder)
    assert np.linalg.norm(wrong, axis=0).max() > 1.01


def test_square_root_squares_to_the_prefix_sums():
    root = Toeplitz.square_root(50).encoder()
    np.testing.assert_allclose(root @ root, np.tril(np.ones((50, 50))), atol=1e-12)
    assert Toeplitz.square_root(50, bands=3).coefficients == (1.0, 0.5, 0.375)
    assert Toeplitz.square_root(2, bands=9).bands == 2


@pytest.mark.parametrize("coefficients", [(), (0, 1), (-1, 0.5), (1, "x"), "10", 3, (1,) * 5])
def test_toeplitz_refuses_bad_coefficients(coefficients):
    with pytest.raises(ConfigError, match="coefficients"):
        Toeplitz(4, coefficients)


def test_noise_that_grows_without_bound_is_an_error():
    for mechanism in (Toeplitz(4000, (1, 2)), Toeplitz(4000, (1, 2), normalize_columns=True)):
        with pytest.raises(ConfigError, match="grows without bound"):
            mechanism.prefix_variance()


@pytest.mark.parametrize(
    ("decay", "scale", "field"),
    [
        ((1.01,), (0.1,), "decay"),
        ((-0.1,), (0.1,), "decay"),
        ((0.5,), (-0.1,), "scale"),
        ((0.5, 0.6), (0.1,), "one of each"),
        ((), (), "decay"),
    ],
)
def test_blt_refuses_bad_parameters(decay, scale, field):
    with pytest.raises(ConfigError, match=field):
        BufferedToeplitz(4, decay, scale)


@pytest.mark.parametrize(
    "matrix",
    [[[1.0, 0.5], [0.0, 1.0]], [[0.0]], [[-1.0]], [[1.0, 0.0]], [1.0], [["x"]], [[1.0], [1.0, 2]]],
)
def test_dense_refuses_what_is_not_lower_triangular(matrix):
    with pytest.raises(ConfigError, match="matrix"):
        Dense(matrix)


def test_dense_keeps_its_own_copy():
    matrix = np.eye(3)
    mechanism = Dense(matrix)
    matrix[0, 0] = 7.0
    assert mechanism == Dense(np.eye(3))
    assert hash(mechanism) == hash(Dense(np.eye(3)))
    assert mechanism != Dense(2 * np.eye(3))
    with pytest.raises(ValueError, match="read-only"):
        mechanism.matrix[0, 0] = 7.0


BANDED = np.array([[1, 0, 0, 0], [2, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, -6.0]])


@pytest.mark.parametrize(
    ("encoder", "b", "k", "squared"),
    [
        # jax_privacy, sensitivity_test.py: test_diag_strategy_matrix and test_banded
        (np.diag([0, 3.0, 0, 1, 2]), 2, 2, 13),
        (np.diag([0, 3.0, 0, 1, 2]), 2, 3, 13),
        (np.diag([0, 3.0, 0, 1, 2]), 2, 1, 9),
        (BANDED, 2, 1, 36),
        (BANDED, 2, 2, 41),
        (BANDED, 3, 2, 41),
        # the same file, test_full_participation: all rounds, nonnegative C
        (np.tril(np.ones((5, 5))), 1, 5, 55),
    ],
)
def test_gram_rules_on_published_matrices(encoder, b, k, squared):
    found = gram_sensitivity(encoder.T @ encoder, Participation(len(encoder), k, b))
    assert found.exact
    assert found.squared == pytest.approx(squared, rel=1e-12)


def test_a_blt_is_accounted_with_the_coefficients_that_make_the_noise():
    """The server multiplies in float32; over 20,000 rounds the difference would be 1e-4."""
    blt = BufferedToeplitz(20_000, decay=(0.99998966,), scale=(0.02,))
    for value in (*blt.decay, *blt.scale):
        assert np.float32(value) == value
    assert BufferedToeplitz(9, (1 - 1e-12,), (0.1,)).decay[0] < 1
