"""Server optimiser: how the noised mean update moves the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError

Kind = Literal["sgd", "adam", "adagrad"]
_KINDS: dict[Kind, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizer:
    """Settings of ``torch.optim`` on the one flat vector (Reddi et al. 2021, Algorithm 2).

    All of them only see noised sums, so none of them costs privacy.

    Args:
        kind: "sgd" (1.0 without momentum is plain averaging), "adam" or "adagrad".
        learning_rate: > 0.
        momentum: of "sgd", in [0, 1).
        adaptivity: of "adam" and "adagrad": what is added to the root of the second moment, > 0.
    """

    kind: Kind = "sgd"
    learning_rate: float = 1.0
    momentum: float = 0.0
    adaptivity: float = 1e-3

    def __post_init__(self) -> None:
        checks.choice("kind", self.kind, get_args(Kind))
        checks.positive("learning_rate", self.learning_rate)
        checks.positive("adaptivity", self.adaptivity)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum}: must be at least 0 and below 1.")
        if self.momentum and self.kind != "sgd":
            raise ConfigError(f"momentum={self.momentum}: only for sgd; {self.kind} has its own.")

    def set(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimiser that ``of`` made go on with these settings, and with its state.

        Raises:
            ConfigError: it is of another kind.
        """
        if type(optimizer) is not _KINDS[self.kind]:
            raise ConfigError(
                f"kind={self.kind!r}: a schedule may change all settings of the server's optimiser "
                "but its kind."
            )
        for group in optimizer.param_groups:
            group.update(self._options)

    def of(self, *groups: Tensor) -> torch.optim.Optimizer:
        """Return the optimiser of vectors; one without a gradient stays, and so does its state."""
        return _KINDS[self.kind](groups, **self._options)

    @property
    def _options(self) -> dict[str, float]:
        own = {"momentum": self.momentum} if self.kind == "sgd" else {"eps": self.adaptivity}
        return {"lr": self.learning_rate, **own}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state as "group.name"; a group has none before its first step."""
    return {
        f"{group}.{name}": value
        for group, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what ``optimizer_tensors`` returned."""
    whole = optimizer.state_dict()
    whole["state"] = {}
    for key, value in tensors.items():
        group, _, name = key.partition(".")
        whole["state"].setdefault(int(group), {})[name] = value
    optimizer.load_state_dict(whole)
