"""Rates: how the learning rates of clients and server change from round to round, by a plan."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from accounting import checks
from accounting.checks import ConfigError
from privpart.settings.client import LocalTraining

RateKind = Literal["constant", "linear", "cosine", "steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """How a learning rate changes from round to round. It depends on no data, so it costs nothing.

    The rate rises in equal steps over ``warmup`` rounds. Then "linear" and "cosine" let it fall, so
    that it would be ``final`` of the learning rate in the round after the last, and "steps"
    multiplies it by ``factor`` in each of the rounds ``at``.

    Args:
        kind: "constant", "linear", "cosine" or "steps".
        warmup: rounds before the first with the whole learning rate, >= 0.
        final: for "linear" and "cosine", in [0, 1].
        at: for "steps": rounds, counted from 0, in increasing order.
        factor: for "steps", > 0.

    >>> schedule = RateSchedule(kind="linear", warmup=1)
    >>> [schedule.share(round_, 5) for round_ in range(5)]
    [0.5, 1.0, 0.75, 0.5, 0.25]
    """

    kind: RateKind = "constant"
    warmup: int = 0
    final: float = 0.0
    at: tuple[int, ...] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        checks.choice("kind", self.kind, get_args(RateKind))
        checks.count("warmup", self.warmup, minimum=0)
        checks.positive("factor", self.factor)
        if not 0 <= self.final <= 1:
            raise ConfigError(f"final={self.final}: must be from 0 to 1.")
        if self.final and self.kind not in ("linear", "cosine"):
            raise ConfigError(f"final={self.final}: only for linear and cosine. Leave it out.")
        if bool(self.at) != (self.kind == "steps") or list(self.at) != sorted({*self.at}):
            raise ConfigError(
                f"at={list(self.at)}: steps needs rounds in increasing order; the others have none."
            )
        if self.kind == "constant" and not self.warmup:
            raise ConfigError("kind=constant: changes nothing without warmup. Leave the table out.")

    @property
    def last_change(self) -> int:
        """The last round of ``at`` or, without any, the first after warm-up."""
        return max(self.warmup, *self.at, 0)

    def share(self, round_: int, rounds: int) -> float:
        """Return the share of the learning rate that a round takes, of 0 to ``rounds`` - 1.

        It is above zero, and has nine digits, so that no processor's sine moves the bits of a
        released model.
        """
        if round_ < self.warmup:
            return (round_ + 1) / (self.warmup + 1)
        if self.kind == "steps":
            share = self.factor ** sum(start <= round_ for start in self.at)
        else:
            left = (rounds - round_) / (rounds - self.warmup)
            falls = {"constant": 1.0, "linear": left, "cosine": math.sin(math.pi / 2 * left) ** 2}
            share = self.final + (1 - self.final) * falls[self.kind]
        return float(f"{share:.9g}")


class LearningRates(BaseModel):
    """Table ``[learning_rates]``: how the rates of clients and server change by round."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    client: Annotated[RateSchedule | None, Field(description="of every client in a round")] = None
    server: Annotated[RateSchedule | None, Field(description="of the server's optimiser")] = None

    def local(
        self, local: LocalTraining, rounds: int
    ) -> LocalTraining | Callable[[int], LocalTraining]:
        """Return how clients train, in all rounds or by round."""
        schedule = self.client
        if schedule is None:
            return local

        def in_round(round_: int) -> LocalTraining:
            rate = local.learning_rate * schedule.share(round_, rounds)
            return replace(local, learning_rate=rate)

        return in_round

    def server_share(self, rounds: int) -> Callable[[int], float] | None:
        """Return the share of the server's learning rate that each of ``rounds`` takes."""
        return None if self.server is None else partial(self.server.share, rounds=rounds)
