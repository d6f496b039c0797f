"""The CNN and loop of Opacus's MNIST example, with DP-FTRL or DP-SGD.

With ``from opacus import PrivacyEngine`` and ``PrivacyEngine()`` in two lines, this is a
program of Opacus's. Network and images are those of ``mnist.py``.

    python mnist_cnn.py [--dp-sgd] [--epochs 5] [--out FOLDER] [--fashion-mnist FOLDER]

With ``--out`` every step is kept: after a crash, the same line continues. A seed is for
simulations, which are not private.
"""

import argparse
from pathlib import Path

import torch
from mnist import digits, fashion_mnist, network
from torch import nn
from torch.utils.data import DataLoader

from privpart import FTRLEngine

BATCH, DELTA = 128, 1e-6


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp-sgd", action="store_true")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--fashion-mnist", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args(arguments)
    folder = given.fashion_mnist
    dataset, test = digits() if folder is None else fashion_mnist(folder)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    data_loader = DataLoader(dataset, batch_size=BATCH)

    privacy_engine = FTRLEngine(seed=given.seed)
    model, optimizer, data_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=data_loader,
        target_epsilon=8.0,
        target_delta=DELTA,
        epochs=given.epochs,
        max_grad_norm=1.0,
        poisson_sampling=given.dp_sgd,
        **({"out": given.out, "resume": True} if given.out else {}),
    )
    print(f"epsilon {privacy_engine.get_epsilon(DELTA)} at delta {DELTA:g}, before training")

    begun, checkpoint = 0, given.out and given.out.with_suffix(".pt")
    if checkpoint and checkpoint.exists():
        begun = privacy_engine.load_checkpoint(path=checkpoint, module=model, optimizer=optimizer)[
            "epochs"
        ]
    criterion = nn.CrossEntropyLoss()
    for epoch in range(begun, given.epochs):
        for images, labels in data_loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
        if checkpoint:
            privacy_engine.save_checkpoint(
                path=checkpoint,
                module=model,
                optimizer=optimizer,
                checkpoint_dict={"epochs": epoch + 1},
            )

    model.eval()
    with torch.no_grad():
        right = (model(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean()
    epsilon = privacy_engine.get_epsilon(DELTA)
    print(f"accuracy {right:.1%}, epsilon {epsilon} after training")
    return float(right), epsilon


if __name__ == "__main__":
    main()
