"""Noised metrics: their cost, their noise, who evaluates, and what a run keeps and says of them."""

import itertools
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import runs
import torch
from plans import tables
from scipy import stats

import privpart
from accounting import Guarantee, Independent, guarantee
from accounting.checks import ConfigError
from accounting.metrics import Metrics
from privpart import RunFolder, SeededSource, Server, fit
from privpart.noise.metrics import STREAM, MetricsRelease, evaluation_users
from privpart.noise.source import SecretSource
from privpart.noise.stream import NoiseStream
from privpart.plan import PrivacyPlan
from privpart.run.begin import create_run
from privpart.run.ledger import LEDGER, Ledger, SigningKey
from privpart.run.noised_metrics import noised_metrics
from privpart.run.report import run_report
from privpart.training.plan_file import validated
from privpart.training.private_metrics import FILE
from privpart.training.training import training
from privpart.training.verify import check_run

METRICS = Metrics(names=("a", "b"), users=3, rounds=(1, 3), noise_multiplier=2.0)
PLAN = runs.plan(metrics=METRICS)
USERS = (10, 11, "eve")


def released(plan=PLAN, source=None, numbers=None, users=USERS):
    """Return a release after its first evaluation, and how many numbers were summed."""
    release = MetricsRelease(plan, source or SeededSource(5), users)
    width = len(plan.metrics.names)
    vectors = torch.zeros(len(users), width).double() if numbers is None else numbers
    release.release(plan.metrics.rounds[0], zip(users, vectors, strict=True))
    return release


# What it costs


@pytest.mark.parametrize("count", range(1, 13))
def test_the_sensitivity_is_that_of_brute_force_over_all_participations(count):
    """A user may evaluate in any of the evaluations, each time with any corner of the cube."""
    metrics = replace(METRICS, rounds=tuple(range(count)), names=("a", "b", "c"))
    corners = [math.hypot(*corner) for corner in itertools.product((0, 1), repeat=3)]
    longest = max(corners) / metrics.length
    patterns = itertools.product((0, 1), repeat=count)
    worst = max(float(np.linalg.norm(longest * np.array(p))) for p in patterns)
    claimed = metrics.mechanism.sensitivity(metrics.participation)
    assert worst == pytest.approx(math.sqrt(claimed.squared), rel=1e-12)
    assert metrics.claim().cost.mu == pytest.approx(worst / 2.0, rel=1e-12)
    assert metrics.claim().cost.mu >= worst / 2.0


def test_a_user_pays_the_larger_of_two_guarantees_or_both():
    training = guarantee(PLAN.mechanism, PLAN.participation, noise_multiplier=1.0).mu
    metrics = METRICS.claim().cost.mu
    assert PLAN.guarantee().mu == max(training, metrics)
    dear = replace(PLAN, metrics=replace(METRICS, noise_multiplier=0.2))
    assert dear.guarantee().mu == dear.metrics.claim().cost.mu > training
    both = replace(PLAN, metrics=replace(METRICS, also_train=True))
    assert both.guarantee().mu == pytest.approx(math.hypot(training, metrics))
    for plan in (PLAN, dear, both):
        assert plan.report(1e-6).mu == plan.guarantee().mu
        assert PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_the_user_who_moves_the_values_most_attains_the_claim():
    """All ones in every evaluation, beside zeros: the shift, in noise, is mu and never above."""
    metrics = replace(METRICS, rounds=tuple(range(7)), names=("a", "b", "c"))
    plan, user = runs.plan(7, metrics=metrics), torch.ones(3).double()
    releases = [MetricsRelease(plan, SeededSource(1), USERS) for _ in range(2)]
    squared = 0.0
    for number in range(7):
        for release, vector in zip(releases, (user, 0 * user), strict=True):
            release.release(number, [(10, vector)])
        shift = np.array(releases[0].values) - np.array(releases[1].values)
        squared += float(shift @ shift) / metrics.standard_error**2
    mu = metrics.claim().cost.mu
    assert mu * (1 - 1e-4) < math.sqrt(squared) <= mu


