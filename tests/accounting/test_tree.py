"""Binary trees: published sensitivities, the streaming noise, completion, prefix-only release."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import BinaryTree, ConfigError, Participation, brute_force
from accounting.mechanisms import tree
from accounting.mechanisms.mechanism import prefix_sums
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


def test_a_full_level_appears_only_when_it_is_complete():
    levels = [BinaryTree(n).sensitivity(Participation(n)).squared for n in (2047, 2048)]
    assert levels == [11, 12]


@pytest.mark.parametrize("height", range(9))
def test_every_round_costs_the_published_formula(height):
    # TF-Privacy, test_max_tree_sensitivity_*: sum over d of 2^d (participations below)^2
    n = 2**height
    assert BinaryTree(n).sensitivity(Participation(n, n)).squared == n * (2 * n - 1)


def test_participations_that_leave_no_choice():
    # 14 of 40 rounds that are 3 apart: 0, 3, ..., 39, whatever a subtree would like better
    for release in ("nodes", "prefix"):
        tree = BinaryTree(40, release=release)
        forced = tree.encoder()[:, ::3].sum(axis=1)
        claimed = tree.sensitivity(Participation(40, 14, 3)).squared
        assert claimed == pytest.approx(forced @ forced, rel=1e-12)


def test_restarts_cost_a_tree_per_participation():
    # once over all trees (dp-accounting, SingleEpochTreeAggregationDpEvent) or once in each of
    # them (TF-Privacy, compute_rdp_tree_restart): reference/mechanisms.md section 2.1
    tree = BinaryTree(1024, restart_every=256)
    once = tree.sensitivity(Participation(1024)).squared
    each = tree.sensitivity(Participation(1024, 4, 256)).squared
    assert (once, each) == (9, 36)


def test_completion_is_not_free():
    # google-research/DP-FTRL privacy.py: 20 epochs of 100 steps in one order, per completed tree
    for rounds, completed, squared in ((2000, False, 425), (4000, True, 926)):
        encoder = BinaryTree(rounds, 2000, completed=completed).encoder()
        orders = [range(first, 2000, 100) for first in range(100)]
        moved = (encoder[:, order].sum(axis=1) for order in orders)
        assert max(float(m @ m) for m in moved) == squared


def test_only_the_last_tree_is_not_completed():
    single = [BinaryTree(n, 3, completed=True).encoder().shape for n in (3, 4, 6)]
    assert single == [(4, 3), (8, 4), (11, 6)]  # 3 -> 4 leaves: 7 nodes instead of 4
    assert BinaryTree(6, 3, completed=True).sensitivity(Participation(6)).squared == 3
    assert BinaryTree(6, 3).sensitivity(Participation(6)).squared == 2


def test_completion_carries_one_node_into_the_next_tree():
    assert BinaryTree(21, 7).prefix_variance()[[6, 7, 13, 14]].tolist() == [3, 4, 6, 7]
    completed = BinaryTree(21, 7, completed=True).prefix_variance()
    assert completed[[6, 7, 13, 14]].tolist() == [3, 2, 4, 3]


def streamed(tree):
    """Honaker's estimates on a stack, written out on their own: rows of B."""
    draws = iter(np.eye(len(tree.nodes())))
    online = tree.estimator == "online"
    rows, base = [], 0.0
    for start in range(0, tree.rounds, tree.restart_every or tree.rounds):
        real = min(tree.restart_every or tree.rounds, tree.rounds - start)
        last = start + real == tree.rounds
        leaves = 1 << (real - 1).bit_length() if tree.completed and not last else real
        stack = []
        for leaf in range(leaves):
            height, value = 0, next(draws)
            while stack and stack[-1][0] == height:
                _, left = stack.pop()
                value = next(draws) + ((left + value) / 2 if online else 0.0)
                height += 1
            stack.append((height, value))
            prefix = base + sum(u / (2 - 2.0**-h) if online else u for h, u in stack)
            if leaf < real:
                rows.append(prefix)
        base = prefix
    assert next(draws, None) is None
    return np.stack(rows)


