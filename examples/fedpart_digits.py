"""FedPart on digits: full and partial rounds, ablations, heterogeneity; then all with DP.

Without noise: full training with as many rounds, or as many uplink bytes, as FedPart's schedule;
ablations of rounds per layer, order and warm-up; label skew; client sampling. With noise, where
every user takes part once and every row has the same epsilon: full rounds, FedPT, and FedPart with
one tree over everything, one pruned tree, or a tree per group of layers.

docs/fedpart.md has the tables of a run and discusses them. 1,437 users are too few for a meaningful
epsilon at a useful accuracy. Takes 70 processor seconds per seed on an AMD EPYC.

Run: python examples/fedpart_digits.py
     python examples/fedpart_digits.py --only dp --seeds 5
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import mean, stdev

import torch
from joblib import Parallel, delayed

from accounting import BinaryTree, Grouped, Independent, Participation, PrunedTree, calibrate
from privpart import (
    EmbeddedEngine,
    LocalTraining,
    PartialModel,
    PrivacyPlan,
    SeededSource,
    Server,
    ServerOptimizer,
    Users,
    fit,
)
from privpart.data import cohorts_in_turn, dirichlet_users, iid_users
from privpart.data.tasks import digits
from privpart.models import small_cnn
from privpart.patterns import layer_groups
from privpart.plan import Rounds, Schedule, active_rounds
from privpart.training.costs import client_costs, parameters_sent
from privpart.training.metric import accuracy as accuracy_on

DELTA, GROUPS = 1e-5, 4
PART_STREAMS = ("one tree", "one tree, pruned", "a tree per group")
FEDPT = ("!dense1.*",)  # the largest layer is frozen
SCHEDULE = Schedule(cycles=4, rounds_per_group=3, warm_up=12, between=4)
ALONE = Schedule(cycles=4, rounds_per_group=3, warm_up=12, between=0)  # as in Tables 5 to 7


@dataclass(frozen=True)
class Case:
    """One row of a table: schedule, clients and noise."""

    rounds: Rounds
    users: int = 12
    per_round: int = 12
    alpha: float | None = None
    train: tuple[str, ...] = ("*",)
    streams: str = "no noise"
    epsilon: float | None = None
    server: float = 1.0

    def local(self) -> LocalTraining:
        """Return two steps on 120 examples, or, with noise, two epochs on a user's single one."""
        return LocalTraining(0.05, steps=2) if self.epsilon is None else LocalTraining(0.1, 2)


def full(rounds: Rounds, groups: int = GROUPS) -> Rounds:
    return (tuple(range(groups)),) * len(rounds)


def network(case: Case, seed: int) -> PartialModel:
    module = small_cnn(channels=(16, 32), hidden=64, image_size=8)
    return PartialModel(
        module, train=case.train, seed=seed, overwrite=True, groups=layer_groups(module)
    )


def mechanism(case: Case, sizes: tuple[int, ...]) -> Grouped:
    """Return a stream per group: over its own rounds, over all, or over the tree nodes it needs."""
    rounds = case.rounds
    if case.streams == "one tree":  # all parameters get noise in every round
        rounds = full(rounds, len(sizes))
    build = {
        "a tree per group": lambda own: BinaryTree(len(own)),
        "one tree": lambda own: BinaryTree(len(own)),
        "one tree, pruned": lambda own: PrunedTree(len(rounds), tuple(own)),
        "no noise": lambda own: Independent(len(own)),
    }[case.streams]
    return Grouped(rounds, tuple(build(own) for own in active_rounds(rounds)), sizes)


class Padded:
    """Clients that train the scheduled groups and send zeros for all others, for one dense tree."""

    def __init__(self, engine: EmbeddedEngine, rounds: Rounds) -> None:
        self.engine = engine
        self.rounds = rounds

    def run(self, task, start) -> Iterator:
        """Yield updates as ``EmbeddedEngine.run`` does, padded to shape (d,)."""
        model, active = self.engine.model, self.rounds[task.round]
        for update in self.engine.run(replace(task, active=active), start):
            padded, parts = torch.zeros(model.dim), model.spans(active)
            lengths = [span.stop - span.start for span in parts]
            for span, part in zip(parts, torch.split(update.update, lengths), strict=True):
                padded[span] = part
            yield replace(update, update=padded)


def held(case: Case, y: torch.Tensor, seed: int) -> Iterable[torch.Tensor]:
    if case.alpha is None:
        return iid_users(len(y), users=case.users, data_seed=seed)
    return dirichlet_users(y, users=case.users, alpha=case.alpha, data_seed=seed)


def train(case: Case, seed: int, weights: int | None = None) -> tuple[torch.nn.Module, float]:
    """Return the trained network and its test accuracy in [0, 1]; ``weights`` seeds the start."""
    torch.set_num_threads(1)
    model = network(case, seed if weights is None else weights)
    task, private = digits(), case.epsilon is not None
    chosen, count = mechanism(case, model.group_sizes), len(case.rounds)
    once, always = Participation(count), Participation(count, count)
    plan = PrivacyPlan(
        mechanism=chosen,
        participation=once if private else always,
        clip_norm=0.3 if private else 1e3,
        noise_multiplier=0.0
        if case.epsilon is None
        else calibrate(chosen, once, target_epsilon=case.epsilon, delta=DELTA),
        report_goal=case.per_round,
    )
    users = Users(task.train_x, task.train_y, held(case, task.train_y, seed))
    engine = EmbeddedEngine(model, users, local=case.local(), data_seed=seed, deterministic=True)
    optimizer = ServerOptimizer(learning_rate=case.server)
    server = Server(plan, model.flat, source=SeededSource(seed), optimizer=optimizer)
    carrier = Padded(engine, case.rounds) if case.streams == "one tree" else engine
    fit(server, carrier, cohorts_in_turn(
        range(case.users), size=case.per_round, rounds=count, data_seed=seed
    ))  # fmt: skip
    model.load(server.parameters)
    return model.module, accuracy_on(model.module, task.test_x, task.test_y)


