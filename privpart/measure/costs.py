"""Costs: what one round takes from one client, in bytes, seconds, FLOPs and memory.

Everything is measured on the messages and on one local step, nothing is estimated from parameter
counts. FLOPs are those of convolutions and matrix products, two per multiply-add; the backward
pass is counted as it runs, so a frozen layer above a trained one costs its input gradient only.

Schedule costs: what a whole run takes from one client, partial rounds beside full ones.

FedPart (Wang et al. 2024) counts the uplink only: of M groups a partial round sends one, so on
average 1/M of a full round's bytes (its Eq. 5). Its Eq. 6 for computation lets every layer between
the output and the trained one compute both gradients. Frozen layers need no weight gradient, so a
real client does less: see ``run_costs``.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accounting import checks
from privpart.client import LocalTraining
from privpart.client import loss as loss_of
from privpart.model import PartialModel
from privpart.plan import Rounds
from privpart.wire import encode_model, encode_update


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second of a client; the defaults are Wang et al. 2021's for real phones."""

    down: float = 0.75e6
    up: float = 0.25e6

    def __post_init__(self) -> None:
        checks.positive("down", self.down)
        checks.positive("up", self.up)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that are alive together when the backward pass of a local step begins.

    Attributes:
        parameters: trained and frozen, and buffers.
        gradients: of the trained part.
        before: the trained part as received, which the update is the difference to.
        optimizer: its state.
        activations: what the forward pass keeps for the backward pass, each storage once, without
            parameters. Temporaries inside a single operation are not counted.
    """

    parameters: int
    gradients: int
    before: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all, in bytes."""
        return self.parameters + self.gradients + self.before + self.optimizer + self.activations


@dataclass(frozen=True, slots=True)
class ClientCosts:
    """What one round takes from one client.

    Attributes:
        trained: numbers that train.
        numbers: numbers in all.
        bytes_down: of the server's message; what a pretrained frozen part took to ship, once, is
            not in it.
        bytes_up: of the client's.
        forward_flops: of all local steps of the round.
        backward_flops: likewise.
        memory: of one local step.
    """

    trained: int
    numbers: int
    bytes_down: int
    bytes_up: int
    forward_flops: int
    backward_flops: int
    memory: StepMemory

    def to_dict(self, bandwidth: Bandwidth) -> dict[str, Any]:
        """Return flat values for JSON and CSV, with the seconds that the messages take."""
        row = asdict(self)
        memory = row.pop("memory")
        row["seconds_down"] = self.bytes_down / bandwidth.down
        row["seconds_up"] = self.bytes_up / bandwidth.up
        return (
            row | {f"{k}_bytes": v for k, v in memory.items()} | {"memory_bytes": self.memory.total}
        )


def client_costs(
    model: PartialModel,
    x: Tensor,
    y: Tensor,
    *,
    local: LocalTraining,
    examples: int,
    active: Sequence[int] | None = None,
) -> ClientCosts:
    """Measure one local step on the batch ``x``, ``y`` and scale it to a round.

    The step is FedAvg's; "moon" adds two forward passes to it.

    Args:
        model: left as it was.
        x: one batch of ``local.batch_size`` examples; their values do not matter. Those beyond
            ``examples`` are left out: no batch of the client is larger.
        y: their classes.
        local: how the client trains.
        examples: that the client holds, >= 1.
        active: groups that train in the round; None is all. Its downlink is still the whole part.
    """
    model.train_only(active)
    update = torch.cat([model.flat[span] for span in model.spans(active)])
    seen = _examples_seen(local, checks.count("examples", examples))
    x, y = x[:examples].clone(), y[:examples].clone()
    forward, backward = _flops(model, x, y, local)
    costs = ClientCosts(
        trained=len(update),
        numbers=model.parameter_count,
        bytes_down=len(encode_model(model)),
        bytes_up=len(encode_update(model, update, active=active)),
        forward_flops=forward * seen // len(x),
        backward_flops=backward * seen // len(x),
        memory=_memory(model, x, y, local, active),
    )
    model.train_only()
    return costs


def _examples_seen(local: LocalTraining, examples: int) -> int:
    """Examples that pass through the model in one round, repetitions included."""
    if local.steps is None:
        return local.epochs * examples
    per_pass = math.ceil(examples / local.batch_size)
    passes, rest = divmod(local.steps, per_pass)
    return passes * examples + rest * min(local.batch_size, examples)


