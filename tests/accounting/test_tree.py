"""Binary trees: published sensitivities, the streaming noise, restarts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import BinaryTree, ConfigError, Participation
from accounting.mechanisms import tree
from accounting.sensitivity import gram_sensitivity


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