def test_a_plan_without_metrics_has_the_hash_that_it_had():
    assert "metrics" not in runs.PLAN.to_dict()
    assert len({runs.PLAN.hash, PLAN.hash, replace(PLAN, metrics=None).hash}) == 2


# The noise and the sum


def test_the_noise_is_the_stream_of_its_own_address_in_whole_steps_of_the_grid():
    numbers = torch.tensor([[0.25, 1.0], [0.5, 0.0], [1.0, 1.0]]).double()
    release = released(numbers=numbers)
    quiet = released()
    step = METRICS.length * METRICS.noise_multiplier / 2.0**20
    steps = [np.array(r.values) * METRICS.users / step for r in (release, quiet)]
    stream = NoiseStream(
        Independent(2), dim=2, stddev=2.0**20, source=SeededSource(5), stream=STREAM
    )
    assert np.allclose(steps[1], stream.next().numpy(), atol=1e-6)
    whole = np.rint(steps[0] - steps[1])
    assert np.allclose(steps[0] - steps[1], whole, atol=1e-6)
    assert np.allclose(whole * step, [1.75, 2.0], atol=1e-5)
    # the draws of a training's streams are others
    for other in (0, 1, 2):
        draws = NoiseStream(
            Independent(2), dim=2, stddev=2.0**20, source=SeededSource(5), stream=other
        )
        assert not np.array_equal(draws.next().numpy(), np.rint(steps[1]).astype(int))


def test_a_metric_never_shares_a_stream_with_the_training_of_the_same_source():
    source = SecretSource()
    grouped = Server(PLAN, torch.zeros(runs.DIM), source=source)
    MetricsRelease(PLAN, source, USERS)
    assert STREAM not in range(10_000)
    with pytest.raises(ConfigError, match="already feeds a noise stream"):
        MetricsRelease(PLAN, source, USERS)
    assert grouped.round == 0


def is_chi_square(values, claimed: float) -> bool:
    """Return whether independent Gaussians have a standard deviation, with 1e-6 of error."""
    statistic = float(np.sum((np.array(values) / claimed) ** 2))
    low, high = stats.chi2.ppf((5e-7, 1 - 5e-7), len(values))
    return bool(low < statistic < high)


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.05, False), (1 / 1.05, False)])
def test_the_noise_has_the_standard_error_that_is_claimed(factor, passes):
    names = tuple(map(str, range(16)))
    count = 1000
    metrics = Metrics(names=names, users=3, rounds=tuple(range(count)), noise_multiplier=2.0)
    plan = runs.plan(count, metrics=metrics)
    release = MetricsRelease(plan, SeededSource(3), USERS)
    values = []
    for number in range(count):
        release.release(number, [(user, torch.zeros(16)) for user in USERS])
        values += release.values
    assert len(values) == 16_000
    assert is_chi_square(values, metrics.standard_error * factor) is passes


def test_noise_of_two_evaluations_and_of_two_metrics_is_independent():
    metrics = replace(METRICS, rounds=tuple(range(2000)))
    release = MetricsRelease(runs.plan(2000, metrics=metrics), SeededSource(4), USERS)
    values = []
    for number in range(2000):
        release.release(number, [(user, torch.zeros(2)) for user in USERS])
        values.append(release.values)
    a, b = np.array(values).T / metrics.standard_error
    for product in (a * b, a[1:] * a[:-1], b[1:] * a[:-1]):
        assert abs(product.sum() / math.sqrt(len(product))) < 5


