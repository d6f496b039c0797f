"""Sameness: no count, clip norm or check depends on how an update was computed and rounded.

Ways to compute clients, their order, the size of their cohort and one rounding of their inputs all
change an update's last bits, as another processor does.
"""

from dataclasses import replace

import pytest
import torch
from plans import small_plan
from torch import nn

from accounting import BinaryTree
from privpart import (
    AdaptiveClipping,
    EmbeddedEngine,
    LocalTraining,
    PartialModel,
    RoundTask,
    SeededSource,
    Server,
    Users,
    fit,
)
from privpart.engines.methods import LocalComputation, Method
from privpart.grid import Grid, noise_bits
from privpart.server import RoundSum

SIZES = [4] * 20 + [1, 2, 3, 4, 0] * 2
CLIENTS = tuple(range(len(SIZES)))
LOCAL = LocalTraining(0.3, batch_size=4, steps=1)
TASK = RoundTask(0, CLIENTS, 0.2, "plan", sum_clip_norm=0.19)
Z = 100.0
EACH = [Method(), Method(vectorized=True)]
SUMS = [Method(vectorized=True), Method(ghost_sum=True)]


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def users(seed=None):
    """The same clients each time; with a seed, every input is moved by one rounding."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.rand(sum(SIZES), 1, 4, 4, generator=generator), torch.arange(sum(SIZES)) % 4
    x *= torch.linspace(0.1, 3, len(x))[:, None, None, None]
    if seed is not None:
        up = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
        x = torch.where(up, x.nextafter(torch.tensor(3e38)), x.nextafter(torch.tensor(0.0)))
    made = Users(x, y, torch.arange(len(x)).split(SIZES), allow_empty=True)
    made.x[:4] = torch.inf  # the first client diverges
    return made


def computation(data):
    return LocalComputation(PartialModel(network, seed=1), data, local=LOCAL, data_seed=5)


def one_by_one(one, task, method=EACH[0]):
    each = torch.empty(len(task.clients), one.model.dim)
    one.updates(task, task.clients, one.model.flat.clone(), method, each)
    return each


def received(task, each):
    """How many updates a server counts as not clipped, and as not finite."""
    dim, found = each.shape[1], set()
    coarse = Grid.of(noise_bits(Z, dim), Z, dim, filter_charge=0.0)
    for grid in (None, coarse):  # without noise, and with so much that rounding shortens updates
        total = torch.zeros(dim, dtype=torch.float64)
        sum_ = RoundSum(task, total, torch.zeros(dim), lambda _: None, grid=grid)
        for client, update in zip(task.clients, each, strict=True):
            sum_.add(task.update(client, update))
        found.add((sum_.bits + 0.5 * len(each), sum_.not_finite))
    return found


def counts(one, task):
    """The same, of every way to compute the clients of a task, as updates and as sums."""
    found = set()
    for method in EACH:
        each = one_by_one(one, task, method)
        found |= received(task, each)
    for method in SUMS:
        total = torch.empty(one.model.dim, dtype=torch.float64)
        norms = one.summed(task, task.clients, one.model.flat.clone(), method, total)
        found.add(of(task.sum_of(task.clients, total, norms)))
    return found | received(task, one_by_one(one, replace(task, clip_norm=1e9)))


def of(part):
    return part.unclipped, part.not_finite


@pytest.fixture(scope="module")
def lengths():
    one = computation(users())
    each = one_by_one(one, replace(TASK, clip_norm=1e9)).double().norm(dim=1)
    assert (len(each), int(each.isnan().sum()), int((each == 0).sum())) == (30, 1, 2)
    return each


def test_every_way_counts_an_update_at_the_clip_norm_as_clipped(lengths):
    """Else the fastest way would move the next clip norm of adaptive clipping."""
    one = computation(users())
    for clip_norm in lengths[lengths > 0].tolist()[::5]:
        shorter = int((lengths < clip_norm).sum()) + 1  # what is not finite counts as zeros
        task = replace(TASK, clip_norm=clip_norm, sum_clip_norm=0.98 * clip_norm)
        assert counts(one, task) == {(shorter, 1)}


def test_orders_cohorts_and_24_roundings_of_the_inputs_change_no_count(lengths):
    """One clip norm in the middle of a gap, and one at the length of a client."""
    ascending = lengths[lengths > 0].sort().values
    generator = torch.Generator().manual_seed(0)
    for seed in range(24):
        at = float(ascending[12]) if seed % 2 else float(ascending[11:13].mean())
        cohort = torch.randperm(30, generator=generator)[: (1, 2, 5, 12)[seed % 4]]
        task = replace(TASK, clients=tuple(cohort.tolist()), clip_norm=at, sum_clip_norm=0.98 * at)
        own = lengths[cohort]
        expected = int((own < 0.9999 * at).sum() + own.isnan().sum()), int(own.isnan().sum())
        one = computation(users(seed))
        assert counts(one, task) == {expected}, seed


def plan():
    fields = {"clip_norm": 0.2, "noise_multiplier": Z, "report_goal": 1000}
    adaptive = AdaptiveClipping(bit_noise_multiplier=2 * Z)
    return small_plan(BinaryTree(6, 1), (6,), **fields, adaptive_clipping=adaptive)


def test_adaptive_clipping_moves_alike_in_every_way():
    """And bit for bit where each update comes alone: integers sum to the same in any order."""

    def run(cohort=CLIENTS, seed=None, **options):
        model = PartialModel(network, seed=1)
        options = {"deterministic": True, "report": lambda _: None} | options
        with EmbeddedEngine(model, users(seed), local=LOCAL, data_seed=5, **options) as one:
            server = Server(plan(), model.flat.clone(), source=SeededSource(0))
            records = fit(server, one, [list(cohort)] * 6)
        counted = [record.counts.counted for record in records]
        return server.clip_norm, counted, server.parameters, records[0].counts.summed

    norm, counted, parameters, _ = run()
    assert norm != 0.2  # power
    for options in (
        {"cohort": CLIENTS[::-1]},
        {"seed": 3},
        {"deterministic": False, "batching": "vmap"},
        {"deterministic": False, "batching": "vmap", "sums": True},
        {"deterministic": False, "sums": True},
    ):
        other, same, found, summed = run(**options)
        assert (other, same, summed > 0) == (norm, counted, "sums" in options), options
        assert (found - parameters).norm() < 1e-4 * parameters.norm(), options
        if "cohort" in options:
            assert torch.equal(found, parameters)
