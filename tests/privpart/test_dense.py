"""Dense: without torch.func the same training, its gradients laid out to be added."""

import pytest
import torch
from small_cohorts import computed, random_users
from torch import nn

from privpart import EmbeddedEngine, LocalTraining, PartialModel, RoundTask
from privpart.engines import vectorized
from privpart.engines.methods import Method
from privpart.engines.vectorized import dense_logits, is_dense_network

TASK = RoundTask(0, tuple(range(5)), 0.2, "plan")
SIZES = (1, 4, 7, 7, 0)
TRAININGS = {
    "sgd": LocalTraining(0.3, epochs=2, batch_size=3),
    "momentum": LocalTraining(0.2, steps=4, batch_size=3, momentum=0.9),
    "adam": LocalTraining(0.01, epochs=2, batch_size=3, optimizer="adam"),
}


def users():
    return random_users(SIZES, (6, 4), classes=3)


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(24, 9), nn.ReLU(), nn.Linear(9, 3))


def bare():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(24, 9, bias=False), nn.GELU(), nn.Linear(9, 9), nn.Tanh(),
        nn.Linear(9, 3, bias=False),
    )  # fmt: skip


def one_activation():
    again = nn.ReLU()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(24, 9), again, nn.Linear(9, 9), again, nn.Identity(),
        nn.Linear(9, 9), nn.ReLU(inplace=True), nn.Linear(9, 3), nn.Sigmoid(),
    )  # fmt: skip


def updates(network, data, method, local, train=("*",)):
    return computed(PartialModel(network, train=train, seed=1), data, method, local, TASK)


@pytest.fixture
def without_vmap(monkeypatch):
    """So that what agrees is not torch.func with itself."""

    def refused(*_args, **_options):
        raise AssertionError("vmap")

    monkeypatch.setattr(vectorized, "vmap", refused)


@pytest.mark.usefixtures("without_vmap")
@pytest.mark.parametrize("local", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize(
    ("network", "train"),
    [
        (plain, ["*"]),
        (plain, ["1.weight", "3.bias"]),
        (plain, ["1.bias", "3.weight"]),
        (plain, ["1.*"]),
        (bare, ["*"]),
        (bare, ["1.*", "5.*"]),
        (one_activation, ["*"]),
        (one_activation, ["3.*"]),
    ],
)
def test_it_is_the_training_of_one_client_after_another(network, train, local):
    alone = updates(network, users(), Method(), local, train)
    together = updates(network, users(), Method(vectorized=True), local, train)
    assert (together - alone).norm(dim=1).max() < 1e-6
    assert alone.norm(dim=1)[:4].min() > 1e-3  # power


@pytest.mark.usefixtures("without_vmap")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_one_client_holds_leaves_the_others_as_they_are(value):
    data, method, local = users(), Method(vectorized=True), TRAININGS["sgd"]
    before = updates(plain, data, method, local)
    data.x[data.indices[2]] = value
    after = updates(plain, data, method, local)
    assert not after[2].equal(before[2])
    for other in (0, 1, 3, 4):
        assert after[other].equal(before[other])


def test_gradients_are_laid_out_as_the_weights_are():
    """Else adding them up takes longer than the products."""
    network, x = plain(), torch.rand(5, 3, 6, 4)
    own = {name: p.detach().expand(5, *p.shape).clone() for name, p in network.named_parameters()}
    leaves = [part.requires_grad_() for part in own.values()]
    found = torch.autograd.grad(dense_logits(network, own, x).square().sum(), leaves)
    assert all(gradient.is_contiguous() for gradient in found)


class Doubling(nn.Linear):
    """Not torch's own layer."""

    def forward(self, x):
        return 2 * super().forward(x)


def tied():
    first, second = nn.Linear(9, 9), nn.Linear(9, 9)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


def twice():
    layer = nn.Linear(9, 9)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked():
    network = nn.Sequential(nn.Linear(9, 3))
    network[0].register_forward_hook(lambda _m, _x, out: 2 * out)
    return network


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(9, 3)), (4, 9)),
        (lambda: nn.Sequential(nn.Linear(9, 3), nn.Flatten()), (4, 9)),
        (lambda: nn.Sequential(nn.Flatten(1, 2), nn.Linear(9, 3)), (2, 2, 9)),
        (lambda: nn.Sequential(nn.Flatten(0, -1), nn.Linear(9, 3)), (9,)),
        (lambda: nn.Sequential(nn.Sequential(nn.Linear(9, 3))), (9,)),
        (lambda: nn.Sequential(nn.Linear(9, 3), nn.Dropout(0.5)), (9,)),
        (lambda: nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9)), (9,)),
        (lambda: nn.Sequential(Doubling(9, 3)), (9,)),
        (lambda: nn.Linear(9, 3), (9,)),
        (nn.Sequential, (4, 9)),
        (tied, (9,)),
        (twice, (9,)),
        (hooked, (9,)),
    ],
)
def test_what_it_would_not_compute_is_left_to_vmap(network, shape):
    assert not is_dense_network(network(), torch.rand(5, *shape))
    assert is_dense_network(plain(), torch.rand(5, 6, 4))  # power


@pytest.mark.parametrize("train", [["8.*"], ["3.*", "6.*"]])
def test_a_layer_that_comes_twice_is_in_the_frozen_prefix_twice(train):
    """``named_children`` names it once: behind such a prefix was another network."""
    local, found = TRAININGS["sgd"], []
    for options in ({"deterministic": True}, {"cache_prefix": True}):
        model = PartialModel(one_activation, train=train, seed=1)
        with EmbeddedEngine(
            model, users(), local=local, data_seed=5, report=lambda _: None, **options
        ) as engine:
            found.append(torch.stack([u.update for u in engine.run(TASK, model.flat.clone())]))
    assert (found[0] - found[1]).norm(dim=1).max() < 1e-6
    assert found[0].norm(dim=1)[:4].min() > 1e-3
