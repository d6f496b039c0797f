"""The CNN and loop of Opacus's MNIST example, with Opacus's DP-SGD.

Network and images are those of ``mnist.py``. ``mnist_cnn.py`` is
this file with DP-FTRL.

    python mnist_cnn_dp_sgd.py [--epochs 5] [--fashion-mnist FOLDER]
"""

import argparse
from pathlib import Path

import torch
from mnist import digits, fashion_mnist, network
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader

BATCH, DELTA = 128, 1e-6


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
