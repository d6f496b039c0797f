"""Networks to audit: smooth ones on which gradient matching works, ReLU ones on which it fails.

An attack that fails on a smooth network is broken; one that fails on a deep ReLU network may only
be weak. A benchmark needs both kinds: smooth networks alone flatter an attack, ReLU networks alone
a defence.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

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
    return _lenet(generator, channels, size, classes, nn.Tanh)


def relu_lenet(
    generator: torch.Generator, *, channels: int = 1, size: int = 8, classes: int = 10
) -> nn.Sequential:
    """Return ``smooth_lenet`` with ReLU in place of tanh; second-order solvers fail on it."""
    return _lenet(generator, channels, size, classes, nn.ReLU)


def smooth_mlp(
    generator: torch.Generator,
    *,
    channels: int = 1,
    size: int = 8,
    hidden: int = 32,
    classes: int = 10,
) -> nn.Sequential:
    """Return dense1, tanh, dense2 on the flattened image, initialised like ``smooth_lenet``."""
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


def relu_resnet8(
    generator: torch.Generator, *, channels: int = 3, width: int = 64, classes: int = 100
) -> nn.Module:
    """Return FedPart's ResNet-8: ReLU, batch normalisation, three residual blocks.

    A 7x7 stem of stride 2 and a 3x3 max-pool, blocks of ``width``, 2 ``width`` and 4 ``width``
    channels, global average pooling, one dense layer: (B, channels, S, S) -> (B, classes).
    ``RESNET8_GROUPS`` names the ten parts that FedPart trains in turn (Wang et al. 2024).

    >>> model = relu_resnet8(torch.Generator().manual_seed(0))
    >>> sum(p.numel() for p in model.parameters())
    1258404
    """
    wide = checks.count("width", width)
    channels = checks.count("channels", channels)
    classes = checks.count("classes", classes, minimum=2)
    with torch.device("meta"):
        layers: dict[str, nn.Module] = {
            "conv1": nn.Conv2d(channels, wide, 7, 2, padding=3, bias=False),
            "bn1": nn.BatchNorm2d(wide),
            "relu": nn.ReLU(),
            "pool": nn.MaxPool2d(3, 2, padding=1),
            "layer0": _Block(wide, wide, 1),
            "layer1": _Block(wide, 2 * wide, 2),
            "layer2": _Block(2 * wide, 4 * wide, 2),
            "average": nn.AdaptiveAvgPool2d(1),
            "flatten": nn.Flatten(),
            "fc": nn.Linear(4 * wide, classes),
        }
    return _initialised(layers, generator)


RESNET8_GROUPS = {
    "#1": ("conv1.*", "bn1.*"),
    "#2": ("layer0.conv1.*", "layer0.bn1.*"),
    "#3": ("layer0.conv2.*", "layer0.bn2.*"),
    "#4": ("layer1.conv1.*", "layer1.bn1.*"),
    "#5": ("layer1.conv2.*", "layer1.bn2.*"),
    "#6": ("layer1.shortcut.*",),
    "#7": ("layer2.conv1.*", "layer2.bn1.*"),
    "#8": ("layer2.conv2.*", "layer2.bn2.*"),
    "#9": ("layer2.shortcut.*",),
    "#10": ("fc.*",),
}


class _Block(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al. 2016)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if inside != outside:
            convolution = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + self.shortcut(x))


def _lenet(
    generator: torch.Generator,
    channels: int,
    size: int,
    classes: int,
    activation: Callable[[], nn.Module],
) -> nn.Sequential:
    channels = checks.count("channels", channels)
    size = checks.count("size", size, minimum=4)
    classes = checks.count("classes", classes, minimum=2)
    kernel, width, stride = (3, 8, 1) if size < 16 else (5, 12, 2)
    side = math.ceil(math.ceil(size / stride) / 2)
    with torch.device("meta"):
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
    return _initialised(layers, generator)


@torch.no_grad()
def _initialised(layers: dict[str, nn.Module], generator: torch.Generator) -> nn.Sequential:
    """Allocate and fill layers built on "meta", where torch draws nothing from its global state."""
    model = nn.Sequential(OrderedDict(layers)).to_empty(device="cpu")
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()  # ones and zeros: nothing random
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            bound = layer.weight[0].numel() ** -0.5
            for parameter in layer.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
    return model
