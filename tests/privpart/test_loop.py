import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from plans import small_plan
from torch import nn
from torch.nn.utils import vector_to_parameters

from accounting import ConfigError
from privpart import (
    CohortRefusedError,
    CohortTooSmallError,
    DivergedError,
    SeededSource,
    Server,
    ServerOptimizer,
    fit,
)


def a_server(dim: int, rounds: int, z: float = 0.0) -> Server:
    plan = small_plan(rounds, clip_norm=0.3, noise_multiplier=z, report_goal=19)
    optimizer = ServerOptimizer(learning_rate=0.5, momentum=0.9)
    return Server(plan, torch.zeros(dim), source=SeededSource(0), optimizer=optimizer)


class Ones:
    def run(self, task, start):
        for client in task.clients:
            yield task.update(client, torch.full_like(start, 0.1))


def test_one_round_per_cohort_with_callbacks_and_evaluations():
    """A round is committed before anyone sees it."""
    seen, order = [], []
    records = fit(
        a_server(4, rounds=5),
        Ones(),
        [[0, 1], [2], [3], [4], [5]],
        commit=lambda server, counts: order.append(server.round),
        evaluate=lambda parameters: order.append("evaluate") or float(parameters[0]),
        evaluate_every=2,
        callbacks=[seen.append, lambda _: order.append("callback")],
    )
    assert order[:5] == [1, "callback", 2, "evaluate", "callback"]
    assert seen == records
    assert [r.round for r in records] == [0, 1, 2, 3, 4]
    assert [r.counts.counted for r in records] == [2, 1, 1, 1, 1]
    assert [r.metric is not None for r in records] == [False, True, False, True, True]


def test_within_a_round_it_is_told_how_many_clients_answered():
    class Sums(Ones):
        def sums(self, task, start):
            for clients in (task.clients[:2], task.clients[2:]):
                total = torch.zeros(len(start), dtype=torch.float64)
                yield task.sum_of(list(clients), total, torch.zeros(len(clients)))

    for engine, expected in ((Ones(), [1, 2, 3]), (Sums(), [2, 3])):
        told = []
        fit(a_server(4, rounds=1), engine, [[0, 1, 2]], heard=lambda *a, to=told: to.append(a))
        assert told == [(0, done, 3) for done in expected]


def test_fits_that_contradict_the_plan_or_themselves_are_refused():
    one = a_server(4, rounds=2)
    for every in (-2, 0, 2.5, math.nan, True):
        with pytest.raises(ConfigError, match="evaluate_every="):
            fit(one, Ones(), [[0], [1]], evaluate=lambda _: 0.0, evaluate_every=every)
    assert one.round == 0
    with pytest.raises(ConfigError, match="evaluate_every=3: there is no evaluate"):
        fit(a_server(4, rounds=2), Ones(), [[0], [1]], evaluate_every=3)
    with pytest.raises(ConfigError, match="3 cohorts, but the plan has 2 rounds"):
        fit(a_server(4, rounds=2), Ones(), [[0], [1], [2]])


class Asking(Ones):
    """Notes who was asked."""

    def __init__(self):
        self.asked = []

    def run(self, task, start):
        self.asked.append(task.clients)
        yield from super().run(task, start)


def in_place(parameters):
    """Train a network whose parameters are views of the server's: torch makes no copy."""
    module = nn.Linear(3, 1)
    vector_to_parameters(parameters, module.parameters())
    with torch.no_grad():
        module.weight.add_(1000.0)
    return 0.0


@pytest.mark.parametrize(
    "change", [in_place, lambda p: p.data.copy_(p.flip(0)) is None, lambda p: p.neg_() is None]
)
@pytest.mark.parametrize("who", ["engine", "evaluation", "commit"])
def test_a_model_that_anything_but_a_round_changed_is_not_released(who, change):
    class Trains(Ones):
        def run(self, task, start):
            if who == "engine" and task.round == 1:
                change(start)
            yield from super().run(task, start)

    def commit(server, counts):
        if who == "commit" and server.round == 2:
            change(server.parameters)
        server.state_dict()
        committed.append(server.round)

    committed, every = [], {"evaluate": change, "evaluate_every": 1} if who == "evaluation" else {}
    one = a_server(4, rounds=4, z=1.0)
    with pytest.raises(ConfigError, match="by something else than a round"):
        fit(one, Trains(), [[0], [1], [2], [3]], commit=commit, **every)
    assert committed == [1]
    with pytest.raises(ConfigError):
        fit(one, Ones(), [[0], [1], [2], [3]], commit=commit)


