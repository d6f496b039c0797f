"""The CNN of Opacus's MNIST example, and images for it.

Scikit-learn's digits, enlarged; or Fashion-MNIST's files in a folder.
"""

import gzip

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def digits():
    found = load_digits()
    small = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    images, labels = nn.functional.interpolate(small, 28), torch.tensor(found.target)
    return TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])


def fashion_mnist(folder):
    def part(name):
        pixels = gzip.decompress((folder / f"{name}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((folder / f"{name}-labels-idx1-ubyte.gz").read_bytes())
        images = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 1, 28, 28)
        y = torch.tensor(np.frombuffer(labels, np.uint8, offset=8).astype(np.int64))
        return TensorDataset(torch.tensor(images / 255, dtype=torch.float32), y)

    return part("train"), part("t10k")
