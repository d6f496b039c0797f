"""Groups of parameters: their sensitivity judged from the joint encoder alone."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Dense,
    Grouped,
    Independent,
    Participation,
    PrunedTree,
    Toeplitz,
    footprint,
)

RESNET8 = (9536, 36992, 36992, 73984, 147712, 8448, 295424, 590336, 33280, 2570)


@cache
def fedpart(cycles=4, full=5, groups=10, each=2):
    """FedPart's rounds, written out on their own: full ones before every cycle."""
    one_cycle = [tuple(range(groups))] * full
    for g in range(groups):
        one_cycle += [(g,)] * each
    return tuple(one_cycle * cycles)


def grouped(schedule, build, sizes=None):
    """The same kind of mechanism for every group; ``build`` takes its active rounds."""
    count = 1 + max(g for groups in schedule for g in groups)
    active = [[t for t, groups in enumerate(schedule) if g in groups] for g in range(count)]
    return Grouped(schedule, [build(own) for own in active], sizes or [1] * count)


def trees(own):
    return BinaryTree(len(own))


RUN = grouped(fedpart(), trees, RESNET8)


# What clients can do, from the encoder over (round, group) and nothing else.


def reached(mechanism, pattern, start, joint=True):
    """A client that improves round by round: what it moves the release by, squared.

    Its part of a round is a vector over the round's groups of length 1, or, if clipping is not
    joint, with every entry of length 1. Any result is attained, so none may exceed the claim.
    """
    cells = mechanism.cells()
    encoder = mechanism.encoder()
    blocks = [[i for i, (t, _) in enumerate(cells) if t == round_] for round_ in pattern]
    x = np.zeros(len(cells))
    gram = encoder.T @ encoder
    best = 0.0
    for sweep in range(30):
        for block in blocks:
            pull = gram[block] @ x if sweep else start.standard_normal(len(block))
            length = np.linalg.norm(pull) if joint else np.abs(pull)
            x[block] = np.divide(pull, length, out=np.zeros(len(block)), where=length > 0)
        best = max(best, float(x @ gram @ x))
    return best


def worst(mechanism, participation, joint=True, tries=6):
    start = np.random.default_rng(0)
    return max(
        reached(mechanism, pattern, start, joint)
        for pattern in participation.patterns()
        for _ in range(tries)
    )


def corners(mechanism, participation):
    """The most that clients reach who put all of a round into one of its groups."""
    gram = np.abs((c := mechanism.encoder()).T @ c)
    cells, found = mechanism.cells(), 0.0

    def choices(pattern):
        if not pattern:
            yield []
            return
        for rest in choices(pattern[1:]):
            for i, (t, _) in enumerate(cells):
                if t == pattern[0]:
                    yield [i, *rest]

    for pattern in participation.patterns():
        for chosen in choices(pattern):
            found = max(found, float(gram[np.ix_(chosen, chosen)].sum()))
    return found


