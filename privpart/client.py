"""Client: local training of the trainable part, and the update that leaves the device."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from accounting import checks
from privpart.clip import clip
from privpart.partial import PartialModel


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """How a client trains: SGD over its own examples.

    Args:
        learning_rate: > 0.
        epochs: passes over the client's examples, >= 1.
        batch_size: >= 1; the last batch of a pass may be smaller.
    """

    learning_rate: float
    epochs: int = 1
    batch_size: int = 16

    def __post_init__(self) -> None:
        checks.positive("learning_rate", self.learning_rate)
        checks.count("epochs", self.epochs)
        checks.count("batch_size", self.batch_size)


def client_update(
    model: PartialModel,
    start: Tensor,
    x: Tensor,
    y: Tensor,
    *,
    local: LocalTraining,
    clip_norm: float,
    generator: torch.Generator,
) -> Tensor:
    """Train from ``start`` and return the clipped change of the trainable part.

    Args:
        model: rebuilt from its seed; its trainable part is overwritten.
        start: this round's trainable part, shape (d,).
        x: examples, shape (n, ...).
        y: classes, shape (n,).
        local: optimiser settings.
        clip_norm: bound on the joint L2 norm of the result.
        generator: order of the examples.

    Returns:
        after - before, shape (d,), clipped: see ``clip``.
    """
    model.load(start)
    for _ in range(local.epochs):
        order = torch.randperm(len(x), generator=generator)
        for batch in torch.split(order, local.batch_size):
            model.gradient.zero_()
            cross_entropy(model.module(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            model.flat.add_(model.gradient, alpha=-local.learning_rate)
    return clip(model.flat - start, clip_norm)
