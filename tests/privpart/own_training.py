"""A population, losses and augmentations as other people write them, for worker processes too."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Population:
    """Fetches examples by id; the protocol asks for nothing else."""

    def __init__(self, examples):
        self._examples = examples

    @property
    def ids(self):
        return list(self._examples)

    def examples(self, client):
        return self._examples[client]


class Shifted(Population):
    """Moves every example at random each time that it is fetched."""

    def examples(self, client):
        x, y = self._examples[client]
        return x + torch.rand(()), y


class ByName(nn.Module):
    """Takes its inputs by name and returns an object with logits and a loss, as transformers do."""

    def __init__(self):
        super().__init__()
        self.dense, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, pixels, scale=None, labels=None):
        hidden = self.dense(pixels).tanh()
        logits = self.head(hidden if scale is None else hidden * scale[:, None])
        loss = None if labels is None else 2 * cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


def network():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def margin(module, batch):
    """A loss of one's own."""
    x, y = batch
    return (module(x) - nn.functional.one_hot(y, 3)).square().mean()


def jitter(batch):
    x, y = batch
    return x + 0.1 * torch.randn(x.shape), y


def short(batch):
    x, y = batch
    return x[:, :5], y
