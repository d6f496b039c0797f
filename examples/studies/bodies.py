"""The study of a pretrained body, all seeds of an arm at once; then a choice within the budget.

Run: ``python examples/studies/bodies.py``, after examples/pretrained_body/prepare.py; writes
benchmarks/results/study/body/tuning.csv, final.csv and membership.csv, and regret.csv. What is in
the first two, or a regret.csv that is there, is not trained again.

``privpart frontier examples/pretrained_body/study.toml`` trains the same arms, points and seeds one
by one: 0.6 to 3 CPU seconds each. ``--study study_seeds.toml --table body-seeds`` has other seeds
and levels. Here each arm's trainings are one computation, with gradients,
clipping and server steps in plain torch and noise C^-1 Z from the plan's own mechanism. It is a
simulation: nothing here is private. ``--compare SWEEP.jsonl`` prints its trials beside those that
``privpart frontier`` stored.

The choice: ``privpart tune`` with 4 trainings on average, each of a part drawn anew, with the rates
that the study chose for it and the noise with which the whole selection meets epsilon 2. Public
images score. The study's own trainings of the same seeds have all of the epsilon for themselves.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frame

import csv
import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from membership import area
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import attacks
from accounting import most_mu
from accounting.selection import draw, repetitions_of
from attacks.membership_inference import scores_of_models
from privpart.data import cohorts_once_each
from privpart.study.study_file import Group, Study, read_study

BODY = Path(__file__).parents[1] / "pretrained_body"
RESULTS = frame.RESULTS / "study"
RATES = ("client.learning_rate", "server.learning_rate")
RUNS, CHOSEN_AT, DRAWS = "4", "2", 3
"""Trainings on average, the epsilon of the choice, and selections at each seed."""
AT_ONCE = 2**24  # numbers of all clients' gradients
SHADOWS, TARGETS = 8, 8
"""Models of the game of membership, for each arm."""
Row = dict[str, Any]
Network = dict[str, Tensor]
"""Name -> parameter."""


class Arm:
    """One arm at one level of noise: its network, start values, mechanism and clip norm."""

    def __init__(self, study: Study, group: Group) -> None:
        import task  # beside the study file

        self.study, self.group, self.task = study, group, task
        self.plan = study.final_cells(group, study.points[0])[0].plan
        self.promise = self.plan.privacy_plan()
        self.size = sum(p.numel() for p in self.start(0)[0].values())
        self.data = {part: task.examples(part) for part in ("users", "public", "test")}

    def start(self, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], torch.nn.Module]:
        """Return what trains, what is frozen, and the network, as of a plan with this seed."""
        sizes = self.plan.model.sizes
        own = self.plan.model.model_copy(update={"seed": seed})
        model = own.partial(lambda: self.task.network(**sizes))
        names = set(model.trainable)
        found = {name: p.detach() for name, p in model.module.named_parameters()}
        trained = {name: found[name] for name in model.trainable}
        return trained, {n: p for n, p in found.items() if n not in names}, model.module

    def reached(
        self,
        seeds: Sequence[int],
        points: Sequence[Row],
        noise: float | None = None,
        draws: Sequence[int] | None = None,
    ) -> list[tuple[float, float]]:
        """Return the accuracy on public and on test images of a training per seed and point.

        ``noise`` is a multiplier in place of the plan's; ``draws`` seed the noise, else the seeds.
        """
        everybody = torch.ones(len(seeds), len(self.data["users"][1]) // self.task.EACH)
        return [
            (self._right(whole, module, "public"), self._right(whole, module, "test"))
            for whole, module in self.models(
                seeds, points, seeds if draws is None else draws, everybody, noise
            )
        ]

    def losses(self, whole: Network, module: torch.nn.Module, part: str) -> Tensor:
        """Return a network's loss on each image of a part."""
        images, labels = self.data[part]
        with torch.no_grad():
            return cross_entropy(
                functional_call(module, whole, (images,)), labels, reduction="none"
            )

    def _right(self, whole: Network, module: torch.nn.Module, part: str) -> float:
        images, labels = self.data[part]
        with torch.no_grad():
            right = functional_call(module, whole, (images,)).argmax(1) == labels
        return int(right.sum()) / len(labels)

    def models(
        self,
        seeds: Sequence[int],
        points: Sequence[Row],
        draws: Sequence[int],
        present: Tensor,
        noise: float | None = None,
    ) -> Iterator[tuple[Network, torch.nn.Module]]:
        """Yield each trained network, as its parameters and the module that computes with them.

        ``present`` is 1 where a user takes part in a training, (trainings, users), and 0 where its
        update is zero.
        """
        step = max(1, AT_ONCE // (self.size * self.plan.data.clients_per_round))
        for i in range(0, len(seeds), step):
            own = (each[i : i + step] for each in (seeds, points, draws))
            yield from self._trained(*own, present[i : i + step], noise)

    def _trained(
        self,
        seeds: Sequence[int],
        points: Sequence[Row],
        sown: Sequence[int],
        present: Tensor,
        noise: float | None,
    ) -> Iterator[tuple[Network, torch.nn.Module]]:
        starts = [self.start(seed) for seed in seeds]
        frozen, module = starts[0][1:]
        names = list(starts[0][0])
        theta = {name: torch.stack([own[0][name] for own in starts]) for name in names}
        moved = {name: torch.zeros_like(own) for name, own in theta.items()}
        rates = {f: torch.tensor([float(p[f]) for p in points]) for f in RATES}
        x, y = self.data["users"]
        x, y = (own.unflatten(0, (-1, self.task.EACH)) for own in (x, y))
        rounds, count = self.plan.privacy.rounds, len(seeds)
        clip, cohort = self.plan.privacy.clip_norm, self.plan.data.clients_per_round
        cohorts = [
            [list(own) for own in cohorts_once_each(range(len(y)), rounds=rounds, data_seed=seed)]
            for seed in seeds
        ]
        z = float(self.promise.noise_multiplier) if noise is None else noise
        correlated = z * clip * np.linalg.inv(self.promise.mechanism.encoder())
        squares = (np.cumsum(correlated, axis=0) ** 2).sum(axis=1)
        expected = (z * clip) ** 2 * self.promise.mechanism.prefix_variance()
        assert np.allclose(squares, expected, rtol=1e-6)  # noqa: S101  the accountant's matrix
        generators = [torch.Generator().manual_seed(1_000_003 * own + 17) for own in sown]
        width = sum(own[0].numel() for own in theta.values())
        draws = torch.stack([torch.randn(rounds, width, generator=own) for own in generators])
        noises = torch.einsum("ts,bsd->btd", torch.tensor(correlated).float(), draws)

        def loss(own: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
            return cross_entropy(functional_call(module, {**frozen, **own}, (a,)), b)

        gradients = vmap(vmap(grad(loss), in_dims=(None, 0, 0)), in_dims=(0, 0, 0))
        for t in range(rounds):
            who = torch.tensor([own[t] for own in cohorts])
            found = gradients(theta, x[who], y[who])
            squared = sum((own.flatten(2) ** 2).sum(dim=2) for own in found.values())
            shrunk = clip / (rates[RATES[0]].view(-1, 1) * squared.sqrt()).clamp(min=clip)
            weights = -rates[RATES[0]].view(-1, 1) * shrunk * present.gather(1, who)
            added = noises[:, t].split([theta[name][0].numel() for name in names], dim=1)
            for name, noise_of_it in zip(names, added, strict=True):
                total = torch.einsum("bc,bcd->bd", weights, found[name].flatten(2)) + noise_of_it
                part = total / cohort
                moved[name] = self.plan.server.momentum * moved[name] + part.view_as(moved[name])
                rate = rates[RATES[1]].view(-1, *[1] * (moved[name].dim() - 1))
                theta[name] = theta[name] + rate * moved[name]
        for i in range(count):
            yield {**frozen, **{name: theta[name][i] for name in names}}, module


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a table; none if it is not there."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def tuned(arm: Arm, labels: Row) -> list[Row]:
    """Return a row per trial, of which the one that is best on public images is chosen."""
    file = arm.study.file.tuning
    points = list(arm.study.points)

    def scores_of(tried: Sequence[Row]) -> list[float]:
        many = [point for point in tried for _ in file.seeds]
        public = [one[0] for one in arm.reached(list(file.seeds) * len(tried), many)]
        return np.reshape(public, (len(tried), -1)).mean(axis=1).tolist()

    scores = scores_of(points)
    near = file.near(points[int(np.argmax(scores))])
    points += near
    scores += scores_of(near)
    best = int(np.argmax(scores))
    return [
        labels | {"trial": i, **point, "metric": score, "chosen": i == best}
        for i, (point, score) in enumerate(zip(points, scores, strict=True))
    ]


def chosen_of(rows: Sequence[Row], labels: Row) -> Row:
    """Return the chosen trial of a group."""
    own = [r for r in rows if r["arm"] == labels["arm"] and r["level"] == labels["level"]]
    return next(r for r in own if str(r["chosen"]) == "True")


def choices(arms: dict[str, Arm], tuning: Sequence[Row], seeds: Sequence[int]) -> list[Row]:
    """Return what each selection among the arms releases: ``DRAWS`` at each seed."""
    repetitions, names = repetitions_of(RUNS, "runs"), list(arms)
    plan = arms[names[0]].plan
    mu = most_mu(repetitions, target_epsilon=float(CHOSEN_AT), delta=plan.privacy.delta)
    noise = math.sqrt(plan.mechanism().sensitivity(plan.participation()).squared) / mu
    runs: dict[str, list[tuple[int, int]]] = {name: [] for name in arms}
    counts = {}
    for own in ((seed, number) for seed in seeds for number in range(DRAWS)):
        source = np.random.default_rng([*own])

        def bits(count: int, source: np.random.Generator = source) -> int:
            return int.from_bytes(source.bytes(-(-count // 8)), "big") >> -count % 8

        counts[own] = draw(repetitions, bits)
        for _ in range(counts[own]):
            runs[names[source.integers(len(names))]].append(own)
    best: dict[tuple[int, int], tuple[float, float, str]] = {}
    for name, own in runs.items():
        point = chosen_of(tuning, {"arm": name, "level": CHOSEN_AT})
        draws = range(1_000, 1_000 + len(own))  # of the noise, fresh in every training
        reached = arms[name].reached([s for s, _ in own], [point] * len(own), noise, draws)
        for key, (public, test) in zip(own, reached, strict=True):
            best[key] = max(best.get(key, (-1.0, 0.0, "")), (public, test, name))
    return [
        {"seed": key[0], "epsilon": CHOSEN_AT, "noise_multiplier": f"{noise:.4g}"}
        | {"trainings": counts[key], "part": part, "public": public, "metric": test}
        for key, (public, test, part) in sorted(best.items())
    ]


def membership(arms: dict[str, Arm], tuning: Sequence[Row]) -> list[Row]:
    """Return how well a model of each arm tells who took part: an attack on its targets.

    By fair coins a user takes part, or has a zero update. All models share start and cohorts.
    """
    rows = []
    for name, arm in arms.items():
        began, draws = time.process_time(), np.random.default_rng([17, len(rows)])
        users = len(arm.data["users"][1]) // arm.task.EACH
        half, own = (draws.random((n, users)) < 0.5 for n in (SHADOWS // 2, TARGETS))
        coins = np.concatenate([half, ~half, own])
        points = [chosen_of(tuning, {"arm": name, "level": CHOSEN_AT})] * len(coins)
        present = torch.from_numpy(coins).float()
        said: list[tuple[Tensor, Tensor]] = []
        sown = range(5_000, 5_000 + len(coins))
        for whole, module in arm.models([0] * len(coins), points, sown, present):
            mine = arm.losses(whole, module, "users").view(-1, arm.task.EACH).mean(dim=1)
            said.append((mine, arm.losses(whole, module, "public")))
        of_users, public = (torch.stack(own).double().numpy() for own in zip(*said, strict=True))
        scores = scores_of_models(of_users, of_users, coins[:SHADOWS], public)
        (rmia,) = attacks.membership(
            {"RMIA": scores["RMIA"]}, coins[SHADOWS:].ravel(), delta=arm.plan.privacy.delta
        )
        auc = area(rmia.auc, coins[SHADOWS:].ravel())
        rows.append(
            {
                "arm": name,
                "epsilon": CHOSEN_AT,
                "attack": "RMIA",
                "targets": TARGETS,
                "users": users,
            }
            | dict(zip(("auc", "auc_low", "auc_high"), auc, strict=True))
            | {"proved": rmia.bounds[0].epsilon}
            | {"cpu_seconds": round(time.process_time() - began, 1)}
        )
    return rows


def trained(file: str, name: str, level: str) -> dict[str, list[Row]]:
    """Tune and train one arm at one level; return the rows of both tables."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(BODY))
    study, began = read_study(BODY / file), time.process_time()
    (group,) = [own for own in study.groups if (own.arm, own.level) == (name, level)]
    arm, labels = Arm(study, group), {"arm": name, "mechanism": group.mechanism, "level": level}
    tuning, seeds = tuned(arm, labels), study.file.final.seeds
    between = time.process_time()
    point = chosen_of(tuning, labels)
    about: Row = {"epsilon": arm.promise.guarantee().epsilon(arm.plan.privacy.delta)}
    about["noise_multiplier"] = float(arm.promise.noise_multiplier)
    about |= {"trained": arm.size} | {field: point[field] for field in RATES}
    reached = arm.reached(seeds, [point] * len(seeds))
    pairs = zip(seeds, reached, strict=True)
    final = [labels | {"seed": seed, "metric": metric, **about} for seed, (_, metric) in pairs]
    ended = time.process_time()
    for rows, spent in ((tuning, between - began), (final, ended - between)):
        for row in rows:  # computed together, so each has its share
            row["cpu_seconds"] = round(spent / len(rows), 3)
    return {"tuning": tuning, "final": final}


def compare(path: Path, arms: Sequence[Arm]) -> None:
    """Print this script's tuning trials beside those of a store of ``privpart frontier``."""
    stored: dict[tuple[str, ...], tuple[float, float]] = {}
    for line in path.read_text().splitlines()[1:]:
        found = json.loads(line)
        labels, result = found["labels"], found.get("result") or found
        if "trial" in labels and "accuracy" in result:
            tables = json.loads(result["plan"])
            point = tuple(float(tables[f.split(".")[0]]["learning_rate"]) for f in RATES)
            stored[labels["arm"], labels["level"], *map(str, point)] = (result["accuracy"], 0.0)
    gaps = []
    for arm in arms:
        keys = [k for k in stored if k[:2] == (arm.group.arm, arm.group.level)]
        points = [dict(zip(RATES, k[2:], strict=True)) for k in keys]
        seeds = arm.study.file.tuning.seeds * len(points)
        for key, (own, _) in zip(keys, arm.reached(seeds, points) if keys else [], strict=True):
            gaps.append(own - stored[key][0])
            print(*key, f"{own:.3f} {stored[key][0]:.3f}", flush=True)
    print(f"{len(gaps)} trials: mean {np.mean(gaps):+.4f}, deviation {np.std(gaps):.4f}")


def main() -> None:
    """Train the groups that are missing, and write the tables."""
    given = frame.options(
        __doc__,
        compare={"type": Path, "help": "sweep.jsonl of privpart frontier"},
        out={"type": Path, "default": RESULTS},
        study="study.toml",
        table="body",
        choice_seeds=10,
        levels={"nargs": "*", "help": "of noise; the default is all of the study's"},
        jobs=1,
    )
    torch.set_num_threads(1)
    sys.path.insert(0, str(BODY))
    study = read_study(BODY / given.study)
    (given.out / given.table).mkdir(parents=True, exist_ok=True)
    if given.compare is not None:
        compare(given.compare, [Arm(study, group) for group in study.groups])
        return
    files = {name: given.out / given.table / f"{name}.csv" for name in ("tuning", "final")}
    tables = {name: rows_of(path) for name, path in files.items()}
    done = {(r["arm"], r["level"]) for r in tables["final"]}
    order = [(g.arm, g.level) for g in sorted(study.groups, key=lambda own: own.level != CHOSEN_AT)]
    missing = [own for own in order if own not in done and own[1] in (given.levels or own[1])]
    todo = [partial(trained, given.study, *own) for own in missing]
    for found in frame.finished(todo, given.jobs):
        for name, rows in found.items():
            tables[name] += rows
            tables[name].sort(key=lambda r: order.index((r["arm"], r["level"])))
            frame.write_csv(files[name], tables[name])
        print(*list(found["final"][0].values())[:3], flush=True)
    groups = {own.arm: own for own in study.groups if own.level == CHOSEN_AT}
    if not groups:
        return
    arms = {name: Arm(study, own) for name, own in groups.items()}
    if not (given.out / "regret.csv").exists():
        seeds = range(given.choice_seeds)
        frame.write_csv(given.out / "regret.csv", choices(arms, tables["tuning"], seeds))
    frame.write_csv(given.out / given.table / "membership.csv", membership(arms, tables["tuning"]))


if __name__ == "__main__":
    main()
