"""Costs: bytes, seconds, FLOPs and memory that a round or a whole run takes from one client.

Bytes are those of encoded messages; FLOPs and memory those of a local step that is run. FLOPs are
those of convolutions and matrix products, two per multiply-add. The backward pass is counted as it
runs, so a frozen layer above a trained one costs its input gradient only.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accounting import checks
from privpart.client import batch_loss, fresh_optimizer
from privpart.data.batches import Batch, count_rows, take
from privpart.data.index import batch_rows
from privpart.model import PartialModel
from privpart.plan import Rounds
from privpart.select.engine import SelectEngine
from privpart.settings.client import LocalTraining
from privpart.training.plan_file import PlanFile
from privpart.training.task_data import Reader, read_task
from privpart.training.training import first_batch, training

_HEADER = 64
"""Layout, direction, seed, hashes of plan and model, and the round."""
DOWN, UP = 0.75e6, 0.25e6
"""Bytes per second of a client: those of phones in Wang et al. 2021."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes in memory when the backward pass of a local step begins.

    Attributes:
        parameters: trainable and frozen parameters, and buffers.
        gradients: gradients of the active parameters.
        before: copy of the active parameters as received, from which the update is computed.
        optimizer: state of the optimiser.
        activations: tensors that the forward pass saves for the backward pass, each storage once,
            without parameters. Temporaries inside a single operation are not counted.
    """

    parameters: int
    gradients: int
    before: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all five, in bytes."""
        return self.parameters + self.gradients + self.before + self.optimizer + self.activations


@dataclass(frozen=True, slots=True)
class ClientCosts:
    """What one round takes from one client.

    Attributes:
        trained: numbers that train.
        numbers: numbers in all.
        bytes_down: size of the server's message, without the one-time download of a pretrained
            frozen part.
        bytes_up: size of the client's message.
        forward_flops: forward FLOPs of all local steps of the round.
        backward_flops: backward FLOPs of all local steps of the round.
        memory: memory of one local step.
    """

    trained: int
    numbers: int
    bytes_down: int
    bytes_up: int
    forward_flops: int
    backward_flops: int
    memory: StepMemory

    def to_dict(self) -> dict[str, Any]:
        """Return flat values for JSON and CSV, with the transfer times of the messages."""
        row = asdict(self)
        memory = row.pop("memory") | {"memory": self.memory.total}
        row |= {"seconds_down": self.bytes_down / DOWN, "seconds_up": self.bytes_up / UP}
        return row | {f"{name}_bytes": size for name, size in memory.items()}


def message_bytes(model: PartialModel, active: Sequence[int] | None = None) -> int:
    """Size of a message with the active parameters, in either direction: 4 d + 64 + about 80 bytes.

    The server sends trainable parameters and a seed, a client returns their change (FedPT,
    Algorithm 1, lines 3 and 10): a header and one float32 vector as safetensors. Neither holds
    weights that come from the seed or were shipped before, or local parts. Flower adds fields of
    its own.

    >>> from torch import nn
    >>> message_bytes(PartialModel(lambda: nn.Linear(9, 1), seed=7))
    176
    """
    vector = torch.cat([model.flat[span] for span in model.spans(active)])
    return _HEADER + len(save({"trainable": vector}))


