"""Adaptive clipping: the cost of its bits, where it may act, and that it finds the quantile."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from no_noise import NoNoise
from plans import small_plan

from accounting import BinaryTree, ConfigError, Independent, Participation, guarantee
from privpart import AdaptiveClipping, PrivacyPlan, SeededSource, Server
from privpart.plan import restarts


def plan(rounds=8, every=2, bits=5.0, clip=0.1, **change) -> PrivacyPlan:
    adaptive = AdaptiveClipping(bit_noise_multiplier=bits, **change)
    fields = {"clip_norm": clip, "noise_multiplier": 2.0, "report_goal": 100}
    return small_plan(BinaryTree(rounds, every), (rounds,), **fields, adaptive_clipping=adaptive)


@given(z=st.floats(0.01, 100), ratio=st.floats(1.01, 1e4))
def test_updates_and_bits_together_cost_what_the_plan_says(z, ratio):
    """Zeroing a client moves the sum by clip_norm and the bits by 1, both through one encoder."""
    adaptive = AdaptiveClipping(bit_noise_multiplier=ratio * z)
    z_u = adaptive.update_noise_multiplier(z)
    mechanism, run = BinaryTree(9, 4), Participation(9, 3, 2)
    updates = guarantee(mechanism, run, noise_multiplier=z_u)
    bits = guarantee(mechanism, run, noise_multiplier=adaptive.bit_noise_multiplier)
    both = updates.compose(bits)
    planned = guarantee(mechanism, run, noise_multiplier=z)
    assert both.mu == pytest.approx(planned.mu, rel=1e-9)
    assert math.hypot(1 / z_u, 1 / adaptive.bit_noise_multiplier) <= 1 / z


def test_bits_that_cost_more_than_the_plan_are_refused():
    with pytest.raises(ConfigError, match="above the noise multiplier 2"):
        plan(bits=1.0)


def test_the_clip_norm_changes_only_where_a_tree_restarts():
    assert restarts(BinaryTree(9, 4)) == {4, 8}
    assert restarts(BinaryTree(8, 4)) == {4}
    assert restarts(Independent(3)) == {1, 2}
    with pytest.raises(ConfigError, match="only where the noise restarts"):
        restarts(BinaryTree(8))
    one = Server(plan(every=3), torch.zeros(4), source=SeededSource(0))
    norms = []
    for _ in range(8):
        task = one.task([])
        norms.append(task.clip_norm)
        one.run_round([task.update(0, torch.ones(4))])
        assert one.last_clip_norm == norms[-1]
    assert norms[0] == norms[1] == norms[2] != norms[3]
    assert norms[3] == norms[4] == norms[5] != norms[6] == norms[7]


def test_the_bit_of_one_client_moves_by_what_is_charged():
    """Zero-out adjacency as it is printed: zeros in place of the update, in the server itself."""
    sums = []
    for value in (1.0, 0.0):
        one = Server(plan(every=3), torch.zeros(4), source=SeededSource(0))
        one.run_round([one.task([]).update(0, torch.full((4,), value))])
        sums.append(one._bits)
    assert abs(sums[0] - sums[1]) == pytest.approx(1.0)


def test_the_clip_norm_stays_in_the_range_of_floats():
    adaptive = AdaptiveClipping(rate=10, bit_noise_multiplier=1.0)
    norm = 0.1
    for _ in range(1000):
        norm = adaptive.next_clip_norm(norm, 1.0, first=0.1)
    assert norm == pytest.approx(1e-5)
    for _ in range(1000):
        norm = adaptive.next_clip_norm(norm, -9.0, first=0.1)
    assert norm == pytest.approx(1e3)


@pytest.mark.parametrize(
    ("rate", "share", "power"),
    [
        (0.16819997657826246, 1.0, 0.9193393283327804),  # math.exp rounds wrongly with FMA
        (0.03392222777527478, 0.0, 1.0171057702669655),  # and this one without
    ],
)
def test_the_next_clip_norm_has_the_same_bits_on_every_processor(rate, share, power):
    adaptive = AdaptiveClipping(rate=rate, bit_noise_multiplier=1.0)
    assert adaptive.next_clip_norm(1.0, share, first=1.0) == power


def test_it_finds_the_quantile():
    one = Server(plan(rounds=60, every=2, rate=0.5), torch.zeros(1), source=NoNoise())
    lengths = torch.linspace(0.01, 1.0, 100)
    while one.round < 60:
        task = one.task([])
        clipped = lengths.clamp(max=task.clip_norm)  # clients clip before they send
        one.run_round(task.update(c, clipped[c : c + 1]) for c in range(100))
    assert one.clip_norm == pytest.approx(0.5, abs=0.02)


def test_noise_follows_the_clip_norm_of_its_tree():
    sums = []
    for clip in (0.1, 0.4):
        one = Server(plan(clip=clip), torch.zeros(5), source=SeededSource(1))
        one.run_round([one.task([]).update(0, torch.zeros(5))])
        sums.append(one.parameters * 100)
    torch.testing.assert_close(sums[1], 4 * sums[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [("quantile", 0.0), ("quantile", 1.0), ("rate", 11), ("bit_noise_multiplier", math.nan)],
)
def test_bad_settings(field, value):
    with pytest.raises(ConfigError, match=field):
        AdaptiveClipping(**{"bit_noise_multiplier": 5.0, field: value})


@pytest.mark.parametrize("quantile", [0.1, 0.5])
def test_a_client_can_tell_which_clip_norms_a_round_may_have(quantile):
    """All that noise can do is allowed, and nothing beyond it; before a restart, the plan's own."""
    promised = plan(rounds=8, every=2, clip=0.1, quantile=quantile, rate=9.0)
    adaptive, reached = promised.adaptive_clipping, {0.1}
    for round_ in range(8):
        if round_ in restarts(promised.mechanism):
            reached = {
                adaptive.next_clip_norm(norm, share, first=0.1)
                for norm in reached
                for share in (-5.0, 0.0, 0.3, 1.0, 7.0)
            }
        assert all(promised.may_clip_to(norm, round_) for norm in reached)
        others = (max(reached) * 1.001, min(reached) / 1.001, 0.0, -0.1, math.inf, math.nan)
        assert not any(promised.may_clip_to(norm, round_) for norm in others)
    assert PrivacyPlan.from_dict(promised.to_dict()).may_clip_to(0.1, 0)
