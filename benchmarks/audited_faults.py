"""Audited faults: which audit finds which silent failure of a server, and what it costs.

Run: ``python benchmarks/audited_faults.py``; writes benchmarks/results/audited_faults.json.

Each fault of ``tests/privpart/faulty_servers.py`` is put into the real server, at full size: a tree
over 64 rounds that restarts every 16, 76,042 parameters, noise multiplier 4, a client in at most 4
rounds 16 apart. A paired replay runs it twice; the canaries, 1,000 per run, run it once and then
four times. A VIOLATION is at 99.99 %, over all bounds of the audit. CPU time is that of the whole
audit. ``--seeds N`` repeats everything. The last lines are what 1,000 canaries cost the server
beyond being clients, at 10^6 parameters: making their updates and reading the released model.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy loads
sys.path.append(str(Path(__file__).parent.parent / "tests" / "privpart"))

import torch
from faulty_servers import FAULTY
from machine import machine

from accounting import BinaryTree, Participation
from attacks.lower_bounds.planted import PlantedCanaries
from privpart import PrivacyPlan, SeededSource, Server, ServerOptimizer
from privpart.cli.audit.replica import Replica, Scored, canary_scores, paired_replay
from privpart.cli.audit.verdict import EpsilonAudit, judged

DIM = 76_042
DELTA = 1e-5
COUNT = 1000
RUNS = 4
PLAN = PrivacyPlan(
    mechanism=BinaryTree(64, restart_every=16),
    participation=Participation(64, 4, 16),
    clip_norm=0.3,
    noise_multiplier=4.0,
    report_goal=100,
)
RESULTS = Path(__file__).parent / "results" / "audited_faults.json"


def audit(**found: Any) -> EpsilonAudit:  # noqa: ANN401
    """Return the verdict on scores or replays."""
    return judged({}, PLAN.guarantee(), delta=DELTA, confidence=0.95, **found)


def row(audited: EpsilonAudit, began: float) -> dict[str, Any]:
    """Return what a table needs of an audit that began at a CPU time."""
    return {
        "verdict": audited.verdict,
        "bounds": {bound.method: round(bound.epsilon, 4) for bound in audited.bounds},
        "reasons": list(audited.reasons),
        "cpu_seconds": round(time.process_time() - began, 2),
    }


def first(scored: Scored) -> Scored:
    """Return the canaries of the first run alone."""
    return replace(scored, scores=scored.scores[:COUNT], present=scored.present[:COUNT])


def measured(server: Callable[..., Server], seed: int) -> dict[str, Any]:
    """Audit a server in every way."""
    replica = Replica(PLAN, DIM, ServerOptimizer(learning_rate=0.3, momentum=0.9), server)
    began = time.process_time()
    replays = paired_replay(replica, seed=seed, delta=DELTA, confidence=0.95)
    found = {"replay": row(audit(replays=replays), began)}
    began = time.process_time()
    scored = canary_scores(replica, count=COUNT, runs=RUNS, seed=seed)
    found[f"canaries, {RUNS} runs"] = row(audit(scored=scored), began)
    one = row(audit(scored=first(scored)), began)
    one["cpu_seconds"] = None  # the runs are timed together
    found["canaries, 1 run"] = one
    return found


def overhead(dim: int = 10**6) -> dict[str, float]:
    """Return milliseconds of a server's update, a canary's making, and reading a model, medians."""
    plan = replace(PLAN, mechanism=BinaryTree(64), participation=Participation(64))
    canaries = PlantedCanaries(
        plan.mechanism, plan.participation, dim=dim, count=COUNT, seed=0, key=bytes(32)
    )
    server = Server(plan, torch.zeros(dim), source=SeededSource(0))
    client = canaries.clients(0)[0]
    update = canaries.update(client, 0, plan.clip_norm)

    def rounds(updates: int) -> float:
        task = server.task([])
        time.sleep(1.0)  # the noise is drawn while clients train
        began = time.process_time()
        server.run_round(task.update(i + 1000 * server.round, update) for i in range(updates))
        return 1000 * (time.process_time() - began)

    def each(function: Callable[[], object]) -> float:
        times = []
        for _ in range(9):
            began = time.process_time()
            function()
            times.append(1000 * (time.process_time() - began))
        return sorted(times)[4]

    few, many = (sorted(rounds(k) for _ in range(5))[2] for k in (1, 51))
    return {
        "round_of_one_update_ms": round(few, 2),
        "each_further_update_ms": round((many - few) / 50, 3),
        "a_canary_made_ms": round(each(lambda: canaries.update(client, 0, plan.clip_norm)), 3),
        "a_model_read_ms": round(each(lambda: canaries.project(server.parameters)), 2),
    }


def main() -> None:
    """Measure, print and write each fault as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    seeds = parser.parse_args().seeds
    found: dict[str, Any] = {
        "machine": machine("torch", "numpy"),
        "accountant": {"epsilon": PLAN.guarantee().epsilon(DELTA), "mu": PLAN.guarantee().mu},
        "overhead": overhead(),
        "faults": {},
    }
    print(json.dumps(found["overhead"]))
    for name, server in {"none": Server, **FAULTY}.items():
        found["faults"][name] = [measured(server, seed) for seed in range(seeds)]
        for audited in found["faults"][name]:
            print(name)
            for how, a in audited.items():
                print(f"    {how}: {a['verdict']} {a['bounds']} {a['cpu_seconds']}", flush=True)
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