def test_a_cohort_that_is_too_small_stops_before_anything_is_committed():
    server, committed = a_server(4, rounds=3), []
    with pytest.raises(CohortTooSmallError, match="round 1: fewer than 1 well-formed updates"):
        fit(server, Ones(), [[0], [0], [1]], commit=lambda *a: committed.append(a))
    assert (server.round, len(committed)) == (1, 1)
    assert len(fit(server, Ones(), [[0], [2], [1]])) == 2
    with pytest.raises(CohortTooSmallError, match=r"received: 2 not asked \(2 participation limit"):
        fit(a_server(4, rounds=3), Ones(), [[0, 1], [0, 1]])
    with pytest.raises(CohortTooSmallError, match="received: nobody was asked"):
        fit(a_server(4, rounds=3), Ones(), [[]])


NOT_IDS = [3.0, None, True, np.bool_(True), b"3", (3,), "", 2**256, 10**5000, torch.tensor(3)]


@pytest.mark.parametrize("client", NOT_IDS, ids=lambda client: type(client).__name__)
def test_what_is_not_an_id_is_refused_before_the_first_round(client):
    one, asked = a_server(4, rounds=2), Ones()
    with pytest.raises(ConfigError, match="cohorts: round 1: client id ") as error:
        fit(one, asked, [[0], [1, client]])
    assert "must be a whole number of magnitude below" in str(error.value)
    assert len(str(error.value)) < 300
    assert one.round == 0


@pytest.mark.parametrize(
    "cohorts",
    [["ada", "bob"], [0, 1], [b"ab", b"cd"], torch.arange(2), [iter([0]), [1]]],
)
def test_a_list_of_clients_is_not_a_list_of_cohorts(cohorts):
    """A string is a sequence of strings: its letters would be clients."""
    with pytest.raises(ConfigError, match=r"cohorts: round 0 has a \w+: must be a sequence of"):
        fit(a_server(4, rounds=2), Ones(), cohorts)


@pytest.mark.parametrize(
    "cohort",
    [[5, 6, 5], [5, np.int64(5)], np.array([5, 5], np.uint8), ["ada", np.str_("ada")]],
    ids=repr,
)
def test_a_client_is_in_a_cohort_once(cohort):
    with pytest.raises(ConfigError, match=r"round 1: clients: two have the id (5|'ada')"):
        fit(a_server(4, rounds=2), Ones(), [[0], cohort])


def test_numpy_ids_are_asked_as_pythons_own():
    engine = Asking()
    cohorts = [np.array([2**64 - 1, 1], np.uint64), np.array(["1", "ada"]), [np.int8(-1), 0]]
    records = fit(a_server(4, rounds=3), engine, cohorts)
    assert [r.counts.counted for r in records] == [2, 2, 2]
    assert engine.asked == [(2**64 - 1, 1), ("1", "ada"), (-1, 0)]
    assert {type(client) for clients in engine.asked for client in clients} == {int, str}


class Some(Ones):
    """Some clients answer well; others as ``bad`` says: number of malformed answers of each."""

    def __init__(self, bad):
        self.bad = bad

    def run(self, task, start):
        for client in task.clients:
            short = [task.update(client, start[:-1])] * self.bad.get(client, 0)
            yield from short or super().run(replace(task, clients=(client,)), start)