@pytest.mark.parametrize(
    ("vector", "counts_as"),
    [
        ([0.5, 0.25], [0.5, 0.25]),
        ([7.0, -3.0], [1.0, 0.0]),
        ([1.0, 1.0], [1.0, 1.0]),
        ([math.nan, 1.0], [0.0, 0.0]),
        ([math.inf, 1.0], [0.0, 0.0]),
        ([0.5, -math.inf], [0.0, 0.0]),
    ],
)
def test_a_vector_is_clipped_and_one_that_is_not_finite_counts_as_zeros(vector, counts_as):
    numbers = torch.zeros(3, 2).double()
    numbers[1] = torch.tensor(vector)
    moved = np.array(released(numbers=numbers).values) - np.array(released().values)
    assert np.allclose(3 * moved, counts_as, atol=1e-5)
    steps = 3 * moved / (METRICS.length * METRICS.noise_multiplier / 2.0**20)
    assert np.linalg.norm(np.rint(steps)) <= 2.0**20 / METRICS.noise_multiplier


@pytest.mark.parametrize("vector", [torch.zeros(3), torch.zeros(1, 2), torch.zeros(2).long()])
def test_a_vector_of_another_shape_is_refused_before_noise_is_drawn(vector):
    release = MetricsRelease(PLAN, SeededSource(0), USERS)
    with pytest.raises(ConfigError, match="must be 2 floating-point numbers"):
        release.release(1, [(10, vector)])
    release.release(1, [])
    assert release.values == released().values or release.clients == ()


@pytest.mark.parametrize("others", [(10, 10, "eve"), (10, 12, "eve"), (10, 11, "10")])
def test_nobody_evaluates_twice_and_nobody_else_does(others):
    release = MetricsRelease(PLAN, SeededSource(0), USERS)
    with pytest.raises(ConfigError, match="evaluates twice, or is no evaluation user"):
        release.release(1, [(user, torch.zeros(2)) for user in others])
    assert release.done == 0


def test_an_evaluation_is_the_next_one_of_the_plan():
    release = MetricsRelease(PLAN, SeededSource(0), USERS)
    for wrong in (0, 2, 3):
        with pytest.raises(ConfigError, match="not the next ones of the plan"):
            release.release(wrong, [])
    release.release(1, [])
    # a second try would have the noise of the first
    with pytest.raises(ConfigError, match="not the next ones of the plan"):
        release.release(1, [])


def test_the_divisor_is_planned_and_not_who_came():
    some = MetricsRelease(PLAN, SeededSource(5), USERS)
    some.release(1, [(10, torch.tensor([1.0, 1.0]))])
    moved = np.array(some.values) - np.array(released().values)
    assert np.allclose(moved, 1 / 3, atol=1e-5)


# Who evaluates


def test_a_public_hash_of_the_id_decides_who_evaluates():
    ids = [*range(500), *(f"user {i}" for i in range(500))]
    chosen = evaluation_users(ids, 100)
    assert len(set(chosen)) == 100
    assert set(evaluation_users(reversed(ids), 100)) == set(chosen)
    # a user stays in its group when others come or leave, but for the edge
    assert len({*evaluation_users(ids[:990], 100)} & {*chosen}) >= 98
    assert evaluation_users([1, "1"], 1) == evaluation_users(["1", 1], 1)
    with pytest.raises(ConfigError, match="at least one must remain"):
        evaluation_users(ids[:100], 100)


# On disk


def evaluated(run: RunFolder, server: Server, release: MetricsRelease) -> None:
    if run.evaluation_due:
        numbers = torch.full((3, 2), 0.5).double()
        release.release(run.rounds - 1, zip(USERS, numbers, strict=True))
        run.commit_metrics(release)


def train(run: RunFolder, rounds: int, plan=PLAN) -> Server:
    server = runs.server(run)
    release = MetricsRelease(plan, server.source, USERS, done=len(run.evaluations))
    evaluated(run, server, release)
    callbacks = [lambda _: evaluated(run, server, release)]
    fit(server, runs.Clients(), runs.COHORTS[:rounds], commit=run.commit, callbacks=callbacks)
    return server


def begun(path, rounds, plan=PLAN, **options):
    with create_run(path, plan, **({"facts": runs.FACTS} | options)) as run:
        train(run, rounds, plan)
    return path


