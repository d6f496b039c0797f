"""Metric: one or several numbers that say how good a module is, measured on public data.

The guarantee does not cover a metric of private data: it would be a release of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.loop import StopTraining
from privpart.training.own_code import described

Metric = Callable[[nn.Module], float | Mapping[str, float]]
"""Maps a module, in evaluation mode and without gradients, to a number, or to several by name.

Studies and selections compare trainings by the first one.
"""

_BATCH = 500


class Accuracy:
    """The share of labels that a module gets right, of all examples and of groups of them.

    Args:
        x: examples that no client holds, shape (n, ...).
        y: their labels, shape (n,), or (n, length) for a language model; -100 does not count.
        groups: the group of each example, n strings or numbers, such as a place or a class.
    """

    def __init__(
        self, x: Tensor, y: Tensor, groups: Sequence[object] | Tensor | None = None
    ) -> None:
        self.x = x
        self.y = y
        if not bool((y >= 0).any()):
            raise ConfigError("metric: there is no test example with a label; must be at least 1.")
        values = groups.tolist() if isinstance(groups, Tensor | np.ndarray) else groups
        self.groups = None if values is None else [str(value) for value in values]
        if self.groups is not None and len(self.groups) != len(y):
            raise ConfigError(
                f"groups: are {len(self.groups)} for {len(y)} examples; must be one for each."
            )
        labels = (y >= 0).reshape(len(y), -1).sum(dim=1)
        for name, rows in self._rows().items():
            if not int(labels[rows].sum()):
                raise ConfigError(f"groups: {name!r} has no example with a label; leave it out.")

    def _rows(self) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(self.groups or ()):
            rows.setdefault(name, []).append(row)
        return rows

    def __call__(self, module: nn.Module) -> float | dict[str, float]:
        """Return the share of correct labels; with groups, also that of each, by name."""
        right, labels = _right(module, self.x, self.y)
        whole = int(right.sum()) / int(labels.sum())
        if self.groups is None:
            return whole
        shares = {
            f"accuracy/{name}": int(right[rows].sum()) / int(labels[rows].sum())
            for name, rows in sorted(self._rows().items())
        }
        return {"accuracy": whole, **shares}


def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of correct labels in evaluation mode; a label of -100 does not count."""
    right, labels = _right(module, x, y)
    return int(right.sum()) / int(labels.sum())


@torch.no_grad()
def _right(module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many labels of each example are right, and how many it has; shapes (n,)."""

    def right(network: nn.Module) -> Tensor:
        batches = zip(torch.split(x, _BATCH), torch.split(y, _BATCH), strict=True)
        correct = [network(inputs).argmax(dim=-1) == labels for inputs, labels in batches]
        return torch.cat(correct)

    correct = in_evaluation(right, module)
    counts = (of.reshape(len(y), -1).sum(dim=1).cpu() for of in (correct, y >= 0))
    return next(counts), next(counts)


@torch.no_grad()
def in_evaluation(metric: Callable[[nn.Module], Any], module: nn.Module) -> Any:  # noqa: ANN401
    """Return a module's metric in evaluation mode; the mode of every layer is restored."""
    # Layer by layer, since a frozen BatchNorm of a module that trains is in evaluation mode.
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        return metric(module)
    finally:
        for layer in training:
            layer.training = True


def measured(metric: Metric, module: nn.Module) -> dict[str, float]:
    """Return the metrics by name, checked: NaN or infinity are those of a model that diverged.

    One number is named "accuracy" if the metric is an ``Accuracy``, else "metric".

    Raises:
        ConfigError: it returns another type than a number or a dict of numbers, or raised an error
            of its own.
        StopTraining: it asks for the training to end.
    """
    try:
        value = _returned(metric, module, "metric")
    except ConfigError as error:
        if isinstance(error.__cause__, StopTraining):
            raise error.__cause__ from None
        raise
    if not isinstance(value, Mapping):
        name = "accuracy" if isinstance(metric, Accuracy) else "metric"
        return {name: _number(value, "metric")}
    named = [key for key in value if isinstance(key, str) and key.strip() and key.isprintable()]
    if len(named) != len(value) or not value:
        raise ConfigError(
            f"metric: returned a dict with the keys {list(value)!r:.100}; must be one or more "
            "names of metrics."
        )
    return {key: _number(number, f"metric: {key!r}") for key, number in value.items()}


def number_of(metric: Callable[[nn.Module], float], module: nn.Module, name: str) -> float:
    """Return one number, as ``measured``; of private data, where nothing may stop a training."""
    return _number(_returned(metric, module, name), name)


def _returned(metric: Callable[[nn.Module], Any], module: nn.Module, name: str) -> Any:  # noqa: ANN401
    # Own code has its own errors, and returns what it likes.
    try:
        return in_evaluation(metric, module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name}: raised {type(error).__name__}: {error}.") from error


def _number(value: Any, name: str) -> float:  # noqa: ANN401  anything
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        of_shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ConfigError(f"{name}: returned {described(value)}{of_shape}; must be one number.")
    return float(value)
