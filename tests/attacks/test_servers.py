"""Servers of other libraries: a right one keeps what is stated of it, and each fault is named."""

import itertools
import math

import numpy as np
import pytest
import torch

from accounting import BinaryTree, ConfigError, Grouped, Independent, Participation
from attacks import replay
from privpart import FTRLEngine
from privpart.example_level.optimizer import FTRLOptimizer

TREE, LIMITS = BinaryTree(8), Participation(8, 2, 4)
STATED = {"noise_multiplier": 2.0, "clip_norm": 0.5, "divisor": 10.0, "dim": 2400, "clients": 10}


def cut(update, bound=0.5):
    norm = float(np.linalg.norm(update.astype(np.float64)))
    return (
        update * min(1.0, bound / max(norm, 1e-300))
        if math.isfinite(norm)
        else np.zeros(len(update))
    )


def server(clip=lambda update, j, t: cut(update), noise=lambda rows: rows, released=None, seed=1):
    """A DP-FTRL loop in float32, with a fault or without."""

    def start():
        decoder = TREE.decoder()
        nodes = np.random.default_rng(seed).normal(size=(decoder.shape[1], STATED["dim"]))
        rows = enumerate(noise(np.diff(decoder @ nodes, axis=0, prepend=0.0)) * 2.0 * 0.5)

        def step(updates):
            t, row = next(rows)
            total = sum((clip(u, j, t) for j, u in enumerate(updates)), start=0.0 * row)
            whole = (total + row) / 10.0 if released is None else released(total, row)
            return whole.astype(np.float32)

        return step

    return start


@pytest.mark.parametrize("seed", range(5))
def test_a_right_server_keeps_what_is_stated_and_its_bound_is_tight(seed):
    found = replay(server(seed=seed), TREE, LIMITS, **STATED)
    assert not found.violation
    assert found.faults == ()
    assert 0.999 < found.longest <= 1.0
    claimed = found.claimed.epsilon(1e-5)
    # the root of a tree is in no prefix sum: an observer sees 4 of its 2 x 4 nodes in two rounds
    assert 0.8 * claimed < found.bound(1e-5).epsilon < claimed


def half(rows):
    return np.concatenate([rows[:, :1200], 0.9 * rows[:, 1200:]], axis=1)


def by_layer(update, j, t):
    return np.concatenate([cut(part) for part in np.split(np.nan_to_num(update), 4)])


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"noise": lambda rows: 0.97 * rows}, "standard deviation of 1.9"),
        ({"noise": half}, "The noise of"),
        ({"noise": lambda rows: rows[[0, 1, 2, 3, 0, 1, 2, 3]]}, "correlation"),
        ({"noise": np.zeros_like}, "no noise"),
        ({"clip": lambda u, j, t: u if (j, t) == (3, 5) else cut(u)}, "1 of 80 updates"),
        ({"clip": lambda u, j, t: cut(u, 1.0)}, "adds 2."),
        ({"clip": by_layer}, "a mu of at least"),
        ({"clip": lambda u, j, t: u * min(1.0, 0.5 / max(1e-30, np.linalg.norm(u)))}, "NaN"),
        ({"released": lambda total, row: np.where(total, total + row, 0.0) / 10}, "no noise"),
        ({"released": lambda total, row: 0.05 * row}, "adds nothing"),
    ],
    ids=[
        "noise x 0.97", "half of the noise x 0.9", "noise repeated", "no noise", "one not clipped",
        "twice the clip norm", "clip per layer", "NaN passes", "noise where sent", "no training",
    ],
)  # fmt: skip
def test_a_fault_is_named(fault, named):
    found = replay(server(**fault), TREE, LIMITS, tensors={"a": 1200, "b": 1200}, **STATED)
    assert found.violation
    assert any(named in sentence for sentence in found.faults), found.faults


def test_noise_that_differs_from_start_to_start_is_refused():
    secret = np.random.default_rng()

    def start():
        return server(seed=secret)()

    with pytest.raises(ConfigError, match=r"start: two servers without clients .* seed the noise"):
        replay(start, TREE, LIMITS, **STATED)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"divisor": math.inf}, "divisor"),
        ({"clients": 1}, "clients"),
        ({"dim": 5}, "dim"),
    ],
)
def test_what_cannot_be_audited_is_refused_by_name(changed, named):
    with pytest.raises(ConfigError, match=named):
        replay(server(), TREE, LIMITS, **STATED | changed)


def test_a_release_of_another_length_is_refused():
    short = server(released=lambda total, row: (total + row)[1:])
    with pytest.raises(ConfigError, match=r"round 0 released \(2399,\); must be \(2400,\)"):
        replay(short, TREE, LIMITS, **STATED)


def test_groups_are_refused():
    groups = Grouped(((0,), (1,)), (Independent(1), Independent(1)), (1200, 1200))
    with pytest.raises(ConfigError, match="has groups"):
        replay(server(), groups, Participation(2), **STATED)


class Given(torch.utils.data.Dataset):
    """Examples that are the updates of a step: of a linear loss, they are its gradients."""

    def __init__(self):
        self.rows = torch.zeros(10, 2400)
        self.places = itertools.cycle(range(10))

    def __len__(self):
        return 80

    def __getitem__(self, _):
        return self.rows[next(self.places)].clone()


def opacus_loop():
    module, given = torch.nn.Linear(2400, 1, bias=False), Given()
    weight = torch.nn.init.zeros_(module.weight)
    private, optimizer, loader = FTRLEngine(seed=3).make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0), mechanism=TREE,
        data_loader=torch.utils.data.DataLoader(given, batch_size=10), epochs=1,
        max_grad_norm=0.5, noise_multiplier=2.0, loss_reduction="sum",
    )  # fmt: skip
    batches = iter(loader)

    def step(updates):
        given.rows = torch.from_numpy(np.stack(updates))
        before = weight.detach().clone()
        optimizer.zero_grad()
        private(next(batches)).sum().backward()
        optimizer.step()
        return (before - weight.detach()).view(-1).numpy()

    return step


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the first layer's, of Opacus
def test_a_loop_under_ftrl_engine_keeps_its_epsilon_to_three_percent(monkeypatch):
    stated = {"noise_multiplier": 2.0, "clip_norm": 0.5, "divisor": 1.0, "dim": 2400, "clients": 10}
    found = replay(opacus_loop, TREE, Participation(8), **stated)
    assert found.faults == ()
    assert 0.97 < found.bound(1e-5).epsilon / found.claimed.epsilon(1e-5) < 1
    factors = FTRLOptimizer._factors
    monkeypatch.setattr(FTRLOptimizer, "_factors", lambda own, of: 2 * factors(own, of))
    found = replay(opacus_loop, TREE, Participation(8), **stated)
    assert any("80 of 80 updates add more" in fault for fault in found.faults)