def test_a_run_keeps_and_says_what_it_released(tmp_path):
    path = begun(tmp_path / "run", 2)
    assert (path / "key").exists()
    with RunFolder.open(path) as run:
        train(run, 4)
    released = noised_metrics(path)
    assert [number for number, _ in released.evaluations] == [1, 3]
    assert released.score() == released.score("a") == released.evaluations[-1][1]["a"]
    assert not (path / "key").exists()
    report = run_report(path)
    assert report.complete
    assert report.noised == released
    assert report.to_dict()["noised_metrics"][1]["round"] == 3
    assert dict(report.summary())["evaluated"].startswith("2 of 2 times; after round 3 a ")
    words = {a.code: a.status for a in report.guarantee.assumptions}
    assert words["metrics"] == "verified"
    assert report.guarantee.mu == PLAN.guarantee().mu
    assert {c.what: c.status for c in check_run(path)}["log of runs"] == "verified"
    with pytest.raises(ConfigError, match="released none"):
        noised_metrics(begun(tmp_path / "other", 1)).score()
    with pytest.raises(ConfigError, match="must be one of a, b"):
        released.score("c")


def test_a_seeded_run_that_is_resumed_releases_what_an_undisturbed_one_does(tmp_path):
    path = begun(tmp_path / "whole", 4, seed=3)
    half = begun(tmp_path / "half", 2, seed=3)
    with RunFolder.open(half) as run:
        train(run, 4)
    assert noised_metrics(half) == noised_metrics(path)
    first, second = (values for _, values in noised_metrics(path).evaluations)
    assert first != second


def test_the_keys_stay_until_the_last_evaluation_is_committed(tmp_path):
    path = tmp_path / "run"
    begun(path, 3)
    with RunFolder.open(path) as run:
        fit(runs.server(run), runs.Clients(), runs.COHORTS, commit=run.commit)
    assert (path / "key").exists()
    report = run_report(path)
    assert not report.complete
    assert "the metrics of the last one to go" in report.progress()
    assert not report.wrong
    with RunFolder.open(path) as run:
        train(run, 4)
    assert not (path / "key").exists()
    assert run_report(path).complete


def test_no_round_is_committed_before_the_metrics_that_are_due(tmp_path):
    with create_run(tmp_path / "run", PLAN, facts=runs.FACTS) as run:
        server = runs.server(run)
        with pytest.raises(ConfigError, match="metrics after round 1 are not committed"):
            fit(server, runs.Clients(), runs.COHORTS, commit=run.commit)
        assert run.rounds == 2


@pytest.mark.parametrize("place", ["before", "after"])
def test_nobody_trains_and_evaluates(tmp_path, place):
    """Cohorts are of clients 0, 1, then 2, "ada", then 4, 5, then 6, 7."""
    users = (0, 11, "eve") if place == "before" else (4, 11, "eve")
    with create_run(tmp_path / "run", PLAN, facts=runs.FACTS) as run:
        server = runs.server(run)
        release = MetricsRelease(PLAN, server.source, users)

        def evaluate(_):
            if run.evaluation_due:
                release.release(run.rounds - 1, [(user, torch.zeros(2)) for user in users])
                run.commit_metrics(release)

        with pytest.raises(ConfigError, match=f"client {users[0]}: evaluates and trains"):
            fit(server, runs.Clients(), runs.COHORTS, commit=run.commit, callbacks=[evaluate])
        assert run.rounds == 2
        assert len(run.evaluations) == (place == "after")


@pytest.mark.parametrize("fault", ["source", "plan", "twice", "early"])
def test_only_the_noise_of_this_run_and_evaluation_is_committed(tmp_path, fault):
    with create_run(tmp_path / "run", PLAN, facts=runs.FACTS) as run:
        server = runs.server(run)
        plan = replace(PLAN, clip_norm=0.25) if fault == "plan" else PLAN
        other = SecretSource() if fault == "source" else server.source
        release = MetricsRelease(plan, other, USERS)
        cohorts = runs.COHORTS[: 1 if fault == "early" else 2]
        fit(server, runs.Clients(), cohorts, commit=run.commit)
        release.release(1, [(user, torch.zeros(2)) for user in USERS])
        if fault == "twice":
            run.commit_metrics(release)
        says = {"source": "not the run's", "plan": "not the run's"}.get(fault, "none are due")
        with pytest.raises(ConfigError, match=says):
            run.commit_metrics(release)