def costs(case: Case) -> tuple[float, float]:
    """Return total MB of uplink and GFLOP of a client that takes part in every round."""
    model, task = network(case, 0), digits()
    batch = min(16, len(task.train_y) // case.users)
    found = client_costs(
        model,
        (task.train_x[:batch], task.train_y[:batch]),
        local=case.local(),
        examples=len(task.train_y) // case.users,
        rounds=case.rounds,
    )
    rounds, flops = len(case.rounds), found.forward_flops + found.backward_flops
    return rounds * found.bytes_up / 1e6, rounds * flops / 1e9


def against_full(**who) -> dict[str, Case]:
    """Return FedPart and full training with equal rounds and with equal bytes."""
    part = Case(SCHEDULE.rounds(GROUPS), **who)
    sizes = network(part, 0).group_sizes
    affordable = round(parameters_sent(part.rounds, sizes) / sum(sizes))
    return {
        "full": replace(part, rounds=full(part.rounds)),
        "FedPart": part,
        "full, as many bytes as FedPart": replace(part, rounds=full(part.rounds)[:affordable]),
    }


def ablation(name: str, **changes: Schedule) -> dict[str, Case]:
    return {f"{name} {k}".strip(): Case(s.rounds(GROUPS)) for k, s in changes.items()}


def with_noise(epsilon: float, server: float, users: int) -> dict[str, Case]:
    rounds = SCHEDULE.rounds(GROUPS)
    part = Case(rounds, users, users // len(rounds), epsilon=epsilon, server=server)
    # if all groups train in every round, a tree per group and one tree are the same
    always = replace(part, rounds=full(rounds), streams="one tree")
    return {
        "full, one tree": always,
        "FedPT (dense1 frozen), one tree": replace(
            always, rounds=full(rounds, GROUPS - 1), train=FEDPT
        ),
        **{f"FedPart, {s}": replace(part, streams=s) for s in PART_STREAMS},
    }


def sections(chosen: argparse.Namespace) -> dict[str, dict[str, dict[str, Case]]]:
    """Return the tables of each experiment, name -> rows; the first row is the baseline."""
    lengths = {1: 12, 2: 6, 3: 4, 6: 2, 12: 1}
    per_layer = {
        f"{r}, {c} cycles": replace(ALONE, rounds_per_group=r, cycles=c) for r, c in lengths.items()
    }
    warm = {0: 5, 12: 4, 24: 3, 36: 2}
    warm_up = {f"{w}, {c} cycles": replace(ALONE, warm_up=w, cycles=c) for w, c in warm.items()}
    orders = {o: replace(ALONE, order=o) for o in ("sequential", "reverse", "random")}
    return {
        "equal": {"Equal rounds, equal bytes": against_full()},
        "layers": {"Rounds per layer, 60 in all": ablation("R/L", **per_layer)},
        "order": {"Order": ablation("", **orders)},
        "warm-up": {"Warm-up, 60 rounds in all": ablation("warm-up", **warm_up)},
        "skew": {f"Label skew, Dirichlet {a:g}": against_full(alpha=a) for a in (1.0, 0.1)},
        "sampling": {"12 of 60 clients per round": against_full(users=60)},
        "dp": {
            f"epsilon {e:g}, server learning rate {s:g}": with_noise(e, s, chosen.users)
            for e in chosen.epsilons
            for s in chosen.server
        },
    }


def spread(values: list[float]) -> str:
    return f"{100 * mean(values):5.1f}" + (f" ± {100 * stdev(values):.1f}" if values[1:] else "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", help="experiments; the default is all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--users", type=int, default=1437, help="with noise, once each")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[30.0, 10.0])
    parser.add_argument("--server", type=float, nargs="+", default=[0.3, 1.0])
    chosen = parser.parse_args()
    known = sections(chosen)
    if strange := set(chosen.only or ()) - known.keys():
        parser.error(f"--only: no {', '.join(strange)}; there are {', '.join(known)}")
    with Parallel(n_jobs=chosen.jobs) as pool:
        for title, cases in [t for k in chosen.only or known for t in known[k].items()]:
            print(f"\n{title}; {chosen.seeds} seeds")
            print(f"{'':<34} rounds  MB up   GFLOP  test accuracy, %   minus the first row")
            first: list[float] = []
            for name, case in cases.items():
                runs = pool(delayed(train)(case, seed) for seed in range(chosen.seeds))
                found = [accuracy for _, accuracy in runs]
                first = first or found
                pairs = zip(found, first, strict=True)
                gap = "" if found is first else spread([a - b for a, b in pairs])
                up, flops = costs(case)
                print(f"{name:<34} {len(case.rounds):>6} {up:>6.2f} {flops:>7.2f}  "
                      f"{spread(found):<17}  {gap}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
