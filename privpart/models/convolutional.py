"""Convolutional networks: two convolutions and two dense layers for one-channel images."""

from collections import OrderedDict
from collections.abc import Mapping

from torch import nn

from accounting import checks
from accounting.checks import ConfigError

# FedPT, section 4.1: the dense layer after the convolutions holds 95 % of the parameters.
CNN_LADDER: Mapping[str, tuple[str, ...]] = {
    "full": ("*",),
    "freeze-dense1": ("!dense1.*",),
}


def small_cnn(
    *,
    channels: tuple[int, int],
    hidden: int,
    image_size: int,
    classes: int = 10,
    kernel: int = 3,
    groups: int = 2,
) -> nn.Module:
    """Return a network of conv1, conv2, norm, dense1, dense2; dense1 holds most parameters.

    Maps (B, 1, image_size, image_size) to logits (B, classes).

    Args:
        channels: filters of conv1 and conv2; the latter is a multiple of ``groups``.
        hidden: width of dense1.
        image_size: height and width of the input, a multiple of 4.
        classes: number of outputs.
        kernel: height and width of the filters, odd.
        groups: groups of the normalisation after conv2; 0 removes the normalisation.
    """
    first, second = (checks.count("channels", c) for c in channels)
    for name, value in {"hidden": hidden, "classes": classes, "kernel": kernel}.items():
        checks.count(name, value)
    if kernel % 2 == 0:
        raise ConfigError(f"kernel={kernel}: must be odd, so that the image keeps its size.")
    if checks.count("groups", groups, minimum=0) and second % groups:
        raise ConfigError(f"groups={groups}: must divide the {second} filters of conv2, or be 0.")
    features = second * (checks.count("image_size", image_size, minimum=4) // 4) ** 2
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(1, first, kernel, padding="same"),
        "pool1": nn.MaxPool2d(2),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(first, second, kernel, padding="same"),
        "norm": nn.GroupNorm(groups, second) if groups else nn.Identity(),
        "pool2": nn.MaxPool2d(2),
        "relu2": nn.ReLU(),
        "flatten": nn.Flatten(),
        "dense1": nn.Linear(features, hidden),
        "relu3": nn.ReLU(),
        "dense2": nn.Linear(hidden, classes),
    }
    return nn.Sequential(OrderedDict(layers))


def emnist_cnn(*, classes: int = 62) -> nn.Module:
    """Return FedPT's EMNIST network (Sidahmed et al. 2022, Table 6): 1,690,174 parameters.

    Maps (B, 1, 28, 28) to logits (B, classes). The paper does not state the number of groups; 32 is
    the default of the normalisation layer that its ResNet uses.
    """
    return small_cnn(
        channels=(32, 64), hidden=512, image_size=28, classes=classes, kernel=5, groups=32
    )


def mcmahan_cnn(*, classes: int = 62) -> nn.Module:
    """Return the CNN of McMahan et al. 2017: 1,690,046 parameters, no normalisation.

    Maps (B, 1, 28, 28) to logits (B, classes). Federated Select (Charles et al. 2022) uses it.
    """
    return small_cnn(
        channels=(32, 64), hidden=512, image_size=28, classes=classes, kernel=5, groups=0
    )
