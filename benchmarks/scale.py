"""Scale: a million users, cohorts of 10,000, and 10^8 parameters, on one machine.

Run: ``python benchmarks/scale.py``; writes benchmarks/results/scale.json. Each job has a process of
its own, so that memory is that of one job.

Seconds are processor time on one thread. Memory is the resident size of the process above that
before the job; of the jobs that train, after each round.
"""

import frame

import pickle
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from accounting import Independent, Participation
from privpart import EmbeddedEngine, PartialModel, PrivacyPlan, SecretSource, Server, fit
from privpart.data import Users, cohorts_in_turn, iid_users
from privpart.pool import keep_freed_memory
from privpart.settings.client import LocalTraining


def users(share: float) -> dict[str, Any]:
    """Deal two examples to each of a million users, and draw 100 cohorts of 10,000."""
    count, size = int(share * 1_000_000), int(share * 10_000)
    x, y = torch.zeros(2 * count, 1), torch.zeros(2 * count, dtype=torch.int64)
    before, began = frame.resident(), time.process_time()
    population = Users(x, y, iid_users(len(x), users=count, data_seed=0))
    dealt, grown = time.process_time() - began, frame.resident() - before
    began = time.process_time()
    cohorts = cohorts_in_turn(population.ids, size=size, rounds=100, data_seed=0)
    drawn = time.process_time() - began
    looked_up = frame.seconds(lambda: [population.indices[client] for client in cohorts[0]])
    return {
        "users": count,
        "seconds": dealt,
        "index_megabytes": len(pickle.dumps(population.indices)) / 1e6,
        "memory_megabytes": grown / 1e6,
        "cohorts_seconds": drawn,
        "seconds_per_client_looked_up": looked_up.cpu / size,
    }


def cohort(share: float) -> dict[str, Any]:
    """Train rounds of 10,000 clients with one step each, of 100,000 users.

    The server keeps the rounds of every client that took part, so memory grows for ten rounds,
    until each of them did.
    """
    size, count, dim = int(share * 10_000), int(share * 100_000), 64
    x = torch.rand(2 * count, dim, generator=torch.Generator().manual_seed(0))
    y = torch.arange(len(x)) % 10
    population = Users(x, y, iid_users(len(x), users=count, data_seed=0))
    network = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 10))
    return trained(network, population, size, 25)


def parameters(share: float) -> dict[str, Any]:
    """Train rounds of two clients with 10^8 parameters."""
    width = int(share**0.5 * 10_000)
    x = torch.rand(8, width, generator=torch.Generator().manual_seed(0))
    population = Users(x, torch.arange(8), iid_users(8, users=8, data_seed=0))
    return trained(nn.Linear(width, width, bias=False), population, 2, 4)


def trained(network: nn.Module, population: Users, size: int, rounds: int) -> dict[str, Any]:
    keep_freed_memory()
    before = frame.resident()
    model = PartialModel(network, train=["*"], seed=None)
    local = LocalTraining(learning_rate=0.1, steps=1, batch_size=2)
    plan = PrivacyPlan(
        mechanism=Independent(rounds),
        participation=Participation(rounds, max_participations=rounds),
        clip_norm=1.0,
        noise_multiplier=1.0,
        report_goal=size,
    )
    server = Server(plan, model.flat.clone(), source=SecretSource())
    cohorts = cohorts_in_turn(population.ids, size=size, rounds=rounds, data_seed=0)
    seconds, memory = [time.process_time()], []

    def note(_: object) -> None:
        seconds.append(time.process_time())
        memory.append(round((frame.resident() - before) / 1e6, 1))

    torch.set_num_threads(1)
    with EmbeddedEngine(model, population, local=local, data_seed=0, sums=True) as engine:
        fit(server, engine, cohorts, callbacks=[note])
    return {
        "clients_per_round": size,
        "parameters": model.dim,
        "seconds_per_round": [round(b - a, 3) for a, b in pairwise(seconds)],
        "memory_megabytes_after_round": memory,
    }


def main() -> None:
    given = frame.options(__doc__, "scale.json")
    result, parts = frame.Result(given.result, "torch", "numpy"), {}
    for job in (users, cohort, parameters):
        parts[job.__name__] = frame.apart(job, 0.01 if given.quick else 1.0)
        frame.show(job.__name__, parts[job.__name__])
    result.write(**parts)


if __name__ == "__main__":
    main()
