"""Code of one's own that carries data from client to client is refused before the first round."""

import random  # noqa: TID251  its global state is what is tested
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import privpart
from accounting import ConfigError
from privpart.training.passed import digest

PLAN = {
    "privacy": {"rounds": 2, "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    | {"mechanism": {"name": "tree"}},
    "model": {"train": ["head.*"]},
    "data": {"clients_per_round": 2},
    "client": {"learning_rate": 0.5, "batch_size": 4},
}


class Population:
    """Client 0 differs much from the others."""

    ids = (0, 1, 2, 3)

    def examples(self, client):
        draws = torch.Generator().manual_seed(client)
        x = torch.randn(8, 4, generator=draws) + (100.0 if client == 0 else 0.0)
        return x, (x[:, 0] > 0).long()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(0)
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x) + self.carried(x))

    def carried(self, x):
        return 0.0


class Bank(Network):
    """It keeps something in an object of its own, which a lent model does not follow."""

    def __init__(self):
        super().__init__()
        self.bank = SimpleNamespace(last=0.0)

    def carried(self, x):
        before, self.bank.last = self.bank.last, x.mean(0).detach()
        return before


class Teacher(Network):
    def carried(self, x):
        self.body.weight.data.mul_(0.9).add_(x.mean(), alpha=0.1)
        return 0.0


class FirstBatch(Network):
    """Initialised by the first batch that it sees, as ActNorm is."""

    def carried(self, x):
        if not float(self.body.bias.abs().sum()) > 50:
            with torch.no_grad():
                self.body.bias.copy_(-x.mean(0))
        return 0.0


seen: list[torch.Tensor] = []


def global_loss(module, batch):
    x, y = batch
    seen.append(x.mean().detach())
    return cross_entropy(module(x), y) * (1 + sum(seen[:-1]))


def trained(tmp_path, module, **options):
    options = {"plan": PLAN, "out": tmp_path / "run", "progress": False} | options
    return privpart.train(module, Population(), **options)


def switching_loss(module, batch):
    x, y = batch
    if x.mean() > 50:
        module.head.weight.requires_grad_(False)
    return cross_entropy(module(x), y)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *(
            (kind, {}, r"different updates|was written to|has changed")
            for kind in (Bank, Teacher, FirstBatch)
        ),
        (Network, {"loss": global_loss}, "two different updates"),
        (Network, {"loss": switching_loss}, "switched off the gradient"),
    ],
)
def test_networks_and_losses_that_keep_something_of_a_client_are_refused(
    kind, options, message, tmp_path
):
    seen.clear()
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path, kind(), **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("draws", ["numpy", "random", "torch"])
def test_augmentation_is_seeded_whatever_it_draws_from(draws, tmp_path):
    def augment(batch):
        x, y = batch
        noise = {
            "numpy": lambda: float(np.random.normal()),  # noqa: NPY002
            "random": random.random,
            "torch": lambda: float(torch.randn(())),
        }[draws]()
        return x + 0.1 * noise, y

    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    runs = [trained(tmp_path / name, Network(), seed=1, augment=augment) for name in "ab"]
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    first, second = (run.module().state_dict() for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_client_is_not_in_the_model_that_was_only_checked_on_it(tmp_path):
    """The check before the first round trains on clients; nothing of it stays."""
    module = Network()
    run = trained(tmp_path, module)
    assert torch.equal(run.module().body.bias, module.body.bias)


def closing_over(weight):
    return lambda module, batch: cross_entropy(module(batch[0]), batch[1]) * weight


def test_what_a_function_closes_over_is_compared():
    assert digest(closing_over(1.0)) == digest(closing_over(1.0))
    assert digest(closing_over(1.0)) != digest(closing_over(-5.0))
    one, other = (lambda module: 1.0), (lambda module: 2.0)  # in one line
    assert digest(one) != digest(other)
    one, other = (nn.Sequential(nn.Linear(2, 2), last) for last in (nn.ReLU(), nn.Tanh()))
    assert digest(one) != digest(other)
    labels = torch.tensor([[0, 1], [1, 1]])
    one, other = (privpart.Accuracy(torch.ones(2, 1), own) for own in labels)
    assert digest(one) != digest(other)
