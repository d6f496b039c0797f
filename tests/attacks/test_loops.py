"""Canaries in ordinary loops of PyTorch: a right engine is consistent, and its faults are named."""

import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accounting import BinaryTree, Independent, Participation
from accounting.checks import ConfigError
from attacks import CanaryLoop, LoopAudit
from privpart import FTRLEngine
from privpart.example_level.optimizer import FTRLOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of Opacus
EXAMPLES, COUNT, BATCH, EPOCHS, CLIP = 200, 300, 50, 2, 0.7
STEPS = -(-(EXAMPLES + COUNT) // BATCH)


def audited(fault=lambda optimizer: None, stated: int = EPOCHS) -> LoopAudit:
    data = TensorDataset(torch.randn(EXAMPLES, 6), torch.randint(3, (EXAMPLES,)))
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    canaries, mechanism = CanaryLoop(net, data, count=COUNT), BinaryTree(STEPS * EPOCHS)
    sgd = torch.optim.SGD(canaries.module.parameters(), lr=0.1, momentum=0.5)
    module, optimizer, loader = FTRLEngine().make_private(
        module=canaries.module,
        optimizer=sgd,
        data_loader=DataLoader(canaries.data, batch_size=BATCH),
        epochs=EPOCHS,
        max_grad_norm=CLIP,
        noise_multiplier=1.0,
        mechanism=mechanism,
    )
    fault(optimizer)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    return canaries.audit(
        optimizer,
        mechanism,
        Participation(STEPS * EPOCHS, stated, STEPS),
        noise_multiplier=1.0,
        clip_norm=CLIP,
        divisor=BATCH,
        delta=1e-5,
    )


def test_a_right_loop_is_consistent_and_says_which_clip_the_canaries_passed():
    found = audited()
    assert not found.violation, found.faults
    assert found.clipped_by == "privpart.example_level.optimizer.FTRLOptimizer"
    guesses = found.bounds[0]
    assert 2 < guesses.epsilon < found.claimed.epsilon(1e-5)
    assert 0.5 < found.visible <= 1


def less_noise(optimizer):
    drawn = optimizer.noise.next
    optimizer.noise.next = lambda out=None: (drawn(out=out) * 0.7).round().to(optimizer.noise.dtype)


def no_clip(optimizer):
    optimizer._factors = lambda samples: 10 * FTRLOptimizer._factors(optimizer, samples)


@pytest.mark.parametrize(
    ("fault", "named"),
    [(less_noise, "clip norms; the plan says 1."), (no_clip, "A canary adds")],
    ids=["noise x 0.7", "clip x 10"],
)
def test_a_fault_of_the_engine_is_a_violation(fault, named):
    found = audited(fault)
    assert found.violation
    assert named in " ".join(found.faults)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, ""),
        ({"noise_multiplier": 0.6}, "clip norms; the plan says 1."),
        ({"max_grad_norm": 7.0}, "A canary adds"),
    ],
    ids=["right", "noise x 0.6", "clip x 10"],
)
@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
def test_a_loop_under_opacus_own_engine(changed, named):
    data = TensorDataset(torch.randn(EXAMPLES, 6), torch.randint(3, (EXAMPLES,)))
    canaries = CanaryLoop(nn.Linear(6, 3), data, count=COUNT)
    module, optimizer, loader = PrivacyEngine().make_private(
        module=canaries.module,
        optimizer=torch.optim.SGD(canaries.module.parameters(), lr=0.1),
        data_loader=DataLoader(canaries.data, batch_size=BATCH, shuffle=True),
        poisson_sampling=False,
        **{"noise_multiplier": 1.0, "max_grad_norm": CLIP} | changed,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    once = Participation(STEPS, 1, STEPS)
    given = {"noise_multiplier": 1.0, "clip_norm": CLIP, "divisor": BATCH, "delta": 1e-5}
    found = canaries.audit(optimizer, Independent(STEPS), once, **given)
    assert found.clipped_by == "opacus.optimizers.optimizer.DPOptimizer"
    assert found.violation == bool(named), found.faults
    assert named in " ".join(found.faults)


def test_an_example_that_comes_more_often_than_stated_is_named():
    assert "was dealt to steps" in audited(stated=1).faults[0]


def test_steps_that_cannot_be_undone_are_refused():
    canaries = CanaryLoop(nn.Linear(2, 2), TensorDataset(torch.ones(8, 2)), count=20)
    adam = torch.optim.Adam(canaries.module.parameters())
    given = {"noise_multiplier": 1.0, "clip_norm": 1.0, "divisor": 8, "delta": 1e-5}
    with pytest.raises(ConfigError, match=r"torch\.optim\.SGD"):
        canaries.audit(adam, BinaryTree(1), Participation(1), **given)
    with pytest.raises(ConfigError, match="count=1"):
        CanaryLoop(nn.Linear(2, 2), TensorDataset(torch.ones(8, 2)), count=1)
