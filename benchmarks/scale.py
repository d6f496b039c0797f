"""Scale: a million users, cohorts of 10,000, and 10^8 parameters, on one machine.

Run: ``python benchmarks/scale.py``; writes benchmarks/results/scale.json. ``--job users`` (or
``cohort``, ``parameters``) measures one of them in this process and prints it: the whole benchmark
starts a process for each, so that memory is that of one job.

Seconds are processor time on one thread. Memory is the resident size of the process above that
before the job; of the jobs that train, after each round.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy loads

import torch
from machine import machine
from torch import nn

from accounting import Independent, Participation
from privpart import EmbeddedEngine, PartialModel, PrivacyPlan, SecretSource, Server, fit
from privpart.client import LocalTraining
from privpart.data import Users, cohorts_in_turn, iid_users
from privpart.pool import keep_freed_memory

RESULTS = Path(__file__).parent / "results" / "scale.json"
_MILLION = 1_000_000


def resident() -> float:
    """Return the resident size of this process, MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def users() -> dict[str, Any]:
    """Deal two examples to each of a million users, and draw 100 cohorts of 10,000."""
    x, y = torch.zeros(2 * _MILLION, 1), torch.zeros(2 * _MILLION, dtype=torch.int64)
    before, began = resident(), time.process_time()
    population = Users(x, y, iid_users(len(x), users=_MILLION, data_seed=0))
    dealt, grown = time.process_time() - began, resident() - before
    began = time.process_time()
    cohorts = cohorts_in_turn(ids=population.ids, size=10_000, rounds=100, data_seed=0)
    drawn = time.process_time() - began
    began = time.process_time()
    for client in cohorts[0]:
        population.indices[client]
    return {
        "users": _MILLION,
        "seconds": dealt,
        "index_megabytes": population.indices.nbytes / 1e6,
        "memory_megabytes": grown,
        "cohorts_seconds": drawn,
        "seconds_per_client_looked_up": (time.process_time() - began) / 10_000,
    }


def cohort() -> dict[str, Any]:
    """Train rounds of 10,000 clients with one step each, of 100,000 users.

    The server keeps the rounds of every client that took part, so memory grows for ten rounds,
    until each of them did.
    """
    size, rounds, dim = 10_000, 25, 64
    x = torch.rand(2 * 100_000, dim, generator=torch.Generator().manual_seed(0))
    y = torch.arange(len(x)) % 10
    population = Users(x, y, iid_users(len(x), users=100_000, data_seed=0))
    network = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 10))
    return _trained(network, population, size, rounds)


def parameters() -> dict[str, Any]:
    """Train rounds of two clients with 10^8 parameters."""
    x = torch.rand(8, 10_000, generator=torch.Generator().manual_seed(0))
    population = Users(x, torch.arange(8), iid_users(8, users=8, data_seed=0))
    return _trained(nn.Linear(10_000, 10_000, bias=False), population, 2, 4)


def _trained(network: nn.Module, population: Users, size: int, rounds: int) -> dict[str, Any]:
    keep_freed_memory()
    before = resident()
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
    cohorts = cohorts_in_turn(ids=population.ids, size=size, rounds=rounds, data_seed=0)
    seconds, memory = [time.process_time()], []

    def note(_: object) -> None:
        seconds.append(time.process_time())
        memory.append(round(resident() - before, 1))

    torch.set_num_threads(1)
    with EmbeddedEngine(model, population, local=local, data_seed=0, sums=True) as engine:
        fit(server, engine, cohorts, callbacks=[note])
    return {
        "clients_per_round": size,
        "parameters": model.dim,
        "seconds_per_round": [round(b - a, 3) for a, b in pairwise(seconds)],
        "memory_megabytes_after_round": memory,
    }


JOBS = {"users": users, "cohort": cohort, "parameters": parameters}


def main() -> None:
    """Measure one job, or all of them in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=JOBS)
    chosen = parser.parse_args().job
    if chosen is not None:
        print(json.dumps(JOBS[chosen]()))
        return
    found: dict[str, Any] = {"machine": machine("torch", "numpy")}
    for name in JOBS:
        command = [sys.executable, __file__, "--job", name]
        told = subprocess.run(command, check=True, capture_output=True, text=True)
        found[name] = json.loads(told.stdout)
        print(name, found[name])
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
