"""Models: the papers' networks by name, each with the parameters that the papers freeze.

All are float32. By default none uses batch statistics, so all are fit for user-level DP.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from privpart.models import layered, resnet, transformer
from privpart.models.convert import freeze_batch_norm, replace_batch_norm
from privpart.models.layered import bag_of_words, emnist_cnn, mcmahan_2nn, mcmahan_cnn, small_cnn
from privpart.models.resnet import resnet8, resnet18, resnet18_gn
from privpart.models.transformer import text_transformer, word_lm
from privpart.settings.client import LossName
from privpart.settings.outlines import GROUPS, outline_of
from privpart.start_values import Initializer

__all__ = [
    "MODELS",
    "Architecture",
    "bag_of_words",
    "build_network",
    "emnist_cnn",
    "example_batch",
    "example_network",
    "freeze_batch_norm",
    "mcmahan_2nn",
    "mcmahan_cnn",
    "replace_batch_norm",
    "resnet8",
    "resnet18",
    "resnet18_gn",
    "small_cnn",
    "text_transformer",
    "word_lm",
]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A network and the parts of it that papers train.

    Attributes:
        build: returns the module; its keyword arguments are sizes.
        example: shape of one input; FedPT crops CIFAR-10 to 24 x 24 and cuts sentences to 20 words.
        ladder: name of a rung -> patterns of trainable parameters, see ``privpart.patterns``. The
            first rung trains everything, each later one freezes more.
        groups: FedPart's layer groups #1, #2, ... in order, as patterns that cover the network
            once; empty if no paper defines them.
        initializers: by pattern, where the network does not use ``PartialModel``'s defaults.
        loss: training loss, see ``LocalTraining``.
    """

    build: Callable[..., nn.Module]
    example: tuple[int, ...]
    ladder: Mapping[str, tuple[str, ...]]
    groups: tuple[tuple[str, ...], ...] = ()
    initializers: Mapping[str, Initializer] = field(default_factory=dict)
    loss: LossName = "cross_entropy"


MODELS: Mapping[str, Architecture] = {
    "small_cnn": Architecture(small_cnn, (1, 8, 8), layered.CNN_LADDER),
    "emnist_cnn": Architecture(emnist_cnn, (1, 28, 28), layered.CNN_LADDER),
    "mcmahan_cnn": Architecture(mcmahan_cnn, (1, 28, 28), layered.CNN_LADDER),
    "mcmahan_2nn": Architecture(mcmahan_2nn, (784,), layered.MCMAHAN_2NN_LADDER),
    "bag_of_words": Architecture(
        bag_of_words, (10_000,), layered.BAG_OF_WORDS_LADDER, loss="binary_cross_entropy"
    ),
    "resnet18_gn": Architecture(
        resnet18_gn, (3, 24, 24), resnet.RESNET18_LADDER, initializers=resnet.RESNET18_GN_START
    ),
    "resnet8": Architecture(resnet8, (3, 32, 32), resnet.RESNET8_LADDER, GROUPS["resnet8"]),
    "resnet18": Architecture(resnet18, (3, 32, 32), resnet.RESNET18_LADDER, GROUPS["resnet18"]),
    "word_lm": Architecture(
        word_lm, (20,), transformer.LANGUAGE_LADDER, initializers=transformer.LANGUAGE_START
    ),
    "text_transformer": Architecture(
        text_transformer,
        (512,),
        transformer.CLASSIFIER_LADDER,
        GROUPS["text_transformer"],
        transformer.CLASSIFIER_START,
    ),
}
"""Network by name: what ``[model] name`` of a plan, and ``build_network``, may be given."""


def build_network(name: str, **sizes: Any) -> nn.Module:  # noqa: ANN401  every network has its own
    """Return a new network by its name in ``MODELS``.

    >>> sum(p.numel() for p in build_network("emnist_cnn").parameters())
    1690174
    """
    outline_of(name, **sizes)
    try:
        return MODELS[name].build(**sizes)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(f"model {name!r}: {reason}.") from None


def example_network(name: str) -> nn.Module:
    """Return a network at its paper's sizes; ``small_cnn`` has the sizes of ``privpart demo``."""
    sizes = {"channels": (16, 32), "hidden": 512, "image_size": 8} if name == "small_cnn" else {}
    return build_network(name, **sizes)


def example_batch(name: str, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return arbitrary inputs and labels of the right shapes for ``example_network(name)``.

    >>> x, y = example_batch("word_lm", 4)
    >>> x.shape, y.shape
    (torch.Size([4, 20]), torch.Size([4, 20]))
    """
    shape = (checks.count("batch_size", batch_size), *MODELS[name].example)
    generator = torch.Generator().manual_seed(0)
    if name in {"word_lm", "text_transformer"}:
        tokens = torch.randint(1000, shape, generator=generator)
        return tokens, tokens if name == "word_lm" else tokens[:, 0] % 5
    x = torch.rand(shape, generator=generator)
    if name == "bag_of_words":
        return x, torch.zeros(shape[0], 500)
    return x, torch.arange(shape[0]) % 10
