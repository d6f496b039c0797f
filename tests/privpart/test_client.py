import copy
from dataclasses import replace

import pytest
import torch
from small_cohorts import cnn
from torch.nn.functional import cross_entropy

from accounting import ConfigError
from privpart import EmbeddedEngine, LocalTraining, PartialModel, RoundTask, Users, client_update
from privpart.client import mean_loss
from privpart.data.index import batch_rows
from privpart.training.metric import accuracy

PART = ["conv*", "norm.*", "dense2.*"]


def examples(count: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 8, 8, generator=generator)
    return x, torch.randint(10, (count,), generator=generator)


OPTIMIZERS = {
    "sgd": (LocalTraining(0.1, 3, 4), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        LocalTraining(0.1, 3, 4, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
    "adam": (
        LocalTraining(0.01, 3, 4, optimizer="adam"),
        lambda p: torch.optim.Adam(p, lr=0.01, fused=False),
    ),
    "sgd that decays": (
        LocalTraining(0.1, 3, 4, weight_decay=0.3),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3),
    ),
    "adam that decays": (
        LocalTraining(0.01, 3, 4, optimizer="adam", weight_decay=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.9, fused=False),
    ),
}


def a_model(train=("*",)):
    return PartialModel(cnn, train=train, seed=1)


def update_of(model, data, local, clip_norm=1.0, seed=5, start=None):
    return client_update(
        model, model.flat.clone() if start is None else start, data, local=local,
        clip_norm=clip_norm, generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


def flat_of(module, names):
    parameters = dict(module.named_parameters())
    return torch.cat([parameters[name].detach().flatten() for name in names])


@pytest.mark.parametrize("train", [["*"], PART])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_local_training_is_the_plain_optimizer_on_the_trainable_part(train, name):
    local, make = OPTIMIZERS[name]
    model = a_model(train)
    reference = copy.deepcopy(model.module)
    x, y = examples(10)
    start = model.flat.clone()
    # the second time shows that nothing is kept from the first
    first, update = (update_of(model, (x, y), local, 1e6, start=start) for _ in range(2))
    before = first.clone()
    for clip_norm in (1e-3, 1e6):  # updates outlive the next client
        assert not torch.equal(update_of(model, examples(6, 1), local, clip_norm), before)
        assert torch.equal(first, before)
    optimizer = make([p for p in reference.parameters() if p.requires_grad])
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        order = torch.randperm(10, generator=generator)
        for rows in (order[:4], order[4:8], order[8:]):
            optimizer.zero_grad()
            cross_entropy(reference(x[rows]), y[rows]).backward()
            optimizer.step()
    after = flat_of(reference, model.trainable)
    torch.testing.assert_close(update, after - start, rtol=1e-4, atol=1e-6)
    assert update.norm() > 0.01


def test_loss_of_a_language_model_is_the_mean_over_tokens_without_padding():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    words = torch.tensor([[1, 4, -100], [0, -100, -100]])
    by_hand = -logits.log_softmax(2)
    expected = (by_hand[0, 0, 1] + by_hand[0, 1, 4] + by_hand[1, 0, 0]) / 3
    torch.testing.assert_close(mean_loss(logits, words), expected)
    torch.testing.assert_close(mean_loss(logits[0], words[0]), by_hand[0, [0, 1], [1, 4]].mean())


def test_steps_cut_the_passes_off():
    def rows(local):
        return [b.tolist() for b in batch_rows(local, 10, torch.Generator().manual_seed(5))]

    passes = rows(LocalTraining(0.1, epochs=3, batch_size=4))
    assert [len(b) for b in passes] == [4, 4, 2] * 3
    assert sorted(row for batch in passes[:3] for row in batch) == list(range(10))
    assert rows(LocalTraining(0.1, batch_size=4, steps=7)) == passes[:7]
    assert rows(LocalTraining(0.1, batch_size=4, steps=2)) == passes[:2]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(
            ({field: value}, field)
            for field in ("learning_rate", "epochs", "batch_size", "steps")
            for value in (0, float("nan"))
        ),
        ({"optimizer": "lion"}, "optimizer"),
        ({"weight_decay": 1.0}, "weight_decay=1.0: must be at least 0 and below 1"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"momentum": 1.0}, "below 1"),
        ({"momentum": float("nan")}, "momentum=nan"),
        ({"momentum": "0.9"}, "momentum='0.9': must be a number"),
        ({"loss": "hinge"}, "loss='hinge': must be one of"),
        ({"momentum": 0.9, "optimizer": "adam"}, "adam has its own"),
        ({"epochs": 2, "steps": 3}, "leave it out"),
        ({"objective": "fedsgd"}, "objective"),
        ({"objective": "fedprox"}, "mu=None"),
        ({"objective": "moon", "mu": 0.0}, "mu"),
        ({"mu": 1.0}, "mu=1.0: fedprox and moon"),
        ({"temperature": 0.1}, "only for moon"),
        ({"objective": "moon", "mu": 1.0, "temperature": 0.0}, "temperature"),
    ],
)
def test_options_out_of_range_or_that_contradict(options, match):
    with pytest.raises(ConfigError, match=match):
        LocalTraining(**{"learning_rate": 0.1} | options)


class Noisy(torch.nn.Module):
    """Dropout, and a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.first, self.head = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)
        self.dropout = torch.nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += len(x)
        return self.head(self.dropout(self.first(x.flatten(1)).relu()))


def noisy_engine():
    x, y = examples(12)
    users = Users(x, y, torch.arange(12).split(3))
    model = PartialModel(Noisy, train=["head.*"], seed=1)
    return EmbeddedEngine(model, users, local=LocalTraining(0.1, 2, 2), data_seed=3)


def test_a_start_that_training_would_overwrite_is_refused():
    engine = noisy_engine()
    with pytest.raises(ConfigError, match="Pass a clone"):
        next(engine.run(RoundTask(0, (0,), 1.0, "plan"), engine.model.flat))


def test_dropout_draws_from_the_client_s_seed_alone():
    engine = noisy_engine()
    start = engine.model.flat.clone()
    task = RoundTask(0, (0, 1, 2, 3), 1.0, "plan")
    outside = torch.get_rng_state()

    def ran(task):
        return {u.client: u.update for u in engine.run(task, start)}

    forth = ran(task)
    assert torch.equal(torch.get_rng_state(), outside)
    torch.rand(3)  # moves the global generator
    back = ran(replace(task, clients=(3, 2, 1, 0)))
    assert all(torch.equal(forth[client], back[client]) for client in range(4))
    assert not torch.equal(ran(replace(task, round=1))[0], forth[0])
    engine.model.module.dropout.p = 0.0
    without = ran(task)
    assert not any(torch.equal(forth[client], without[client]) for client in range(4))


def test_accuracy_is_taken_without_dropout_and_training_goes_on():
    module = noisy_engine().model.module
    module.first.eval()  # a mode of its own
    x, y = examples(200)
    assert len({accuracy(module, x, y) for _ in range(5)}) == 1
    modes = {name: layer.training for name, layer in module.named_modules()}
    assert modes == {"": True, "first": False, "head": True, "dropout": True}
