"""What each sensitivity says of itself: exact or a bound, and by which rule."""

import numpy as np
import pytest

from accounting import (
    BandedInverse,
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Dense,
    Independent,
    Participation,
    Toeplitz,
    brute_force,
    calibrate,
    guarantee,
)

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
    tree, run = BinaryTree(8), Participation(8)
    with pytest.raises(ConfigError, match=r"^method='prv': must be one of exact, pld, rdp"):
        calibrate(tree, run, target_epsilon=1.0, delta=1e-6, method="prv")
    with pytest.raises(ConfigError, match=r"^target_epsilon=1e\+60: must lie between"):
        calibrate(tree, run, target_epsilon=1e60, delta=1e-6)
    with pytest.raises(ConfigError, match=r"Without noise there is no guarantee to report\.$"):
        guarantee(tree, run, noise_multiplier=0.0)
    with pytest.raises(ConfigError, match=r"^encoder has shape \(2, 2\): must have 8 columns, one"):
        brute_force(np.eye(2), run)
    with pytest.raises(ConfigError, match=r"^encoder has entries that are not finite"):
        brute_force(np.full((8, 8), np.nan), run)
