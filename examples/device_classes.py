"""Weak devices train fewer parameters than strong ones in the same rounds, with one guarantee.

Run: python examples/device_classes.py
"""

import torch
from torch import Tensor

from accounting import BinaryTree, Participation
from accounting.report import up
from privpart import (
    EmbeddedEngine,
    LocalTraining,
    PartialModel,
    PrivacyPlan,
    SecretSource,
    Server,
    ServerOptimizer,
    Users,
    fit,
)
from privpart.data import cohorts_once_each, iid_users
from privpart.data.tasks import digits
from privpart.engines.device_classes import DeviceClasses
from privpart.models import small_cnn
from privpart.wire import encode_update

ROUNDS, USERS, DELTA, SEED = 36, 1437, 1e-5, 7
PARTS = {"strong": ["*"], "weak": ["conv*", "norm.*", "dense2.*"]}


def class_of(client: int) -> int:
    """Return the class of a client: public and independent of its data; two of three are weak."""
    return min(client % 3, 1)


def network(train: list[str]) -> PartialModel:
    return PartialModel(
        lambda: small_cnn(channels=(8, 16), hidden=128, image_size=8), train=train, seed=SEED
    )


def main() -> None:
    torch.set_num_threads(1)
    task = digits()
    users = Users(task.train_x, task.train_y, iid_users(USERS, users=USERS, data_seed=0))
    plan = PrivacyPlan(
        mechanism=BinaryTree(ROUNDS),
        participation=Participation(ROUNDS),
        clip_norm=0.3,
        noise_multiplier=1.0,
        report_goal=USERS // ROUNDS,
    )
    engines = [
        EmbeddedEngine(
            network(train),
            users,
            local=LocalTraining(0.1, epochs=2),
            data_seed=0,
        )
        for train in PARTS.values()
    ]
    whole = network(["*"])
    optimizer = ServerOptimizer(learning_rate=0.5, momentum=0.9)
    server = Server(plan, whole.flat, source=SecretSource(), optimizer=optimizer)
    print("class    trains   would send (bytes)")
    for name, engine in zip(PARTS, engines, strict=True):
        share = engine.model.dim / whole.dim
        print(f"{name:<7} {share:>7.1%} {len(encode_update(engine.model, engine.model.flat)):>20,}")

    print("Simulated: over the wire, this server would refuse the message of a weak device.")

    def accuracy(parameters: Tensor) -> float:
        whole.load(parameters)
        with torch.no_grad():
            return float((whole.module(task.test_x).argmax(1) == task.test_y).float().mean())

    records = fit(
        server,
        DeviceClasses(whole, engines, class_of),
        cohorts_once_each(users=USERS, rounds=ROUNDS, data_seed=0),
        evaluate=accuracy,
        evaluate_every=12,
    )
    print()
    for record in records:
        if record.metric is not None:
            print(f"round {record.round + 1:>2}: test accuracy {record.metric:.1%}")
    report = server.report(DELTA)
    print(f"\nepsilon {up(report.epsilon)} at delta {DELTA:g}, the same as for equal devices:")
    print("zeros do not lengthen an update, and one public constant divides the sum everywhere.")


if __name__ == "__main__":
    main()