@st.composite
def runs(draw, most=7):
    n, count = draw(st.integers(1, most)), draw(st.integers(1, 3))
    subsets = st.sets(st.integers(0, count - 1), min_size=1)
    schedule = [tuple(sorted(draw(subsets))) for _ in range(n)]
    used = sorted({g for groups in schedule for g in groups})
    schedule = [tuple(used.index(g) for g in groups) for groups in schedule]
    builds = [
        trees,
        lambda own: BinaryTree(len(own), 2, estimator="online"),
        lambda own: PrunedTree(n, own),
        lambda own: Independent(len(own)),
        lambda own: Toeplitz.square_root(len(own)),
        lambda own: BufferedToeplitz(len(own), (0.9, 0.4), (0.3, 0.2)),
        lambda own: Dense(np.tril(np.random.default_rng(len(own)).uniform(-1, 1, (len(own),) * 2),
                                  -1) + np.eye(len(own))),
    ]  # fmt: skip
    active = [[t for t, groups in enumerate(schedule) if g in groups] for g in range(len(used))]
    mechanism = Grouped(
        schedule, [draw(st.sampled_from(builds))(own) for own in active], [1] * len(used)
    )
    b = draw(st.integers(1, n))
    return mechanism, Participation(n, draw(st.integers(1, min(3, -(-n // b)))), b)


@given(runs())
@settings(max_examples=120)
def test_no_client_reaches_more_than_the_claim_and_some_client_reaches_an_exact_one(run):
    mechanism, participation = run
    claimed = mechanism.sensitivity(participation)
    assert worst(mechanism, participation, tries=2) <= claimed.squared * (1 + 1e-9)
    if claimed.exact:
        assert corners(mechanism, participation) == pytest.approx(claimed.squared, rel=1e-9)


def test_a_bound_whose_rounds_are_dearest_in_different_groups_is_not_called_exact():
    """Round 0 costs most in group 0, round 1 in group 1, and together they need the same one."""
    first = Dense([[1.0, 0.0], [1.0, 1.0]])  # X = [[2, 1], [1, 1]]
    second = Dense([[0.5**0.5, 0.0], [0.5**0.5, 2**0.5]])  # X = [[1, 1], [1, 2]]
    mechanism = Grouped([(0, 1), (0, 1), (2,)], [first, second, Independent(1)], [1, 1, 1])
    participation = Participation(3, 2, 1)
    claimed = mechanism.sensitivity(participation)
    assert claimed.squared == pytest.approx(6)
    assert not claimed.exact
    assert worst(mechanism, participation, tries=40) < 5.9


@pytest.mark.parametrize(
    ("k", "b", "own", "single"),
    [(1, 1, 5, 7), (2, 10, 18, 20), (3, 33, 16, 22), (4, 20, 29, 44), (100, 1, 3110, 10172)],
)
def test_resnet8_in_four_cycles(k, b, own, single):
    """T = 100 and T_g = 28: 5 where one tree costs 7, and so on."""
    assert len(fedpart()) == RUN.rounds == 100
    assert {mechanism.rounds for mechanism in RUN.mechanisms} == {28}
    participation = Participation(100, k, b)
    claimed = RUN.sensitivity(participation)
    assert claimed.exact is (k == 1)
    assert claimed.squared == pytest.approx(own, rel=1e-9)
    assert claimed.squared >= own
    assert BinaryTree(100).sensitivity(participation).squared == single


def test_the_control_clipping_each_group_on_its_own_costs_the_sum_of_the_groups():
    """M = 4 trees of depth 5: 20 and not 5. With the clip norm over sqrt(M) it is 5 again."""
    schedule = fedpart(cycles=1, full=15, groups=4, each=1)
    mechanism = grouped(schedule, trees)
    once = Participation(mechanism.rounds)
    claimed = mechanism.sensitivity(once).squared
    assert claimed == 5
    apart = worst(mechanism, once, joint=False)
    assert apart == pytest.approx(4 * claimed)
    assert apart / math.sqrt(4) ** 2 == pytest.approx(claimed)


def test_rounds_of_different_groups_do_not_interact():
    mechanism = grouped([(0,), (1,), (0,), (1,)], lambda own: Toeplitz(2, (1.0, 1.0)))
    assert mechanism.sensitivity(Participation(4, 2, 1)).squared == pytest.approx(5)  # 0 and 2
    apart = grouped([(0,), (1,)], lambda own: Independent(1))
    assert apart.sensitivity(Participation(2, 2, 1)).squared == pytest.approx(2)


def test_one_group_is_the_mechanism_itself():
    for mechanism in (BinaryTree(11), Toeplitz.square_root(11), Independent(11)):
        alone = Grouped([(0,)] * 11, [mechanism], [5])
        for k, b in ((1, 1), (2, 3), (3, 2)):
            participation = Participation(11, k, b)
            own = mechanism.sensitivity(participation)
            assert alone.sensitivity(participation).squared == pytest.approx(own.squared)
        np.testing.assert_array_equal(alone.prefix_variance(), mechanism.prefix_variance())
        np.testing.assert_array_equal(alone.encoder(), mechanism.encoder())
        assert footprint(alone) == footprint(mechanism)


@given(runs(most=9))
@settings(max_examples=60)
def test_the_decoder_is_the_prefix_sum_within_groups_and_has_the_variance_by_group(run):
    mechanism, _ = run
    cells = mechanism.cells()
    expected = [[float(g == h and s <= t) for s, h in cells] for t, g in cells]
    np.testing.assert_allclose(mechanism.decoder() @ mechanism.encoder(), expected, atol=1e-9)
    latest = np.zeros(len(mechanism.sizes))  # it stays between active rounds
    by_cell = dict(zip(cells, (mechanism.decoder() ** 2).sum(axis=1), strict=True))
    for t, row in enumerate(mechanism.variance_by_group()):
        for g in range(len(latest)):
            latest[g] = by_cell.get((t, g), latest[g])
        np.testing.assert_allclose(row, latest, rtol=1e-9)


def test_sizes_weigh_the_noise_and_its_draws():
    mechanism = Grouped([(0,), (1,)], [Independent(1), Independent(1)], [1, 3])
    np.testing.assert_allclose(mechanism.prefix_variance(), [0.25, 1.0])
    assert footprint(mechanism).draws_per_round == 0.5
    assert footprint(RUN).state_vectors == 3 == footprint(BinaryTree(100)).state_vectors
    assert footprint(RUN).draws_per_round == pytest.approx(0.29)  # of 0.28 different ones


TREE = BinaryTree(2)


@pytest.mark.parametrize(
    ("schedule", "mechanisms", "sizes", "message"),
    [
        ([[]], [TREE], [1], r"schedule\[0\]: is empty"),
        ([[0], [1]], [TREE], [1], "groups from 0 to 0"),
        ([[0, 0], [0]], [TREE], [1], "ascending"),
        ([[0], [-1]], [TREE], [1], "-1"),
        ([[0], [0.5]], [TREE], [1], "0.5"),
        ([[0]], [TREE], [1], "active in 1 rounds, its mechanism has rounds=2"),
        ([[0], [0]], [TREE, TREE], [1, 1], "group 1 is active in 0 rounds"),
        ([[0], [0]], [TREE], [0], "sizes"),
        ([[0], [0]], [TREE], [1, 1], "sizes has 2 entries for 1"),
        ([[0], [0]], ["tree"], [1], "one ungrouped mechanism per group"),
        ([[0], [0]], [Grouped([[0], [0]], [TREE], [1])], [1], "one ungrouped mechanism per group"),
        ("00", [TREE], [1], "must be a list"),
    ],
)
def test_what_cannot_be_grouped_says_why(schedule, mechanisms, sizes, message):
    with pytest.raises(ConfigError, match=message):
        Grouped(schedule, mechanisms, sizes)


# Pruned trees.


@given(st.integers(1, 33), st.data())
@settings(max_examples=150)
def test_pruned_trees_against_the_whole_tree(span, data):
    active = sorted(data.draw(st.sets(st.integers(0, span - 1), min_size=1)))
    tree = PrunedTree(span, active)
    whole = BinaryTree(span).encoder()[:, active]
    assert {tuple(row) for row in tree.encoder()} == {tuple(row) for row in whole if row.any()}
    np.testing.assert_array_equal(
        tree.decoder() @ tree.encoder(), np.tril(np.ones((len(active),) * 2))
    )
    assert (tree.prefix_variance() <= BinaryTree(span).prefix_variance()[active]).all()
    np.testing.assert_array_equal((tree.decoder() ** 2).sum(axis=1), tree.prefix_variance())
    columns = (tree.encoder() ** 2).sum(axis=0)
    claimed = tree.sensitivity(Participation(len(active)))
    assert claimed.squared == pytest.approx(columns.max())


def test_a_tree_that_is_always_active_is_the_whole_tree():
    tree = PrunedTree(13, range(13))
    np.testing.assert_array_equal(tree.prefix_variance(), BinaryTree(13).prefix_variance())
    for k, b in ((1, 1), (2, 3), (3, 2)):
        participation = Participation(13, k, b)
        expected = BinaryTree(13).sensitivity(participation).squared
        assert tree.sensitivity(participation).squared == pytest.approx(expected)


@pytest.mark.parametrize("active", [(), (1, 1), (2, 1), (0, 8), (-1,), (0.5,), "01", None, (True,)])
def test_active_rounds_are_rounds_of_the_run(active):
    with pytest.raises(ConfigError, match="active"):
        PrunedTree(8, active)
