"""Examples: batches of the shape that each network takes, to measure its costs."""

import torch
from torch import Tensor, nn

from accounting import checks
from privpart.models import build_network

# Shape of one input. FedPT crops CIFAR-10 to 24 x 24 and truncates sentences to 20 words.
_SHAPES: dict[str, tuple[int, ...]] = {
    "small_cnn": (1, 8, 8),
    "emnist_cnn": (1, 28, 28),
    "mcmahan_cnn": (1, 28, 28),
    "mcmahan_2nn": (784,),
    "bag_of_words": (10_000,),
    "resnet18_gn": (3, 24, 24),
    "resnet8": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "word_lm": (20,),
    "text_transformer": (512,),
}


def example_network(name: str) -> nn.Module:
    """Return a network at its paper's sizes; ``small_cnn`` has the sizes of ``privpart demo``.

    Raises:
        ConfigError: ``name`` is not in ``MODELS``.
    """
    sizes = {"channels": (16, 32), "hidden": 512, "image_size": 8} if name == "small_cnn" else {}
    return build_network(name, **sizes)


def example_batch(name: str, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return arbitrary inputs and labels of the right shapes for ``example_network(name)``.

    >>> x, y = example_batch("word_lm", 4)
    >>> x.shape, y.shape
    (torch.Size([4, 20]), torch.Size([4, 20]))
    """
    shape = (checks.count("batch_size", batch_size), *_SHAPES[name])
    generator = torch.Generator().manual_seed(0)
    if name in {"word_lm", "text_transformer"}:
        tokens = torch.randint(1000, shape, generator=generator)
        return tokens, tokens if name == "word_lm" else tokens[:, 0] % 5
    x = torch.rand(shape, generator=generator)
    if name == "bag_of_words":
        return x, torch.zeros(shape[0], 500)
    return x, torch.arange(shape[0]) % 10
