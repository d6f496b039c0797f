"""Audited bounds: which share of the accountant's epsilon a whole-path replay proves, by plan.

Run: ``python benchmarks/audited_bounds.py``; writes benchmarks/results/audited_bounds.json.

Plans are right, of 8 rounds and 6,090 parameters at noise multiplier 2 (``tests/audits``), each
audited at its default number of draws with ``--seeds`` seeds. "shown" is the epsilon of the client
that released models show the most of, if everything is as planned; where it is below the
accountant's, no attack on them proves that. ``FTRLEngine`` is audited by ``attacks.replay``.
"overhead" is what 1,000 canaries cost the server beyond being clients, at 10^6 parameters: making
their updates and reading the released model.
"""

import frame

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from accounting import BinaryTree, Grouped, Guarantee, Participation
from accounting.mechanisms.pruned_tree import PrunedTree
from attacks.lower_bounds.planted import PlantedCanaries
from privpart import PrivacyPlan, SeededSource, Server
from privpart.cli.audit.verdict import judged
from privpart.cli.audit.whole_path import PlannedPath, replay_path
from privpart.training.plan_file import parse
from privpart.training.training import training

sys.path.append(str(Path(__file__).parent.parent / "tests" / "audits"))
import audited_plans as plans
from other_servers import audited, of_opacus

DELTA = 1e-5
SIZES = [("body", 3000), ("head", 3000)]
TURNS = ((0, 1), (0,), (1,), (0,), (1,), (0, 1), (0,), (1,))
GOALS = "\nreport_goals = { from_round = [0, 4], value = [12, 24] }"
RATES = "[learning_rates]\nserver = { name = 'cosine' }"
BLT, TOEPLITZ, ONE_TREE = 'name = "blt"', 'name = "toeplitz"', 'name = "tree"'
TEXTS = {
    "tree, once": plans.plan(ONE_TREE, plans.ONCE),
    "tree, twice": plans.plan(ONE_TREE, plans.TWICE),
    "tree, in all rounds": plans.plan(ONE_TREE, plans.ALWAYS),
    "tree that restarts, twice": plans.plan(plans.TREE, plans.TWICE),
    "tree that restarts, clip norms by round": plans.plan(plans.TREE, plans.TWICE + plans.CLIPS),
    "tree that restarts, divisors by round": plans.plan(plans.TREE, plans.TWICE + GOALS),
    "BLT, twice": plans.plan(BLT, plans.TWICE),
    "BLT, in all rounds": plans.plan(BLT, plans.ALWAYS),
    "banded Toeplitz, in all rounds": plans.plan(TOEPLITZ, plans.ALWAYS),
    "independent, in all rounds": plans.plan('name = "independent"', plans.ALWAYS),
    "groups, trees, once": plans.plan(ONE_TREE, plans.ONCE, more=plans.TURNS),
    "groups, trees, twice": plans.plan(ONE_TREE, plans.TWICE, more=plans.TURNS),
    "groups, BLT, twice": plans.plan(BLT, plans.TWICE, more=plans.TURNS),
    "groups, Toeplitz, twice": plans.plan(TOEPLITZ, plans.TWICE, more=plans.TURNS),
    "Poisson, 2 rounds": plans.sampled(plans.POISSON).replace("rounds = 8", "rounds = 2"),
    "Poisson, 8 rounds": plans.sampled(plans.POISSON),
    "bins": plans.sampled(plans.BINS),
    "bins, redrawn": plans.sampled(plans.BINS + ", redraw = true"),
}
PRUNED = {"pruned trees, once": 1, "pruned trees, twice": 2}


def of_text(text: str, seed: int) -> dict[str, float]:
    """Audit a plan as the command does, without its clients."""
    read = parse(text, name="plan")
    setup = training(read, report=lambda _: None)
    sizes = [(name, view.numel()) for name, view in setup.model.views(setup.model.flat).items()]
    rates = read.learning_rates.server_share(read.privacy.rounds)
    return _row(PlannedPath(setup.promise(), sizes, read.server, rates), seed)


