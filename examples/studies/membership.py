"""Membership: who took part, told from the released model, for a full and a partial training.

    python examples/studies/membership.py --work DIR    about seven minutes of one core; resumes
    python examples/studies/membership.py --quick       digits, one seed, no noise: ten seconds

240 users with up to six images each; all take part in each of eight rounds, with one step. Digits
are 8 x 8 pixels; of Fashion-MNIST's images, averaged over squares to 7 x 7, the other 58,560 train
nothing. Two dense layers, 9,610 and 7,690 parameters; the partial training sends the last one and
the biases of the first, 1,418, of a first layer that keeps its random start. Both have the same
budget, clip norm and rates; the server's rate falls with the noise. All of this was chosen on
digits, and nothing changed for Fashion-MNIST.

Per cell and seed, eight shadow models and two targets, whose users took part by fair coins;
accuracy is that of a training on all users, on the test images. A row of the results is an attack
on a cell, over the targets of all its seeds. "never" is the same attack on units of test images
with coins that decided nothing: it has to be at chance.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frame

import itertools
import math
import tempfile
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import attacks
from attacks.membership_inference import scores_of_models
from privpart.cli.audit.membership_models import Draw, Population, said_by_models, trained
from privpart.training.plan_file import PlanFile, validated
from privpart.training.training import Own, training

POOLED = nn.Sequential(nn.AvgPool2d(4), nn.Flatten())
EPSILONS = (0.5, 2.0, 8.0, math.inf)
DATA = {"digits": (nn.Flatten(), 64, 0), "fashion-mnist": (POOLED, 49, 9760)}
"""What makes an image a vector, its length, and how many users of six images train nothing."""
PARTS = {"full": ["*"], "partial": ["*.bias", "3.*"]}
SHADOWS, TARGETS, SEEDS, DELTA = 8, 2, 5, 1e-5


class Cell(NamedTuple):
    """A training, of which each seed has one."""

    data: str
    epsilon: float
    part: str

    @property
    def key(self) -> str:
        """Its name; digits, which came first, are not named in it, so that coins stay the same."""
        return f"{self.data} {self.epsilon:g} {self.part}".removeprefix("digits ")


def network(data: str, seed: int) -> nn.Module:
    """Return two dense layers."""
    vector, length, _ = DATA[data]
    torch.manual_seed(seed)  # noqa: TID251  the start weights
    return nn.Sequential(vector, nn.Linear(length, 128), nn.ReLU(), nn.Linear(128, 10))


def plan_of(data: str, part: str, epsilon: float, seed: int) -> PlanFile:
    """Return the plan of a training."""
    private = {"noise_multiplier": 0.0} if epsilon == math.inf else {"target_epsilon": epsilon}
    values: dict[str, Any] = {
        "schema": "privpart/plan/1",
        "privacy": {
            "rounds": 8,
            "clip_norm": 1.0,
            "delta": DELTA,
            "max_participations": 8,
            "mechanism": {"name": "blt"},
            **private,
        },
        "model": {"train": PARTS[part]},
        "data": {"task": data, "users": 240, "clients_per_round": 240, "seed": seed},
        "client": {"learning_rate": 0.6, "epochs": 1},
        "server": {"learning_rate": 1.0, "momentum": 0.9},
    }
    if others := DATA[data][2]:
        values["data"] |= {"held_out": others}
    plan = validated(values, in_python=True)
    noise = plan.privacy_plan().noise_multiplier
    values["server"] = {"learning_rate": min(2.0, 4.0 / noise) if noise else 2.0, "momentum": 0.9}
    return validated(values, in_python=True)


def drawn(users: int, seed: int, key: str) -> Draw:
    """Return the coins of a cell's models; of the targets, no attack sees them."""
    draws = np.random.default_rng([seed, *key.encode()])
    half = draws.random((SHADOWS // 2, users)) < 0.5
    own = draws.random((TARGETS, users)) < 0.5
    return Draw(np.concatenate([half, ~half, own]), SHADOWS, int(draws.integers(2**48)))


def measured(cell: Cell, seed: int, work: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Train the models of a cell and seed, unless ``work`` has what they said."""
    path = work / f"{'-'.join(cell.key.split())}-{seed}.npz"
    if path.exists():
        return dict(np.load(path, allow_pickle=False))
    began = time.process_time()
    own = Own(module=network(cell.data, seed))
    setup = training(
        plan_of(cell.data, cell.part, cell.epsilon, seed), objects=own, report=lambda _: None
    )
    population = Population.of(setup, list(setup.clients.ids))
    draw = drawn(len(population.users), seed, cell.key)
    said = said_by_models(population, draw)
    everyone = trained(
        population, np.ones(len(population.users), bool), draw.seed + len(draw.coins)
    )
    values = {
        "coins": draw.coins,
        "losses": said.losses,
        "norms": said.norms,
        "public": said.public,
        "accuracy": np.array(setup.evaluate(everyone)),
        "noise": np.array(population.promised.noise_multiplier),
        "seconds": np.array(time.process_time() - began),
    }
    scratch = path.with_suffix(".part.npz")
    np.savez(scratch, **values)
    scratch.replace(path)
    return values


def judged(scores: Sequence[dict[str, Any]], coins: Sequence[Any]) -> dict[str, Any]:
    """Return, by attack, what is told over the targets of all seeds."""
    together = {attack: np.concatenate([s[attack] for s in scores]) for attack in scores[0]}
    found = attacks.membership(together, np.concatenate(coins), delta=DELTA)
    return {own.attack: own for own in found}


def area(auc: float, present: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Return an area under the curve and its 95 % interval over users (Hanley and McNeil 1982).

    It does not cover how seeds differ, nor what the users of one model have in common.
    """
    inside, outside = int(present.sum()), int((~present).sum())
    first, second = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc) + (inside - 1) * (first - auc**2) + (outside - 1) * (second - auc**2)
    half = 1.96 * math.sqrt(variance / (inside * outside))
    return auc, auc - half, auc + half


def rows_of(cell: Cell, seeds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of the results for each attack on a cell."""
    scores, present, never, unused = [], [], [], []
    for seed, own in enumerate(seeds):
        shadows = own["coins"][:SHADOWS]
        scores.append(scores_of_models(own["losses"], own["norms"], shadows, own["public"]))
        present.append(own["coins"][SHADOWS:].ravel())
        public = own["public"]
        fake = drawn(public.shape[1], seed, f"never {cell.key}").coins
        of_never = scores_of_models(public, public, fake[:SHADOWS], public)
        never.append({attack: s for attack, s in of_never.items() if attack != "gradient"})
        unused.append(fake[SHADOWS:].ravel())
    chance = judged(never, unused)
    rows = []
    for attack, found in judged(scores, present).items():
        row: dict[str, Any] = {"data": cell.data, "epsilon": cell.epsilon, "part": cell.part}
        row |= {"attack": attack}
        row |= {"seeds": len(seeds), "users": seeds[0]["losses"].shape[1]}
        row |= {"coins": sum(map(len, present))}
        row["noise_multiplier"] = float(seeds[0]["noise"])
        row["accuracy"] = mean(float(own["accuracy"]) for own in seeds)
        auc = area(found.auc, np.concatenate(present))
        row |= dict(zip(("auc", "auc_low", "auc_high"), auc, strict=True))
        for name, positives in (("tpr_1", found.found[1]), ("tpr_01", found.found[0])):
            row |= {name: positives.rate, f"{name}_low": positives.low}
            row[f"{name}_high"] = positives.high
        row["proved"] = found.bounds[0].epsilon
        if attack in chance:
            other = chance[attack]
            names = "never_auc", "never_auc_low", "never_auc_high"
            row |= dict(zip(names, area(other.auc, np.concatenate(unused)), strict=True))
            row["never_proved"] = other.bounds[0].epsilon
        row["cpu_seconds"] = sum(float(own["seconds"]) for own in seeds)
        rows.append(row)
    return rows


def main() -> None:
    """Train, or draw."""
    quick = {"seeds": 1, "data": ["digits"]}
    options = frame.options(
        __doc__, "membership.csv", quick, seeds=SEEDS, work="", data=frame.among(DATA)
    )
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(options.work or scratch)
        work.mkdir(parents=True, exist_ok=True)
        epsilons = (math.inf,) if options.quick else EPSILONS
        cells = [Cell(*key) for key in itertools.product(options.data, epsilons, PARTS)]
        # Seed by seed, so that whoever stops early has whole seeds.
        for seed, cell in itertools.product(range(options.seeds), cells):
            measured(cell, seed, work)
            sys.stderr.write(f"{cell.key}, seed {seed}\n")
        rows = [
            row
            for cell in cells
            for row in rows_of(cell, [measured(cell, s, work) for s in range(options.seeds)])
        ]
    for row in rows:
        name = "{data}, epsilon {epsilon:g}, {part}, {attack}".format_map(row)
        frame.show(name, row, "accuracy", "auc", "tpr_1", "proved", "never_auc")
    frame.write_csv(options.result, rows)


if __name__ == "__main__":
    main()
