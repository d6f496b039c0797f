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

import frame

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

import accounting
import attacks
from privpart import ClientUpdate, PrivacyPlan, SeededSource, Server

DELTA, EPSILONS = 1e-5, (1.0, 4.0, 10.0)
ROUNDS, DIM, CLIP_NORM, CANARIES = 64, 76_042, 0.5, 1000
BENIGN, UNSENT = 20, 300
Bounds = dict[str, Callable[..., attacks.Bound]]


def methods(claimed_mu: float) -> Bounds:
    """Return the bounds of ``attacks.lower_bounds.bounds`` by name."""
    return {
        "one run": attacks.one_run,
        "one run, GDP": attacks.one_run_gdp,
        "Clopper-Pearson": attacks.clopper_pearson,
        "pooled t": attacks.pooled_t,
        "guesses": partial(attacks.guesses, claimed_mu=claimed_mu),
    }


def summary(values: list[float]) -> list[float]:
    """Return mean and standard deviation, to three digits."""
    return [round(mean(values), 3), round(stdev(values) if len(values) > 1 else 0.0, 3)]


def simulated(mus: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return Gaussian scores of canaries and their coins."""
    present = attacks.coins(len(mus), rng)
    return rng.standard_normal(len(mus)) + mus * present, present


def seen_by_round(mu: float, m: int, rng: np.random.Generator) -> np.ndarray:
    """Return the visible mu of canaries in random rounds of the tree."""
    covariance = attacks.round_covariance(accounting.BinaryTree(ROUNDS).decoder())
    visible = np.array([attacks.view(covariance, row, 1.0).mu for row in np.eye(ROUNDS, dtype=int)])
    return mu * visible[rng.integers(ROUNDS, size=m)] / visible.max()


def table(seeds: int) -> dict[str, Any]:
    """Return the bounds of simulated scores."""
    rows: dict[str, Any] = {}
    for name, m, runs, apart in (
        ("1000 in the first round", 1000, seeds, False),
        ("1000 in random rounds", 1000, seeds, True),
        ("10000", 10_000, max(2, seeds // 4), False),
        ("100000", 100_000, max(2, seeds // 20), False),
    ):
        values: dict[str, list[list[float]]] = defaultdict(list)
        for epsilon in EPSILONS:
            mu = accounting.gaussian.mu(epsilon, DELTA)
            here: dict[str, list[float]] = defaultdict(list)
            for seed in range(runs):
                rng = np.random.default_rng([seed, m])
                mus = seen_by_round(mu, m, rng) if apart else np.full(m, mu)
                scores, present = simulated(mus, rng)
                for method, bound in methods(0.0).items():
                    shifted = scores - mus / 2 if method == "guesses" else scores
                    here[method].append(bound(shifted, present, delta=DELTA).epsilon)
            for method, own in here.items():
                values[method].append(summary(own))
        rows[name] = {"seeds": runs, **values}
        frame.show(name, rows[name])
    return rows


def coverage(seeds: int) -> dict[str, Any]:
    """Return the share of bounds above the truth."""
    shares: dict[str, list[float]] = defaultdict(list)
    for epsilon in (0.0, 4.0):
        mu = accounting.gaussian.mu(epsilon, DELTA) if epsilon else 0.0
        above: dict[str, int] = defaultdict(int)
        for seed in range(seeds):
            sample = simulated(np.full(CANARIES, mu), np.random.default_rng([seed, 7]))
            for name, bound in methods(0.925).items():
                above[name] += bound(*sample, delta=DELTA).epsilon > epsilon
        for name, count in above.items():
            shares[name].append(round(count / seeds, 4))
    frame.show("coverage", shares)
    return {"seeds": seeds, "canaries": CANARIES, "share above the truth at 0, 4": shares}


@dataclass(frozen=True)
class Setting:
    """A mechanism, its participation, and the part and rounds in which canaries live."""

    mechanism: accounting.Mechanism
    sizes: tuple[int, ...] = (DIM,)

    @property
    def own(self) -> accounting.Mechanism:
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
            participation=accounting.Participation(ROUNDS),
            clip_norm=CLIP_NORM,
            noise_multiplier=noise_multiplier,
            report_goal=1,
        )


def settings() -> dict[str, Setting]:
    """Return the mechanisms by name."""
    half = (DIM // 2, DIM - DIM // 2)
    turns = tuple((t % 2,) for t in range(ROUNDS))
    decay, scale = (0.703864, 0.970182, 0.998105), (0.295937, 0.131099, 0.057899)
    whole, part = (
        accounting.BufferedToeplitz(n, decay=decay, scale=scale) for n in (ROUNDS, ROUNDS // 2)
    )
    return {
        "tree": Setting(accounting.BinaryTree(ROUNDS)),
        "BLT": Setting(whole),
        "two groups, BLT": Setting(accounting.Grouped(turns, (part, part), half), half),
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


def noises(setting: Setting) -> Iterator[tuple[str, float, float]]:
    """Yield each epsilon, its mu and its noise multiplier."""
    plan_mu = accounting.guarantee(
        setting.mechanism, accounting.Participation(ROUNDS), noise_multiplier=1.0
    ).mu
    for epsilon in EPSILONS:
        mu = accounting.gaussian.mu(epsilon, DELTA)
        yield f"epsilon {epsilon:g}", mu, plan_mu / mu


def through_the_server(seeds: int, names: list[str]) -> dict[str, Any]:
    """Return the bounds of canaries in the real server, by mechanism, drift and epsilon."""
    rows: dict[str, Any] = {}
    for name, drift in itertools.product(names, (False, True)):
        setting = settings()[name]
        key = f"{name}, drift" if drift else name
        rows[key] = {}
        for epsilon, mu, z in noises(setting):
            values: dict[str, list[float]] = defaultdict(list)
            started = time.process_time()
            for seed in range(seeds):
                scores, present, own = scored(setting, z, seed, drift=drift)
                values["share of mu"].append(own.mu / mu)
                values["sd of absent scores"].append(float(scores[~present].std()))
                for method, bound in methods(own.mu).items():
                    values[method].append(bound(scores, present, delta=DELTA).epsilon)
            spent = {"seconds a run": round((time.process_time() - started) / seeds, 1)}
            rows[key][epsilon] = spent | {method: summary(own) for method, own in values.items()}
            frame.show(f"{key}, {epsilon}", rows[key][epsilon])
    about = {"canaries": CANARIES, "unsent": UNSENT, "parameters": DIM, "rounds": ROUNDS}
    return {"seeds": seeds, **about, "rows": rows}


def worst_round(setting: Setting, z: float) -> tuple[np.ndarray, int]:
    """Return the covariance of the noise, and the round of its part that shows a client best."""
    covariance = attacks.round_covariance(setting.own.decoder())
    once = accounting.Participation(len(setting.rounds))
    return covariance, attacks.worst_view(covariance, once, z).rounds[0]


def scored(
    setting: Setting, z: float, seed: int, *, drift: bool
) -> tuple[np.ndarray, np.ndarray, attacks.View]:
    """Send canaries through the real server; return their scores, coins and view."""
    covariance, when = worst_round(setting, z)
    canaries = attacks.Canaries(seed, CANARIES + UNSENT, setting.sizes[0])
    present = attacks.coins(CANARIES, np.random.default_rng([seed, 1]))

    def extra(t: int) -> Iterator[Tensor]:
        if t == setting.rounds[when]:
            yield from (canaries.update(int(j), CLIP_NORM) for j in np.flatnonzero(present))

    benign = drifting if drift else still
    rows = [canaries.project(total) for _, total in released(setting, z, seed, extra, benign)]
    seen = torch.stack(rows).numpy()
    pattern = np.eye(len(seen), dtype=int)[when]
    own = attacks.drifting_view(covariance, pattern, z, seen[:, CANARIES:])
    return (own.weights[:, None] * seen[:, :CANARIES]).sum(0), present, own


def replays(seeds: int, names: list[str]) -> dict[str, Any]:
    """Return the bounds of paired replays of the real server."""
    rows: dict[str, Any] = {}
    for name in names:
        setting, rows[name] = settings()[name], {}
        for epsilon, _, z in noises(setting):
            started = time.process_time()
            pairs = [replay(setting, z, seed) for seed in range(seeds)]
            rows[name][epsilon] = {
                "bound": summary([r.bound(DELTA).epsilon for r in pairs]),
                "sigma / z": summary([r.sigma / z for r in pairs]),
                "faults": sum(len(r.faults) for r in pairs),
                "seconds": round((time.process_time() - started) / seeds, 1),
            }
            frame.show(f"replay, {name}, {epsilon}", rows[name][epsilon])
    return {"seeds": seeds, "rows": rows}


def replay(setting: Setting, z: float, seed: int) -> attacks.Replay:
    """Run the server twice with the same noise, with and without one client."""
    covariance, worst = worst_round(setting, z)
    when = setting.rounds[worst]
    client = attacks.Canaries(seed, 1, setting.sizes[0]).update(0, CLIP_NORM)

    def sums(*, joins: bool) -> Tensor:
        def extra(t: int) -> Iterator[Tensor]:
            return iter([client] if joins and t == when else [])

        return torch.stack([total for _, total in released(setting, z, seed, extra, drifting)])

    joined, alone = sums(joins=True), sums(joins=False)
    drift = BENIGN / setting.sizes[0] ** 0.5
    return attacks.paired(joined - alone, alone - drift, covariance, noise_multiplier=z)


def dense(seeds: int) -> dict[str, Any]:
    """Return the bounds of one round of independent noise, with dense and with disjoint canaries.

    Dense directions are not orthogonal: others disturb each score.
    """
    rows: dict[str, Any] = {}
    for epsilon in EPSILONS:
        mu = accounting.gaussian.mu(epsilon, DELTA)
        values: dict[str, list[float]] = {"dense": [], "disjoint": []}
        for seed in range(seeds):
            rng = np.random.default_rng([seed, 3])
            present = attacks.coins(CANARIES, rng)
            total = rng.standard_normal(DIM).astype(np.float32)
            for there, u in zip(present, directions(seed), strict=True):
                total += mu * there * u
            scores = np.array([float(u @ total) for u in directions(seed)])
            own = rng.standard_normal(CANARIES) + mu * present
            for name, made in (("dense", scores), ("disjoint", own)):
                bound = attacks.guesses(made, present, delta=DELTA, claimed_mu=mu)
                values[name].append(bound.epsilon)
        rows[f"epsilon {epsilon:g}"] = {name: summary(own) for name, own in values.items()}
    frame.show("dense", rows)
    return {"seeds": seeds, "method": "guesses"} | rows


def directions(seed: int) -> Iterator[np.ndarray]:
    """Yield a random direction for each canary, the same ones again for the same seed."""
    rng = np.random.default_rng([seed, 4])
    for _ in range(CANARIES):
        u = rng.standard_normal(DIM, dtype=np.float32)
        yield u / np.linalg.norm(u)


def cost() -> dict[str, Any]:
    """Return processor milliseconds of one update and of all projections."""
    canaries = attacks.Canaries(0, CANARIES, 1_000_000)
    vector = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    first = frame.seconds(lambda: canaries.project(vector)).cpu
    numbers = itertools.count()
    jobs = {
        "project": lambda: canaries.project(vector),
        "update": lambda: canaries.update(next(numbers), 1.0),
    }
    times = frame.in_turns(jobs, 20, warm=False)
    milliseconds = {k: round(median(1e3 * s.cpu for s in own), 2) for k, own in times.items()}
    frame.show("cost", milliseconds)
    return {"milliseconds, median": milliseconds, "milliseconds, first": round(1e3 * first)}


def main() -> None:
    """Measure everything, and write it down."""
    given = frame.options(__doc__, "lower_bounds.json")
    quick, names = given.quick, list(settings())[: 1 if given.quick else None]
    result = frame.Result(given.result, "torch", "numpy", "scipy")
    result.write(
        delta=DELTA,
        confidence=0.95,
        epsilons=EPSILONS,
        cost=cost(),
        table=table(2 if quick else 60),
        coverage=coverage(10 if quick else 400),
        server=through_the_server(1 if quick else 4, names),
        replay=replays(1 if quick else 2, names),
        dense=dense(1 if quick else 3),
    )


if __name__ == "__main__":
    main()
