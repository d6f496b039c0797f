"""The example of device classes: one client moves the sum by at most clip_norm."""

import runpy
from pathlib import Path

import pytest
import torch

from privpart import EmbeddedEngine, LocalTraining, PartialModel, RoundTask, Users
from privpart.models import small_cnn

EXAMPLE = Path(__file__).parents[2] / "examples" / "device_classes.py"
DeviceClasses = runpy.run_path(str(EXAMPLE))["DeviceClasses"]
STRONG, WEAK, WEAKEST = ["*"], ["norm.*", "dense2.*"], ["dense2.bias"]
CLIP = 0.25
USERS = Users(
    torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
    torch.arange(16) % 10,
    torch.arange(16).split(2),
)


def model(train):
    return PartialModel(
        lambda: small_cnn(channels=(2, 4), hidden=8, image_size=8), train=train, seed=3
    )


def engine(train):
    local = LocalTraining(0.5)
    return EmbeddedEngine(model(train), USERS, local=local, data_seed=1, deterministic=True)


def task(clients):
    return RoundTask(0, tuple(clients), CLIP, "plan")


def test_the_update_is_the_class_update_with_zeros_elsewhere():
    trains = (STRONG, WEAK, WEAKEST)
    start = model(STRONG).flat
    parameters = list(model(STRONG).module.named_parameters())
    mixed = DeviceClasses(model(STRONG), list(map(engine, trains)), lambda client: client % 3)
    for update in mixed.run(task(range(6)), start):
        train = trains[update.client % 3]
        alone = engine(train)
        own = next(alone.run(task([update.client]), alone.model.flat.clone()))
        names = set(model(train).trainable)
        mask = torch.cat([torch.full((p.numel(),), name in names) for name, p in parameters])
        assert torch.equal(update.update[mask], own.update)
        assert not update.update[~mask].any()
        norms = float(update.update.double().norm()), float(own.update.double().norm())
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
        assert 0 < update.update.double().norm() <= CLIP