def test_a_record_says_who_is_missing_and_why():
    engine = Asking()
    first = fit(a_server(4, rounds=3), engine, [[0, 1], [1, 2, 3]])
    assert engine.asked == [(0, 1), (2, 3)]
    assert [(r.counts.asked, dict(r.not_asked)) for r in first] == [
        (2, {}),
        (2, {"participation limit": 1}),
    ]
    assert [r.missing() for r in first] == ["", "1 not asked (1 participation limit)"]

    class Twice(Ones):
        def run(self, task, start):
            for client in task.clients[:-1]:
                yield from [task.update(client, start)] * 2
            yield replace(task.update(9, start), round=7)

    (found,) = fit(a_server(4, rounds=3), Twice(), [[0, 1, 2, 3, 4]])
    assert found.counts.counted == 4
    assert found.missing() == "5 refused (4 twice in a round, 1 another round); 1 without an answer"
    (found,) = fit(a_server(4, rounds=3), Some({0: 1}), [[0, 1, 2]])
    assert found.missing() == "1 refused (1 wrong shape or type)"


@pytest.mark.parametrize("z", [0.0, 1.0])
def test_when_most_of_a_cohort_is_refused_the_run_stops_and_says_why(z):
    one, committed = a_server(4, rounds=2, z=z), []
    with pytest.raises(CohortRefusedError) as error:
        fit(one, Some({0: 1, 2: 1, 3: 1}), [range(5)], commit=lambda *a: committed.append(a))
    assert str(error.value) == (
        "round 0: most of the 5 clients that were asked were refused: 3 refused (3 wrong shape or "
        "type). Nothing was released. Correct what they send, then resume."
    )
    assert isinstance(error.value, CohortTooSmallError)
    assert (one.round, committed) == (0, [])
    clean = a_server(4, rounds=2, z=z)
    for each in (one, clean):  # as if nothing had happened
        assert fit(each, Ones(), [range(5), [7]])
    assert torch.equal(one.parameters, clean.parameters)


class Diverging:
    """From its second round on, these of the clients' updates are not finite."""

    def __init__(self, clients, bad=math.nan):
        self.clients, self.bad = clients, bad

    def run(self, task, start):
        for client in task.clients:
            update = torch.full_like(start, 0.1)
            update[0] = self.bad if task.round and client % 10 in self.clients else 0.1
            yield task.update(client, update)


COHORTS = [range(10 * r, 10 * r + 5) for r in range(4)]


@pytest.mark.parametrize("z", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_run_stops_after_a_round_in_which_most_updates_are_not_finite(z, bad):
    one, committed, seen = a_server(4, rounds=4, z=z), [], []
    with pytest.raises(DivergedError) as error:
        fit(
            one, Diverging({0, 2, 3}, bad), COHORTS, callbacks=[seen.append],
            commit=lambda server, counts: committed.append(counts.not_finite),
        )  # fmt: skip
    assert str(error.value).startswith("round 1: 3 of the 5 updates were not finite")
    assert "learning rate, the clients' input data, and half precision" in str(error.value)
    assert "not covered by the guarantee: not for release" in str(error.value)
    assert (one.round, committed, [record.round for record in seen]) == (2, [0, 3], [0, 1])
    assert one.parameters.isfinite().all()
    assert one.ineligible([10]) == {10: "participation limit"}  # the round counts
    assert fit(one, Ones(), COHORTS)  # and may be followed by others, if somebody says so
    assert len(fit(a_server(4, rounds=4, z=z), Diverging({0, 2}), COHORTS)) == 4
    going = fit(a_server(4, rounds=4, z=z), Diverging({0, 2, 3}), COHORTS, stop_if_diverged=False)
    assert [record.counts.not_finite for record in going] == [0, 3, 3, 3]


def test_no_sender_stops_a_round_however_many_are_away():
    class Flood(Ones):
        def run(self, task, start):
            for _ in range(1000):
                yield task.update(0, torch.zeros(start.numel() + 1))  # malformed
                yield replace(task.update(0, start), round=7)
                yield replace(task.update(1, start), plan="another")
                yield replace(task.update(2, start), round="0")
                yield task.update("never asked", torch.zeros(start.numel() + 1))
                yield None
            for client in task.clients[6:]:
                yield from [task.update(client, start)] * 250
                yield task.update(client, torch.zeros(start.numel() + 1))

    (found,) = fit(a_server(4, rounds=1), Flood(), [range(10)])
    counts = found.counts
    assert counts.released
    assert (counts.counted, counts.asked, counts.refused_clients) == (4, 10, 2)
    assert counts.refused == counts.received - 4 == sum(counts.refusals.values()) == 7000
    assert found.missing().endswith("; 4 without an answer")
