"""Write images.npz of users, public.npz for the metric, and pretrained.safetensors.

Run: python make_data.py

An image is a coloured grating under noise; its label is the angle and the width of the stripes. The
network is pretrained on gratings without colour.
"""

import numpy as np
import torch
from network import ResNet18
from safetensors.torch import save_file
from task import HERE
from torch.nn.functional import cross_entropy

SIZE = 16


def gratings(count, draws, *, coloured=True):
    """Return images, shape (count, 3, SIZE, SIZE), and labels 0 to 9."""
    label = np.arange(count) % 10
    angle = label % 5 * np.pi / 8 * draws.choice([-1, 1], count)  # both are mirror images
    x, y = np.cos(angle)[:, None, None], np.sin(angle)[:, None, None]
    down, across = np.mgrid[:SIZE, :SIZE]
    waves = np.where(label < 5, 0.8, 1.6)[:, None, None] * (x * across + y * down)
    grey = np.sin(waves + draws.uniform(0, 2 * np.pi, (count, 1, 1)))[:, None]
    colour = draws.uniform(-1, 1, (count, 3, 1, 1)) if coloured else 1
    noise = draws.normal(0, 0.5, (count, 3, SIZE, SIZE))
    return (grey * colour + noise).astype("float32"), label


def pretrained(width, steps, draws):
    """Return a network that knows the gratings without colour."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        network = ResNet18(width)
    optimizer = torch.optim.Adam(network.parameters(), 0.003)
    for _ in range(steps):
        images, labels = map(torch.from_numpy, gratings(100, draws, coloured=False))
        optimizer.zero_grad()
        cross_entropy(network(images), labels).backward()
        optimizer.step()
    return network


def main(width=16, users=200, images_each=8, steps=80):
    draws = np.random.default_rng(0)
    images, labels = gratings(users * images_each, draws)
    ids = draws.integers(2**64, size=users, dtype=np.uint64)
    user = np.tile(ids, images_each)
    np.savez(HERE / "images.npz", image=images, label=labels, user=user)
    images, labels = gratings(500, draws)
    np.savez(HERE / "public.npz", image=images, label=labels)
    save_file(pretrained(width, steps, draws).state_dict(), HERE / "pretrained.safetensors")


if __name__ == "__main__":
    main()
