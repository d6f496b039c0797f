"""Train only part of a small network on real digits, under user-level DP-FTRL.

Run: python examples/train_last_layer.py
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
    RoundRecord,
    SecretSource,
    Server,
    ServerOptimizer,
    Users,
    fit,
)
from privpart.data import cohorts_once_each, iid_users
from privpart.data.tasks import digits
from privpart.models import small_cnn
from privpart.training.costs import message_bytes

ROUNDS, USERS, DELTA = 72, 1437, 1e-5


def main() -> None:
    torch.set_num_threads(1)
    task = digits()
    # The large dense layer keeps its seeded start values; clients rebuild it and never send it.
    model = PartialModel(
        lambda: small_cnn(channels=(16, 32), hidden=512, image_size=8),
        train=["conv*", "norm.*", "dense2.*"],
        seed=7,
    )
    print(f"training {', '.join(model.trainable)}: {model.dim:,} of {model.parameter_count:,}")
    print(f"frozen part {model.fingerprint}, update {message_bytes(model):,} bytes\n")

    plan = PrivacyPlan(
        mechanism=BinaryTree(ROUNDS),
        participation=Participation(ROUNDS),
        clip_norm=0.3,
        noise_multiplier=1.0,
        report_goal=USERS // ROUNDS,
    )
    # The noise comes from a secret key, so the results differ from run to run.
    optimizer = ServerOptimizer(learning_rate=0.3, momentum=0.9)
    server = Server(plan, model.flat, source=SecretSource(), optimizer=optimizer)
    engine = EmbeddedEngine(
        model,
        Users(task.train_x, task.train_y, iid_users(USERS, users=USERS, data_seed=0)),
        local=LocalTraining(learning_rate=0.1, epochs=2),
        data_seed=0,
    )

    def accuracy(parameters: Tensor) -> float:
        model.load(parameters)
        with torch.no_grad():
            return float((model.module(task.test_x).argmax(1) == task.test_y).float().mean())

    def show(record: RoundRecord) -> None:
        if record.metric is not None:
            print(f"round {record.round + 1:>3}: test accuracy {record.metric:.1%}")

    fit(
        server,
        engine,
        cohorts_once_each(range(USERS), rounds=ROUNDS, data_seed=0),
        evaluate=accuracy,
        evaluate_every=24,
        callbacks=[show],
    )
    report = server.report(DELTA)
    print(f"\nepsilon {up(report.epsilon)} at delta {DELTA:g}: {report.status}")


if __name__ == "__main__":
    main()
