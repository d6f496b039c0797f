"""Real images and the networks on which the attacks are known to work."""

import pytest
import torch
from sklearn.datasets import load_digits
from subjects import seeded
from torch import Tensor, nn

from attacks.networks import smooth_lenet, smooth_mlp

torch.set_num_threads(1)  # small tensors: more threads only get into each other's way


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.tensor(data.images / 16).reshape(-1, 1, 8, 8)
    chosen = [3, 10, 57, 200, 888, 1500, 700, 1234, 42, 1700]
    return images[chosen], torch.tensor(data.target)[chosen]


@pytest.fixture
def lenet() -> nn.Module:
    return smooth_lenet(seeded(0))


@pytest.fixture
def mlp() -> nn.Module:
    return smooth_mlp(seeded(0))
