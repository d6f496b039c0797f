"""The CNN and loop of Opacus's MNIST example, with Opacus's DP-SGD.

Images: scikit-learn's digits, enlarged; or Fashion-MNIST's files in a folder. ``mnist_cnn.py`` is
this file with DP-FTRL.

    python mnist_cnn_dp_sgd.py [--epochs 5] [--fashion-mnist FOLDER]
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, DELTA = 128, 1e-6


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


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--fashion-mnist", type=Path)
    given = parser.parse_args(arguments)
    folder = given.fashion_mnist
    dataset, test = digits() if folder is None else fashion_mnist(folder)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    data_loader = DataLoader(dataset, batch_size=BATCH)

    privacy_engine = PrivacyEngine()
    model, optimizer, data_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=data_loader,
        target_epsilon=8.0,
        target_delta=DELTA,
        epochs=given.epochs,
        max_grad_norm=1.0,
    )

    criterion = nn.CrossEntropyLoss()
    for _ in range(given.epochs):
        for images, labels in data_loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        right = (model(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean()
    epsilon = privacy_engine.get_epsilon(DELTA)
    print(f"accuracy {right:.1%}, epsilon {epsilon} at delta {DELTA:g}")
    return float(right), epsilon


if __name__ == "__main__":
    main()
