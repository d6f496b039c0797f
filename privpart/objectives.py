"""Objectives: what a client minimises beside the cross-entropy, on the parts that train.

fedavg   nothing (McMahan et al. 2017)
fedprox  mu/2 ||w - start||^2 (Li et al. 2020): over the active part, for the rest does not move
moon     mu times a contrast of features (Li et al. 2021): near those of the received model,
         far from those of this client's own model of the last time. That model stays in the
         memory of the device: a simulation that is resumed has lost it, and says so.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cosine_similarity, cross_entropy

from accounting.checks import ConfigError


def proximal_loss(now: Tensor, start: Tensor, weight: float) -> Tensor:
    """Return weight/2 ||now - start||^2, shape ()."""
    return weight / 2 * (now - start).square().sum()


def add_proximal_gradient(gradient: Tensor, now: Tensor, start: Tensor, weight: float) -> None:
    """Add the gradient of ``proximal_loss`` to ``gradient``, in place; all of shape (c,)."""
    gradient.add_(now, alpha=weight).sub_(start, alpha=weight)


def contrastive_loss(
    features: Tensor, received: Tensor, previous: Tensor, temperature: float
) -> Tensor:
    """Return MOON's term, shape (): mean over examples of -log of the received model's share.

    Args:
        features: of the model in training, shape (n, f).
        received: of the model that the server sent.
        previous: of this client's model after its last participation. If that is the received
            model itself, the term is log 2 and has no gradient.
        temperature: > 0.
    """
    near = cosine_similarity(features, received, dim=1)
    far = cosine_similarity(features, previous, dim=1)
    both = torch.stack([near, far], dim=1) / temperature
    return cross_entropy(both, torch.zeros(len(both), dtype=torch.long, device=both.device))


def last_layer(module: nn.Module) -> nn.Module:
    """Return the last layer that holds parameters: its input are the features of an example."""
    holders = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    if not holders:
        raise ConfigError("objective='moon': the network has no layer with parameters.")
    return holders[-1]


@contextmanager
def watched_input(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that gets, on every forward pass, the layer's input as shape (n, f)."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1)))
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def features_of(module: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the features of ``x`` under other parameters, shape (n, f); changes nothing."""
    with watched_input(last_layer(module)) as seen:
        functional_call(module, dict(parameters), (x,))
    return seen[-1]
