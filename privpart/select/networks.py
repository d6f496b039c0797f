"""Networks: which slices of the paper's four models clients select, and how a smaller one is built.

Charles et al. 2022, section 5: rows of the logistic regression, filters of the CNN's second
convolution, neurons of the 2NN's first layer, words and hidden neurons of the transformer.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from accounting import checks
from privpart.select.layout import KeySpace, Part

ABSENT = -1
"""Fills a bag of words up to the length of the longest."""


def cnn_filters(image_size: int = 28, *, norm: bool = False) -> KeySpace:
    """Filters of conv2 of ``small_cnn`` and its relatives, coupled with all that reads them.

    Args:
        image_size: height and width of the input; each filter leaves a map of a quarter of it.
        norm: whether the network normalises behind conv2.
    """
    pixels = (checks.count("image_size", image_size, minimum=4) // 4) ** 2
    parts = [Part("conv2.weight"), Part("conv2.bias")]
    if norm:
        parts += [Part("norm.weight"), Part("norm.bias")]
    return KeySpace("filters", (*parts, Part("dense1.weight", dim=1, block=pixels)))


def dense_neurons() -> KeySpace:
    """Neurons of the first hidden layer of ``mcmahan_2nn``: its rows, and the columns behind."""
    parts = (Part("dense1.weight"), Part("dense1.bias"), Part("dense2.weight", dim=1))
    return KeySpace("neurons", parts)


def bag_words() -> KeySpace:
    """Words of ``WordBag``."""
    return KeySpace("words", (Part("rows"),))


def lm_words() -> KeySpace:
    """Words of ``word_lm``, whose output rows are its embedding rows."""
    return KeySpace("words", (Part("embedding.weight"),))


def lm_hidden(layer: int = 0) -> KeySpace:
    """Hidden neurons of the feed-forward part of one encoder layer of ``word_lm``."""
    at = f"layers.{checks.count('layer', layer, minimum=0)}"
    return KeySpace(
        f"hidden {layer}",
        (
            Part(f"{at}.linear1.weight"),
            Part(f"{at}.linear1.bias"),
            Part(f"{at}.linear2.weight", dim=1),
        ),
    )


class WordBag(nn.Module):
    """Logistic regression on sparse bags of words, at the cost of the words that occur.

    The same model as ``privpart.models.bag_of_words``, whose weight is ``rows`` transposed. It adds
    the rows of the words in the order of the input, so that leaving absent words out of the model
    changes no bit of what it computes.

    Args:
        words: n, >= 1.
        tags: outputs, >= 1.
    """

    def __init__(self, words: int, tags: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(
            torch.zeros(checks.count("words", words), checks.count("tags", tags))
        )
        self.bias = nn.Parameter(torch.zeros(tags))

    def forward(self, bags: Tensor) -> Tensor:
        """Map word ids (B, L), filled up with ``ABSENT``, to logits (B, tags)."""
        present = (bags != ABSENT).to(self.rows.dtype)
        total: Tensor = embedding_bag(
            bags.clamp(min=0), self.rows, mode="sum", per_sample_weights=present
        )
        return total + self.bias
