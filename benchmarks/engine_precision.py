"""Engine precision: bfloat16 beside float32, in processor seconds and in accuracy under noise.

Run: ``python benchmarks/engine_precision.py``; writes benchmarks/results/engine_precision.json.
``--resume`` keeps what was measured.

Both precisions of a case take turns in one process of one thread, each by the engine's own rule.
Trainings of a task differ in precision alone: same start, cohorts and noise.
"""

import frame

import statistics
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine_cases import CASES, SMALLEST, Case
from engine_speed import Engine

from privpart import SeededSource
from privpart.engines.options import EngineOptions
from privpart.training.plan_file import PlanFile, read, validated
from privpart.training.training import training

EXAMPLES = Path(__file__).parent.parent / "examples"
PRECISIONS = "float32", "bfloat16"
NAMES = [
    "MLP, full",
    "EMNIST CNN, full",
    "ResNet-18 GN, full",
    "LSTM, full",
    "wide transformer, full",
    "wide transformer, LoRA",
    "wide transformer, LoRA, batches of 2",
]
METHOD = {
    "cases": "a round of the cohort of engine_cases.py; ratio: float32 over bfloat16, of the least "
    "and the median of the turns, of processor seconds",
    "difference": "of the sums of clipped updates, over the length of float32's",
    "tasks": "accuracy on public test images after the last round, by seed of the noise; gain: "
    "bfloat16's minus float32's under the same noise",
}


def measure(case: Case, turns: int) -> dict[str, Any]:
    """Time both precisions of a case in turns."""
    if case.seed is None:  # both start from the weights that torch draws
        torch.manual_seed(0)  # noqa: TID251  as in a network of somebody's own
        case = replace(case, network=partial(deepcopy, case.network()))
    engines = {name: Engine(replace(case, precision=name)) for name in PRECISIONS}
    sums = {name: engine.round() for name, engine in engines.items()}
    times = frame.in_turns({name: engine.round for name, engine in engines.items()}, turns)
    spent = {name: frame.spreads(each) for name, each in times.items()}
    exact = sums["float32"]
    return {
        "ratio": frame.ratios(times["float32"], times["bfloat16"]),
        "difference": float((sums["bfloat16"] - exact).norm() / exact.norm()),
        "methods": {name: str(engine.engine.method) for name, engine in engines.items()},
        "seconds": spent,
    }


def plans() -> dict[str, PlanFile]:
    """Return the tasks: two examples, and users with 14 images each who train a whole network."""
    digits = read(EXAMPLES / "digits.toml")
    tables = digits.tables
    often = {"rounds": 40, "max_participations": 8, "min_separation": 5}
    tables = tables | {
        "privacy": tables["privacy"] | often,
        "model": {"name": "mcmahan_2nn", "sizes": {"inputs": 64, "hidden": 100}, "seed": 7},
        "data": tables["data"] | {"users": 100, "clients_per_round": 20},
        "client": tables["client"] | {"epochs": 5, "batch_size": 4},
    }
    return {
        "digits, part of a CNN": digits,
        "digits, FedPart": read(EXAMPLES / "fedpart_digits.toml"),
        "digits, MLP, 14 images each": validated(tables),
    }


def accuracy(plan: PlanFile, precision: Any, seed: int) -> float:
    """Train under noise from a seed, one client after another; return the accuracy."""
    options = EngineOptions(deterministic=True, precision=precision)
    setup = training(plan, options=options, report=lambda _: None)
    server, _ = setup.run(setup.promise(), SeededSource(seed))
    return setup.evaluate(server.parameters)


def main() -> None:
    given = frame.options(
        __doc__,
        "engine_precision.json",
        quick={"turns": 1, "seeds": 0, "cases": SMALLEST},
        turns=7,
        seeds=5,
        cases=frame.among(CASES, NAMES),
        resume=False,
    )
    torch.set_num_threads(1)
    result = frame.Result(given.result, "torch")
    tasks = result.old.get("tasks", {}) if given.resume else {}
    cases = result.cases(
        given.cases,
        lambda name: measure(CASES[name], given.turns),
        resume=given.resume,
        method=METHOD,
        tasks=tasks,
    )
    for name, plan in plans().items():
        rows = tasks.setdefault(name, {precision: [] for precision in PRECISIONS})
        for seed in range(len(rows["bfloat16"]), given.seeds):
            for precision in PRECISIONS:
                rows[precision].append(accuracy(plan, precision, seed))
            result.write(method=METHOD, cases=cases, tasks=tasks)
        if given.seeds:
            exact, rounded = (rows[precision] for precision in PRECISIONS)
            gains = [b - a for a, b in zip(exact, rounded, strict=True)]
            rows["mean"] = {name: statistics.fmean(rows[name]) for name in PRECISIONS}
            rows["gain"] = frame.spread(gains) | {"mean": statistics.fmean(gains)}
            result.write(method=METHOD, cases=cases, tasks=tasks)
        frame.show(name, rows)


if __name__ == "__main__":
    main()
