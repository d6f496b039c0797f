"""Networks to audit: smooth ones on which gradient matching works, ReLU ones on which it fails.

An attack that fails on a smooth network is broken; one that fails on a deep ReLU network may only
be weak. A benchmark needs both kinds: smooth networks alone flatter an attack, ReLU networks alone
a defence.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from accounting import checks

Model = TypeVar("Model", bound=nn.Module)


def smooth_lenet(
    generator: torch.Generator,
    *,
    channels: int = 1,
    size: int = 8,
    classes: int = 10,
    activation: Callable[[], nn.Module] = nn.Tanh,
) -> nn.Sequential:
    """Return conv1, conv2, dense1, dense2 with tanh between: (B, channels, size, size) -> logits.

    Images under 16 pixels get 3x3 kernels, 8 channels and one stride of 2 (5,122 parameters for
    8x8 digits); larger ones 5x5 kernels, 12 channels and two strides of 2 (23,102 for 28x28).
    Start values are those of ``drawn``.

    >>> model = smooth_lenet(torch.Generator().manual_seed(0))
    >>> sum(p.numel() for p in model.parameters())
    5122
    """
    channels = checks.count("channels", channels)
    size = checks.count("size", size, minimum=4)
    classes = checks.count("classes", classes, minimum=2)
    kernel, width, stride = (3, 8, 1) if size < 16 else (5, 12, 2)
    side = math.ceil(math.ceil(size / stride) / 2)

    def build() -> nn.Sequential:
        layers: dict[str, nn.Module] = {
            "conv1": nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2),
            "act1": activation(),
            "conv2": nn.Conv2d(width, width, kernel, 2, padding=kernel // 2),
            "act2": activation(),
            "flatten": nn.Flatten(),
            "dense1": nn.Linear(width * side * side, 32),
            "act3": activation(),
            "dense2": nn.Linear(32, classes),
        }
        return nn.Sequential(OrderedDict(layers))

    return drawn(build, generator)


relu_lenet = partial(smooth_lenet, activation=nn.ReLU)
"""The same with ReLU in place of tanh; second-order solvers fail on it."""


def smooth_mlp(
    generator: torch.Generator, *, channels: int = 1, size: int = 8, classes: int = 10
) -> nn.Sequential:
    """Return dense1, tanh, dense2 on the flattened image, initialised like ``smooth_lenet``."""
    pixels = checks.count("channels", channels) * checks.count("size", size) ** 2
    classes = checks.count("classes", classes, minimum=2)

    def build() -> nn.Sequential:
        layers: dict[str, nn.Module] = {
            "flatten": nn.Flatten(),
            "dense1": nn.Linear(pixels, 32),
            "tanh1": nn.Tanh(),
            "dense2": nn.Linear(32, classes),
        }
        return nn.Sequential(OrderedDict(layers))

    return drawn(build, generator)


@torch.no_grad()
def drawn(build: Callable[[], Model], generator: torch.Generator) -> Model:
    """Return what ``build`` returns, with start values from ``generator``.

    Weights and biases of dense and convolutional layers are U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
    """
    with torch.device("meta"):  # where torch draws nothing from its global state
        model = build()
    for layer in model.to_empty(device="cpu").modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()  # ones and zeros: nothing random
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            bound = layer.weight[0].numel() ** -0.5
            for parameter in layer.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
    return model