def _flops(model: PartialModel, x: Tensor, y: Tensor, local: LocalTraining) -> tuple[int, int]:
    """Forward and backward FLOPs of one batch."""
    with (
        # FlopCounterMode counts nothing for the fused attention kernel of the CPU (torch 2.13)
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as forward,
    ):
        loss = loss_of(model.module(x), y, local.loss)
    with FlopCounterMode(display=False) as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    model.gradient.zero_()
    return forward.get_total_flops(), backward.get_total_flops()


def _memory(
    model: PartialModel, x: Tensor, y: Tensor, local: LocalTraining, active: Sequence[int] | None
) -> StepMemory:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tensors = [*model.module.parameters(), *model.module.buffers()]
    resident = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model.module(x), y, local.loss)
    activations = sum(size for place, size in kept.items() if place not in resident)
    del loss
    trained = sum(model.flat[span].nbytes for span in model.spans(active))
    return StepMemory(
        parameters=sum(resident.values()),
        gradients=trained,
        before=trained,
        optimizer=_optimizer_bytes(model, local, active),
        activations=activations,
    )


def _optimizer_bytes(
    model: PartialModel, local: LocalTraining, active: Sequence[int] | None
) -> int:
    before = model.flat.clone()
    optimizer = local.fresh_optimizer(model, active)
    optimizer.step()
    model.flat.copy_(before)
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


@dataclass(frozen=True, slots=True)
class RunCosts:
    """What all rounds that it takes part in take from one client.

    Attributes:
        rounds: that it takes part in.
        bytes_up: of its messages.
        bytes_down_whole: of the server's, if each holds the whole trainable part.
        bytes_down_changed: if each holds only the groups that changed since the client's last
            round; the first holds all.
        flops: of its local steps, forward and backward, as they ran.
    """

    rounds: int
    bytes_up: int
    bytes_down_whole: int
    bytes_down_changed: int
    flops: int


def parameters_sent(rounds: Rounds, sizes: Sequence[int]) -> int:
    """Return how many numbers a client sends that is in every round.

    >>> parameters_sent(((0, 1), (0,), (1,)), [10, 5])
    30
    """
    return sum(sizes[group] for active in rounds for group in active)


def uplink_share(groups: int) -> float:
    """Return a partial round's mean share of a full round's bytes, 1/M."""
    return 1 / checks.count("groups", groups)


def computation_share(active: Sequence[int], groups: int) -> float:
    """Return a round's share of a full round's computation by FedPart's model.

    All layers cost the same, backward twice as much as forward, and the backward pass runs from the
    output, which is the last group, down to the lowest active one. The mean over all M groups is
    Eq. 6: (2 M + 1) / (3 M), about 2/3.

    >>> sum(computation_share([g], 10) for g in range(10)) / 10
    0.7
    """
    reached = checks.count("groups", groups) - min(active)
    return (1 + 2 * reached / groups) / 3


def changed_groups(rounds: Rounds, since: int | None, now: int) -> tuple[int, ...]:
    """Return the groups that a client lacks before round ``now`` if it last was in ``since``.

    It has what the server sent it then, so it lacks what was trained in ``since`` and after; None
    is a client that is in its first round, and lacks all.
    """
    every = rounds if since is None else rounds[since:now]
    return tuple(sorted({group for active in every for group in active}))


def run_costs(
    model: PartialModel,
    rounds: Rounds,
    x: Tensor,
    y: Tensor,
    *,
    local: LocalTraining,
    examples: int,
    every: int = 1,
) -> RunCosts:
    """Encode the messages of a run and run one local step of each kind of round, and add up.

    Args:
        model: with the groups of the schedule; left as it was.
        rounds: see ``Schedule.rounds``.
        x: one batch.
        y: its classes.
        local: how the client trains.
        examples: that the client holds, >= 1.
        every: rounds from one of the client's to the next, >= 1; its first is round 0.
    """
    own = range(0, len(rounds), checks.count("every", every))
    kinds = {
        active: client_costs(model, x, y, local=local, examples=examples, active=active)
        for active in dict.fromkeys(rounds[t] for t in own)
    }
    lacks = [changed_groups(rounds, t - every if t else None, t) for t in own]
    sizes = {groups: len(encode_model(model, active=groups)) for groups in dict.fromkeys(lacks)}
    costs = [kinds[rounds[t]] for t in own]
    return RunCosts(
        rounds=len(own),
        bytes_up=sum(c.bytes_up for c in costs),
        bytes_down_whole=sum(c.bytes_down for c in costs),
        bytes_down_changed=sum(sizes[groups] for groups in lacks),
        flops=sum(c.forward_flops + c.backward_flops for c in costs),
    )
