"""Client side: what one round of a plan takes from one client, measured.

Bytes are of encoded messages, as the mean over the plan's rounds, because groups that take turns
send less in some. FLOPs, seconds and memory are those of the client's own local training.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from privpart.client import client_update
from privpart.experiment.plan_file import PlanFile
from privpart.experiment.task_data import Reader, read_task
from privpart.experiment.training import Training, first_batch, training
from privpart.measure.costs import ClientCosts, client_costs
from privpart.messages import client_id
from privpart.select.engine import SelectEngine

_REPEATS = 7


@dataclass(frozen=True, slots=True)
class ClientSide:
    """One round of one client, as the mean over the plan's rounds.

    Attributes:
        bytes_up: of the client's message.
        bytes_down: of the server's message, which holds all that trains.
        client_flops: of the local training; None where clients select slices.
        client_seconds: processor seconds of the local training on this machine, the median.
        memory_bytes: of a local step in the round that takes most; None where clients select.
    """

    bytes_up: int
    bytes_down: int
    client_flops: int | None
    client_seconds: float
    memory_bytes: int | None

    def columns(self) -> dict[str, Any]:
        """Return the columns of a table."""
        return asdict(self)


def client_side(plan: PlanFile, read: Reader = read_task) -> ClientSide:
    """Measure one client of a plan on one thread; the plan's code is imported and called.

    Raises:
        ConfigError: see ``training``.
    """
    torch.set_num_threads(1)
    setup = training(plan, report=lambda _: None, read=read)
    if isinstance(setup.trainer, SelectEngine):
        ledger = setup.trainer.rehearse()
        seconds = _seconds(setup.trainer.rehearse)
        return ClientSide(ledger.bytes_up[0], ledger.bytes_down[0], None, seconds, None)
    return _of_rounds(setup)


def _of_rounds(setup: Training) -> ClientSide:
    plan, model = setup.plan, setup.model
    local = setup.engine.local_of(0)
    batch, examples = first_batch(setup.clients, local)
    groups = len(model.groups)
    rounds = (None,) if plan.schedule is None else plan.schedule.rounds(groups)
    kinds = Counter[tuple[int, ...] | None](rounds)
    found: dict[tuple[int, ...] | None, tuple[ClientCosts, float]] = {}
    for active in kinds:
        costs = client_costs(model, batch, local=local, examples=examples, active=active)
        found[active] = (costs, _seconds(partial(_update, setup, active)))

    def over_rounds(of: Callable[[ClientCosts, float], float]) -> float:
        return sum(count * of(*found[active]) for active, count in kinds.items()) / len(rounds)

    return ClientSide(
        round(over_rounds(lambda costs, _: costs.bytes_up)),
        round(over_rounds(lambda costs, _: costs.bytes_down)),
        round(over_rounds(lambda costs, _: costs.forward_flops + costs.backward_flops)),
        over_rounds(lambda _, seconds: seconds),
        max(costs.memory.total for costs, _ in found.values()),
    )


def _update(setup: Training, active: tuple[int, ...] | None) -> None:
    client = client_id(setup.clients.ids[0])
    client_update(
        setup.model,
        setup.first.clone(),
        setup.clients.examples(client),
        local=setup.engine.local_of(0),
        clip_norm=setup.plan.privacy.clip_norm,
        generator=torch.Generator().manual_seed(0),
        active=active,
    )


def _seconds(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS + 1):
        began = time.process_time()
        run()
        taken.append(time.process_time() - began)
    return median(taken[1:])  # the first one warms up
