"""Lower bounds on epsilon: how tight they are, how often they are wrong, and what they cost.

Run: ``python benchmarks/lower_bounds.py``; writes benchmarks/results/lower_bounds.json.
``--quick`` does a few seeds of everything and writes nothing.

    table      simulated scores: the mean bound and its standard deviation over seeds, by method
    coverage   the share of seeds whose bound is above the truth, at epsilon 0 and 4
    server     1,000 canaries through the real ``Server``, 76,042 parameters, 64 rounds, under a
               tree, a BLT and two groups in turns, beside benign clients that drift all the way
    replay     the real ``Server`` twice with the same noise, with and without one client
    dense      the same scores from dense Gaussian directions instead of disjoint supports
    cost       processor milliseconds of one update and of all projections, 10^6 parameters
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy loads

import numpy as np
import torch
from machine import machine
from torch import Tensor

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    Grouped,
    Mechanism,
    Participation,
    gaussian,
    guarantee,
)
from attacks import (
    Bound,
    Canaries,
    Replay,
    Scorer,
    View,
    clopper_pearson,
    coins,
    drifting_view,
    estimate,
    guesses,
    one_run,
    one_run_gdp,
    paired,
    pooled_t,
    round_covariance,
    view,
    worst_view,
)
from privpart import ClientUpdate, PrivacyPlan, SeededSource, Server

RESULT = Path(__file__).parent / "results" / "lower_bounds.json"
DELTA, EPSILONS = 1e-5, (1.0, 4.0, 10.0)
ROUNDS, DIM, CLIP_NORM, CANARIES = 64, 76_042, 0.5, 1000
BENIGN, UNSENT = 20, 300
Bounds = dict[str, Callable[..., Bound]]


def methods(claimed_mu: float) -> Bounds:
    """Return the bounds of ``attacks.lower_bounds.bounds`` by name."""
    return {
        "one run": one_run,
        "one run, GDP": one_run_gdp,
        "Clopper-Pearson": clopper_pearson,
        "pooled t": pooled_t,
        "guesses": partial(guesses, claimed_mu=claimed_mu),
    }


def summary(values: list[float]) -> list[float]:
    """Return mean and standard deviation, to three digits."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return [round(statistics.mean(values), 3), round(spread, 3)]


