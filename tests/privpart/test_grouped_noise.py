"""The noise of groups: each one's own matrix, draws that no two share, exact resumption."""

import numpy as np
import pytest
import torch
from rational_draws import RationalSource
from scipy.stats import chi2

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Grouped,
    Independent,
    PrunedTree,
    Toeplitz,
)
from privpart import NoiseStream, SecretSource, SeededSource

SCHEDULE = [(0, 1, 2), (0, 1, 2), (0,), (0,), (1,), (1,), (2,), (0, 1, 2), (0,), (1, 2)]
ACTIVE = [[t for t, groups in enumerate(SCHEDULE) if g in groups] for g in range(3)]


def build(kind):
    makers = {
        "tree": [BinaryTree(len(own)) for own in ACTIVE],
        "online": [BinaryTree(len(own), 4, estimator="online", completed=True) for own in ACTIVE],
        "pruned": [PrunedTree(len(SCHEDULE), own) for own in ACTIVE],
        "blt": [BufferedToeplitz(len(own), (0.9, 0.4), (0.3, 0.2)) for own in ACTIVE],
        "mixed": [BinaryTree(6), BufferedToeplitz(6, (0.5,), (0.25,)), Independent(5)],
    }
    return makers[kind]


KINDS = ["tree", "online", "pruned", "blt", "mixed"]


@pytest.mark.parametrize("kind", KINDS)
def test_noise_covariance_is_that_of_the_joint_decoder(kind):
    """Write out how every draw enters every (round, group), and compare with B B^T exactly."""
    width = 20  # coordinates per group, one per draw
    mechanism = Grouped(SCHEDULE, build(kind), [width] * 3)
    # draw i of a group is the i-th unit vector of that group's coordinates
    source = RationalSource(lambda stream, index, coordinate: int(index == coordinate))
    noise = NoiseStream(mechanism, dim=3 * width, stddev=2.0**30, source=source, stream=2)
    total = np.zeros((3, 3 * width))
    rows = []
    for groups in SCHEDULE:
        drawn_before = len(source.asked)
        parts = noise.next().reshape(len(groups), width).numpy() / 2.0**30
        assert {stream - 2 for stream, _ in source.asked[drawn_before:]} == set(groups)
        for g, part in zip(groups, parts, strict=True):
            total[g, g * width : (g + 1) * width] += part
            rows.append(total[g].copy())
    assert len(set(source.asked)) == len(source.asked)  # no draw twice, in any group
    prefix = np.stack(rows)
    decoder = mechanism.decoder()
    np.testing.assert_allclose(prefix @ prefix.T, decoder @ decoder.T, atol=1e-6)


STDDEV = 2.0**20


def noise_of(kind="mixed", source=None, sizes=(4, 3, 5), **change):
    source = source or SeededSource(1)
    mechanism = Grouped(SCHEDULE, build(kind), sizes)
    return NoiseStream(mechanism, dim=sum(sizes), stddev=STDDEV, source=source, **change)


def test_only_active_coordinates_are_drawn():
    one, lengths = noise_of(), []
    for _ in SCHEDULE:
        lengths.append(len(one.next()))
    assert lengths == [sum((4, 3, 5)[g] for g in groups) for groups in SCHEDULE]
    with pytest.raises(ConfigError, match="all 10 planned rounds is used up"):
        one.next()


def test_equal_groups_have_unequal_noise():
    """Under one stream id they would have the same draws, and their difference none."""
    schedule = [(0, 1)]
    both = Grouped(schedule, [Independent(1)] * 2, [50_000] * 2)
    fields = {"mechanism": both, "dim": 100_000, "stddev": STDDEV}
    first, second = NoiseStream(**fields, source=SecretSource()).next().double().chunk(2)
    assert abs(float((first * second).mean())) < STDDEV**2 * 6.2 / 50_000**0.5
    source = SecretSource()
    NoiseStream(**fields, source=source)
    with pytest.raises(ConfigError, match="already feeds"):
        NoiseStream(**fields, source=source, stream=1)