def client_costs(
    model: PartialModel,
    batch: Batch,
    *,
    local: LocalTraining,
    examples: int,
    rounds: Rounds | None = None,
) -> ClientCosts:
    """Measure one local step on a batch and scale it to a round, or to the mean of rounds.

    The step is FedAvg's; "moon" would add two forward passes to it. Frozen layers need no weight
    gradient, so a client computes less in a partial round than by FedPart's formula, which counts
    both gradients from the output down (Wang et al. 2024, Eq. 6).

    Args:
        model: model to measure; it is left unchanged.
        batch: ``local.batch_size`` examples with arbitrary values, see ``client_update``. Examples
            beyond ``examples`` are dropped, because no batch of the client is larger.
        local: local training of the client.
        examples: number of examples that the client holds, >= 1.
        rounds: active groups of each round, see ``Schedule.rounds``; None means all in every round.
            The server's message holds the whole trainable part in either case. The memory is that
            of the round that takes most.
    """
    # the order of the examples changes nothing, so any generator will do
    passed = sum(map(len, batch_rows(local, checks.count("examples", examples), torch.Generator())))
    rows = min(examples, count_rows(batch))
    batch = take(batch, torch.arange(rows))
    kinds: dict[tuple[int, ...] | None, ClientCosts] = {}
    for active in dict.fromkeys(rounds or (None,)):
        model.train_only(active)
        forward, backward = _flops(model, batch, local)
        kinds[active] = ClientCosts(
            trained=model.active_dim(active),
            numbers=model.parameter_count,
            bytes_down=message_bytes(model),
            bytes_up=message_bytes(model, active),
            forward_flops=forward * passed // rows,
            backward_flops=backward * passed // rows,
            memory=_memory(model, batch, local, active),
        )
        model.train_only()
    costs = [kinds[active] for active in rounds or (None,)]
    names = ("trained", "bytes_up", "forward_flops", "backward_flops")
    return replace(
        max(costs, key=lambda cost: cost.memory.total),
        **{name: round(mean(getattr(cost, name) for cost in costs)) for name in names},
    )


def client_side(plan: PlanFile, read: Reader = read_task) -> dict[str, Any]:
    """Measure one client of a plan on one thread; the plan's code is imported and called.

    Returns:
        ``bytes_up`` and ``bytes_down`` of the encoded messages, the mean over the rounds, because
        groups that take turns send less in some; the server's message holds all that trains.
        ``client_flops`` of the local training, and ``memory_bytes`` of a local step in the round
        that takes most, both None where clients select slices.

    Raises:
        ConfigError: see ``training``.
    """
    torch.set_num_threads(1)
    setup = training(plan, report=lambda _: None, read=read)
    if isinstance(setup.trainer, SelectEngine):
        ledger = setup.trainer.rehearse()
        sent = {"bytes_up": ledger.bytes_up[0], "bytes_down": ledger.bytes_down[0]}
        return sent | {"client_flops": None, "memory_bytes": None}
    local = setup.engine.local_of(0)
    batch, examples = first_batch(setup.clients, local)
    rounds = None if plan.schedule is None else plan.schedule.rounds(len(setup.model.groups))
    costs = client_costs(setup.model, batch, local=local, examples=examples, rounds=rounds)
    return {
        "bytes_up": costs.bytes_up,
        "bytes_down": costs.bytes_down,
        "client_flops": costs.forward_flops + costs.backward_flops,
        "memory_bytes": costs.memory.total,
    }


def _flops(model: PartialModel, batch: Batch, local: LocalTraining) -> tuple[int, int]:
    """Return the forward and backward FLOPs of one batch."""
    with (
        # FlopCounterMode counts nothing for the fused attention kernel of the CPU (torch 2.13)
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as forward,
    ):
        loss = batch_loss(model.module, batch, local.loss)
    with FlopCounterMode(display=False) as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    model.gradient.zero_()
    return forward.get_total_flops(), backward.get_total_flops()


def _memory(
    model: PartialModel, batch: Batch, local: LocalTraining, active: Sequence[int] | None
) -> StepMemory:
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        # by storage, since several operations may save one tensor
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    tensors = [*model.module.parameters(), *model.module.buffers()]
    resident = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = batch_loss(model.module, batch, local.loss)
    activations = sum(size for place, size in sizes.items() if place not in resident)
    del loss
    trained = sum(model.flat[span].nbytes for span in model.spans(active))
    before = model.flat.clone()
    optimizer, gradients = fresh_optimizer(local, model, active)
    optimizer.step(gradients)
    model.flat.copy_(before)
    return StepMemory(
        parameters=sum(resident.values()),
        gradients=trained,
        before=trained,
        optimizer=sum(value.nbytes for value in optimizer.state),
        activations=activations,
    )


def parameters_sent(rounds: Rounds, sizes: Sequence[int]) -> int:
    """Return how many parameters a client sends if it takes part in every round.

    >>> parameters_sent(((0, 1), (0,), (1,)), [10, 5])
    30
    """
    return sum(sizes[group] for active in rounds for group in active)
