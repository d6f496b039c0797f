"""Tuned within a budget: the best of about ten trainings, beside one with chosen settings.

Run: ``python examples/studies/tuned.py --result FILE.json``; about ten minutes of one core.

Each row has the same total epsilon. "untouched" trains once with the package's defaults and a clip
norm of 1; "by hand" once with the rates and clip norm of examples/digits.toml, which somebody chose
on public digits; "tune" is `privpart tune` among 48 candidates around the untouched settings: each
of its about ten trainings has the noise with which the whole selection meets that epsilon. It is
scored by 240 public users, and every row is measured by the test images, which nothing else reads.
The last row is what the choice costs: settings by hand, with the noise of a training of tune. Noise
is secret, so figures of another run differ by it; seeds are those of model, deal and cohorts.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frame

import os
import tempfile
from statistics import mean, stdev
from typing import Any

from privpart import Run, train, tune
from privpart.training.metric import accuracy
from privpart.training.plan_file import Data
from privpart.training.task_data import plan_data

ROUNDS, USERS, PUBLIC, COHORT = 63, 1197, 240, 19
SPACE = {
    "points": 24,
    "fields": {
        "client.learning_rate": {"low": 0.03, "high": 0.3, "scale": "log"},
        "server.learning_rate": {"low": 0.03, "high": 1.0, "scale": "log"},
        "privacy.clip_norm": {"low": 0.1, "high": 1.0, "scale": "log"},
        "server.momentum": [0.0, 0.9],
        "client.epochs": [1, 2],
    },
}
PARTS = {
    "full": {"model.train": ["*"]},
    "partial": {"model.train": ["conv*", "norm.*", "dense2.*"]},
}


def plan_of(seed: int, epsilon: float, rounds: int) -> dict[str, Any]:
    """Return the plan of one training with untouched settings; nobody's test image is in it."""
    return {
        "schema": "privpart/plan/1",
        "privacy": {
            "rounds": rounds,
            "clip_norm": 1.0,
            "target_epsilon": epsilon,
            "delta": 1e-5,
            "mechanism": {"name": "blt"},
        },
        "model": {
            "name": "small_cnn",
            "sizes": {"channels": [16, 32], "hidden": 512, "image_size": 8},
            "seed": seed,
        },
        "data": {
            "task": "digits",
            "users": USERS,
            "held_out": PUBLIC,
            "measured_on": "held-out",
            "clients_per_round": COHORT,
            "seed": seed,
        },
        "client": {"learning_rate": 0.1},
        "server": {},
    }


def by_hand(plan: dict[str, Any], noise: float) -> dict[str, Any]:
    """Return a plan with the settings of digits.toml; their server's rate falls with the noise."""
    rates = {"client": {"learning_rate": 0.1, "epochs": 2}}
    rates["server"] = {"learning_rate": min(0.5, 0.3 / noise), "momentum": 0.9}
    return plan | rates | {"privacy": plan["privacy"] | {"clip_norm": 0.3}}


def tested(run: Run, plan: dict[str, Any]) -> float:
    """Return a run's accuracy on the test images."""
    module = run.module()
    images = {k: v for k, v in plan["data"].items() if k != "measured_on"}
    task = plan_data(Data.model_validate(images), module)
    return accuracy(module, task.test_x, task.test_y)


def trial(seed: int, epsilon: float, rounds: int, runs: str, folder: Path) -> dict[str, float]:
    """Return the test accuracy of each way, at one seed."""
    plan = plan_of(seed, epsilon, rounds)
    out = folder / f"{seed}-{epsilon:g}"
    untouched = train(plan=plan, out=out / "untouched", progress=False)
    noise = untouched.report().guarantee.noise_multiplier
    hand = train(plan=by_hand(plan, noise), out=out / "hand", progress=False)
    base = plan | {"privacy": {k: v for k, v in plan["privacy"].items() if k != "target_epsilon"}}
    tables = {"plan": base, "target_epsilon": epsilon, "runs": runs, "seconds": 1.0}
    best = tune(
        tables | {"score": "accuracy", "candidates": PARTS, "space": SPACE},
        out / "tune",
        show=lambda _: None,
    )
    noise = best.report().guarantee.noise_multiplier
    noised = by_hand(plan, noise)
    noised["privacy"] = {**base["privacy"], "clip_norm": 0.3, "noise_multiplier": noise}
    last = train(plan=noised, out=out / "noised", progress=False)
    ways = {"untouched": untouched, "by hand": hand, "tune": best, "by hand, noise of tune": last}
    return {name: tested(run, plan) for name, run in ways.items()}


def main() -> None:
    """Train every way at every seed and budget, and write the table."""
    given = frame.options(
        __doc__,
        result="tuned.json",
        quick={"seeds": 1, "rounds": 2, "runs": "binomial:expected=1.5,most=2", "epsilons": [8.0]},
        seeds=5,
        rounds=ROUNDS,
        runs="10",
        epsilons=[8.0],
    )
    result, rows = frame.Result(given.result, "torch"), []
    with tempfile.TemporaryDirectory() as folder:
        # What these simulations spend of nobody's budget is not for this user's book.
        os.environ["PRIVPART_STATE_DIR"] = str(Path(folder) / "state")
        for epsilon in given.epsilons:
            found = []
            for seed in range(given.seeds):
                found.append(trial(seed, epsilon, given.rounds, given.runs, Path(folder)))
                print(epsilon, seed, found[-1], flush=True)
            for way in found[0]:
                values = [one[way] for one in found]
                spread = stdev(values) if len(values) > 1 else None
                rows.append(
                    {"epsilon": epsilon, "way": way, "accuracies": values, "mean": mean(values)}
                    | {"standard_deviation": spread}
                )
            result.write(method=__doc__, runs=given.runs, rows=rows)
    for row in rows:
        print(row["epsilon"], row["way"], f"{row['mean']:.3f}", row["standard_deviation"])


if __name__ == "__main__":
    main()