def of_pruned(times: int, seed: int) -> dict[str, float]:
    """Audit a tree over the run whose nodes without a round of a group are left out."""
    active = [tuple(t for t, groups in enumerate(TURNS) if g in groups) for g in (0, 1)]
    trees = [PrunedTree(len(TURNS), rounds) for rounds in active]
    plan = PrivacyPlan(
        mechanism=Grouped(TURNS, trees, [size for _, size in SIZES]),
        participation=Participation(len(TURNS), times, 4),
        clip_norm=0.5,
        noise_multiplier=2.0,
        report_goal=12,
    )
    return _row(PlannedPath(plan, SIZES), seed)


def _row(path: PlannedPath, seed: int) -> dict[str, float]:
    found = replay_path(path, seed=seed)
    evidence: dict[str, Any] = {"replays": [found.replay], "checks": found.checks}
    claimed = path.plan.guarantee()
    audit = judged({}, claimed, delta=DELTA, confidence=0.95, of_replay=found.bound, **evidence)
    if audit.verdict != "consistent":
        raise RuntimeError("; ".join(audit.reasons))
    mu = found.visible_mu
    shown = audit.epsilon if mu is None else Guarantee(mu).epsilon(DELTA)
    return {"accountant": audit.epsilon, "shown": shown, "bound": audit.bounds[0].epsilon}


def of_engine(seed: int) -> dict[str, float]:
    """Audit ``FTRLEngine``; its noise is of one seed, and its bound of about 60,000 draws."""
    found = audited(*of_opacus("FTRLEngine"), 1)
    epsilon = float(found["stated"].rpartition(" ")[2])
    return {"accountant": epsilon, "shown": epsilon, "bound": float(found["at_least"])}


def timed(audit: Callable[[int], dict[str, float]], seeds: int) -> dict[str, float]:
    """Return the mean of an audit over seeds, its ratios, and CPU seconds of one."""
    began = time.process_time()
    rows = [audit(seed) for seed in range(seeds)]
    values = {name: mean(row[name] for row in rows) for name in rows[0]}
    ratios = {f"bound/{of}": values["bound"] / values[of] for of in ("accountant", "shown")}
    seconds = (time.process_time() - began) / seeds
    return {name: round(value, 4) for name, value in (values | ratios).items()} | {
        "seeds": seeds,
        "cpu_seconds": round(seconds, 1),
    }


def overhead(dim: int) -> dict[str, float]:
    """Return milliseconds of a server's update, a canary's making, and reading a model, medians."""
    plan = PrivacyPlan(
        mechanism=BinaryTree(64),
        participation=Participation(64),
        clip_norm=0.3,
        noise_multiplier=4.0,
        report_goal=100,
    )
    canaries = PlantedCanaries(
        plan.mechanism, plan.participation, dim=dim, count=1000, seed=0, key=bytes(32)
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
    audits: dict[str, Callable[[int], dict[str, float]]] = {
        **{name: lambda seed, text=text: of_text(text, seed) for name, text in TEXTS.items()},
        **{name: lambda seed, k=k: of_pruned(k, seed) for name, k in PRUNED.items()},
        "FTRLEngine": of_engine,
    }
    quick = {"kinds": ["pruned trees, once"], "seeds": 1}
    given = frame.options(
        __doc__, "audited_bounds.json", quick=quick, seeds=1, kinds=frame.among(audits)
    )
    result = frame.Result(given.result, "torch", "numpy")
    rows = dict(result.old.get("rows", {}))
    for name in given.kinds:
        rows[name] = timed(audits[name], 1 if name == "FTRLEngine" else given.seeds)
        frame.show(name, rows[name])
        result.write(rows=rows)
    cost = overhead(10_000 if given.quick else 10**6)
    frame.show("overhead", cost)
    result.write(rows=rows, overhead=cost)


if __name__ == "__main__":
    main()
