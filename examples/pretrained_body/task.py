"""Clothes behind a body that was trained on other clothes, of which any part may train.

python prepare.py
privpart train --plan plan.toml --out run
"""

from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from network import Residual
from safetensors.torch import load_file
from torch import Tensor, nn

from privpart.data import Users
from privpart.training.metric import Accuracy

HERE = Path(__file__).parent
EACH = 2
Part = Literal["users", "public", "test"]


@cache
def examples(part: Part) -> tuple[Tensor, Tensor]:
    """Return pixels in [0, 1], (n, 1, 14, 14), and labels, (n,)."""
    with np.load(HERE / "images.npz") as file:
        x, y = (torch.from_numpy(file[f"{part}_{kind}"]) for kind in "xy")
    return x.view(-1, 1, 14, 14).float() / 255, y


def network(rank: int = 0, narrow: int = 0) -> nn.Module:
    """Return the pretrained body with a new head; LoRA and adapters change nothing at first."""
    found = Residual(rank, narrow)
    lacks = found.load_state_dict(load_file(HERE / "pretrained.safetensors"), strict=False)
    if lacks.unexpected_keys:
        raise ValueError(f"pretrained.safetensors has {lacks.unexpected_keys}; run prepare.py.")
    return found


def clients() -> Users:
    """Return the users, who hold two images each."""
    x, y = examples("users")
    rows = torch.arange(len(y)).view(-1, EACH)
    return Users(x, y, dict(enumerate(rows)))


test_accuracy = Accuracy(*examples("test"))
public_accuracy = Accuracy(*examples("public"))
"""Of images that no user holds, by which hyperparameters are chosen."""