@pytest.mark.parametrize("estimator", ["vanilla", "online"])
@pytest.mark.parametrize("completed", [False, True])
def test_the_documented_stream_is_the_decoder(estimator, completed):
    for n, every in itertools.product((1, 2, 7, 8, 12, 21), (None, 1, 3, 4, 7)):
        tree = BinaryTree(n, every, estimator=estimator, completed=completed)
        # weights are multiples of 2^-16; at their optimum the variance hardly depends on them
        np.testing.assert_allclose(streamed(tree), tree.decoder(), atol=2e-5)
        variances = ((matrix**2).sum(axis=1) for matrix in (streamed(tree), tree.decoder()))
        np.testing.assert_allclose(*variances, rtol=1e-9)
        lower = BinaryTree(
            n, every, estimator=estimator, completed=completed, release="prefix"
        ).decoder()  # fmt: skip
        assert not np.triu(lower, 1).any()
        np.testing.assert_allclose(lower @ lower.T, streamed(tree) @ streamed(tree).T, atol=1e-12)


def test_prefix_release_of_two_rounds_by_hand():
    # B = [[1, 0, 0], [1/3, 1/3, 2/3]]: covariance [[1, 1/3], [1/3, 2/3]], so A^T S^-1 A has
    # diagonal 9/5 (both prefix sums move) and 9/5 (only the second one does: 1 / (2/3 - 1/9))
    tree = BinaryTree(2, estimator="online", release="prefix")
    gram = tree.encoder().T @ tree.encoder()
    np.testing.assert_allclose(np.diag(gram), [9 / 5, 9 / 5])


def test_prefix_release_of_four_rounds_by_hand():
    # variances 1, 2/3, 5/3, 4/7 of the prefix sums; 19/7 = 2.7142857...
    tree = BinaryTree(4, estimator="online", release="prefix")
    np.testing.assert_allclose(tree.prefix_variance(), [1, 2 / 3, 5 / 3, 4 / 7])
    assert tree.sensitivity(Participation(4)).squared == pytest.approx(19 / 7, rel=1e-12)


@pytest.mark.parametrize(
    ("n", "k", "b", "squared"),
    [
        # reference/mechanisms.md section 2.4
        (2, 1, 1, 1.8),
        (3, 1, 1, 1.8),
        (4, 1, 1, 2.7143),
        (8, 1, 1, 3.4941),
        (1600, 1, 1, 9.4660),
        (8, 2, 4, 9.4084),
        (7, 2, 1, 9.0476),
    ],
)
def test_online_prefix_release_costs_less_than_the_depth(n, k, b, squared):
    found = BinaryTree(n, estimator="online", release="prefix").sensitivity(Participation(n, k, b))
    assert found.exact
    assert found.squared == pytest.approx(squared, abs=5.1e-5)
    assert found.squared < BinaryTree(n).sensitivity(Participation(n, k, b)).squared


def test_online_prefix_release_is_a_labelled_bound_beyond_enumeration():
    # reference/mechanisms.md section 2.4: at most 63.83, where the nodes cost 70
    participation = Participation(1600, 5, 320)
    found = BinaryTree(1600, estimator="online", release="prefix").sensitivity(participation)
    assert not found.exact
    assert found.squared <= 63.83


def test_vanilla_prefix_release_gains_nothing_for_one_participation():
    for n in (1, 2, 3, 7, 8, 100, 1600):
        nodes, prefix = BinaryTree(n), BinaryTree(n, release="prefix")
        once = Participation(n)
        assert nodes.sensitivity(once).squared == prefix.sensitivity(once).squared


def test_vanilla_prefix_release_leaves_out_right_children():
    # two rounds, both taken: leaf 1, root; leaf 2 is never part of a prefix sum
    both = Participation(2, 2)
    assert BinaryTree(2).sensitivity(both).squared == 1 + 1 + 4
    assert BinaryTree(2, release="prefix").sensitivity(both).squared == 1 + 4
    encoder = BinaryTree(13, 6, release="prefix").encoder()
    fenwick = [(t & -t) for t in (1, 2, 3, 4, 5, 6) * 2 + (1,)]
    np.testing.assert_allclose(encoder.sum(axis=1), fenwick, atol=1e-12)


