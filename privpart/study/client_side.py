"""Client side: what one round of a plan takes from one client, measured.

Bytes are of encoded messages, as the mean over the plan's rounds, because groups that take turns
send less in some. FLOPs, seconds and memory are those of the client's own local training.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any

import torch

from privpart.client import client_update
from privpart.messages import client_id
from privpart.select.engine import SelectEngine
from privpart.training.costs import client_costs
from privpart.training.plan_file import PlanFile
from privpart.training.task_data import Reader, read_task
from privpart.training.training import Training, first_batch, training

_REPEATS = 7


def client_side(plan: PlanFile, read: Reader = read_task) -> dict[str, Any]:
    """Measure one client of a plan on one thread; the plan's code is imported and called.

    Returns:
        ``bytes_up`` and ``bytes_down`` of the messages; the server's holds all that trains.
        ``client_flops`` of the local training, and ``memory_bytes`` of a local step in the round
        that takes most, both None where clients select slices. ``client_seconds``: processor
        seconds of the local training on this machine, the median.

    Raises:
        ConfigError: see ``training``.
    """
    torch.set_num_threads(1)
    setup = training(plan, report=lambda _: None, read=read)
    if isinstance(setup.trainer, SelectEngine):
        ledger = setup.trainer.rehearse()
        seconds = _seconds(setup.trainer.rehearse)
        unknown = {"client_flops": None, "client_seconds": seconds, "memory_bytes": None}
        return {"bytes_up": ledger.bytes_up[0], "bytes_down": ledger.bytes_down[0]} | unknown
    local = setup.engine.local_of(0)
    batch, examples = first_batch(setup.clients, local)
    schedule = plan.schedule
    rounds = (None,) if schedule is None else schedule.rounds(len(setup.model.groups))
    costs = {
        active: client_costs(setup.model, batch, local=local, examples=examples, active=active)
        for active in dict.fromkeys(rounds)
    }
    seconds_of = {active: _seconds(partial(_update, setup, active)) for active in costs}
    flops = [costs[r].forward_flops + costs[r].backward_flops for r in rounds]
    return {
        "bytes_up": round(mean(costs[r].bytes_up for r in rounds)),
        "bytes_down": round(mean(costs[r].bytes_down for r in rounds)),
        "client_flops": round(mean(flops)),
        "client_seconds": mean(seconds_of[r] for r in rounds),
        "memory_bytes": max(cost.memory.total for cost in costs.values()),
    }


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
    seconds = []
    for _ in range(_REPEATS + 1):
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    return median(seconds[1:])  # the first one warms up
