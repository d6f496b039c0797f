"""Calibration never overshoots, is tight, and finds what trying every number finds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import (
    BinaryTree,
    ConfigError,
    Independent,
    Participation,
    calibrate,
    guarantee,
)

STACK_OVERFLOW = BinaryTree(1600), Participation(1600)


def epsilon(mechanism, participation, z, delta=1e-6, method="exact"):
    run = guarantee(mechanism, participation, noise_multiplier=z, method=method)
    return run.epsilon(delta)


@settings(max_examples=200)
@given(
    n=st.integers(1, 3000),
    k=st.integers(1, 6),
    tree=st.booleans(),
    target=st.floats(-2, 2).map(lambda exponent: 10.0**exponent),
    exponent=st.floats(-15, -1),
)
def test_noise_is_safe_and_tight(n, k, tree, target, exponent):
    mechanism = BinaryTree(n) if tree else Independent(n)
    run = Participation(n, min(k, n))
    delta = 10.0**exponent
    z = calibrate(mechanism, run, target_epsilon=target, delta=delta)
    reached = epsilon(mechanism, run, z, delta)
    assert target * (1 - 1e-4) <= reached <= target


@pytest.mark.parametrize(
    ("target", "method"),
    [(2.0, "pld"), *((target, m) for target in (0.5, 2.0, 18.71) for m in ("rdp",))],
)
def test_noise_by_other_methods_is_safe_and_tight(target, method):
    z = calibrate(*STACK_OVERFLOW, target_epsilon=target, delta=1e-6, method=method)
    reached = epsilon(*STACK_OVERFLOW, z, method=method)
    assert target * (1 - 1e-4) <= reached <= target
    assert z >= calibrate(*STACK_OVERFLOW, target_epsilon=target, delta=1e-6)


@pytest.mark.parametrize("target", [1e-50, 1e-30, 1e-12, 1e12, 1e50])
@pytest.mark.parametrize("delta", [1e-320, 1e-300, 1e-17, 0.5, 1 - 1e-16])
def test_extreme_targets_are_met(target, delta):
    z = calibrate(*STACK_OVERFLOW, target_epsilon=target, delta=delta)
    assert epsilon(*STACK_OVERFLOW, z, delta) <= target


def test_rdp_out_of_reach_says_so():
    with pytest.raises(ConfigError, match=r'at this delta\. Use method="exact"\.$'):
        calibrate(*STACK_OVERFLOW, target_epsilon=0.005, delta=1e-9, method="rdp")