def test_prefix_release_never_costs_more_than_the_nodes():
    for n, every, completed in itertools.product((5, 12, 30), (None, 3, 7), (False, True)):
        for estimator in ("vanilla", "online"):
            options = {"estimator": estimator, "completed": completed}
            for participation in (Participation(n), Participation(n, 2, 2), Participation(n, 4)):
                prefix = BinaryTree(n, every, release="prefix", **options)
                nodes = BinaryTree(n, every, **options).sensitivity(participation)
                assert prefix.sensitivity(participation).squared <= nodes.squared * (1 + 1e-12)


def test_effective_gram_has_no_negative_entry():
    # what makes "all patterns tried" exact for vector updates: reference section 2.4
    for n in (2, 3, 7, 16, 100, 257):
        encoder = BinaryTree(n, estimator="online", release="prefix").encoder()
        assert (encoder.T @ encoder).min() > -1e-14


def test_fast_and_dense_prefix_rules_agree():
    for n, every in ((23, None), (30, 8), (40, 16)):
        tree = BinaryTree(n, every, release="prefix")
        np.testing.assert_allclose(tree.decoder() @ tree.encoder(), prefix_sums(n), atol=1e-10)
        for k, b in ((1, 1), (2, 1), (3, 5), (4, 6)):
            participation = Participation(n, k, b)
            claimed = tree.sensitivity(participation).squared
            assert claimed == pytest.approx(brute_force(tree.encoder(), participation), rel=1e-10)


@given(st.integers(20, 130), st.integers(3, 45), st.integers(2, 4), st.none() | st.integers(9, 70))
def test_recursion_agrees_with_all_patterns_of_longer_runs(n, b, k, every):
    # long enough for a later round of a subtree to be worth the room that it takes
    participation = Participation(n, min(k, -(-n // b)), b)
    for release in ("nodes", "prefix"):
        tree = BinaryTree(n, every, release=release)
        encoder = tree.encoder()
        judged = gram_sensitivity(encoder.T @ encoder, participation)
        claimed = tree.sensitivity(participation).squared
        assert claimed <= judged.squared * (1 + 1e-9)
        if judged.exact:
            assert claimed == pytest.approx(judged.squared, rel=1e-9)


def test_large_participations_take_few_steps_of_the_recursion(monkeypatch):
    steps, plain = [], tree._max_plus
    monkeypatch.setattr(tree, "_max_plus", lambda *both: steps.append(1) or plain(*both))
    for release in ("nodes", "prefix"):
        BinaryTree(2048, release=release).sensitivity(Participation(2048, 5, 410))
        BinaryTree(2048, release=release).sensitivity(Participation(2048, 2048))
        BinaryTree(10_000, release=release).sensitivity(Participation(10_000, 200, 37))
    assert 0 < len(steps) < 20_000  # 11,149; billions if the recursion breaks


def test_the_default_accounts_every_node():
    assert BinaryTree(1600).release == "nodes"
    online = BinaryTree(1600, estimator="online").sensitivity(Participation(1600))
    assert online.squared == 11


@pytest.mark.parametrize("value", [0, -3, 2.0, float("nan"), True])
def test_restart_must_be_a_whole_number(value):
    with pytest.raises(ConfigError, match="restart_every"):
        BinaryTree(8, restart_every=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("estimator", "full"), ("release", "model"), ("completed", 1), ("completed", None)],
)
def test_unknown_options(field, value):
    with pytest.raises(ConfigError, match=field):
        BinaryTree(8, **{field: value})


def test_dense_work_has_a_limit():
    with pytest.raises(ConfigError, match="Use release='nodes'"):
        BinaryTree(8193, estimator="online", release="prefix").encoder()
