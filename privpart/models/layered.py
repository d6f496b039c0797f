"""Layered networks: two convolutions and two dense layers, dense layers alone, or a single one."""

from collections import OrderedDict
from collections.abc import Mapping

from torch import nn

from privpart.settings import outlines

# FedPT, section 4.1: the dense layer after the convolutions holds 95 % of the parameters.
CNN_LADDER: Mapping[str, tuple[str, ...]] = {"full": ("*",), "freeze-dense1": ("!dense1.*",)}
MCMAHAN_2NN_LADDER: Mapping[str, tuple[str, ...]] = {
    "full": ("*",),
    "freeze-1": ("!dense1.*",),
    "freeze-1-2": ("!dense1.*", "!dense2.*"),
}
BAG_OF_WORDS_LADDER: Mapping[str, tuple[str, ...]] = {"full": ("*",)}


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
    outlines.small_cnn(
        channels=channels,
        hidden=hidden,
        image_size=image_size,
        classes=classes,
        kernel=kernel,
        groups=groups,
    )
    first, second = channels
    features = second * (image_size // 4) ** 2
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


def mcmahan_2nn(*, inputs: int = 784, hidden: int = 200, classes: int = 62) -> nn.Module:
    """Return the "2NN" of McMahan et al. 2017: dense1, dense2, dense3 with ReLU between.

    Maps (B, ...) with ``inputs`` values per example to logits (B, classes); 209,662 parameters.
    """
    outlines.mcmahan_2nn(inputs=inputs, hidden=hidden, classes=classes)
    layers: dict[str, nn.Module] = {
        "flatten": nn.Flatten(),
        "dense1": nn.Linear(inputs, hidden),
        "relu1": nn.ReLU(),
        "dense2": nn.Linear(hidden, hidden),
        "relu2": nn.ReLU(),
        "dense3": nn.Linear(hidden, classes),
    }
    return nn.Sequential(OrderedDict(layers))


def bag_of_words(*, words: int = 10_000, tags: int = 500) -> nn.Module:
    """Return one-versus-rest logistic regression: counts (B, words) -> logits (B, tags).

    It is Federated Select's tag prediction (Charles et al. 2022, section 5.2): 5,000,500
    parameters. Its loss is each tag's binary cross-entropy, see ``LocalTraining(loss=...)``.
    """
    outlines.bag_of_words(words=words, tags=tags)
    return nn.Sequential(OrderedDict(dense=nn.Linear(words, tags)))
