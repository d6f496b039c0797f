"""Server: sum of clipped updates, plus noise, divided by a public constant, then a step.

Nothing that a client sends is trusted: malformed updates count as zero, every update is clipped
again, a client counts once per round and at most as often as the plan allows. The divisor is the
plan's ``report_goal``, never the number of clients that came (that number is private, and dividing
by it would let one client weigh more than accounted).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.client import ClientUpdate
from privpart.clip import clip
from privpart.keystream import NoiseSource
from privpart.noise import NoiseStream
from privpart.plan import PrivacyPlan

_ACCEPTED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """What happened in a round. Not covered by the guarantee: for the operator, not for release."""

    received: int
    counted: int
    refused: int


class Server:
    """The trainable part under DP-FTRL: SGD with momentum on noised means of updates.

    Args:
        plan: what is promised; fixes clip norm, noise, divisor, rounds, participation.
        start: trainable part before the first round, shape (d,); public.
        source: of the noise; ``SecretSource()`` unless the run is a simulation.
        learning_rate: server step on the mean update, > 0; 1 is plain averaging.
        momentum: in [0, 1).

    Attributes:
        parameters: the trainable part, shape (d,): what the next round's clients receive.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        start: Tensor,
        *,
        source: NoiseSource,
        learning_rate: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum={momentum}: must be at least 0 and below 1.")
        if start.dtype is not torch.float32:
            raise ConfigError(
                f"start has {start.dtype}: must be torch.float32. The noise is float32, and a "
                "finer type would keep low bits of the sum that no noise covers."
            )
        self.plan = plan
        self.source = source
        self.parameters = start.detach().clone()
        self.round = 0
        self._optimizer = torch.optim.SGD(
            [self.parameters],
            lr=checks.positive("learning_rate", learning_rate),
            momentum=momentum,
        )
        self._noise = (
            NoiseStream(plan.mechanism, dim=start.numel(), stddev=plan.noise_stddev, source=source)
            if plan.noise_multiplier > 0
            else None
        )
        self._participations: dict[int, list[int]] = {}

    @property
    def private(self) -> bool:
        """Whether the plan's guarantee may be claimed: there is noise, and it is secret."""
        return self._noise is not None and self.source.private

    def run_round(self, updates: Iterable[ClientUpdate]) -> RoundCounts:
        """Aggregate one round of updates and step; return what was counted.

        Guarantees:
            Whatever the updates hold, nothing is raised for them, and leaving one client out
            changes the sum by at most clip_norm. Who a client is must come from whoever
            authenticates it: the limits count ids, and a client that picks its own evades them.

        Raises:
            ConfigError: all planned rounds are done.
        """
        if self.round >= self.plan.mechanism.rounds:
            raise ConfigError(
                f"all {self.plan.mechanism.rounds} planned rounds are done: another one is not "
                "covered by the guarantee. Plan more rounds from the start."
            )
        total = torch.zeros(self.parameters.shape, dtype=torch.float64)
        received = counted = 0
        for update in updates:
            received += 1
            if self._admit(update):
                total += clip(update.delta.detach(), self.plan.clip_norm)
                counted += 1
        if self._noise is not None:
            total += self._noise.next()
        self._step(total / self.plan.report_goal)
        self.round += 1
        return RoundCounts(received, counted, received - counted)

    def _admit(self, update: ClientUpdate) -> bool:
        """Whether the update is well formed and its client may take part; if so, note it."""
        if not isinstance(update, ClientUpdate) or type(update.client) is not int:
            return False
        delta, plan = update.delta, self.plan.participation
        if not isinstance(delta, Tensor) or delta.dtype not in _ACCEPTED:
            return False
        if delta.layout is not torch.strided or delta.device.type != "cpu":
            return False
        if delta.shape != self.parameters.shape or not bool(torch.isfinite(delta).all()):
            return False
        rounds = self._participations.setdefault(update.client, [])
        if len(rounds) >= plan.max_participations:
            return False
        if rounds and self.round - rounds[-1] < plan.min_separation:
            return False
        rounds.append(self.round)
        return True

    def _step(self, mean: Tensor) -> None:
        self.parameters.grad = -mean.to(self.parameters.dtype)
        self._optimizer.step()
