"""Client side: what one round of a plan takes from one client, measured."""

from typing import Any

import torch

from privpart.select.engine import SelectEngine
from privpart.training.costs import client_costs
from privpart.training.plan_file import PlanFile
from privpart.training.task_data import Reader, read_task
from privpart.training.training import first_batch, training


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
