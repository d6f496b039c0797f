"""Work of a round, for environments that have torch and numpy but not privpart.

``peers.py`` writes a case to a file. Its own process and the peers read that file, so all start
with the same parameters and see the same images of the same clients.
"""

import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

BATCH = 16
CLIP = 1.0


@dataclass(frozen=True)
class Work:
    """A network with its start values, its trainable part, and a cohort.

    Args:
        module: network with its start values; frozen parameters have no gradient.
        start: start values of the trainable parameters by name.
        x: images, shape (clients, examples, 1, 28, 28).
        y: labels, shape (clients, examples).
        rate: learning rate of the clients' SGD.
    """

    module: nn.Module
    start: dict[str, Tensor]
    x: Tensor
    y: Tensor
    rate: float


def network() -> nn.Module:
    """Return FedPT's EMNIST network for ten classes, equal to privpart.models.emnist_cnn."""
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(1, 32, 5, padding="same"),
        "pool1": nn.MaxPool2d(2),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(32, 64, 5, padding="same"),
        "norm": nn.GroupNorm(32, 64),
        "pool2": nn.MaxPool2d(2),
        "relu2": nn.ReLU(),
        "flatten": nn.Flatten(),
        "dense1": nn.Linear(64 * 7 * 7, 512),
        "relu3": nn.ReLU(),
        "dense2": nn.Linear(512, 10),
    }
    return nn.Sequential(OrderedDict(layers))


@cache
def read(path: Path) -> Work:
    """Return the case of a file, cached for the life of the process."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "trained"}
        trained = [str(name) for name in file["trained"]]
    x, y, rate = arrays.pop("x"), arrays.pop("y"), float(arrays.pop("rate"))
    module = network()
    module.load_state_dict(arrays)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    return Work(module, {name: arrays[name] for name in trained}, x, y, rate)


def train(work: Work, start: dict[str, Tensor], client: int) -> dict[str, Tensor]:
    """Train from ``start`` for one epoch in the order of the file; return the trained parameters.

    A plain PyTorch loop. The result is not copied: the next call overwrites it.
    """
    parameters = dict(work.module.named_parameters())
    trained = {name: parameters[name] for name in start}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(start[name])
    optimizer = torch.optim.SGD(trained.values(), lr=work.rate)
    for x, y in zip(work.x[client].split(BATCH), work.y[client].split(BATCH), strict=True):
        optimizer.zero_grad()
        cross_entropy(work.module(x), y).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in trained.items()}


def expected_sum(work: Work) -> Tensor:
    """Return the sum of the clipped updates of all clients, flat, in float64."""
    start = torch.cat([s.double().flatten() for s in work.start.values()])
    total = torch.zeros_like(start)
    for client in range(len(work.y)):
        after = train(work, work.start, client).values()
        update = torch.cat([a.double().flatten() for a in after]) - start
        total += min(1.0, CLIP / float(update.norm())) * update
    return total


def next_round() -> bool:
    """Report readiness or the end of a round; wait, and return whether another round follows."""
    print("@done", flush=True)
    return sys.stdin.readline().strip() == "go"
