"""Calibration never overshoots, is tight, and finds what trying every number finds."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import (
    BinaryTree,
    Budget,
    ConfigError,
    Independent,
    Participation,
    Sensitivity,
    calibrate,
    guarantee,
    least_separation,
    most_participations,
    most_rounds,
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
    [(2.0, "pld"), *((target, m) for target in (0.5, 2.0, 18.71) for m in ("rdp", "zcdp"))],
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


@st.composite
def small_plans(draw):
    z = 10.0 ** draw(st.floats(0, 1.5))
    target = 10.0 ** draw(st.floats(-0.5, 1))
    b = draw(st.integers(1, 12))
    k = draw(st.none() | st.integers(1, 6))
    # With one participation per tree a restart can only help; more rounds never do.
    restart = draw(st.none() | st.integers(1, 12))
    return z, target, b, k, restart


@settings(max_examples=40)
@given(small_plans())
def test_most_rounds_is_what_trying_every_number_finds(plan):
    z, target, b, k, restart = plan

    def tree(n):
        return BinaryTree(n, restart)

    def meets(n):
        fits = -(-n // b)
        return epsilon(tree(n), Participation(n, min(k or fits, fits), b), z) <= target

    good = [n for n in range(1, 61) if meets(n)]
    budget = Budget(z, target, 1e-6)
    limits = {"max_participations": k, "min_separation": b, "at_most": 60}
    if good:
        assert most_rounds(tree, budget, **limits) == max(good)
    else:
        with pytest.raises(ConfigError, match="no rounds meets it"):
            most_rounds(tree, budget, **limits)


@settings(max_examples=40)
@given(small_plans(), st.integers(1, 60))
def test_most_participations_is_what_trying_every_number_finds(plan, n):
    z, target, b, _, restart = plan
    tree = BinaryTree(n, restart)
    good = [
        k for k in range(1, -(-n // b) + 1) if epsilon(tree, Participation(n, k, b), z) <= target
    ]
    budget = Budget(z, target, 1e-6)
    if good:
        assert most_participations(tree, budget, min_separation=b) == max(good)
    else:
        with pytest.raises(ConfigError, match="no max_participations meets it"):
            most_participations(tree, budget, min_separation=b)


@settings(max_examples=40)
@given(small_plans(), st.integers(1, 60), st.integers(1, 6))
def test_least_separation_is_what_trying_every_number_finds(plan, n, k):
    z, target, _, _, restart = plan
    k = min(k, n)
    tree = BinaryTree(n, restart)
    widest = (n - 1) // (k - 1) if k > 1 else 1
    good = [b for b in range(1, widest + 1) if epsilon(tree, Participation(n, k, b), z) <= target]
    budget = Budget(z, target, 1e-6)
    if good:
        assert least_separation(tree, budget, max_participations=k) == min(good)
    else:
        with pytest.raises(ConfigError, match="no min_separation meets it"):
            least_separation(tree, budget, max_participations=k)


def test_other_methods_allow_fewer_rounds():
    counts = {
        method: most_rounds(Independent, Budget(6.0, 2.0, 1e-6, method))
        for method in ("exact", "rdp")
    }
    assert counts["rdp"] < counts["exact"]


def test_one_participation_costs_the_same_for_ever():
    budget = Budget(6.0, 2.0, 1e-6)
    assert most_rounds(Independent, budget, max_participations=1, at_most=777) == 777
    assert most_rounds(Independent, budget, max_participations=1) == 100_000


@dataclass(frozen=True)
class Jagged(Independent):
    """Costs less at every third number of rounds, as a mechanism fitted anew to each might."""

    def sensitivity(self, participation):
        return Sensitivity(float(self.rounds if self.rounds % 3 else 1), False, "jagged")


@pytest.mark.parametrize("target", np.geomspace(0.7, 20, 12))
def test_not_monotone_is_still_safe(target):
    budget = Budget(8.0, target, 1e-6)
    found = most_rounds(Jagged, budget, at_most=50)
    assert epsilon(Jagged(found), Participation(found, found), 8.0) <= target
    following = Participation(found + 1, found + 1)
    assert found == 50 or epsilon(Jagged(found + 1), following, 8.0) > target


def test_rounds_may_follow_each_other_unless_said_otherwise():
    budget = Budget(8.0, 4.0, 1e-6)
    tree = BinaryTree(64)
    for most, made in ((most_participations, tree), (most_rounds, BinaryTree)):
        free = most(made, budget)
        assert free == most(made, budget, min_separation=1)
        assert free < most(made, budget, min_separation=16)


def test_large_searches_stay_fast():
    budget = Budget(40.0, 1.3, 1e-6)
    assert least_separation(BinaryTree(2048), budget, max_participations=5) == 64
    assert most_participations(BinaryTree(2048), budget, min_separation=100) == 5
