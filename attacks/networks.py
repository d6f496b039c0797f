"""Small smooth networks on which gradient matching is known to work: yardsticks for an audit.

An attack that fails here is broken; one that fails on a deep ReLU network may only be weak.
"""

import math
from collections import OrderedDict

import torch
from torch import nn

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
    classes = checks.count("classes", classes, minimum=2)
    kernel, width, stride = (3, 8, 1) if size < 16 else (5, 12, 2)
    side = math.ceil(math.ceil(size / stride) / 2)
    with torch.device("meta"):
        layers: dict[str, nn.Module] = {
            "conv1": nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2),
            "tanh1": nn.Tanh(),
            "conv2": nn.Conv2d(width, width, kernel, 2, padding=kernel // 2),
            "tanh2": nn.Tanh(),
            "flatten": nn.Flatten(),
            "dense1": nn.Linear(width * side * side, 32),
            "tanh3": nn.Tanh(),
            "dense2": nn.Linear(32, classes),
        }
    return _initialised(layers, generator)


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
    classes = checks.count("classes", classes, minimum=2)
    with torch.device("meta"):
        layers: dict[str, nn.Module] = {
            "flatten": nn.Flatten(),
            "dense1": nn.Linear(pixels, hidden),
            "tanh1": nn.Tanh(),
            "dense2": nn.Linear(hidden, classes),
        }
    return _initialised(layers, generator)


@torch.no_grad()
def _initialised(layers: dict[str, nn.Module], generator: torch.Generator) -> nn.Sequential:
    """Allocate and fill layers built on "meta", where torch draws nothing from global state."""
    model = nn.Sequential(OrderedDict(layers)).to_empty(device="cpu")
    for layer in model:
        weights = list(layer.parameters())
        for parameter in weights:
            bound = weights[0][0].numel() ** -0.5
            parameter.uniform_(-bound, bound, generator=generator)
    return model
