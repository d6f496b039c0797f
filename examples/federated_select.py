"""Federated Select: the accuracy of smaller client models, and what the parties see of the keys.

Repeats Charles et al. 2022, section 5.3, on real digits. Clients select random filters of a CNN, or
random neurons of a network of two dense layers; each client draws its own keys, or all share them.
A private run follows, in which clients fetch their slices by private retrieval. It shows only what
is printed: twenty clients per round are too few to learn under noise. Takes some minutes on two
processors.

Run: python examples/federated_select.py
"""

import argparse
from statistics import mean, stdev

import torch
from joblib import Parallel, delayed
from torch import Tensor, nn

from accounting import BinaryTree, Independent, Participation
from privpart import (
    LocalTraining,
    PartialModel,
    PrivacyPlan,
    SecretSource,
    SeededSource,
    Server,
    ServerOptimizer,
    Users,
    fit,
)
from privpart.data import cohorts_in_turn, cohorts_once_each, iid_users
from privpart.data.tasks import digits
from privpart.models import mcmahan_2nn, small_cnn
from privpart.select import (
    IndependentKeys,
    SelectEngine,
    SharedKeys,
    on_demand,
    private,
    select_claims,
)
from privpart.select.delivery import seen_in
from privpart.select.key_spaces import cnn_filters, dense_neurons
from privpart.training.metric import accuracy as accuracy_on

TASK, USERS = digits(), 120
NEVER_CLIPS, DELTA, PRIVATE_FILTERS = 1e3, 1e-5, 16


def cnn(filters: int = 64) -> nn.Module:
    return small_cnn(channels=(8, filters), hidden=64, image_size=8, groups=0)


def two_layers(neurons: int = 200) -> nn.Module:
    network = mcmahan_2nn(inputs=64, hidden=100, classes=10)
    network.dense1, network.dense2 = nn.Linear(64, neurons), nn.Linear(neurons, 100)
    return network


NETWORKS = {
    "cnn": (cnn, cnn_filters(image_size=8), (4, 8, 16, 32, 64)),
    "2nn": (two_layers, dense_neurons(), (10, 50, 100, 200)),
}


def engine(name: str, m: int, *, shared: bool, seed: int, **options) -> SelectEngine:
    build, space, sizes = NETWORKS[name]
    chooser = SharedKeys if shared else IndependentKeys
    draws = {"seed" if shared else "data_seed": seed}
    users = options.pop("users", USERS)
    return SelectEngine(
        PartialModel(build, seed=seed),
        [space],
        lambda count: PartialModel(lambda: build(count), seed=seed),
        Users(
            TASK.train_x, TASK.train_y, iid_users(len(TASK.train_x), users=users, data_seed=seed)
        ),
        local=LocalTraining(learning_rate=0.1, epochs=2, batch_size=6),
        choosers=[chooser(sizes[-1], m, **draws)],
        data_seed=seed,
        **options,
    )


def accuracy(name: str, seed: int):
    model = PartialModel(NETWORKS[name][0], seed=seed)

    def of(parameters: Tensor) -> float:
        model.load(parameters)
        return accuracy_on(model.module, TASK.test_x, TASK.test_y)

    return model.flat.clone(), of


def train(name: str, m: int, shared: bool, seed: int, rounds: int) -> float:
    """Return the test accuracy of the whole model after all rounds, without noise."""
    torch.set_num_threads(1)
    cohorts = cohorts_in_turn(range(USERS), size=20, rounds=rounds, data_seed=seed)
    plan = PrivacyPlan(
        mechanism=Independent(rounds),
        participation=Participation(rounds, rounds),
        clip_norm=NEVER_CLIPS,
        noise_multiplier=0,
        report_goal=20,
    )
    start, evaluate = accuracy(name, seed)
    server = Server(plan, start, source=SeededSource(seed))
    clients = engine(name, m, shared=shared, seed=seed, delivery=on_demand)
    return fit(server, clients, cohorts, evaluate=evaluate)[-1].metric


def private_run(rounds: int) -> None:
    users = 20 * rounds
    plan = PrivacyPlan(
        mechanism=BinaryTree(rounds),
        participation=Participation(rounds),
        clip_norm=0.3,
        noise_multiplier=1.0,
        report_goal=20,
    )
    start, evaluate = accuracy("cnn", 0)
    optimizer = ServerOptimizer(learning_rate=0.5, momentum=0.9)
    server = Server(plan, start, source=SecretSource(), optimizer=optimizer)
    clients = engine("cnn", PRIVATE_FILTERS, shared=False, seed=0, delivery=private, users=users)
    cohorts = cohorts_once_each(range(users), rounds=rounds, data_seed=0)
    record = fit(server, clients, cohorts, evaluate=evaluate)[-1]
    ledger, asked = clients.ledger, sum(map(len, cohorts))
    down, up = (sum(b.values()) / asked for b in (ledger.bytes_down, ledger.bytes_up))
    print(f"\nprivate run, {PRIVATE_FILTERS} of 64 filters: test accuracy {record.metric:.1%}")
    print(f"per client {down:,.0f} bytes down, {up:,.0f} up; whole model {start.nbytes:,} each way")
    for line in select_claims(server.report(DELTA).guarantee, DELTA, seen_in(ledger)):
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS))
    options = parser.parse_args()
    runs = [
        (name, m, shared, seed)
        for name in options.networks
        for m in NETWORKS[name][2]
        for shared in (False, True)
        for seed in range(options.seeds)
    ]
    results = dict(
        zip(
            runs,
            Parallel(options.jobs)(delayed(train)(*run, options.rounds) for run in runs),
            strict=True,
        )
    )
    print(f"test accuracy after {options.rounds} rounds, mean and spread of {options.seeds} seeds")
    print("network    m  rel. size      own keys     shared keys")
    for name in options.networks:
        sizes = NETWORKS[name][2]
        layout = engine(name, sizes[0], shared=True, seed=0).layout
        for m in sizes:
            cells = [
                [results[name, m, shared, seed] for seed in range(options.seeds)]
                for shared in (False, True)
            ]
            shown = "  ".join(f"{mean(c):>7.1%} ± {stdev(c):>5.1%}" for c in cells)
            size = len(layout.shared) + m * layout.widths[0]
            print(f"{name:<7} {m:>4} {size / layout.dim:>10.2f}  {shown}")
    private_run(options.rounds)


if __name__ == "__main__":
    main()
