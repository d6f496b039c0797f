"""Small smooth networks on which gradient matching is known to work: yardsticks for an audit.

An attack that fails here is broken; one that fails on a deep ReLU network may only be weak.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from accounting import checks


def smooth_lenet(
    generator: torch.Generator, *, channels: int = 1, size: int = 8, classes: int = 10
) -> nn.Sequential:
    """Return conv1, conv2, dense1, dense2 with tanh between: (B, channels, size, size) -> logits.

    Images under 16 pixels get 3x3 kernels, 8 channels and one stride of 2 (5,122 parameters for
    8x8 digits); larger ones 5x5 kernels, 12 channels and two strides of 2 (23,102 for 28x28).
    Weights and biases are U(-1/sqrt(fan_in), 1/sqrt(fan_in)) from ``generator``.

    >>> model = smooth_lenet(torch.Generator().manual_seed(0))
    >>> sum(p.numel() for p in model.parameters())
    5122
    """
    channels = checks.count("channels", channels)
    size = checks.count("size", size, minimum=4)
    kernel, width, stride = (3, 8, 1) if size < 16 else (5, 12, 2)
    side = math.ceil(math.ceil(size / stride) / 2)
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2)),
        ("tanh1", nn.Tanh()),
        ("conv2", nn.Conv2d(width, width, kernel, 2, padding=kernel // 2)),
        ("tanh2", nn.Tanh()),
        ("flatten", nn.Flatten()),
        ("dense1", nn.Linear(width * side * side, 32)),
        ("tanh3", nn.Tanh()),
        ("dense2", nn.Linear(32, checks.count("classes", classes, minimum=2))),
    ]
    return _initialised(nn.Sequential(OrderedDict(layers)), generator)


def smooth_mlp(
    generator: torch.Generator,
    *,
    channels: int = 1,
    size: int = 8,
    hidden: int = 32,
    classes: int = 10,
) -> nn.Sequential:
    """Return dense1, tanh, dense2 on the flattened image; initialised as ``smooth_lenet``."""
    pixels = checks.count("channels", channels) * checks.count("size", size) ** 2
    hidden = checks.count("hidden", hidden)
    layers: list[tuple[str, nn.Module]] = [
        ("flatten", nn.Flatten()),
        ("dense1", nn.Linear(pixels, hidden)),
        ("tanh1", nn.Tanh()),
        ("dense2", nn.Linear(hidden, checks.count("classes", classes, minimum=2))),
    ]
    return _initialised(nn.Sequential(OrderedDict(layers)), generator)


def _initialised(model: nn.Sequential, generator: torch.Generator) -> nn.Sequential:
    for layer in model:
        fan_in = next((p[0].numel() for p in layer.parameters()), 0)
        for parameter in layer.parameters():
            _uniform(parameter, fan_in**-0.5, generator)
    return model


@torch.no_grad()
def _uniform(parameter: Tensor, bound: float, generator: torch.Generator) -> None:
    parameter.uniform_(-bound, bound, generator=generator)