def test_a_copy_that_lacks_an_evaluation_is_an_older_copy(tmp_path):
    """Otherwise the same model would be evaluated twice, under two noises."""
    path = tmp_path / "run"
    with create_run(path, PLAN, facts=runs.FACTS) as run:
        server = runs.server(run)
        fit(server, runs.Clients(), runs.COHORTS[:2], commit=run.commit)
        shutil.copytree(path, tmp_path / "older", ignore=shutil.ignore_patterns("lock"))
        evaluated(run, server, MetricsRelease(PLAN, server.source, USERS))
    shutil.rmtree(path)
    shutil.move(tmp_path / "older", path)
    with pytest.raises(ConfigError, match="older copy: it stands after 2 rounds and evaluations"):
        RunFolder.open(path)
    assert {c.what: c.status for c in check_run(path)}["log of runs"] == "wrong"


# What a report says


def forged(path, **fields):
    """Append an evaluation that somebody's own code would write and sign."""
    from privpart.run.evaluations import Evaluation

    ledger = Ledger(path)
    ledger.signer = SigningKey((path / "signing-key").read_bytes())
    values = {"round": 1, "values": (0.5, 0.5), "clients": USERS, "noised_by": "server"} | fields
    ledger.append(Evaluation(**values))
    return path


def rounds_only(path, rounds, plan=PLAN):
    with create_run(path, plan, facts=runs.FACTS) as run:
        runs.train(run, rounds)
    return path


def test_a_user_who_trained_and_evaluated_pays_for_both(tmp_path):
    path = forged(rounds_only(tmp_path / "run", 2), clients=(0, 11))
    report = run_report(path)
    assert report.deviations == ("a user who evaluates took part in a round",)
    both = replace(PLAN, metrics=replace(METRICS, also_train=True)).guarantee()
    assert report.guarantee.mu == both.mu
    assert report.guarantee.status == "does-not-hold"
    assert {a.code: a.status for a in report.guarantee.assumptions}["metrics"] == "violated"


def test_an_evaluation_that_was_not_planned_is_counted(tmp_path):
    report = run_report(forged(rounds_only(tmp_path / "run", 1), round=0))
    assert report.deviations == ("metrics were released after round 0, which is not planned",)
    wide = replace(METRICS, also_train=True, rounds=(0, 1, 3))
    assert report.guarantee.mu == replace(PLAN, metrics=wide).guarantee().mu


def test_evaluations_of_rounds_and_numbers_that_no_plan_has_make_no_figure(tmp_path):
    path = forged(rounds_only(tmp_path / "run", 2), values=(0.5,))
    for read in (noised_metrics, run_report):
        with pytest.raises(ConfigError, match="is damaged"):
            read(path)
    path = rounds_only(tmp_path / "long", 1, replace(PLAN, metrics=replace(METRICS, rounds=(3,))))
    for number in range(1, 5):
        runs.add_row(path, round=number, clients=[20])
    report = run_report(forged(path, round=4))
    assert "metrics were released after round 4, which is not planned" in report.deviations
    assert report.guarantee.status == "does-not-hold"


def test_metrics_that_another_code_noised_are_asserted(tmp_path):
    class Loud(MetricsRelease):
        """Adds no noise, and is therefore no code of this package."""

    with create_run(tmp_path / "run", PLAN, facts=runs.FACTS) as run:
        server = runs.server(run)
        fit(server, runs.Clients(), runs.COHORTS[:2], commit=run.commit)
        evaluated(run, server, Loud(PLAN, server.source, USERS))
    (shown,) = [
        a for a in run_report(tmp_path / "run").guarantee.assumptions if a.code == "metrics"
    ]
    assert shown.status == "asserted"
    assert "in 1 of 1 evaluations code that is not this package's" in shown.evidence


