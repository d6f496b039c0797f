"""Inspect: FedPart's diagnostics of partial rounds (Wang et al. 2024).

All of them look at data or at local steps, and no guarantee of a run covers them. Use them in
simulations and on public data only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from privpart.client import Loss, batch_loss, client_update
from privpart.data.batches import Batch, count_rows, take
from privpart.model import PartialModel

_NOT_CLIPPED = 1e30


def step_sizes(
    model: PartialModel,
    start: Tensor,
    examples: Batch,
    **training: Any,  # noqa: ANN401  those of ``client_update``
) -> tuple[Tensor, list[float]]:
    """Return a client's update and the length ||dw|| of each of its steps (FedPart, Fig. 1).

    The update is not clipped.

    Args:
        model: model of the client.
        start: trainable parameters at the start of the round, shape (d,).
        examples: the client's, see ``client_update``.
        training: other arguments of ``client_update``.
    """
    sizes: list[float] = []
    before = start.clone()

    def measure() -> None:
        sizes.append(float((model.flat - before).norm()))
        before.copy_(model.flat)

    training |= {"clip_norm": _NOT_CLIPPED, "after_step": measure}
    return client_update(model, start, examples, **training), sizes


def jump_after_averaging(rounds: Sequence[Sequence[float]]) -> float:
    """Return the mean ratio of a round's first step size to the previous round's last.

    Args:
        rounds: step sizes of one client in each of two or more rounds, at least one per round.
    """
    ratios = [new[0] / old[-1] for old, new in pairwise(rounds) if old and new]
    if not ratios:
        raise ConfigError("rounds: must be two or more, with at least one step each.")
    return fmean(ratios)


@dataclass(frozen=True, slots=True)
class MaskRatio:
    """Ratio k of FedPart's Assumption 3: how much the deviations of masked gradients differ.

    Attributes:
        random: largest ratio between random masks of 1/M of the parameters (FedPart, Table 13).
        groups: largest ratio between the masks that FedPart uses, its layer groups.
        by_group: mean deviation of each group, E ||S (g - E g)||.
    """

    random: float
    groups: float
    by_group: tuple[float, ...]


def mask_ratio(
    model: PartialModel,
    examples: Batch,
    *,
    masks: int,
    generator: torch.Generator,
    loss: str | Loss = "cross_entropy",
) -> MaskRatio:
    """Estimate k of FedPart's Assumption 3 from per-example gradients, shape (n, d) in memory.

    Args:
        model: model with two or more groups.
        examples: two or more, see ``client_update``.
        masks: number of random masks, >= 2.
        generator: random generator of the masks.
        loss: see ``batch_loss``.
    """
    groups = len(model.group_sizes)
    count = count_rows(examples)
    if groups < 2 or count < 2 or checks.count("masks", masks) < 2:
        raise ConfigError("mask_ratio: needs at least two groups, examples and masks.")
    model.train_only()
    deviation = torch.empty(count, model.dim)
    for number, row in enumerate(deviation):
        example = take(examples, torch.tensor([number]))
        model.gradient.zero_()
        batch_loss(model.module, example, loss).backward()  # type: ignore[no-untyped-call]
        row.copy_(model.gradient)
    model.gradient.zero_()
    # squares are summed per mask below
    deviation.sub_(deviation.mean(dim=0)).square_()

    def length(columns: Tensor | slice) -> float:
        return float(deviation[:, columns].sum(dim=1).sqrt().mean())

    size = max(1, model.dim // groups)
    random = [length(torch.randperm(model.dim, generator=generator)[:size]) for _ in range(masks)]
    by_group = tuple(length(model.spans([group])[0]) for group in range(groups))
    return MaskRatio(max(random) / min(random), max(by_group) / min(by_group), by_group)


def maximal_activation(
    module: nn.Module, layer: str, channel: int, start: Tensor, *, steps: int = 100
) -> Tensor:
    """Return the image that maximises the activation of one channel (Erhan et al. 2009).

    Args:
        module: network; it is left unchanged.
        layer: name of one of its layers.
        channel: channel of the layer's output; its mean is maximised.
        start: start image, shape (C, H, W), in [0, 1]. To compare two networks, use the same image
            for both: images from different starts differ by chance.
        steps: number of Adam steps, >= 1.

    Returns:
        Shape (C, H, W), in [0, 1].
    """
    layers = dict(module.named_modules())
    if layer not in layers:
        raise ConfigError(f"layer={layer!r}: must be one of {', '.join(filter(None, layers))}.")
    outputs: list[Tensor] = []
    handle = layers[layer].register_forward_hook(lambda _m, _x, output: outputs.append(output))
    image = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([image], lr=0.05)
    try:
        for _ in range(checks.count("steps", steps)):
            outputs.clear()
            module(image[None])
            if not 0 <= channel < outputs[0].shape[1]:
                raise ConfigError(f"channel={channel}: {layer} has {outputs[0].shape[1]} channels.")
            (image.grad,) = torch.autograd.grad(-outputs[0][0, channel].mean(), image)
            optimizer.step()
            # an image outside of the range would compare saturation, not features
            image.data.clamp_(0, 1)
    finally:
        handle.remove()
    return image.detach()


def first_kernels(module: nn.Module) -> Tensor:
    """Return the first convolution's kernels, each scaled to [0, 1], shape (filters, C, k, k)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            kernels = layer.weight.detach()
            low = kernels.amin(dim=(1, 2, 3), keepdim=True)
            span = kernels.amax(dim=(1, 2, 3), keepdim=True) - low
            return (kernels - low) / span.clamp_min(1e-12)
    raise ConfigError("kernels: the network has no convolution.")
