"""FedPart on digits: full against partial rounds, at equal rounds and at equal bytes; then with DP.

Without noise: a network trained in full rounds, for as many rounds and for as many uplink bytes as
FedPart's schedule. With noise, every user once: the same schedule under one tree over all rounds,
noise only where something trains (a pruned tree), and under a tree per group, at the same epsilon.

1,437 users give no meaningful epsilon at a useful accuracy. Two minutes on two processors.

Run: python examples/fedpart_digits.py
"""

import argparse
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
    Users,
    fit,
)
from privpart.groups import layer_groups
from privpart.models import small_cnn
from privpart.schedule import Schedule, active_rounds
from privpart.schedule_costs import sent_numbers
from privpart.tasks import cohorts_in_turn, digits, iid_users
from privpart.training import accuracy as accuracy_on

DELTA = 1e-5


def network(seed):
    module = small_cnn(channels=(16, 32), hidden=64, image_size=8)
    return PartialModel(module, seed=seed, groups=layer_groups(module))


SIZES = network(0).group_sizes


def mechanism(rounds, kind):
    """One tree per group, the nodes of one tree that each group needs, or no correlation."""
    build = {
        "a tree per group": lambda own: BinaryTree(len(own)),
        "one tree, pruned": lambda own: PrunedTree(len(rounds), tuple(own)),
        "no noise": lambda own: Independent(len(own)),
    }[kind]
    active = active_rounds(rounds)
    return Grouped(rounds, tuple(build(own) for own in active), SIZES)


def train(rounds, kind, epsilon, users, seed):
    """Return the test accuracy, in [0, 1]; epsilon None is all users always, no clip, no noise."""
    torch.set_num_threads(1)
    model, task, chosen = network(seed), digits(), mechanism(rounds, kind)
    per_round = users if epsilon is None else users // len(rounds)
    most = len(rounds) if epsilon is None else 1
    once = Participation(len(rounds))
    z = 0.0 if epsilon is None else calibrate(chosen, once, target_epsilon=epsilon, delta=DELTA)
    plan = PrivacyPlan(
        mechanism=chosen,
        participation=Participation(len(rounds), most),
        clip_norm=1e3 if epsilon is None else 0.3,
        noise_multiplier=z,
        report_goal=per_round,
    )
    engine = EmbeddedEngine(
        model,
        Users(task.train_x, task.train_y, iid_users(1437, users=users, data_seed=seed)),
        local=LocalTraining(0.1, steps=8) if epsilon is None else LocalTraining(0.1, epochs=2),
        data_seed=seed,
    )
    server = Server(plan, model.flat, source=SeededSource(seed))
    cohorts = cohorts_in_turn(users=users, size=per_round, rounds=len(rounds), data_seed=seed)
    fit(server, engine, cohorts)
    model.load(server.parameters)
    return accuracy_on(model.module, task.test_x, task.test_y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--clients", type=int, default=12, help="without noise, in every round")
    parser.add_argument("--users", type=int, default=1437, help="with noise, once each")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[30.0, 10.0])
    chosen = parser.parse_args()
    schedule = Schedule(cycles=chosen.cycles, rounds_per_group=3, warm_up=12, between=4)
    part = schedule.rounds(len(SIZES))
    full = (tuple(range(len(SIZES))),) * len(part)
    as_many_bytes = full[: round(sent_numbers(part, SIZES) / sum(SIZES))]
    cases = {
        "no noise: full": (full, "no noise", None, chosen.clients),
        "no noise: FedPart": (part, "no noise", None, chosen.clients),
        "no noise: full, FedPart's bytes": (as_many_bytes, "no noise", None, chosen.clients),
    }
    for epsilon in chosen.epsilons:
        name = f"epsilon {epsilon:g}"
        cases[f"{name}: full, one tree"] = (full, "a tree per group", epsilon, chosen.users)
        for kind in ("one tree, pruned", "a tree per group"):
            cases[f"{name}: FedPart, {kind}"] = (part, kind, epsilon, chosen.users)
    print(f"{'':<38} rounds  MB up  test accuracy (%), mean and spread of {chosen.seeds} seeds")
    with Parallel(n_jobs=chosen.jobs) as pool:
        for name, (rounds, kind, epsilon, users) in cases.items():
            found = pool(
                delayed(train)(rounds, kind, epsilon, users, seed) for seed in range(chosen.seeds)
            )
            spread = f" ± {100 * stdev(found):.1f}" if len(found) > 1 else ""
            sent = 4e-6 * sent_numbers(rounds, SIZES)
            print(f"{name:<38} {len(rounds):>6} {sent:>6.2f}  {100 * mean(found):.1f}{spread}")


if __name__ == "__main__":
    main()