@pytest.mark.parametrize(
    "fields",
    [
        {"round": 0},
        {"round": 2},
        {"round": True},
        {"values": (math.inf, 0.5)},
        {"values": ("0.5", 0.5)},
        {"clients": (10, 10)},
        {"clients": (1.5,)},
    ],
)
def test_an_evaluation_out_of_place_is_damage(tmp_path, fields):
    try:
        path = forged(rounds_only(tmp_path / "run", 2), **fields)
    except ValueError:
        return
    with pytest.raises(ConfigError, match=f"{LEDGER} is damaged"):
        Ledger(path)


def test_two_evaluations_of_one_model_are_damage(tmp_path):
    path = begun(tmp_path / "run", 2)
    with pytest.raises(ConfigError, match="out of place"):
        Ledger(forged(path))


# From a plan


TABLE = {"measures": ["accuracy"], "users": 60, "every": 2}


def plan_of(table=None, **changes):
    changes["privacy"] = {"metrics": TABLE | (table or {})} | changes.get("privacy", {})
    return validated(tables(**changes))


def test_by_default_who_evaluates_pays_what_who_trains_pays():
    promised = plan_of().privacy_plan()
    training = guarantee(
        promised.mechanism, promised.participation, noise_multiplier=promised.noise_multiplier
    )
    assert promised.metrics.rounds == (1, 3, 4)
    assert promised.metrics.claim().cost.mu == pytest.approx(training.mu, rel=1e-9)
    assert promised.metrics.claim().cost.mu <= training.mu
    assert promised.guarantee() == training
    assert promised.guarantee().epsilon(1e-4) <= 8


@pytest.mark.parametrize("noise", [3.0, 30.0])
def test_a_target_is_met_by_training_and_metrics_of_the_same_users_together(noise):
    plan = plan_of({"also_train": True, "noise_multiplier": noise, "allow_large_noise": True})
    promised = plan.privacy_plan()
    training = guarantee(
        promised.mechanism, promised.participation, noise_multiplier=promised.noise_multiplier
    )
    together = training.compose(promised.metrics.claim().cost).epsilon(1e-4)
    assert promised.guarantee().epsilon(1e-4) == together
    assert 8 * (1 - 1e-4) < together <= 8


LOSS = {"measures": ["loss", "accuracy"], "loss_bound": 4.0}


@pytest.mark.parametrize(
    ("table", "changes", "says"),
    [
        ({"users": 261}, {}, "39 remain to train, fewer than clients_per_round=40"),
        ({"users": 5}, {}, "hides what a number from 0 to 1 says"),
        ({"measures": ["loss"]}, {}, "loss_bound: is for the measure"),
        ({"loss_bound": 1.0}, {}, "loss_bound: is for the measure"),
        ({"also_train": True}, {}, "users who train as well pay for both"),
        ({"measures": ["accuracy", "accuracy"]}, {}, "two have one name"),
        ({"measures": ["./a.py:f", "./b.py:f"]}, {}, "two have one name"),
        ({"measures": ["acuracy"]}, {}, "privacy.metrics.measures.0"),
        ({"noise_multiplier": 0.1}, {}, "the metrics alone cost epsilon"),
        (
            {"noise_multiplier": 0.1, "also_train": True},
            {},
            "leaves nothing of target_epsilon=8 for the training",
        ),
        ({}, {"privacy": {"noise_multiplier": 0.0, "target_epsilon": None}}, "without noise"),
        ({}, {"privacy": {"round_seconds": 3.0}}, "cannot be combined with privacy.round_seconds"),
        ({}, {"model": {"local": ["dense2.*"]}}, "cannot be combined with model.local"),
        (
            {},
            {
                "privacy": {"sampling": {"name": "poisson", "expected_batch": 40}},
                "data": {"clients_per_round": None},
            },
            "cannot be combined with privacy.sampling",
        ),
    ],
)
def test_plans_that_are_refused(table, changes, says):
    with pytest.raises(ConfigError, match=says):
        plan_of(table, **changes).privacy_plan()


