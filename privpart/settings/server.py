"""Server optimiser: the settings of the server's steps, a plan's table ``[server]``."""

from dataclasses import dataclass
from typing import Literal, get_args

from accounting import checks
from accounting.checks import ConfigError

Kind = Literal["sgd", "adam", "adagrad", "yogi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizer:
    """Settings of a ``torch.optim`` optimiser of the flat vector (Reddi et al. 2021, Algorithm 2).

    An optimiser sees only noised sums, so its choice costs no privacy. "yogi" is that of the paper,
    without torch's correction of the first rounds.

    Args:
        kind: "sgd", "adam", "adagrad" or "yogi".
        learning_rate: > 0; 1.0 with "sgd" and no momentum is plain averaging.
        momentum: for "sgd" only, in [0, 1).
        adaptivity: for all others: the constant added to the root of the second moment, > 0.
        weight_decay: share of the parameters that a step takes off, times the learning rate, in
            [0, 1); decoupled from the gradient (Loshchilov and Hutter 2019).
    """

    kind: Kind = "sgd"
    learning_rate: float = 1.0
    momentum: float = 0.0
    adaptivity: float = 1e-3
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        checks.choice("kind", self.kind, get_args(Kind))
        checks.positive("learning_rate", self.learning_rate)
        checks.positive("adaptivity", self.adaptivity)
        if not checks.nonnegative("momentum", self.momentum) < 1:
            raise ConfigError(f"momentum={self.momentum}: must be at least 0 and below 1.")
        if self.momentum and self.kind != "sgd":
            raise ConfigError(f"momentum={self.momentum}: only for sgd. Leave it out.")
        if not checks.nonnegative("weight_decay", self.weight_decay) < 1:
            raise ConfigError(f"weight_decay={self.weight_decay}: must be at least 0 and below 1.")
