"""Local training: the settings of a client, a plan's table ``[client]``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from accounting import checks
from accounting.checks import ConfigError

OptimizerName = Literal["sgd", "adam"]
Objective = Literal["fedavg", "fedprox", "moon"]
LossName = Literal["cross_entropy", "binary_cross_entropy", "mean_squared_error", "model"]
_MOST_STEPS = 100_000
"""Vectorized clients list all batches of a round in memory before they train."""
_LARGEST_BATCH = 2**31


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """How a client trains on its own examples; only "moon" keeps anything for the next round.

    Args:
        learning_rate: > 0.
        epochs: passes over the client's examples, 1 to 100,000.
        batch_size: 1 to 2^31; the last batch of a pass may be smaller.
        steps: total number of batches, 1 to 100,000, instead of epochs; None trains whole passes.
        optimizer: ClientOpt of FedPT's Algorithm 1, "sgd" or "adam" with torch's default betas.
        momentum: for "sgd", in [0, 1).
        weight_decay: share of the parameters that a step takes off, times the learning rate, in
            [0, 1); decoupled from the gradient, as in AdamW (Loshchilov and Hutter 2019).
        objective: "fedavg", "fedprox" or "moon", see ``privpart.client``.
        mu: weight of the term that "fedprox" or "moon" adds, > 0.
        temperature: for "moon", > 0.
        loss: a ``LossName``, or a function of the module and a batch, see ``batch_loss``.
        augment: a function from a batch to a batch, applied to each batch before its step, for
            example random crops; None changes nothing. torch's random numbers are then seeded by
            round and client.
        alternate: patterns on names of parameters that take turns within a client, for plain SGD,
            as LoRA's two factors do in LA-LoRA (Liu et al. 2026). Step k, counted from 0, moves
            the parameters that match entry k modulo their number, and those that match none. All
            of them are sent, clipped jointly, and noised: the guarantee does not depend on how
            a client computes its update.

    In a plan file, ``loss`` and ``augment`` may name a function, as "package.module:function" or
    "./file.py:function". Nothing can be trained before that name is replaced by the function.

    Raises:
        ConfigError: a value out of range, or options that contradict each other.
    """

    learning_rate: float
    epochs: int = 1
    batch_size: int = 16
    steps: int | None = None
    optimizer: OptimizerName = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    objective: Objective = "fedavg"
    mu: float | None = None
    temperature: float = 0.5
    loss: str | Callable[..., Any] = "cross_entropy"
    augment: str | Callable[..., Any] | None = None
    alternate: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks.positive("learning_rate", self.learning_rate)
        checks.count("epochs", self.epochs, maximum=_MOST_STEPS)
        checks.count("batch_size", self.batch_size, maximum=_LARGEST_BATCH)
        if self.steps is not None:
            checks.count("steps", self.steps, maximum=_MOST_STEPS)
            if self.epochs != 1:
                raise ConfigError(f"epochs={self.epochs}: leave it out, steps={self.steps} is set.")
        checks.choice("optimizer", self.optimizer, get_args(OptimizerName))
        _refuse_unless_named("loss", self.loss, get_args(LossName))
        if self.augment is not None:
            _refuse_unless_named("augment", self.augment, ())
        if not checks.nonnegative("momentum", self.momentum) < 1:
            raise ConfigError(f"momentum={self.momentum}: must be at least 0 and below 1.")
        if self.momentum and self.optimizer == "adam":
            raise ConfigError(f"momentum={self.momentum}: only for sgd; adam has its own.")
        if not checks.nonnegative("weight_decay", self.weight_decay) < 1:
            raise ConfigError(f"weight_decay={self.weight_decay}: must be at least 0 and below 1.")
        self._check_objective()
        if self.alternate:
            self._check_alternate()

    def _check_objective(self) -> None:
        checks.choice("objective", self.objective, get_args(Objective))
        if (self.mu is None) != (self.objective == "fedavg"):
            raise ConfigError(f"mu={self.mu}: fedprox and moon need it, and fedavg has none.")
        if self.mu is not None:
            checks.positive("mu", self.mu)
        checks.positive("temperature", self.temperature)
        if self.objective != "moon" and self.temperature != 0.5:
            raise ConfigError(f"temperature={self.temperature}: only for moon.")

    def _check_alternate(self) -> None:
        turns = len(self.alternate)
        if turns < 2 or not all(isinstance(pattern, str) for pattern in self.alternate):
            raise ConfigError(f"alternate={self.alternate!r}: must be at least two patterns.")
        if not self.plain_sgd or self.objective != "fedavg":
            raise ConfigError(
                "alternate: only for the objective fedavg with sgd, and no momentum or "
                "weight_decay."
            )
        if self.steps is not None and self.steps < turns:
            raise ConfigError(
                f"steps={self.steps}: is below the {turns} entries of alternate, so that some "
                "would never move; must be at least as many."
            )

    def moving(self, names: Sequence[str], step: int) -> list[bool]:
        """Return which parameters, by name, a step moves; ``step`` is counted from 0.

        Raises:
            ConfigError: a pattern of ``alternate`` matches none of the names.
        """
        if not self.alternate:
            return [True] * len(names)
        turns = [[fnmatchcase(name, pattern) for name in names] for pattern in self.alternate]
        for pattern, matches in zip(self.alternate, turns, strict=True):
            if not any(matches):
                raise ConfigError(
                    f"alternate: {pattern!r} matches no parameter that trains in this round."
                )
        due = turns[step % len(turns)]
        return [now or not any(matches) for now, *matches in zip(due, *turns, strict=True)]

    @property
    def plain_sgd(self) -> bool:
        """Whether a step subtracts the gradient of the loss times the learning rate."""
        more = self.momentum or self.weight_decay or self.objective == "fedprox"
        return self.optimizer == "sgd" and not more


def _refuse_unless_named(field: str, value: object, names: Sequence[str]) -> None:
    """Raise ConfigError unless a value is a function, one of the names, or a reference."""
    if not callable(value) and value not in names and not (isinstance(value, str) and ":" in value):
        of_ours = f"one of {', '.join(names)}; " if names else ""
        raise ConfigError(
            f"{field}={value!r}: must be {of_ours}a function; or, in a plan file, a reference such "
            'as "./task.py:function".'
        )
