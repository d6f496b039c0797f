"""Train the body on public kinds of clothes; write images.npz and pretrained.safetensors.

    python prepare.py [--data-dir FOLDER]

Fashion-MNIST's first five kinds (T-shirt, trouser, pullover, dress, coat) are public and train the
body. Users hold the other five (sandal, shirt, sneaker, bag, ankle boot), as do 1,000 public images
that choose hyperparameters, and test images.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from network import LABELS, Residual
from safetensors.torch import save_file
from torch.nn.functional import avg_pool2d, cross_entropy

from privpart import PartialModel
from privpart.data.tasks import fashion_mnist

HERE = Path(__file__).parent
USERS, EACH, PUBLIC, TEST = 2_000, 2, 1_000, 2_000
EPOCHS, BATCH, SEED = 6, 128, 20_260_101


def kinds(x: torch.Tensor, y: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images of five kinds, averaged to 14 x 14 pixels, and labels from 0."""
    own = (y >= first) & (y < first + LABELS)
    return avg_pool2d(x[own], 2).flatten(1), y[own] - first


def body(x: torch.Tensor, y: torch.Tensor) -> torch.nn.Module:
    """Return the network, trained on these images."""
    network = PartialModel(Residual, train=["*"], seed=SEED).module
    generator = torch.Generator().manual_seed(SEED)
    steps = EPOCHS * (len(y) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(y), generator=generator)[: len(y) // BATCH * BATCH].split(
            BATCH
        ):
            loss = cross_entropy(network(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, help="folder of Fashion-MNIST's files")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the two files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = fashion_mnist(options.data_dir)
    network = body(*kinds(task.train_x, task.train_y, 0))
    with torch.no_grad():
        x, y = kinds(task.test_x, task.test_y, 0)
        print(f"public kinds: {(network(x).argmax(1) == y).float().mean():.3f} of test images")
    kept = {n: w for n, w in network.state_dict().items() if not n.startswith("head.")}
    save_file(kept, options.out / "pretrained.safetensors")
    x, y = kinds(task.train_x, task.train_y, LABELS)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SEED))
    users, public = order[: USERS * EACH + PUBLIC].split([USERS * EACH, PUBLIC])
    test_x, test_y = kinds(task.test_x, task.test_y, LABELS)
    test = torch.randperm(len(test_y), generator=torch.Generator().manual_seed(SEED))[:TEST]
    parts = {"users": (x[users], y[users]), "public": (x[public], y[public])}
    parts["test"] = (test_x[test], test_y[test])
    files = {f"{n}_x": (255 * x).round().byte().numpy() for n, (x, _) in parts.items()}
    files |= {f"{n}_y": y.numpy() for n, (_, y) in parts.items()}
    np.savez_compressed(options.out / "images.npz", **files)


if __name__ == "__main__":
    main()
