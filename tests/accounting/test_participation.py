import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import BinaryTree, ConfigError, FixedOrder, Participation, Toeplitz


def test_impossible_combination_says_what_would_be_possible():
    with pytest.raises(ConfigError, match="at most 5 fit into 1000") as error:
        Participation(1000, max_participations=10, min_separation=200)
    assert "max_participations of 5 or less, or min_separation of 111 or less" in str(error.value)
    Participation(1000, max_participations=5, min_separation=200)
    Participation(1000, max_participations=10, min_separation=111)


def test_tf_privacy_counts_the_rounds_in_between():
    converted = Participation.from_tf_privacy(rounds=9, max_participations=3, min_separation=3)
    assert converted == Participation(9, 3, 4)
    consecutive = Participation.from_tf_privacy(rounds=9, max_participations=9, min_separation=0)
    assert consecutive == Participation(9, 9, 1)
    with pytest.raises(ConfigError, match="min_separation"):
        Participation.from_tf_privacy(rounds=9, max_participations=3, min_separation=-1)


def test_patterns_are_all_admissible_ones():
    assert set(Participation(4, 2, 2).patterns()) == {
        *((i,) for i in range(4)), (0, 2), (0, 3), (1, 3)
    }  # fmt: skip


def test_log_gives_the_realised_worst_case():
    log = [[5, 0, 9], [1], [], [2, 4]]
    assert Participation.from_log(10, log) == Participation(10, 3, 2)
    assert Participation.from_log(10, iter([iter([3, 7])])) == Participation(10, 2, 4)
    assert Participation.from_log(10, [[3], [3], [9]]) == Participation(10)
    assert Participation.from_log(10, []) == Participation(10)
    assert Participation.from_log(10, {"ada": [8, 1], "bob": ()}) == Participation(10, 2, 7)


@given(st.lists(st.sets(st.integers(0, 11), max_size=5), max_size=4))
def test_every_client_of_a_log_keeps_to_what_it_gives(log):
    realised = Participation.from_log(12, log)
    patterns = set(realised.patterns())
    assert all(tuple(sorted(client)) in patterns for client in log if client)
    assert realised.max_participations == max([1, *map(len, log)])


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ([[0], [1, 3, 1]], "client 1 is listed twice in round 1"),
        ([[10]], "round 10 of client 0: must be at most 9"),
        ([[-1]], "round of client 0=-1: must be at least 0"),
        ([[0.5]], "whole number"),
        ({"ada": [1, 1]}, "client 'ada' is listed twice"),
        ([3], "client 0: 3 must be a sequence of rounds"),
        ({"ada": "12"}, "client 'ada'='1': must be a whole number"),
    ],
)
def test_log_refuses_rounds_that_cannot_be(log, message):
    with pytest.raises(ConfigError, match=message):
        Participation.from_log(10, log)


def test_narrow_integers_become_plain_ones():
    narrow = Participation(np.int8(127), np.int8(3), np.int8(60))
    assert {type(value) for value in (narrow.rounds, narrow.min_separation)} == {int}
    toeplitz = Toeplitz(127, (1.0, 0.5))
    assert toeplitz.sensitivity(narrow) == toeplitz.sensitivity(Participation(127, 3, 60))


def test_passes_in_a_fixed_order_allow_only_their_own_places():
    order = FixedOrder(8, max_participations=2, min_separation=3)
    taken = set(order.patterns())
    assert taken == {(0,), (3,), (0, 3), (1,), (4,), (1, 4), (2,), (5,), (2, 5)}
    assert taken < set(order.in_any_order().patterns())


def test_a_tree_over_passes_of_one_order():
    """20 passes of 100 rounds, then 48 rounds of nobody: DP-FTRL's privacy.py says 926."""
    tree = BinaryTree(2048)
    assert tree.sensitivity(FixedOrder(2048, 20, 100)).squared == 926
    assert tree.sensitivity(Participation(2048, 20, 100)).squared == 934
    assert BinaryTree(2000).sensitivity(FixedOrder(2000, 20, 100)).squared == 425
