"""The grid: whole numbers of bounded norm from any update, and a noise multiplier that holds."""

import math
from fractions import Fraction
from threading import Thread

import numpy as np
import pytest
import torch
from every_mechanism import FILTERS, TREES, short
from hypothesis import given
from hypothesis import strategies as st
from plans import small_plan

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Grouped,
    Independent,
    Participation,
    Toeplitz,
)
from accounting.mechanisms.program import OUT
from privpart import AdaptiveClipping, NoiseStream, SeededSource, Server
from privpart.clip import clip, is_clipped, l2_norm
from privpart.grid import Grid, noise_bits, quantise
from privpart.messages import CohortSum, RoundTask
from privpart.noise.stream import Executor
from privpart.server import RoundSum

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
Z = [1e-7, 0.02, 0.5, 1.0, 3.7, 1000.0]


def grid_of(z, dim, charge=0.0):
    return Grid.of(noise_bits(z, dim), z, dim, filter_charge=charge)


def coarse(dim, factor=8.0):
    """A grid on which an update of the clip norm has ``factor`` steps per root of its length."""
    z = 2.0**20 / (factor * math.sqrt(dim) * (1 + 1e-9))
    return Grid.of(20, z, dim, filter_charge=0.0)


def integers(update, clip_norm, grid):
    """What ``quantise`` writes, in Python's integers; and what it returns."""
    whole = np.zeros(len(update), np.int32)
    norm = quantise(update, clip_norm, grid, whole)
    return whole.tolist(), norm


def squared(numbers):
    return sum(q * q for q in numbers)


def bound(grid):
    return math.floor(Fraction(grid.norm) ** 2)


HOSTILE = [
    0.0, -0.0, 1e-45, -1e-45, 1e-38, 5e-324, 1e-300, 1e-160, 1.0, -0.3, 65504.0, 1e38,
    -3.4e38, 1e154, 1e200, 1.7e308, math.inf, -math.inf, math.nan,
]  # fmt: skip
numbers = st.one_of(st.sampled_from(HOSTILE), st.floats(width=64), st.floats(-2, 2))
grids = st.one_of(
    st.builds(grid_of, st.sampled_from(Z), st.integers(1, 50)),
    st.builds(coarse, st.just(50), st.sampled_from([8.0, 8.5, 13.0])),
    st.builds(coarse, st.just(1), st.sampled_from([8.0, 8.3, 9.99])),
)


@given(
    values=st.lists(numbers, max_size=50),
    dtype=st.sampled_from(DTYPES),
    clip_norm=st.sampled_from([1e-30, 1e-8, 0.1, 1.0, 1e10, 1e300]),
    grid=grids,
)
def test_no_update_is_longer_than_the_grid_s_norm(values, dtype, clip_norm, grid):
    update = torch.tensor(values, dtype=torch.float64).to(dtype)
    q, norm = integers(update, clip_norm, grid)
    assert squared(q) <= bound(grid)
    assert is_clipped(norm, clip_norm) == is_clipped(l2_norm(clip(update, clip_norm)), clip_norm)
    if not update.isfinite().all():
        assert not any(q)
        assert math.isnan(norm)


@given(
    values=st.lists(st.floats(-1, 1), min_size=1, max_size=40),
    far=st.sampled_from([1.0, 1 - 1e-12, 1 + 1e-12, 2.0, 1e6, 1e30]),
    factor=st.sampled_from([8.0, 8.01, 20.0, 1e4]),
)
def test_updates_near_the_bound(values, far, factor):
    """Scaled to the clip norm itself, where rounding lengthens a vector."""
    update = torch.tensor(values, dtype=torch.float64)
    if not (length := float(update.norm())):
        return
    grid = coarse(len(values), factor)
    q, _ = integers(update / length * far, 1.0, grid)
    assert squared(q) <= bound(grid)
    if far >= 1:  # and little is lost: at most a step per coordinate, and two more
        assert math.sqrt(squared(q)) >= grid.norm - 1.5 * math.sqrt(len(values)) - 3


def test_rounding_that_lengthens_most():
    """Every coordinate just above a half: the first try is too long by the root of d / 2."""
    for dim, factor in ((100, 8.0), (10_000, 8.0), (10_000, 11.3), (3, 8.0)):
        grid = coarse(dim, factor)
        each = math.floor(factor * (1 - 1e-3)) - 0.499
        update = torch.full((dim,), each, dtype=torch.float64) * grid.step(1.0)
        q, _ = integers(update, 1.0, grid)
        assert squared(q) <= bound(grid)
        naive = np.rint(np.full(dim, grid.norm / math.sqrt(dim) + 0.5 - 1e-9))
        assert squared(map(int, naive.tolist())) > bound(grid)  # power: without the test of the sum