def test_a_sampled_plan_has_no_metrics():
    with pytest.raises(ConfigError, match="no proof covers"):
        METRICS.refuse_beside(4, 1.0, sampled=True)
    with pytest.raises(ConfigError, match=r"metrics\.rounds: has round 3"):
        runs.plan(3, metrics=METRICS)
    with pytest.raises(ConfigError, match="the training has no noise"):
        runs.plan(noise_multiplier=0.0, metrics=METRICS)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_training_user_is_never_an_evaluation_user(seed):
    setup = training(plan_of(data={"seed": seed}))
    evaluate = set(setup.evaluators.users.ids)
    assert len(evaluate) == 60
    assert evaluate == set(evaluation_users(range(300), 60))
    assert not evaluate & set(setup.clients.ids)
    assert not evaluate & {client for cohort in setup.cohorts for client in cohort}
    assert len(set(setup.ids)) == 300
    both = {"also_train": True, "noise_multiplier": 3.0, "allow_large_noise": True}
    setup = training(plan_of(both, data={"seed": seed}))
    assert set(setup.evaluators.users.ids) == evaluate
    assert evaluate <= set(setup.clients.ids)
    assert len(setup.ids) == 300


OWN = """
import torch

def right(module, examples):
    x, y = examples
    return float((module(x).argmax(-1) == y).double().mean())

def broken(module, examples):
    return float("nan")

def shaped(module, examples):
    return torch.zeros(3)

seen = []

def carrier(module, examples):
    seen.append(examples)
    return 1 / len(seen)

def late(module, examples):
    from privpart import StopTraining
    seen.append(0)
    if len(seen) > 4:
        raise StopTraining("this user is badly served")
    return 1.0
"""


def test_a_user_without_examples_counts_as_zero():
    from privpart.data.users import Users

    setup = training(plan_of(LOSS))
    evaluators = setup.evaluators
    users = evaluators.users
    rows = {client: users.indices[client] for client in users.ids}
    rows[min(rows)] = torch.tensor([], dtype=torch.long)
    empty = replace(evaluators, users=Users(users.x, users.y, rows, allow_empty=True))
    empty.rehearse(setup.model, setup.first)
    (_, first), (_, second), *_ = empty.vectors(setup.model, setup.first, 0)
    assert bool(first.isnan().all())
    assert bool(second.isfinite().all())


def test_the_loss_of_a_model_that_diverged_is_not_the_least():
    setup = training(plan_of(LOSS))
    diverged = torch.full_like(setup.first, math.nan)
    (_, vector), *_ = setup.evaluators.vectors(setup.model, diverged, 0)
    assert float(vector[0]) == 1.0


def own(tmp_path, name, *measures, **table):
    """Return a plan with functions of a module of this name, which one process loads once."""
    (tmp_path / f"{name}.py").write_text(OWN)
    named = [f"./{name}.py:{one}" if f"def {one}(" in OWN else one for one in measures]
    return validated(plan_of({"measures": named} | table).tables, folder=tmp_path)


def test_a_trained_run_releases_noised_metrics_by_builtin_and_own_functions(tmp_path):
    names = "accuracy", "loss", "right", "broken"
    given = own(tmp_path, "released", *names, loss_bound=4.0, allow_large_noise=True).tables
    quiet = given["privacy"] | {"target_epsilon": 1e6}
    plan = validated(given | {"privacy": quiet}, folder=tmp_path)
    run = privpart.train(plan=plan, out=tmp_path / "run", seed=1, progress=False)
    metrics = run.noised_metrics()
    assert metrics.names == names
    assert metrics.standard_error < 0.01
    for _, values in metrics.evaluations:
        # one user whose vector is not finite counts as zeros in all of its metrics
        assert all(abs(value) < 5 * metrics.standard_error for value in values.values())
    lines = [json.loads(line) for line in (run.path / FILE).read_text().splitlines()]
    assert lines == metrics.rows()
    # as after a crash between a commit and the file
    (run.path / FILE).unlink()
    privpart.train(plan=plan, out=run.path, resume=True, progress=False)
    assert len((run.path / FILE).read_text().splitlines()) == 3
    plan = validated(given | {"privacy": quiet | {"metrics": LOSS | {"users": 60, "every": 2}}})
    values = privpart.train(plan=plan, out=tmp_path / "two", seed=1, progress=False)
    shown = values.noised_metrics().evaluations[-1][1]
    assert 0.05 < shown["accuracy"] < 0.6
    assert 0.3 < shown["loss"] < 0.8


