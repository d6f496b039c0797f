"""The example of device classes: one client moves the sum by at most clip_norm."""

import runpy
from pathlib import Path

import pytest
import torch

from accounting import ConfigError
from privpart import (
    EmbeddedEngine,
    LocalTraining,
    PartialModel,
    RoundTask,
    Users,
)
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


def model(train, seed=3):
    return PartialModel(
        lambda: small_cnn(channels=(2, 4), hidden=8, image_size=8), train=train, seed=seed
    )


def engine(train, seed=3):
    local = LocalTraining(0.5)
    return EmbeddedEngine(model(train, seed), USERS, local=local, data_seed=1, deterministic=True)


def classes(*trains, server=STRONG):
    engines = [engine(train) for train in trains]
    return DeviceClasses(model(server), engines, lambda client: client % len(trains))


def task(clients, clip_norm=CLIP):
    return RoundTask(0, tuple(clients), clip_norm, "plan")


def test_the_update_is_the_class_update_with_zeros_elsewhere():
    trains = (STRONG, WEAK, WEAKEST)
    start = model(STRONG).flat
    parameters = list(model(STRONG).module.named_parameters())
    for update in classes(*trains).run(task(range(6)), start):
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


def test_other_networks_and_classes_without_engine_are_refused():
    with pytest.raises(ConfigError, match="at least one"):
        DeviceClasses(model(STRONG), [], lambda _: 0)
    mixed = classes(STRONG, WEAK)
    for number, fault in ((-1, "class_of=-1"), (2, "below 2"), (0.0, "whole")):
        mixed.class_of = lambda _, number=number: number
        with pytest.raises(ConfigError, match=fault):
            next(mixed.run(task([0]), model(STRONG).flat))
    with pytest.raises(ConfigError, match="own copy"):
        DeviceClasses(model(WEAK), [engine(WEAKEST, seed=4)], lambda _: 0)
    shared = engine(WEAK)
    with pytest.raises(ConfigError, match="own copy"):
        DeviceClasses(shared.model, [shared], lambda _: 0)
    with pytest.raises(ConfigError, match="which the server does not"):
        DeviceClasses(model(WEAK), [engine(STRONG)], lambda _: 0)
