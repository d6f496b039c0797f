"""Tuned within a budget: the best of about ten trainings, beside one with chosen settings.

Run: ``python examples/studies/tuned.py --result FILE.json``; about ten minutes of one core for
digits, five for ``--task fashion-mnist`` (Debian's package dataset-fashion-mnist).

Each row has the same total epsilon. "untouched" trains once with the package's defaults and a clip
norm of 1; "by hand" once with settings that were chosen on public images; "tune" is `privpart tune`
among 48 candidates around the untouched settings: each of its about ten trainings has the noise
with which the whole selection meets that epsilon. It is scored by 240 public users, and every row
is measured by the test images, which nothing else reads. The last row is what the choice costs:
settings by hand, with the noise of a training of tune. Noise is secret, so figures of another run
differ by it; seeds are those of model, deal and cohorts.

By hand, digits take the rates and clip norm of examples/digits.toml, chosen on public digits. For
Fashion-MNIST, every other of the 48 candidates trains once on stand-ins for the users: as many,
with as many images each, drawn from 80 % of the images of the public users, under the noise of one
training; the one that is best on the other 20 % is taken.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frame

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import mean, stdev
from typing import Any

import torch

from privpart import Accuracy, Run, train, tune
from privpart.data import tasks
from privpart.data.users import Users
from privpart.study.tune import tune_of
from privpart.training.metric import accuracy
from privpart.training.plan_file import Data
from privpart.training.task_data import PlanData, plan_data
from privpart.training.training import Own

PUBLIC = 240
QUIET = {"progress": False, "evaluate_every": 1000}
Plan = dict[str, Any]
ByHand = Callable[[Plan, float], Plan]
"""Changes the settings of a plan, by the noise multiplier of its training."""


@dataclass(frozen=True)
class Task:
    """Users of a task, of whom each takes part once; the network; how long a client trains."""

    users: int
    cohort: int
    sizes: Plan
    client: Plan
    passes: Plan


TASKS = {
    "digits": Task(
        users=1197,
        cohort=19,
        sizes={"channels": [16, 32], "hidden": 512, "image_size": 8},
        client={"learning_rate": 0.1},
        passes={"client.epochs": [1, 2]},
    ),
    # Two batches of a user's 71 images, so that a training takes seconds.
    "fashion-mnist": Task(
        users=600,
        cohort=20,
        sizes={"channels": [4, 8], "hidden": 128, "image_size": 28},
        client={"learning_rate": 0.1, "steps": 2},
        passes={"client.steps": [1, 2]},
    ),
}
SPACE = {
    "client.learning_rate": {"low": 0.03, "high": 0.3, "scale": "log"},
    "server.learning_rate": {"low": 0.03, "high": 1.0, "scale": "log"},
    "privacy.clip_norm": {"low": 0.1, "high": 1.0, "scale": "log"},
    "server.momentum": [0.0, 0.9],
}
SETTINGS = {"client": True, "server": True, "model": {"train"}, "privacy": {"clip_norm"}}
"""What a candidate changes of a plan."""
PARTS = {
    "full": {"model.train": ["*"]},
    "partial": {"model.train": ["conv*", "norm.*", "dense2.*"]},
}


def plan_of(task: str, seed: int, epsilon: float, rounds: int) -> Plan:
    """Return the plan of one training with untouched settings; nobody's test image is in it."""
    users = TASKS[task]
    return {
        "schema": "privpart/plan/1",
        "privacy": {
            "rounds": rounds or users.users // users.cohort,
            "clip_norm": 1.0,
            "target_epsilon": epsilon,
            "delta": 1e-5,
            "mechanism": {"name": "blt"},
        },
        "model": {"name": "small_cnn", "sizes": users.sizes, "seed": seed},
        "data": {
            "task": task,
            "users": users.users,
            "held_out": PUBLIC,
            "measured_on": "held-out",
            "clients_per_round": users.cohort,
            "seed": seed,
        },
        "client": users.client,
        "server": {},
    }


def with_noise(plan: Plan, noise: float | None) -> Plan:
    """Return a plan with this noise multiplier, or with none yet, in place of a target epsilon."""
    privacy = {k: v for k, v in plan["privacy"].items() if k != "target_epsilon"}
    return plan | {"privacy": privacy | ({} if noise is None else {"noise_multiplier": noise})}


def tables_of(plan: Plan, epsilon: float, runs: str) -> Plan:
    """Return the tune file of a selection around a plan."""
    tables = {"plan": with_noise(plan, None), "target_epsilon": epsilon, "runs": runs}
    space = {"points": 24, "fields": SPACE | TASKS[plan["data"]["task"]].passes}
    return tables | {"seconds": 1.0, "score": "accuracy", "candidates": PARTS, "space": space}


def as_in_digits_toml(plan: Plan, noise: float) -> Plan:
    """Return a plan with the settings of digits.toml; their server's rate falls with the noise."""
    server = {"learning_rate": min(0.5, 0.3 / noise), "momentum": 0.9}
    client = {"learning_rate": 0.1, "epochs": 2}
    return plan | {
        "client": client,
        "server": server,
        "privacy": plan["privacy"] | {"clip_norm": 0.3},
    }