@pytest.mark.parametrize(
    ("name", "says"), [("shaped", "must be one number"), ("carrier", "gave two different numbers")]
)
def test_own_metrics_that_are_refused_before_a_run_begins(tmp_path, name, says):
    with pytest.raises(ConfigError, match=says):
        privpart.train(plan=own(tmp_path, f"of_{name}", name), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_a_user_measures_stops_no_training(tmp_path):
    """That it stopped would tell of the user's examples, without noise."""
    with pytest.raises(ConfigError, match=r"late.*StopTraining: this user"):
        privpart.train(plan=own(tmp_path, "of_late", "late"), out=tmp_path / "run", progress=False)
    report = run_report(tmp_path / "run")
    assert (report.rounds > 0, report.closed) == (True, False)


def test_noised_metrics_stop_a_training(tmp_path):
    def enough(record):
        released = noised_metrics(tmp_path / "run")
        if released.evaluations and released.score("accuracy") > -1:
            raise privpart.StopTraining

    plan = own(tmp_path, "enough", "accuracy", allow_large_noise=True)
    run = privpart.train(plan=plan, out=tmp_path / "run", callbacks=[enough], progress=False)
    assert len(run.noised_metrics().evaluations) == 1
    assert run.report().closed


def test_the_book_charges_the_metrics(tmp_path):
    from privpart.run.budget_book import account

    dear = replace(PLAN, metrics=replace(METRICS, noise_multiplier=0.1))
    begun(tmp_path / "run", 1, dear, facts=runs.FACTS | {"population_name": "people"})
    assert account("people").total.mu == dear.metrics.claim().cost.mu == dear.guarantee().mu
    assert account("people").total.mu > Guarantee(PLAN.guarantee().mu).mu


def test_a_fork_adds_what_the_metrics_of_its_parent_cost(tmp_path):
    from privpart.run.begin import fork

    dear = replace(PLAN, metrics=replace(METRICS, noise_multiplier=0.1))
    parent = begun(tmp_path / "parent", 4, dear)
    with fork(parent, tmp_path / "child", PLAN) as run:
        train(run, 4)
    both = math.hypot(dear.guarantee().mu, PLAN.guarantee().mu)
    assert run_report(tmp_path / "child", delta=1e-6).guarantee.mu == pytest.approx(both, rel=1e-9)


def test_a_run_that_moved_to_another_machine_has_its_evaluations_there(tmp_path, monkeypatch):
    from privpart.run import log
    from privpart.run.witness import compared, witness

    path = begun(tmp_path / "run", 2)
    here = witness()
    (standing,) = (one for one in here.runs if one.run == Ledger(path).facts["run_id"])
    assert (standing.rounds, standing.evaluations) == (2, 1)
    monkeypatch.setenv(log.VARIABLE, str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="adopt=True"):
        RunFolder.open(path)
    with RunFolder.open(path, adopt=True) as run:
        train(run, 3)
    with RunFolder.open(path) as run:
        train(run, 4)
    report = run_report(path)
    assert report.complete
    assert {a.code: a.status for a in report.guarantee.assumptions}["metrics"] == "asserted"
    from privpart.run.evidence import gather

    assert compared(here, gather(path)).says.endswith(
        "the first 3 of these 6 rounds and evaluations were committed, and no others"
    )
    monkeypatch.delenv(log.VARIABLE)


def test_clients_that_are_elsewhere_do_not_evaluate():
    with pytest.raises(ConfigError, match="the clients are elsewhere"):
        training(plan_of(), part=True)
