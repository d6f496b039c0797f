"""Metric: a number that says how good a module is, measured on public data.

The guarantee does not cover a metric of private data: it would be a release of its own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.training.own_code import described

Metric = Callable[[nn.Module], float]
"""Maps a module, in evaluation mode and without gradients, to a number."""

_BATCH = 500


class Accuracy:
    """The share of labels that a module gets right.

    Args:
        x: examples that no client holds, shape (n, ...).
        y: their labels, shape (n,), or (n, length) for a language model; -100 does not count.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = x
        self.y = y
        if not bool((y >= 0).any()):
            raise ConfigError("metric: there is no test example with a label; must be at least 1.")

    def __call__(self, module: nn.Module) -> float:
        """Return the share of correct labels."""
        return accuracy(module, self.x, self.y)


@torch.no_grad()
def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of correct labels in evaluation mode; a label of -100 does not count."""

    def right(network: nn.Module) -> float:
        batches = zip(torch.split(x, _BATCH), torch.split(y, _BATCH), strict=True)
        return sum(
            int((network(inputs).argmax(dim=-1) == labels).sum()) for inputs, labels in batches
        )

    return in_evaluation(right, module) / int((y >= 0).sum())


@torch.no_grad()
def in_evaluation(metric: Metric, module: nn.Module) -> float:
    """Return a module's metric in evaluation mode; the mode of every layer is restored."""
    # Layer by layer, since a frozen BatchNorm of a module that trains is in evaluation mode.
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        return metric(module)
    finally:
        for layer in training:
            layer.training = True


def measured(metric: Metric, module: nn.Module, name: str = "metric") -> float:
    """Return a metric, checked: a finite number, or NaN or infinity for a model that diverged.

    Raises:
        ConfigError: the metric is of another type than a number, or raised an error of its own.
    """
    value: Any
    # Own code has its own errors, and returns what it likes.
    try:
        value = in_evaluation(metric, module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name}: raised {type(error).__name__}: {error}.") from error
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        of_shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ConfigError(f"{name}: returned {described(value)}{of_shape}; must be one number.")
    return float(value)
