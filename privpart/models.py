"""Models: small networks with named layers, all fit for user-level DP (no batch statistics)."""

from collections import OrderedDict

from torch import nn

from accounting import checks


def small_cnn(
    *, channels: tuple[int, int], hidden: int, image_size: int, classes: int = 10, kernel: int = 3
) -> nn.Module:
    """Two convolutions, one group normalisation, two dense layers, for one-channel images.

    The first dense layer holds most parameters, as in the EMNIST network of FedPT (Table 6); it is
    what FedPT freezes. Layers: conv1, conv2, norm, dense1, dense2.

    Args:
        channels: filters of conv1 and conv2; the latter even.
        hidden: width of dense1.
        image_size: height and width of the input, a multiple of 4.
        classes: number of outputs.
        kernel: odd size of the filters.
    """
    first, second = (checks.count("channels", c) for c in channels)
    features = second * (checks.count("image_size", image_size, minimum=4) // 4) ** 2
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(1, first, kernel, padding="same")),
        ("pool1", nn.MaxPool2d(2)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(first, second, kernel, padding="same")),
        ("norm", nn.GroupNorm(2, second)),
        ("pool2", nn.MaxPool2d(2)),
        ("relu2", nn.ReLU()),
        ("flatten", nn.Flatten()),
        ("dense1", nn.Linear(features, hidden)),
        ("relu3", nn.ReLU()),
        ("dense2", nn.Linear(hidden, classes)),
    ]
    return nn.Sequential(OrderedDict(layers))