def as_candidate(best: Plan, plan: Plan, _: float) -> Plan:
    """Return a plan with the settings of a candidate."""
    return plan | {
        "client": best["client"],
        "server": best["server"],
        "model": plan["model"] | {"train": best["model"]["train"]},
        "privacy": plan["privacy"] | {"clip_norm": best["privacy"]["clip_norm"]},
    }


def best_on_public_images(plan: Plan, folder: Path) -> Plan:
    """Return the candidate that is best on public images, each with the noise of one training."""
    images = images_of(plan["data"])
    users = plan["data"]["users"]
    kept, each = int(0.8 * len(images.test_y)), len(images.users.x) // users
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(kept, generator=generator)[:each] for _ in range(users)]
    stand_ins = Users(images.test_x[:kept], images.test_y[:kept], rows)
    score = Accuracy(images.test_x[kept:], images.test_y[kept:])
    deal = {k: plan["data"][k] for k in ("clients_per_round", "seed")}
    candidates = tune_of(tables_of(plan, plan["privacy"]["target_epsilon"], "10"), Own()).candidates
    best, highest = {}, -1.0
    for candidate in candidates[::2]:
        settings = candidate.plan.model_dump(mode="json", include=SETTINGS)
        one, out = as_candidate(settings, plan, 0.0) | {"data": deal}, folder / candidate.name
        run = train(clients=stand_ins, metric=score, plan=one, out=out, **QUIET)
        reached = score(run.module())
        print(candidate.name, f"{reached:.3f}", flush=True)
        if reached > highest:
            best, highest = settings, reached
    return best


# Each training reads the task's files; there is one content of them.
tasks.fashion_mnist = lru_cache(tasks.fashion_mnist)


def images_of(data: Plan) -> PlanData:
    """Return the users' images, and those to measure on."""
    return plan_data(Data.model_validate(data), torch.nn.Identity())


def tested(run: Run, plan: Plan) -> float:
    """Return a run's accuracy on the test images."""
    task = images_of({k: v for k, v in plan["data"].items() if k != "measured_on"})
    return accuracy(run.module(), task.test_x, task.test_y)


def trial(plan: Plan, by_hand: ByHand, runs: str, folder: Path) -> dict[str, float]:
    """Return the test accuracy of each way, at the seed of a plan."""
    untouched = train(plan=plan, out=folder / "untouched", **QUIET)
    noise = noise_of(untouched)
    hand = train(plan=by_hand(plan, noise), out=folder / "hand", **QUIET)
    tables = tables_of(plan, plan["privacy"]["target_epsilon"], runs)
    best = tune(tables, folder / "tune", show=lambda _: None)
    noised = with_noise(by_hand(plan, noise_of(best)), noise_of(best))
    last = train(plan=noised, out=folder / "noised", **QUIET)
    ways = {"untouched": untouched, "by hand": hand, "tune": best, "by hand, noise of tune": last}
    return {name: tested(run, plan) for name, run in ways.items()}


def noise_of(run: Run) -> float:
    """Return the noise multiplier of a run."""
    return run.report().guarantee.noise_multiplier


def main() -> None:
    """Train every way at every seed and budget, and write the table."""
    given = frame.options(
        __doc__,
        result="tuned.json",
        quick={"seeds": 1, "rounds": 2, "runs": "binomial:expected=1.5,most=2", "epsilons": [8.0]},
        task={"choices": list(TASKS), "default": "digits"},
        seeds=5,
        rounds=0,
        runs="10",
        epsilons=[8.0],
    )
    result, rows, chosen = frame.Result(given.result, "torch"), [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # What these simulations spend of nobody's budget is not for this user's book.
        os.environ["PRIVPART_STATE_DIR"] = str(folder / "state")
        for epsilon in given.epsilons:
            plans = [plan_of(given.task, s, epsilon, given.rounds) for s in range(given.seeds)]
            by_hand, found = as_in_digits_toml, []
            if given.task != "digits":
                chosen[epsilon] = best_on_public_images(plans[0], folder / f"public-{epsilon:g}")
                by_hand = partial(as_candidate, chosen[epsilon])
            for seed, plan in enumerate(plans):
                found.append(trial(plan, by_hand, given.runs, folder / f"{epsilon:g}-{seed}"))
                print(epsilon, seed, found[-1], flush=True)
            for way in found[0]:
                values = [one[way] for one in found]
                spread = stdev(values) if len(values) > 1 else None
                rows.append(
                    {"epsilon": epsilon, "way": way, "accuracies": values, "mean": mean(values)}
                    | {"standard_deviation": spread}
                )
            result.write(
                method=__doc__, task=given.task, runs=given.runs, by_hand=chosen, rows=rows
            )
    cells = [[f"{row['epsilon']:g}", row["way"], shown(row)] for row in rows]
    print(frame.markdown(["epsilon", "settings", "accuracy"], cells))


def shown(row: Plan) -> str:
    """Return a row's mean and standard deviation, as docs/how-to/tune.md has them."""
    spread = row["standard_deviation"]
    return f"{row['mean']:.3f}" + ("" if spread is None else f" ± {spread:.3f}")


if __name__ == "__main__":
    main()
