"""Matching: which reconstruction is which image, and which of many images an update came from."""

from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from accounting.checks import ConfigError
from attacks.observation import Observation
from attacks.reconstruct import matching_loss


def match_batch(found: Tensor, truth: Tensor) -> Tensor:
    """Return the order of ``found`` that fits ``truth`` with the least total squared error.

    A gradient of a batch does not depend on the order of its images, so a score must not either.
    The Hungarian method finds the best one-to-one pairing; ``found[order]`` pairs with ``truth``.
    This is scoring: no attack sees it.

    Args:
        found: (B, ...).
        truth: (B, ...).

    Returns:
        (B,) permutation.

    Raises:
        ConfigError: shapes that differ, values that are not finite.

    >>> match_batch(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.1], [0.8]]))
    tensor([1, 0])
    """
    a, b = found.detach().double().flatten(1), truth.detach().double().flatten(1)
    if found.shape != truth.shape or not bool(a.isfinite().all() and b.isfinite().all()):
        raise ConfigError(
            f"found: shape {tuple(found.shape)}; must be finite and {tuple(truth.shape)}."
        )
    cost = (b[:, None] - a[None]).square().sum(2)
    _, order = linear_sum_assignment(cost.numpy())
    return torch.from_numpy(np.asarray(order))


def reid_rank(
    model: nn.Module, observation: Observation, truth: Tensor, decoys: Tensor, labels: Tensor
) -> int:
    """Return the rank of the true image among decoys for an attacker who has them all; 1 is best.

    The attacker computes the update of each candidate and ranks them by how well it matches. No
    optimisation can fail here, so a view that resists reconstruction and yields rank 1 still
    tells who was in the data. Ties count against the attacker.

    Args:
        model: the client's architecture.
        observation: of a batch of one.
        truth: (1, C, H, W), one of the candidates.
        decoys: (N, C, H, W) other images.
        labels: (1 + N,) of the truth and then of the decoys; each candidate comes with its own.
    """
    if observation.shape[0] != 1 or len(labels) != 1 + len(decoys):
        raise ConfigError("decoys: a batch of one and a label for every candidate are needed.")
    candidates = torch.cat([truth.double(), decoys.double()])
    scores = []
    for image, label in zip(candidates, labels, strict=True):
        known = replace(observation, labels=label[None])
        scores.append(float(matching_loss(model, known, label[None])(image[None]).detach()))
    return sum(score <= scores[0] for score in scores)
