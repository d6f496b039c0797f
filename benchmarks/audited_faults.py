"""Audited faults: which audit finds which silent failure of a server, and what it costs.

Run: ``python benchmarks/audited_faults.py``; writes benchmarks/results/audited_faults.json.

Each fault of ``tests/privpart/faulty_servers.py`` is put into the real server, at full size: a tree
over 64 rounds that restarts every 16, 76,042 parameters, noise multiplier 4, a client in at most 4
rounds 16 apart. A replay runs its whole path several times; the canaries, 1,000 per run, run it
once and then four times. A VIOLATION is at 99.99 %, over all bounds of the audit. CPU time is that
of the whole audit. ``--seeds N`` repeats everything. "overhead" is what 1,000 canaries cost the
server beyond being clients, at 10^6 parameters: making their updates and reading the released
model.
"""

import frame

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from accounting import BinaryTree, Participation
from attacks.lower_bounds.planted import PlantedCanaries
from privpart import PrivacyPlan, SeededSource, Server, ServerOptimizer
from privpart.cli.audit.replica import Replica, canary_scores
from privpart.cli.audit.verdict import EpsilonAudit, judged
from privpart.cli.audit.whole_path import PlannedPath, replay_path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "privpart"))
from faulty_servers import FAULTY

DELTA, COUNT, RUNS = 1e-5, 1000, 4
PLAN = PrivacyPlan(
    mechanism=BinaryTree(64, restart_every=16),
    participation=Participation(64, 4, 16),
    clip_norm=0.3,
    noise_multiplier=4.0,
    report_goal=100,
)


def row(began: float | None, **evidence: Any) -> dict[str, Any]:
    """Return what a table needs of an audit of scores or replays that began at a CPU time."""
    audited: EpsilonAudit = judged({}, PLAN.guarantee(), delta=DELTA, confidence=0.95, **evidence)
    return {
        "verdict": audited.verdict,
        "bounds": {bound.method: round(bound.epsilon, 4) for bound in audited.bounds},
        "reasons": list(audited.reasons),
        "cpu_seconds": None if began is None else round(time.process_time() - began, 2),
    }


def measured(server: Callable[..., Server], seed: int, dim: int) -> dict[str, Any]:
    """Audit a server in every way."""
    replica = Replica(PLAN, dim, ServerOptimizer(learning_rate=0.3, momentum=0.9), server)
    began = time.process_time()
    tensors = [("weight", dim - 42), ("bias", 42)]
    path = PlannedPath(PLAN, tensors, replica.optimizer, server=server)
    found = replay_path(path, seed=seed)
    rows = {"replay": row(began, replays=[found.replay], checks=found.checks)}
    began = time.process_time()
    scored = canary_scores(replica, count=COUNT, runs=RUNS, seed=seed)
    rows[f"canaries, {RUNS} runs"] = row(began, scored=scored)
    first = replace(scored, scores=scored.scores[:COUNT], present=scored.present[:COUNT])
    rows["canaries, 1 run"] = row(None, scored=first)  # the runs are timed together
    return rows


def overhead(dim: int) -> dict[str, float]:
    """Return milliseconds of a server's update, a canary's making, and reading a model, medians."""
    plan = replace(PLAN, mechanism=BinaryTree(64), participation=Participation(64))
    canaries = PlantedCanaries(
        plan.mechanism, plan.participation, dim=dim, count=COUNT, seed=0, key=bytes(32)
    )
    server = Server(plan, torch.zeros(dim), source=SeededSource(0))
    client = canaries.clients(0)[0]
    update = canaries.update(client, 0, plan.clip_norm)

    def round_of(updates: int) -> float:
        task = server.task([])
        time.sleep(1.0)  # the noise is drawn while clients train
        answers = (task.update(i + 1000 * server.round, update) for i in range(updates))
        return 1000 * frame.seconds(lambda: server.run_round(answers)).cpu

    few, many = (median(round_of(k) for _ in range(5)) for k in (1, 51))
    jobs = {
        "a_canary_made_ms": lambda: canaries.update(client, 0, plan.clip_norm),
        "a_model_read_ms": lambda: canaries.project(server.parameters),
    }
    times = frame.in_turns(jobs, 9, warm=False)
    return {
        "round_of_one_update_ms": round(few, 2),
        "each_further_update_ms": round((many - few) / 50, 3),
    } | {name: round(1000 * median(s.cpu for s in own), 3) for name, own in times.items()}


def main() -> None:
    quick = {"dim": 2000, "faults": ["none", next(iter(FAULTY))]}
    servers = {"none": Server, **FAULTY}
    given = frame.options(
        __doc__,
        "audited_faults.json",
        quick=quick,
        seeds=1,
        dim=76_042,
        faults=frame.among(servers),
    )
    result = frame.Result(given.result, "torch", "numpy")
    promise = PLAN.guarantee()
    about = {
        "accountant": {"epsilon": promise.epsilon(DELTA), "mu": promise.mu},
        "overhead": overhead(10_000 if given.quick else 10**6),
    }
    frame.show("overhead", about["overhead"])
    faults: dict[str, Any] = {}
    for name in given.faults:
        faults[name] = [measured(servers[name], seed, given.dim) for seed in range(given.seeds)]
        for audited in faults[name]:
            for how, one in audited.items():
                frame.show(f"{name}: {how}", one, "verdict", "bounds", "cpu_seconds")
        result.write(**about, faults=faults)


if __name__ == "__main__":
    main()