def test_layouts_change_nothing():
    values = [0.25, -3.0, 1e-3, 0.5, 7.0, -0.125, 2.0, 1.0]
    grid, plain = grid_of(1.0, len(values)), torch.tensor(values)
    wide = torch.stack([plain, plain], dim=1)
    first, *others = (integers(u, 1.0, grid) for u in (plain, wide[:, 0], wide.t()[1]))
    assert others == [first] * 2
    expanded = torch.tensor([0.5]).expand(8)
    assert integers(expanded, 1.0, grid) == integers(torch.full((8,), 0.5), 1.0, grid)
    negated = torch.tensor(values)._neg_view()
    assert integers(negated, 1.0, grid)[0] == [-q for q in first[0]]
    assert integers(torch.zeros(0), 1.0, grid) == ([], 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_needs_no_clip_is_the_nearest_integer(dtype):
    update = torch.randn(2000, generator=torch.Generator().manual_seed(0)).to(dtype) / 100
    grid = grid_of(0.3, 2000)
    q, _ = integers(update, 1.0, grid)
    exact = [Fraction(x) / Fraction(grid.step(1.0)) for x in update.double().tolist()]
    # the factor is rounded: of integers up to 2^22, by next to nothing
    assert all(
        abs(a - b) <= Fraction(1, 2) + Fraction(1, 2**20) for a, b in zip(q, exact, strict=True)
    )


def test_a_sum_of_many_is_the_sum_of_their_integers():
    grid, random = grid_of(0.02, 30), np.random.default_rng(0)
    scratch, task = torch.zeros(30), RoundTask(0, (), 1.0, "plan")
    # 2^52 is the sum of far more clients than any run has: still exact
    for before in (0.0, 2.0**52):
        total, exact = torch.full((30,), before, dtype=torch.float64), [int(before)] * 30
        found = RoundSum(task, total, scratch, lambda _: None, grid=grid)
        for client in range(300):
            update = torch.from_numpy(random.standard_normal(30) * 10 ** random.uniform(-6, 6))
            q, _ = integers(update, 1.0, grid)
            found.add(task.update(client, update))
            exact = [a + b for a, b in zip(exact, q, strict=True)]
        assert [int(x) for x in found.total.tolist()] == exact


class Changing(Thread):
    """Writes to an update's memory, as a hostile client that shares it could."""

    def __init__(self, update):
        super().__init__()
        self.update, self.going = update, True

    def run(self):
        while self.going:
            self.update.fill_(1e6)
            self.update[0] = math.nan
            self.update.zero_()


def test_an_update_that_changes_while_it_is_read_stays_within_the_norm():
    update, grid = torch.zeros(200_000), grid_of(1.0, 200_000)
    other = Changing(update)
    other.start()
    try:
        for _ in range(10):
            q, _ = integers(update, 1.0, grid)
            assert squared(q) <= bound(grid)
    finally:
        other.going = False
        other.join()


def test_parts_are_one_vector():
    """Longer than the parts that are worked on at a time: clipped jointly."""
    update = torch.randn(2**16 * 2 + 7, generator=torch.Generator().manual_seed(0))
    grid = grid_of(1.0, len(update))
    q, norm = integers(update, 1.0, grid)
    assert squared(q) <= bound(grid)
    assert math.sqrt(squared(q)) > 0.999 * grid.norm
    assert norm == pytest.approx(float(update.double().norm()), rel=1e-12)
    assert np.corrcoef(np.array(q[-7:]), update[-7:].numpy())[0, 1] > 0.999


@given(z=st.floats(2.0**-25, 1e12), dim=st.integers(1, 10**9))
def test_bits_are_in_range_and_the_clip_norm_stays_below_2_to_the_26(z, dim):
    bits = noise_bits(z, dim)
    assert 1 <= bits <= 24
    assert 2.0**bits / z <= 2.0**26


def test_a_grid_that_would_swallow_updates_and_next_to_no_noise_are_refused():
    for z, dim in ((1e6, 10**8), (2.0**22, 4)):
        with pytest.raises(ConfigError, match="lost in the steps of the grid"):
            grid_of(z, dim)
    for charge in (2.0**20, math.nan):
        with pytest.raises(ConfigError, match="lost in the steps"):
            Grid.of(20, 1.0, 4, filter_charge=charge)
    assert Grid.of(20, 1.0, 4, filter_charge=2.0**19).norm <= 2.0**19
    for z in (2.0**-26, 5e-324):
        with pytest.raises(ConfigError, match=r"noise_multiplier=.*protects nobody"):
            noise_bits(z, 10)
    assert Grid(20, 1.0, norm=8.0, sum_norm=0.0).sum_clip_norm(1.0) == 0  # no sums


# Sums that an engine clipped: rounded once, after summing.


def plan(z=1.0, **change):
    fields = {"mechanism": Independent(3), "participation": (3,), "noise_multiplier": z}
    return small_plan(**fields | change)


def rounded_sum(server, totals, dim):
    """The integers of one trusted sum."""
    task, total = server.task([]), torch.zeros(dim, dtype=torch.float64)
    found = RoundSum(task, total, torch.zeros(dim), lambda _: None, grid=server._grid)
    part = task.sum_of(range(len(totals)), torch.from_numpy(sum(totals)), [9.0] * len(totals))
    found.add(part, CohortSum)
    assert found.summed == len(totals)
    return found.total.numpy()


def clipped_exactly(vector, norm):
    """The vector, shortened so that its exact norm is at most ``norm``."""
    if sum(Fraction(x) ** 2 for x in vector.tolist()) > Fraction(norm) ** 2:
        vector = vector * (norm / np.linalg.norm(vector) * (1 - 1e-12))
    assert sum(Fraction(x) ** 2 for x in vector.tolist()) <= Fraction(norm) ** 2
    return vector


def hostile_clients(dim, clip, step, random):
    """Updates of at most the clip norm: whole steps and next to nothing, which rounds up."""
    each = np.full(dim, math.floor(clip / step / math.sqrt(dim)))
    room = (clip / step) ** 2 - float(each @ each)
    longer = np.arange(dim) < math.floor(room / (2 * each[0] + 1)) - 1
    yield (each + longer + 1e-7) * step
    yield (np.where(np.arange(dim) == 0, clip / step - 0.01, 0) + 1e-7) * step
    yield (np.where(np.arange(dim) < 4, math.floor(clip / step / 2 - 1), 0) + 1e-6) * step
    for _ in range(3):
        client = random.standard_normal(dim)
        yield client / np.linalg.norm(client) * clip


def searched(server, dim, clip, random):
    """The most by which one client moves the rounded sum, squared, over hostile choices."""
    worst, step = 0, server._grid.step(0.5)
    for client in hostile_clients(dim, clip, step, random):
        for sign in (1, -1):
            own = clipped_exactly(sign * client, clip)
            edge = np.trunc(random.uniform(-30, 30, dim)) + 0.5 - 1e-8  # the others: near a half
            base = sign * edge * step
            with_client = rounded_sum(server, [base * 0.25, base * 0.75, own], dim)
            without = rounded_sum(server, [base * 0.25, base * 0.75], dim)
            moved = [int(a) - int(b) for a, b in zip(with_client, without, strict=True)]
            worst = max(worst, squared(moved))
    return worst


@pytest.mark.parametrize("z", [2000.0, 3000.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_client_of_a_float_sum_moves_the_rounded_sum_by_the_norm_at_most(z):
    dim = 400
    server = Server(plan(z), torch.zeros(dim), source=SeededSource(0))
    grid = server._grid
    clip = server.task([]).sum_clip_norm
    assert clip == grid.sum_clip_norm(0.5) < 0.5
    worst = searched(server, dim, clip, np.random.default_rng(0))
    assert worst <= bound(grid)
    assert math.sqrt(worst) > grid.norm - 0.05 * math.sqrt(dim)  # and nearly attains it


def test_the_search_finds_sums_that_were_clipped_too_long():
    """Its power: clipped to the plan's clip norm, one client moves a coarse sum by more."""
    dim = 400
    server = Server(plan(3000.0), torch.zeros(dim), source=SeededSource(0))
    assert searched(server, dim, 0.5 * (1 - 1e-9), np.random.default_rng(0)) > bound(server._grid)


# What floating point in a filter costs, charged to the clip norm.


def gain(mechanism):
    """The least weight of a round's draw in its noise, over the rounds."""
    program = mechanism.noise_program()
    ops = [op for t in range(mechanism.rounds) for op in program.round(t) if op.target == OUT]
    return min(Fraction(c) for op in ops for _, c in op.draws)


def claim_holds(mechanism, participation, grid, dim, error):
    """Whether mu from the integers, (S norm + sqrt(d n) eta / b) / 2^bits, is at most S / z."""
    s_squared = Fraction(mechanism.sensitivity(participation).squared)
    left = Fraction(2) ** grid.bits / Fraction(grid.noise_multiplier) - Fraction(grid.norm)
    if not error:
        return left >= 0
    charge_squared = dim * mechanism.rounds * (Fraction(error) / gain(mechanism)) ** 2
    return left >= 0 and charge_squared <= s_squared * left**2


@pytest.mark.parametrize(("z", "dim"), [(0.02, 10**6), (3.3, 10**8)])
def test_mu_from_the_integers_is_the_accountant_s(mechanism, z, dim):
    n, bits = mechanism.rounds, noise_bits(z, dim)
    own = Executor(mechanism.noise_program(), 2.0**bits)
    for k, b in ((1, 1), (2, 1), (3, 2), (2, 4)):
        if n > (k - 1) * b:
            error = own.filter_error(k * 2.0**bits / z)
            grid = Grid.of(bits, z, dim, filter_charge=math.sqrt(dim * n) * error)
            assert claim_holds(mechanism, Participation(n, k, b), grid, dim, error)
            uncharged = Grid.of(bits, z, dim, filter_charge=0.0)
            uncharged = Grid(bits, z, uncharged.norm * (1 + 2.0**-49), 0.0)
            assert not claim_holds(mechanism, Participation(n, k, b), uncharged, dim, error)


def filter_charge_of(server):
    """By how much the clip norm was shortened, in steps."""
    grid = server._grid
    return 2.0**grid.bits / grid.noise_multiplier - grid.norm


@pytest.mark.parametrize(
    "mechanism", [m for m in (*TREES, *FILTERS) if m.rounds < 12 and m.rounds > 1], ids=short
)
def test_the_server_charges_its_own_filter(mechanism):
    n, dim = mechanism.rounds, 50
    own = plan(mechanism=mechanism, participation=())
    server = Server(own, torch.zeros(dim), source=SeededSource(0))
    error = Executor(mechanism.noise_program(), 2.0**20).filter_error(2.0**20)
    assert filter_charge_of(server) >= math.sqrt(dim * n) * error
    assert filter_charge_of(server) <= math.sqrt(dim * n) * error * (1 + 1e-9) + 2.0**-29
    assert bool(error) == (mechanism.noise_program().filter_error() > 0)


def test_groups_charge_the_largest_error_over_all_parameters():
    blt = BufferedToeplitz(2, (0.9,), (0.3,))
    steep = Toeplitz(3, (1.0, 0.9, 0.8))
    mechanism = Grouped([(0, 1), (0,), (0, 1)], [steep, blt], [30, 20])
    own = plan(mechanism=mechanism, participation=())
    server = Server(own, torch.zeros(50), source=SeededSource(0))
    errors = [Executor(m.noise_program(), 2.0**20).filter_error(2.0**20) for m in (steep, blt)]
    assert filter_charge_of(server) >= math.sqrt(50 * 3) * max(errors)


@pytest.mark.parametrize("z_bits", [1.2, 5.0, 333.3])
def test_bits_of_adaptive_clipping_are_integers_of_half_the_norm(z_bits):
    clipping = AdaptiveClipping(bit_noise_multiplier=z_bits)
    own = plan(1.0, mechanism=BinaryTree(4, 2), participation=(4,), adaptive_clipping=clipping)
    server = Server(own, torch.zeros(4), source=SeededSource(0))
    grid, half = server._bit_grid, math.floor(server._bit_grid.norm / 2)
    fields = {"stddev": 2.0**grid.bits, "source": SeededSource(0), "stream": 1}
    noise = NoiseStream(own.mechanism, dim=1, **fields)
    for bits in (0.0, 0.5, -0.5, 2.5):
        server._bits = 0.0
        server._adapt(bits)
        steps = Fraction(server._bits) * 2 * half
        assert abs(steps - (int(bits * 2) * half + int(noise.next()))) < Fraction(1, 2**20)
    # zeroing a client moves the integers by ``half``, less than noise of 2^bits hides by plan
    assert Fraction(half) * 2 <= Fraction(2) ** grid.bits / Fraction(z_bits)
    assert 2 * half > 0.99 * grid.norm - 2
