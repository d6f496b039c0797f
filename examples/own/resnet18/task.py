"""Images by user, for a pretrained network of which the last block and a new head train.

Run make_data.py first: it draws the images of users, and pretrains the network on other images.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad

from privpart.data import from_tensors

HERE = Path(__file__).parent
MARGIN = 2
"""Pixels by which a crop is moved at most."""


def clients():
    """Return the users of images.npz, which has an id for each image."""
    with np.load(HERE / "images.npz") as file:
        return from_tensors((file["image"], file["label"]), user=file["user"])


def crop_and_flip(batch):
    """Return other crops of the images, half of them mirrored."""
    images, labels = batch
    size = images.shape[-1]
    moves = torch.randint(2 * MARGIN + 1, (len(images), 2)).tolist()
    crops = torch.stack(
        [
            image[:, top : top + size, left : left + size]
            for image, (top, left) in zip(pad(images, [MARGIN] * 4), moves, strict=True)
        ]
    )
    return torch.where(torch.rand(len(crops), 1, 1, 1) < 0.5, crops.flip(3), crops), labels


def accuracy(module):
    """Return the share of public images whose label the network finds."""
    with np.load(HERE / "public.npz") as public:
        images, labels = (torch.from_numpy(public[name]) for name in ("image", "label"))
    return (module(images).argmax(dim=1) == labels).float().mean()