@pytest.mark.parametrize("kind", ["tree", "pruned"])
def test_distribution_with_a_power_twin(kind):
    cells = 60_000
    one = noise_of(kind, SecretSource(), sizes=(cells, cells, cells))
    total = torch.zeros(3, cells, dtype=torch.int64)
    low, high = chi2.ppf([5e-10, 1 - 5e-10], cells)
    for t, groups in enumerate(SCHEDULE):
        total[list(groups)] += one.next().reshape(len(groups), cells)
        for g in groups:
            statistic = float(
                ((total[g] / STDDEV) ** 2).sum() / one.mechanism.variance_by_group()[t, g]
            )
            assert low < statistic < high
            assert not low < statistic * 1.05**2 < high


def saved(one):
    """A copy of the state, whose tensors share memory with the stream."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in one.state_dict().items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_s_round_that_is_drawn_twice_has_another_noise(kind):
    key = bytes(32)
    first = noise_of(kind, SecretSource(key))
    for _ in range(4):
        first.next()
    state, lost = saved(first), first.next()
    again = noise_of(kind, SecretSource(key))
    again.load_state_dict(state)
    assert not torch.equal(again.next(), lost)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_anywhere_in_a_cycle_bit_for_bit(kind):
    undisturbed = noise_of(kind)
    states, noises = [saved(undisturbed)], []
    for _ in SCHEDULE:
        noises.append(undisturbed.next())
        states.append(saved(undisturbed))
    for start, state in enumerate(states):
        resumed = noise_of(kind)
        resumed.load_state_dict(state)
        assert resumed.round == start
        for t in range(start, len(SCHEDULE)):
            assert torch.equal(resumed.next(), noises[t])


def used(rounds=5):
    one = noise_of()
    for _ in range(rounds):
        one.next()
    return one.state_dict()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", "x", "schema"),
        ("mechanism", "0" * 64, "mechanism"),
        ("round", 11, "whole number from 0 to 10"),
        ("round", None, "whole number"),
        ("stream", 1, "stream"),
        ("state.0", torch.zeros(9, 4), "unknown state.0"),
        ("state.1", torch.zeros(9, 3), "shape"),
        ("salts", "[[0, 1]]", "list of rounds and salts"),
        ("extra", 1, "unknown extra"),
        ("state.3", 1, "unknown state.3"),
    ],
)
def test_damaged_states_are_refused(key, value, message):
    fresh = noise_of()
    with pytest.raises(ConfigError, match=message):
        fresh.load_state_dict(used() | {key: value})
    assert fresh.round == 0


def test_groups_of_unlike_ranges_give_the_wider_integers():
    """A filter that grows needs int64 where a tree does with int32; neither loses a step."""
    steep = Toeplitz(2, (1.0, 900.0))
    mechanism = Grouped([(0, 1), (0, 1), (0,)], [BinaryTree(3), steep], [4, 3])
    noise = NoiseStream(mechanism, dim=7, stddev=STDDEV, source=SeededSource(0))
    assert [part.executor.integers for part in noise._parts] == [np.int32, np.int64]
    assert noise.dtype is torch.int64
    first = noise.next()
    own = NoiseStream(BinaryTree(3), dim=4, stddev=STDDEV, source=SeededSource(0))
    assert first.dtype is torch.int64
    assert torch.equal(first[:4], own.next().long())
    noise.next()
    own.next()
    out = torch.full((7,), -1)
    third = noise.next(out=out)  # in which one group is active
    assert third.data_ptr() == out.data_ptr()
    assert torch.equal(third, own.next().long())
    assert out[4:].tolist() == [-1, -1, -1]
    errors = [part.executor.filter_error(2.0) for part in noise._parts]
    assert noise.filter_error(2.0) == max(errors) > errors[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_s_noise_is_that_of_its_own_stream(kind):
    """No group's integers depend on the others."""
    noise = noise_of(kind)
    own = [
        NoiseStream(mechanism, dim=size, stddev=STDDEV, source=SeededSource(1), stream=g)
        for g, (mechanism, size) in enumerate(zip(build(kind), (4, 3, 5), strict=True))
    ]
    for groups in SCHEDULE:
        expected = torch.cat([own[g].next().to(noise.dtype) for g in groups])
        assert torch.equal(noise.next(), expected)
