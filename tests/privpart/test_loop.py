import math

import pytest
import torch

from accounting import BinaryTree, ConfigError, Participation
from privpart import (
    CohortTooSmallError,
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
from privpart.data import cohorts_once_each, iid_users
from privpart.data.tasks import digits
from privpart.models import small_cnn


def a_server(dim: int, rounds: int, z: float = 0.0) -> Server:
    plan = PrivacyPlan(
        mechanism=BinaryTree(rounds),
        participation=Participation(rounds),
        clip_norm=0.3,
        noise_multiplier=z,
        report_goal=19,
    )
    optimizer = ServerOptimizer(learning_rate=0.5, momentum=0.9)
    return Server(plan, torch.zeros(dim), source=SeededSource(0), optimizer=optimizer)


class Ones:
    def run(self, task, start):
        for client in task.clients:
            yield task.update(client, torch.full_like(start, 0.1))


def test_one_round_per_cohort_with_callbacks_and_evaluations():
    seen = []
    records = fit(
        a_server(4, rounds=5),
        Ones(),
        [[0, 1], [2], [3], [4], [5]],
        evaluate=lambda parameters: float(parameters[0]),
        evaluate_every=2,
        callbacks=[seen.append],
    )
    assert seen == records
    assert [r.round for r in records] == [0, 1, 2, 3, 4]
    assert [r.counts.counted for r in records] == [2, 1, 1, 1, 1]
    assert [r.metric is not None for r in records] == [False, True, False, True, True]


@pytest.mark.parametrize("every", [-2, 0, 2.5, math.nan, True])
def test_rounds_between_evaluations_are_a_count(every):
    one = a_server(4, rounds=2)
    with pytest.raises(ConfigError, match="evaluate_every="):
        fit(one, Ones(), [[0], [1]], evaluate=lambda _: 0.0, evaluate_every=every)
    assert one.round == 0


def test_more_cohorts_than_planned_rounds():
    with pytest.raises(ConfigError, match="3 cohorts, but the plan has 2 rounds"):
        fit(a_server(4, rounds=2), Ones(), [[0], [1], [2]])


def test_clients_beyond_their_limit_are_not_asked():
    asked = []

    class Asking(Ones):
        def run(self, task, start):
            asked.append(task.clients)
            yield from super().run(task, start)

    fit(a_server(4, rounds=3), Asking(), [[0, 1], [1, 2], [0, 3]])
    assert asked == [(0, 1), (2,), (3,)]


def test_a_cohort_that_is_too_small_stops_before_anything_is_committed():
    server, committed = a_server(4, rounds=3), []
    with pytest.raises(CohortTooSmallError, match="round 1: fewer than 1 well-formed updates"):
        fit(server, Ones(), [[0], [0], [1]], commit=lambda *a: committed.append(a))
    assert (server.round, len(committed)) == (1, 1)
    assert len(fit(server, Ones(), [[0], [2], [1]])) == 2


def test_a_round_is_committed_before_anyone_sees_it():
    order = []
    fit(
        a_server(4, rounds=2),
        Ones(),
        [[0], [1]],
        commit=lambda server, counts: order.append(("commit", server.round)),
        evaluate=lambda parameters: order.append("evaluate") or 0.0,
        evaluate_every=1,
        callbacks=[lambda record: order.append("callback")],
    )
    assert order == [("commit", 1), "evaluate", "callback", ("commit", 2), "evaluate", "callback"]


def digits_accuracy(train: list[str], z: float, rounds: int = 72) -> float:
    task = digits()
    model = PartialModel(
        lambda: small_cnn(channels=(16, 32), hidden=64, image_size=8), train=train, seed=0
    )
    users = Users(task.train_x, task.train_y, iid_users(1437, users=1437, data_seed=0))
    server = a_server(model.dim, rounds=72, z=z)
    server.parameters.copy_(model.flat)
    engine = EmbeddedEngine(model, users, local=LocalTraining(0.1, epochs=2), data_seed=0)
    cohorts = cohorts_once_each(users=1437, rounds=72, data_seed=0)

    def accuracy(parameters):
        model.load(parameters)
        with torch.no_grad():
            return float((model.module(task.test_x).argmax(1) == task.test_y).float().mean())

    return fit(server, engine, cohorts[:rounds], evaluate=accuracy)[-1].metric


def test_partial_training_learns_digits_and_repeats_itself():
    part = ["conv*", "norm.*", "dense2.*"]
    assert digits_accuracy(part, z=0.0) > 0.8
    first, again = (digits_accuracy(part, z=0.0, rounds=18) for _ in range(2))
    assert first == again > 0.4  # learning has begun
    assert digits_accuracy(part, z=30.0) < 0.4
