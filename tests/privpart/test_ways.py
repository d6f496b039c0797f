"""Ways to compute clients: each is the plain training, keeps clients apart and never too long."""

from copy import deepcopy

import pytest
import torch
from small_cohorts import computed
from torch import nn
from torch.nn import functional

from privpart import LocalTraining, PartialModel, RoundTask, Users
from privpart.data.index import batch_rows
from privpart.engines.methods import Method, client_generator

CLIENTS = 4
SIZES = (3, 4, 0, 4)
WORDS, WIDTH, LENGTH, LABELS = 11, 8, 5, 3
TASK = RoundTask(0, tuple(range(CLIENTS)), 0.2, "plan")
FREE = RoundTask(0, tuple(range(CLIENTS)), 1e6, "plan")
LOCAL = LocalTraining(0.3, epochs=2, batch_size=2)


class Attentive(nn.Module):
    """torch's encoder layer, with or without padding."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, words):
        x = self.words(words)
        padding = words == 0 if self.kind == "padded" else None
        x = self.layer(x, src_key_padding_mask=padding)
        return self.head(x.mean(dim=1))


class Product(nn.Module):
    """torch's scaled dot product."""

    def __init__(self):
        super().__init__()
        self.words, self.heads = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, words):
        parts = self.heads(self.words(words)).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.head(mixed.mean(dim=1))


class LowRank(nn.Linear):
    """A dense layer with an adapter."""

    def __init__(self, width):
        super().__init__(width, width)
        self.lora_A, self.lora_B = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return super().forward(x) + self.lora_B(self.lora_A(x))


def adapted():
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), LowRank(WIDTH), nn.LayerNorm(WIDTH), nn.Flatten(),
        nn.Linear(WIDTH * LENGTH, LABELS),
    )  # fmt: skip


WAYS = {
    "encoder layer": (lambda: Attentive("plain"), "*"),
    "padded encoder layer": (lambda: Attentive("padded"), "*"),
    "scaled dot product": (Product, "*"),
    "adapters": (adapted, "*lora_*"),
}


def users():
    n, generator = sum(SIZES), torch.Generator().manual_seed(2)
    x = torch.randint(1, WORDS, (n, LENGTH), generator=generator)
    x[::2, -1] = 0
    y = torch.randint(LABELS, (n,), generator=generator)
    return Users(x, y, torch.arange(n).split(list(SIZES)), allow_empty=True)


def built(network, train):
    module, generator = network(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(norm + 0.3 * torch.randn(parameter.shape, generator=generator))
    return PartialModel(module, train=[train], seed=None)


def updates(model, data, method, task):
    return computed(model, data, method, LOCAL, task)


def in_float64(model, data, client):
    """Return a client's update, not clipped, by steps of gradients in float64."""
    network = deepcopy(model.module).double()
    trained = [dict(network.named_parameters())[name] for name in model.trainable]
    before = [p.detach().clone() for p in trained]
    rows = data.indices[client]
    for batch in batch_rows(LOCAL, len(rows), client_generator(5, 0, client)):
        x, y = data.x[rows][batch], data.y[rows][batch]
        loss = functional.cross_entropy(network(x), y)
        gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.sub_(gradient, alpha=LOCAL.learning_rate)
    moved = [(p.detach() - b).flatten() for p, b in zip(trained, before, strict=True)]
    return torch.cat(moved)


@pytest.mark.parametrize("way", WAYS)
def test_a_way_is_the_plain_training_apart_for_each_client_and_never_too_long(way):
    model, data, method = built(*WAYS[way]), users(), Method(vectorized=True)
    found, plain = updates(model, data, method, FREE), updates(model, data, Method(), FREE)
    lengths = plain.norm(dim=1)
    assert sorted(lengths > 1e-3) == [False, True, True, True]  # power; one has no examples
    assert (found - plain).norm(dim=1).max() < 1e-5
    for client in range(CLIENTS):
        assert (found[client].double() - in_float64(model, data, client)).norm() < 1e-5
    clipped = updates(model, data, method, TASK)
    assert (clipped.double().norm(dim=1) <= TASK.clip_norm).all()
    assert (clipped.norm(dim=1) >= 0.99 * lengths.clamp(max=TASK.clip_norm)).all()  # power
    other = Users(data.x.clone(), data.y.clone(), data.indices, allow_empty=True)
    mine = other.indices[0]
    other.x[mine], other.y[mine] = 1 + data.x[mine] % (WORDS - 1), (1 + data.y[mine]) % LABELS
    changed = updates(model, other, method, FREE)
    assert (changed[0] - found[0]).norm() > 1e-3  # power
    assert (changed[1:] - found[1:]).norm() < 1e-6
