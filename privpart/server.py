"""Server optimiser: how the noised mean update moves the model.

Round sum: what a round's clients sent, refused or clipped and added up.

Server: sum of clipped updates, plus noise, divided by a public constant, then a step.

Nothing that a client sends is trusted: malformed updates are refused, every other is clipped again
(one that is not finite counts as zeros), a client counts once per round and at most as often as the
plan allows; only sums of simulated clients, by a door of their own, are taken at their word. The
divisor is the plan's ``report_goal``, never the number of clients that came (that number is
private, and dividing by it would let one client weigh more than accounted).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from accounting import PrivacyReport, checks
from accounting.checks import ConfigError
from privpart.clip import add_in_place, clip
from privpart.messages import (
    ClientUpdate,
    CohortSum,
    RoundTask,
    may_take_part,
    well_formed,
    well_formed_sum,
)
from privpart.noise.source import NoiseSource
from privpart.noise.stream import GroupedNoise, NoiseStream, noise_stream
from privpart.patterns import parts_of
from privpart.plan import PrivacyPlan, restarts

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


_UNCLIPPED = 1 - 1e-5
"""A client clips in float32: its update is then this close to the clip norm, or closer."""


class RoundSum:
    """The sum of one round, and who is in it.

    Args:
        task: what the round asked.
        dim: numbers in an update.
        may_take_part: whether the limits allow a client in this round.
        bits: whether to count the updates that were not clipped, for adaptive clipping.

    Attributes:
        total: shape (dim,), float64.
        came: ids of the clients that are in it.
        received: updates of any kind.
        summed: clients that came in sums.
        bits: +1/2 for each that was not clipped, -1/2 for each other.

    Guarantees:
        Whatever comes as an update, nothing is raised for it, and leaving one client out changes
        the sum by at most the clip norm.
    """

    def __init__(
        self, task: RoundTask, dim: int, may_take_part: Callable[[int], bool], *, bits: bool
    ) -> None:
        self.total = torch.zeros(dim, dtype=torch.float64)
        self.came: set[int] = set()
        self.received, self.summed, self.bits = 0, 0, 0.0
        self._task, self._may_take_part, self._count_bits = task, may_take_part, bits

    def add(self, update: object) -> None:
        """Clip and add an update from whomever, or refuse it."""
        self.received += 1
        task, shape = self._task, self.total.shape
        if not well_formed(update, task.round, task.plan, shape) or update.client in self.came:
            return
        if not self._may_take_part(update.client):
            return
        clipped = clip(update.update.detach(), task.clip_norm)  # zeros if not finite
        if self._count_bits:
            self.bits += 0.5 if clipped.norm() <= task.clip_norm * _UNCLIPPED else -0.5
        add_in_place(self.total, clipped)
        self.came.add(update.client)

    def add_sum(self, part: object) -> None:
        """Add a sum whose maker is trusted, or refuse it: there is no half of it."""
        self.received += len(part.clients) if isinstance(part, CohortSum) else 1
        if not well_formed_sum(part, self._task, self.total.shape):
            return
        clients = part.clients
        if not self.came.isdisjoint(clients) or not all(map(self._may_take_part, clients)):
            return
        self.bits += part.unclipped - 0.5 * len(clients)
        self.total += part.total
        self.summed += len(clients)
        self.came.update(clients)


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """What happened in a round. Not covered by the guarantee: for the operator, not for release.

    Attributes:
        received: updates, of any kind.
        counted: updates that entered the sum.
        refused: malformed, replayed, of another plan, twice in the round, or beyond the limits.
        summed: of the counted, those that the engine clipped and added up in the server's place.
        released: False if too few were well formed: then nothing has changed.
    """

    received: int
    counted: int
    refused: int
    summed: int = 0
    released: bool = True


class Server:
    """The trainable part under DP-FTRL.

    Args:
        plan: what is promised; fixes clip norm, noise, divisor, rounds, participation.
        start: trainable part before the first round, shape (d,); public.
        source: of the noise; ``SecretSource()`` unless the run is a simulation.
        optimizer: of the noised mean update, or a schedule: from the round, from 0, to its
            settings; plain averaging unless said otherwise. It must not look at data.

    Attributes:
        parameters: the trainable part, shape (d,): what the next round's clients receive.
        plan_hash: of the plan, computed once.
        round: the next round, from 0; equal to ``plan.rounds`` when the run is complete.
        clip_norm: of the next round.
        cohort: ids whose updates entered the last sum, ascending; not for release.
        last_clip_norm: of the last round.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        start: Tensor,
        *,
        source: NoiseSource,
        optimizer: ServerOptimizer | Callable[[int], ServerOptimizer] | None = None,
    ) -> None:
        if start.dtype is not torch.float32:
            raise ConfigError(
                f"start has {start.dtype}: must be torch.float32. The noise is float32, and a "
                "finer type would keep low bits of the sum that no noise covers."
            )
        self.plan = plan
        self.source = source
        self.parameters = start.detach().clone()
        self.round = 0
        self.clip_norm = float(plan.clip_norm)
        self.plan_hash = plan.hash
        self._groups = parts_of(plan.mechanism, self.parameters)
        constant = optimizer or ServerOptimizer()
        self._settings = constant if callable(constant) else lambda _: constant
        self._optimizer = self._settings(0).of(*self._groups)
        z = plan.update_noise_multiplier  # in units of the clip norm, which trees may change
        self._noise = noise_stream(plan.mechanism, start.numel(), z, source, 0)
        self._restarts: frozenset[int] = frozenset()
        self._bit_noise: NoiseStream | GroupedNoise | None = None
        if plan.adaptive_clipping is not None:
            self._restarts = restarts(plan.mechanism)
            z = plan.adaptive_clipping.bit_noise_multiplier
            self._bit_noise = noise_stream(plan.mechanism, 1, z, source, 1)
        self._bits = 0.0  # noised sum of centred bits since the last restart
        self._participations: dict[int, list[int]] = {}
        self._halted = ""
        self.cohort: tuple[int, ...] = ()
        self.last_clip_norm = self.clip_norm

    def _active(self) -> Sequence[int]:
        return self.plan.active(self.round) or (0,)

    @property
    def private(self) -> bool:
        """Whether the plan's guarantee may be claimed: there is noise, and it is secret."""
        return self._noise is not None and self.source.private

    def report(self, delta: float) -> PrivacyReport:
        """Return the plan's guarantee at ``delta`` in (0, 1), saying where its noise came from."""
        return self.plan.report(delta, noise_source="os" if self.source.private else "seeded")

    def eligible(self, clients: Iterable[int]) -> list[int]:
        """Return those of ``clients`` that the plan still allows in the next round, in order."""
        return [client for client in clients if self._may_take_part(client)]

    def task(self, clients: Sequence[int]) -> RoundTask:
        """Return what the next round asks of a cohort.

        Raises:
            ConfigError: the server was halted: its model must not be seen.
        """
        self._check_running()
        active = self.plan.active(self.round)
        return RoundTask(self.round, tuple(clients), self.clip_norm, self.plan_hash, active)

    def run_round(
        self, updates: Iterable[ClientUpdate], *, sums: Iterable[CohortSum] = ()
    ) -> RoundCounts:
        """Aggregate one round of updates and step; return what was counted.

        Args:
            updates: whatever came, from whomever.
            sums: of updates that code of the operator's clipped and added up; taken at its word.

        Guarantees:
            Whatever the updates hold, nothing is raised for them, and leaving one client out
            changes the sum by at most ``clip_norm``. Who a client is must come from whoever
            authenticates it: the limits count ids, and a client that picks its own evades them.
            Below the minimum cohort nothing changes: no step, no noise drawn, no participation.

        Raises:
            ConfigError: all planned rounds are done.
        """
        self._check_running()
        if self.round >= self.plan.rounds:
            raise ConfigError(
                f"all {self.plan.rounds} planned rounds are done: another one is not "
                "covered by the guarantee. Plan more rounds from the start."
            )
        self._settings(self.round).set(self._optimizer)
        dim = sum(self._groups[group].numel() for group in self._active())
        found = RoundSum(self.task(()), dim, self._may_take_part, bits=self._bit_noise is not None)
        for update in updates:
            found.add(update)
        for part in sums:
            found.add_sum(part)
        came, received = found.came, found.received
        if len(came) < self.plan.minimum_cohort:
            return RoundCounts(received, 0, received, released=False)
        self.halt("a round was interrupted between drawing its noise and ending")
        self.cohort, self.last_clip_norm = tuple(sorted(came)), self.clip_norm
        for client in came:
            self._participations.setdefault(client, []).append(self.round)
        if self._noise is not None:
            found.total += self._noise.next() * self.clip_norm
        self._step(found.total / self.plan.report_goal)
        self.round += 1
        self._adapt(found.bits)
        self._halted = ""
        return RoundCounts(received, len(came), received - len(came), found.summed)

    def halt(self, reason: str) -> None:
        """Refuse all further rounds: the last one was drawn, and may not have been committed."""
        self._halted = reason

    def _check_running(self) -> None:
        if self._halted:
            raise ConfigError(
                f"this server is halted: {self._halted}. Its model may not be seen; make a new "
                "server and restore the last committed round."
            )

    def _may_take_part(self, client: int) -> bool:
        rounds = self._participations.get(client, ())
        return may_take_part(self.plan.participation, rounds, self.round)

    def _step(self, mean: Tensor) -> None:
        """Step the active groups; the others have no gradient, so that not even momentum acts."""
        self._optimizer.zero_grad(set_to_none=True)
        active = [self._groups[group] for group in self._active()]
        for part, own in zip(active, torch.split(mean, [len(p) for p in active]), strict=True):
            part.grad = -own.to(part.dtype)
        self._optimizer.step()

    def _adapt(self, bits: float) -> None:
        """Add the round's bits, noised; at a restart, let them move the clip norm."""
        adaptive = self.plan.adaptive_clipping
        if adaptive is None or self._bit_noise is None:
            return
        self._bits += bits + float(self._bit_noise.next())
        if self.round in self._restarts:
            began = max((r for r in self._restarts if r < self.round), default=0)
            share = 0.5 + self._bits / (self.plan.report_goal * (self.round - began))
            first = float(self.plan.clip_norm)
            self.clip_norm = adaptive.next_clip_norm(self.clip_norm, share, first=first)
            self._bits = 0.0

    def load_start(self, parameters: Tensor) -> None:
        """Begin with another trainable part, shape (d,), before the first round."""
        if self.round or parameters.shape != self.parameters.shape:
            raise ConfigError(
                f"start: {parameters.numel()} parameters for a model of {self.parameters.numel()} "
                f"after {self.round} rounds; a start belongs before the first."
            )
        self.parameters.copy_(parameters)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that the next round depends on but plan, key and participations.

        Returns:
            Tensors by name, and plain values, ready for JSON. A run that is complete keeps no
            noise: nothing needs it any more, and it would undo the guarantee.
        """
        tensors = {"parameters": self.parameters.detach()}
        for name, tensor in optimizer_tensors(self._optimizer).items():
            tensors[f"optimizer.{name}"] = tensor
        values: dict[str, Any] = {
            "plan": self.plan_hash,
            "round": self.round,
            "clip_norm": self.clip_norm,
            "bits": self._bits,
        }
        for prefix, stream in self._streams() if self.round < self.plan.rounds else ():
            state = stream.state_dict()
            tensors |= {f"{prefix}.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
            values[prefix] = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
        return tensors, values

    def load_state_dict(
        self,
        tensors: dict[str, Tensor],
        values: dict[str, Any],
        participations: dict[int, list[int]],
    ) -> None:
        """Continue where ``state_dict`` was taken; bit for bit, given the same key.

        Raises:
            ConfigError: state of another plan or model.
        """
        if values["plan"] != self.plan_hash:
            raise ConfigError(
                f"the state belongs to plan {values['plan'][:12]}, this is {self.plan_hash[:12]}."
            )
        if tensors["parameters"].shape != self.parameters.shape:
            raise ConfigError(
                f"the state has {tensors['parameters'].numel()} parameters, "
                f"the model {self.parameters.numel()}."
            )
        self.parameters.copy_(tensors["parameters"])
        self.round, self.clip_norm = values["round"], values["clip_norm"]
        self._bits = values["bits"]
        self._participations = participations
        load_optimizer_tensors(self._optimizer, _under("optimizer", tensors))
        for prefix, stream in self._streams() if self.round < self.plan.rounds else ():
            stream.load_state_dict({**values[prefix], **_under(prefix, tensors)})

    def _streams(self) -> list[tuple[str, NoiseStream | GroupedNoise]]:
        both = (("noise", self._noise), ("bit_noise", self._bit_noise))
        return [(name, stream) for name, stream in both if stream is not None]


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    dot = f"{prefix}."
    return {name[len(dot) :]: t.clone() for name, t in tensors.items() if name.startswith(dot)}