def simulated(mus: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return Gaussian scores of canaries and their coins."""
    present = coins(len(mus), rng)
    return rng.standard_normal(len(mus)) + mus * present, present


def seen_by_round(mu: float, m: int, rng: np.random.Generator) -> np.ndarray:
    """Return the visible mu of canaries in random rounds of the tree."""
    covariance = round_covariance(BinaryTree(ROUNDS).decoder())
    visible = np.array([view(covariance, row, 1.0).mu for row in np.eye(ROUNDS, dtype=int)])
    return mu * visible[rng.integers(ROUNDS, size=m)] / visible.max()


def table(seeds: int) -> dict[str, Any]:
    """Return the bounds of simulated scores."""
    rows: dict[str, Any] = {}
    for name, m, runs, spread in (
        ("1000 in the first round", 1000, seeds, False),
        ("1000 in random rounds", 1000, seeds, True),
        ("10000", 10_000, max(2, seeds // 4), False),
        ("100000", 100_000, max(2, seeds // 20), False),
    ):
        found: dict[str, dict[float, list[float]]] = {}
        for epsilon in EPSILONS:
            mu = gaussian.mu(epsilon, DELTA)
            for seed in range(runs):
                rng = np.random.default_rng([seed, m])
                mus = seen_by_round(mu, m, rng) if spread else np.full(m, mu)
                scores, present = simulated(mus, rng)
                for method, bound in methods(0.0).items():
                    shifted = scores - mus / 2 if method == "guesses" else scores
                    value = bound(shifted, present, delta=DELTA).epsilon
                    found.setdefault(method, {}).setdefault(epsilon, []).append(value)
        rows[name] = {"seeds": runs} | {
            method: [summary(values) for values in by.values()] for method, by in found.items()
        }
        print(name, rows[name], flush=True)
    return rows


def coverage(seeds: int) -> dict[str, Any]:
    """Return the share of bounds above the truth, and of the point estimate."""
    shares: dict[str, list[float]] = {}
    for epsilon in (0.0, 4.0):
        mu = gaussian.mu(epsilon, DELTA) if epsilon else 0.0
        above: dict[str, int] = {}
        for seed in range(seeds):
            rng = np.random.default_rng([seed, 7])
            sample = simulated(np.full(CANARIES, mu), rng)
            values = {
                name: bound(*sample, delta=DELTA).epsilon for name, bound in methods(0.925).items()
            }
            values["estimate"] = estimate(*sample, delta=DELTA).epsilon
            for name, value in values.items():
                above[name] = above.get(name, 0) + (value > epsilon)
        for name, count in above.items():
            shares.setdefault(name, []).append(round(count / seeds, 4))
    print("coverage", shares, flush=True)
    return {"seeds": seeds, "canaries": CANARIES, "share above the truth at 0, 4": shares}


@dataclass(frozen=True)
class Setting:
    """A mechanism, its participation, and the part and rounds in which canaries live."""

    mechanism: Mechanism
    sizes: tuple[int, ...] = (DIM,)

    @property
    def own(self) -> Mechanism:
        """The mechanism of the canaries' part."""
        groups = self.mechanism.groups
        return self.mechanism if groups is None else groups.mechanisms[0]

    @property
    def rounds(self) -> list[int]:
        """The rounds in which the canaries' part trains."""
        groups = self.mechanism.groups
        return list(range(ROUNDS)) if groups is None else groups.active_rounds()[0]

    def plan(self, noise_multiplier: float) -> PrivacyPlan:
        """Return the plan; it divides by 1."""
        return PrivacyPlan(
            mechanism=self.mechanism,
            participation=Participation(ROUNDS),
            clip_norm=CLIP_NORM,
            noise_multiplier=noise_multiplier,
            report_goal=1,
        )


def settings() -> dict[str, Setting]:
    """Return the mechanisms by name."""
    half = (DIM // 2, DIM - DIM // 2)
    turns = tuple((t % 2,) for t in range(ROUNDS))
    blt = partial(
        BufferedToeplitz,
        decay=(0.703864, 0.970182, 0.998105),
        scale=(0.295937, 0.131099, 0.057899),
    )
    return {
        "tree": Setting(BinaryTree(ROUNDS)),
        "BLT": Setting(blt(ROUNDS)),
        "two groups, BLT": Setting(
            Grouped(turns, (blt(ROUNDS // 2), blt(ROUNDS // 2)), half), half
        ),
    }


def released(
    setting: Setting,
    noise_multiplier: float,
    seed: int,
    extra: Callable[[int], Iterator[Tensor]],
    benign: Callable[[int, int], list[Tensor]],
) -> Iterator[tuple[int, Tensor]]:
    """Run the real server; yield rounds in which the first part trains, and its noised sum.

    The sum is the change of the released model, in clip norms: nothing else is looked at.
    """
    plan = setting.plan(noise_multiplier)
    first = setting.sizes[0]
    server = Server(plan, torch.zeros(DIM), source=SeededSource(seed))
    for t in range(ROUNDS):
        active = plan.active(t) or (0,)
        length = sum(setting.sizes[g] for g in active)
        sent = [*benign(t, length), *(extra(t) if active == (0,) else ())]
        before = server.parameters.double()
        server.run_round(
            ClientUpdate(10_000 * t + i, update, t, plan.hash) for i, update in enumerate(sent)
        )
        if active == (0,):
            yield setting.rounds.index(t), (server.parameters.double() - before)[:first] / CLIP_NORM


def still(t: int, length: int) -> list[Tensor]:
    """Every benign client sends zeros."""
    return [torch.zeros(length)] * BENIGN


def drifting(t: int, length: int) -> list[Tensor]:
    """Every benign client pushes the same way in every round, as hard as it may: the worst case."""
    return [torch.full((length,), CLIP_NORM / length**0.5)] * BENIGN


def through_the_server(seeds: int) -> dict[str, Any]:
    """Return the bounds of canaries in the real server, by mechanism, drift and epsilon."""
    rows: dict[str, Any] = {}
    for (name, setting), drift in itertools.product(settings().items(), (False, True)):
        covariance = round_covariance(setting.own.decoder())
        once = Participation(len(setting.rounds))
        plan_mu = guarantee(setting.mechanism, Participation(ROUNDS), noise_multiplier=1.0).mu
        key = f"{name}, drift" if drift else name
        rows[key] = {}
        for epsilon in EPSILONS:
            mu = gaussian.mu(epsilon, DELTA)
            z = plan_mu / mu
            when = worst_view(covariance, once, z).rounds[0]
            values: dict[str, list[float]] = {}
            started = time.process_time()
            for seed in range(seeds):
                scores, present, own = scored(setting, z, when, seed, drift=drift)
                values.setdefault("share of mu", []).append(own.mu / mu)
                values.setdefault("sd of absent scores", []).append(float(scores[~present].std()))
                for method, bound in methods(own.mu).items():
                    found = bound(scores, present, delta=DELTA).epsilon
                    values.setdefault(method, []).append(found)
            rows[key][f"epsilon {epsilon:g}"] = {
                "seconds a run": round((time.process_time() - started) / seeds, 1)
            } | {method: summary(own) for method, own in values.items()}
            print(key, epsilon, rows[key][f"epsilon {epsilon:g}"], flush=True)
    return {
        "seeds": seeds,
        "canaries": CANARIES,
        "unsent": UNSENT,
        "parameters": DIM,
        "rounds": ROUNDS,
        "rows": rows,
    }


def scored(
    setting: Setting, z: float, when: int, seed: int, *, drift: bool
) -> tuple[np.ndarray, np.ndarray, View]:
    """Send canaries through the real server; return their scores, coins and view."""
    canaries = Canaries(seed, CANARIES + UNSENT, setting.sizes[0])
    present = coins(CANARIES, np.random.default_rng([seed, 1]))

    def extra(t: int) -> Iterator[Tensor]:
        if t == setting.rounds[when]:
            yield from (canaries.update(int(j), CLIP_NORM) for j in np.flatnonzero(present))

    benign = drifting if drift else still
    rows = [canaries.project(total) for _, total in released(setting, z, seed, extra, benign)]
    seen = torch.stack(rows).numpy()
    pattern = np.eye(len(seen), dtype=int)[when]
    covariance = round_covariance(setting.own.decoder())
    own = drifting_view(covariance, pattern, z, seen[:, CANARIES:])
    scorer = Scorer(own.weights, CANARIES)
    for t, row in enumerate(seen):
        scorer.add(t, row[:CANARIES])
    return scorer.scores(), present, own


def replays(seeds: int) -> dict[str, Any]:
    """Return the bounds of paired replays of the real server."""
    rows: dict[str, Any] = {}
    for name, setting in settings().items():
        covariance = round_covariance(setting.own.decoder())
        once = Participation(len(setting.rounds))
        plan_mu = guarantee(setting.mechanism, Participation(ROUNDS), noise_multiplier=1.0).mu
        rows[name] = {}
        for epsilon in EPSILONS:
            z = plan_mu / gaussian.mu(epsilon, DELTA)
            started = time.process_time()
            found = [replay(setting, z, covariance, once, seed) for seed in range(seeds)]
            rows[name][f"epsilon {epsilon:g}"] = {
                "bound": summary([r.bound.epsilon for r in found]),
                "sigma / z": summary([r.sigma / z for r in found]),
                "faults": sum(len(r.faults) for r in found),
                "seconds": round((time.process_time() - started) / seeds, 1),
            }
            print("replay", name, epsilon, rows[name][f"epsilon {epsilon:g}"], flush=True)
    return {"seeds": seeds, "rows": rows}


def replay(
    setting: Setting, z: float, covariance: np.ndarray, once: Participation, seed: int
) -> Replay:
    """Run the server twice with the same noise, with and without one client."""
    when = setting.rounds[worst_view(covariance, once, z).rounds[0]]
    client = Canaries(seed, 1, setting.sizes[0]).update(0, CLIP_NORM)

    def sums(*, joins: bool) -> Tensor:
        def extra(t: int) -> Iterator[Tensor]:
            return iter([client] if joins and t == when else [])

        return torch.stack([total for _, total in released(setting, z, seed, extra, drifting)])

    joined, alone = sums(joins=True), sums(joins=False)
    known = BENIGN / setting.sizes[0] ** 0.5
    return paired(joined - alone, alone - known, covariance, noise_multiplier=z, delta=DELTA)


def dense(seeds: int) -> dict[str, Any]:
    """Return the bounds of one round of independent noise, with dense and with disjoint canaries.

    Dense directions are not orthogonal: others disturb each score.
    """
    rows: dict[str, Any] = {}
    for epsilon in EPSILONS:
        mu = gaussian.mu(epsilon, DELTA)
        values: dict[str, list[float]] = {"dense": [], "disjoint": []}
        for seed in range(seeds):
            rng = np.random.default_rng([seed, 3])
            present = coins(CANARIES, rng)
            rows_of = partial(np.random.default_rng, [seed, 4])
            total = rng.standard_normal(DIM).astype(np.float32)
            directions = rows_of()
            for there in present:
                u = directions.standard_normal(DIM, dtype=np.float32)
                total += mu * there * u / np.linalg.norm(u)
            directions = rows_of()
            scores = np.array(
                [
                    float(u @ total / np.linalg.norm(u))
                    for u in (
                        directions.standard_normal(DIM, dtype=np.float32) for _ in range(CANARIES)
                    )
                ]
            )
            own = rng.standard_normal(CANARIES) + mu * present
            for name, made in (("dense", scores), ("disjoint", own)):
                bound = guesses(made, present, delta=DELTA, claimed_mu=mu)
                values[name].append(bound.epsilon)
        rows[f"epsilon {epsilon:g}"] = {name: summary(own) for name, own in values.items()}
    print("dense", rows, flush=True)
    return {"seeds": seeds, "method": "guesses"} | rows


def cost() -> dict[str, Any]:
    """Return processor milliseconds of one update and of all projections."""
    canaries = Canaries(0, CANARIES, 1_000_000)
    vector = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    started = time.process_time()
    canaries.project(vector)
    first = time.process_time() - started
    timings: dict[str, list[float]] = {"project": [], "update": []}
    for j in range(20):
        for name, action in (
            ("project", partial(canaries.project, vector)),
            ("update", partial(canaries.update, j, 1.0)),
        ):
            started = time.process_time()
            action()
            timings[name].append(1e3 * (time.process_time() - started))
    found = {name: round(statistics.median(own), 2) for name, own in timings.items()}
    print("cost", found, flush=True)
    return {"milliseconds, median": found, "milliseconds, first": round(1e3 * first)}


def main() -> None:
    """Measure everything, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few seeds; writes nothing")
    quick = parser.parse_args().quick
    found = {
        "machine": machine("torch", "numpy", "scipy"),
        "delta": DELTA,
        "confidence": 0.95,
        "epsilons": EPSILONS,
        "cost": cost(),
        "table": table(2 if quick else 60),
        "coverage": coverage(10 if quick else 400),
        "server": through_the_server(1 if quick else 4),
        "replay": replays(1 if quick else 2),
        "dense": dense(1 if quick else 3),
    }
    if not quick:
        RESULT.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
