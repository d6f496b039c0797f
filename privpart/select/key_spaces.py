"""Key spaces: which slices of the paper's four models clients select, and the smaller networks.

Charles et al. 2022, section 5: rows of the logistic regression, filters of the CNN's second
convolution, neurons of the 2NN's first layer, words and hidden neurons of the transformer.
"""

from collections.abc import Sequence

from torch import nn

from accounting import checks
from accounting.checks import ConfigError
from privpart.models.transformer import LanguageModel
from privpart.select.layout import KeySpace, Part


def cnn_filters(image_size: int = 28, *, norm: bool = False) -> KeySpace:
    """Return the filters of conv2 of ``small_cnn`` and its variants, with all that depends on them.

    conv2's output map has a quarter of the image's height and width. ``norm``: whether a
    normalisation follows.
    """
    pixels = (checks.count("image_size", image_size, minimum=4) // 4) ** 2
    parts = [Part("conv2.weight"), Part("conv2.bias")]
    if norm:
        parts += [Part("norm.weight"), Part("norm.bias")]
    return KeySpace("filters", (*parts, Part("dense1.weight", dim=1, block=pixels)))


def dense_neurons() -> KeySpace:
    """Return the first layer's neurons of ``mcmahan_2nn``, with the columns that read them."""
    parts = (Part("dense1.weight"), Part("dense1.bias"), Part("dense2.weight", dim=1))
    return KeySpace("neurons", parts)


def lm_words() -> KeySpace:
    """Return the words of ``word_lm``, whose output layer shares the embedding's rows."""
    return KeySpace("words", (Part("embedding.weight"),))


def lm_hidden(*layers: int) -> KeySpace:
    """Return the feed-forward neurons of ``word_lm``: key k selects neuron k of each layer."""
    parts: list[Part] = []
    for layer in layers:
        at = f"layers.{checks.count('layer', layer, minimum=0)}"
        parts += [Part(f"{at}.linear1.weight"), Part(f"{at}.linear1.bias")]
        parts += [Part(f"{at}.linear2.weight", dim=1)]
    return KeySpace("hidden", tuple(parts))


def key_spaces(network: nn.Module) -> dict[str, KeySpace]:
    """Return the key spaces of a network of ``privpart.models`` by name; {} if it has none.

    >>> from privpart.models import mcmahan_2nn, word_lm
    >>> list(key_spaces(mcmahan_2nn())), list(key_spaces(word_lm()))
    (['neurons'], ['words', 'hidden'])
    """
    if isinstance(network, LanguageModel):
        return {"words": lm_words(), "hidden": lm_hidden(*range(len(network.layers)))}
    layers = dict(network.named_children())
    conv2, dense1 = layers.get("conv2"), layers.get("dense1")
    if isinstance(conv2, nn.Conv2d) and isinstance(dense1, nn.Linear):
        # of one filter's output map
        pixels = dense1.in_features // conv2.out_channels
        size = 4 * round(pixels**0.5)
        return {"filters": cnn_filters(size, norm=isinstance(layers.get("norm"), nn.GroupNorm))}
    if isinstance(dense1, nn.Linear) and isinstance(layers.get("dense2"), nn.Linear):
        return {"neurons": dense_neurons()}
    return {}


def shrunk(network: nn.Module, spaces: Sequence[KeySpace], counts: Sequence[int]) -> nn.Module:
    """Shrink ``network`` in place to the first ``count`` slices of each space, and return it.

    The layers of ``key_spaces`` compute with any shape of their weights.

    Raises:
        ConfigError: the groups of a normalisation do not divide the remaining filters.
    """
    for space, count in zip(spaces, counts, strict=True):
        for part in space.parts:
            owner, _, name = part.parameter.rpartition(".")
            layer, parameter = network.get_submodule(owner), network.get_parameter(part.parameter)
            # a group must keep whole channels
            if isinstance(layer, nn.GroupNorm) and count % layer.num_groups:
                raise ConfigError(
                    f"{count} {space.name}: must be a multiple of the {layer.num_groups} groups "
                    f"of {owner!r}. Use another number, or a network without it."
                )
            values = parameter.detach().narrow(part.dim, 0, count * part.block).clone()
            setattr(layer, name, nn.Parameter(values))
    return network
