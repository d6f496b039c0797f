"""Multilayer networks: McMahan's 2NN with two hidden layers, and logistic regression with none."""

from collections import OrderedDict
from collections.abc import Mapping

from torch import nn

from accounting import checks

MCMAHAN_2NN_LADDER: Mapping[str, tuple[str, ...]] = {
    "full": ("*",),
    "freeze-1": ("!dense1.*",),
    "freeze-1-2": ("!dense1.*", "!dense2.*"),
}
BAG_OF_WORDS_LADDER: Mapping[str, tuple[str, ...]] = {"full": ("*",)}


def mcmahan_2nn(*, inputs: int = 784, hidden: int = 200, classes: int = 62) -> nn.Module:
    """Return the "2NN" of McMahan et al. 2017: dense1, dense2, dense3 with ReLU between.

    Maps (B, ...) with ``inputs`` values per example to logits (B, classes); 209,662 parameters.
    """
    for name, value in {"inputs": inputs, "hidden": hidden, "classes": classes}.items():
        checks.count(name, value)
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
    return nn.Sequential(
        OrderedDict(dense=nn.Linear(checks.count("words", words), checks.count("tags", tags)))
    )
