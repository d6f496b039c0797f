import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from accounting import ConfigError
from privpart import EmbeddedEngine, LocalTraining, PartialModel, Users, client_update
from privpart.models import small_cnn

PART = ["conv*", "norm.*", "dense2.*"]


def examples(count: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 8, 8, generator=generator)
    return x, torch.randint(10, (count,), generator=generator)


@pytest.mark.parametrize("train", [["*"], PART])
def test_local_training_is_plain_sgd_on_the_trainable_part(train):
    model = PartialModel(small_cnn(channels=(4, 8), hidden=16, image_size=8), train=train, seed=1)
    reference = copy.deepcopy(model.module)
    x, y = examples(10)
    update = client_update(
        model,
        model.flat.clone(),
        x,
        y,
        local=LocalTraining(0.1, epochs=3, batch_size=4),
        clip_norm=1e6,
        generator=torch.Generator().manual_seed(5),
    )
    before = torch.cat([dict(reference.named_parameters())[n].flatten() for n in model.trainable])
    optimizer = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        order = torch.randperm(10, generator=generator)
        for rows in (order[:4], order[4:8], order[8:]):
            optimizer.zero_grad()
            cross_entropy(reference(x[rows]), y[rows]).backward()
            optimizer.step()
    after = torch.cat([dict(reference.named_parameters())[n].flatten() for n in model.trainable])
    torch.testing.assert_close(update, (after - before).detach(), rtol=1e-5, atol=1e-7)
    assert update.norm() > 0.01


def test_frozen_bits_survive_training_and_only_the_trainable_part_is_sent():
    model = PartialModel(small_cnn(channels=(4, 8), hidden=16, image_size=8), train=PART, seed=1)
    frozen = {n: p.clone() for n, p in model.module.named_parameters() if n in model.frozen}
    x, y = examples(6)
    update = client_update(
        model,
        model.flat.clone(),
        x,
        y,
        local=LocalTraining(0.5, epochs=2),
        clip_norm=0.25,
        generator=torch.Generator(),
    )
    assert update.shape == (model.dim,)
    assert 0.2499 < update.double().norm() <= 0.25
    now = dict(model.module.named_parameters())
    assert all(torch.equal(now[name], values) for name, values in frozen.items())


def test_diverging_training_sends_nothing_harmful():
    model = PartialModel(small_cnn(channels=(4, 8), hidden=16, image_size=8), seed=1)
    x, y = examples(6)
    update = client_update(
        model,
        model.flat.clone(),
        x * 1e30,
        y,
        local=LocalTraining(1e30, epochs=3, batch_size=2),
        clip_norm=1.0,
        generator=torch.Generator(),
    )
    assert torch.isfinite(update).all()
    assert update.norm() <= 1


def test_engine_does_not_depend_on_the_order_of_clients():
    model = PartialModel(small_cnn(channels=(4, 8), hidden=16, image_size=8), train=PART, seed=1)
    x, y = examples(12)
    users = Users(x, y, torch.arange(12).split(3))
    engine = EmbeddedEngine(
        model, users, local=LocalTraining(0.1, 2, 2), clip_norm=1.0, data_seed=3
    )
    start = model.flat.clone()
    forth = {u.client: u.delta for u in engine.run(0, [0, 1, 2, 3], start)}
    back = {u.client: u.delta for u in engine.run(0, [3, 2, 1, 0], start)}
    assert all(torch.equal(forth[client], back[client]) for client in range(4))
    later = next(engine.run(1, [0], start)).delta
    assert not torch.equal(later, forth[0])


@pytest.mark.parametrize("field", ["learning_rate", "epochs", "batch_size"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_bad_local_training(field, value):
    with pytest.raises(ConfigError, match=field):
        LocalTraining(**{"learning_rate": 0.1, field: value})
