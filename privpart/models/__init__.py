"""Models: the papers' networks by name, each with the parameters that the papers freeze.

All are float32. By default none uses batch statistics, so all are fit for user-level DP.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from accounting.checks import ConfigError
from privpart.client import LossName
from privpart.models import convolutional, multilayer, preactivation, resnet, transformer
from privpart.models.convert import freeze_batch_norm, replace_batch_norm
from privpart.models.convolutional import emnist_cnn, mcmahan_cnn, small_cnn
from privpart.models.multilayer import bag_of_words, mcmahan_2nn
from privpart.models.preactivation import resnet18_gn
from privpart.models.resnet import resnet8, resnet18
from privpart.models.transformer import text_transformer, word_lm
from privpart.start_values import Initializer

__all__ = [
    "MODELS",
    "Architecture",
    "bag_of_words",
    "build_network",
    "emnist_cnn",
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
        ladder: name of a rung -> patterns of trainable parameters, see ``privpart.patterns``. The
            first rung trains everything, each later one freezes more.
        groups: FedPart's layer groups #1, #2, ... in order, as patterns that cover the network
            once; empty if no paper defines them.
        initializers: by pattern, where the network does not use ``PartialModel``'s defaults.
        loss: training loss, see ``LocalTraining``.
    """

    build: Callable[..., nn.Module]
    ladder: Mapping[str, tuple[str, ...]]
    groups: tuple[tuple[str, ...], ...] = ()
    initializers: Mapping[str, Initializer] = field(default_factory=dict)
    loss: LossName = "cross_entropy"


MODELS: Mapping[str, Architecture] = {
    "small_cnn": Architecture(small_cnn, convolutional.CNN_LADDER),
    "emnist_cnn": Architecture(emnist_cnn, convolutional.CNN_LADDER),
    "mcmahan_cnn": Architecture(mcmahan_cnn, convolutional.CNN_LADDER),
    "mcmahan_2nn": Architecture(mcmahan_2nn, multilayer.MCMAHAN_2NN_LADDER),
    "bag_of_words": Architecture(
        bag_of_words, multilayer.BAG_OF_WORDS_LADDER, loss="binary_cross_entropy"
    ),
    "resnet18_gn": Architecture(
        resnet18_gn, preactivation.RESNET18_GN_LADDER, initializers=preactivation.RESNET18_GN_START
    ),
    "resnet8": Architecture(resnet8, resnet.RESNET8_LADDER, resnet.RESNET8_GROUPS),
    "resnet18": Architecture(resnet18, resnet.RESNET18_LADDER, resnet.RESNET18_GROUPS),
    "word_lm": Architecture(
        word_lm, transformer.LANGUAGE_LADDER, initializers=transformer.LANGUAGE_START
    ),
    "text_transformer": Architecture(
        text_transformer,
        transformer.CLASSIFIER_LADDER,
        transformer.CLASSIFIER_GROUPS,
        transformer.CLASSIFIER_START,
    ),
}
"""Network by name: what ``[model] name`` of a plan, and ``build_network``, may be given."""


def build_network(name: str, **sizes: Any) -> nn.Module:  # noqa: ANN401  every network has its own
    """Return a new network by its name in ``MODELS``.

    Raises:
        ConfigError: ``name`` is unknown, or a size is not valid for that network.

    >>> sum(p.numel() for p in build_network("emnist_cnn").parameters())
    1690174
    """
    if name not in MODELS:
        near = difflib.get_close_matches(str(name), MODELS, n=3, cutoff=0.3)
        raise ConfigError(f"model {name!r}: unknown. Near it: {', '.join(near or MODELS)}.")
    try:
        return MODELS[name].build(**sizes)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(f"model {name!r}: {reason}.") from None
