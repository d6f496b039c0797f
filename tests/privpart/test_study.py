"""Studies: the protocol, whose choices cannot depend on a test example, and its intervals."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import tables
from scipy import stats
from small_study import changed, result

from accounting import ConfigError
from privpart.data.tasks import digits
from privpart.data.users import Users
from privpart.engines.options import EngineOptions
from privpart.models import small_cnn, word_lm
from privpart.study import runner as runner_module
from privpart.study.frontier import Interval, Reached, rows_of
from privpart.study.runner import Runner
from privpart.study.stages import (
    ChosenPoint,
    chosen_point,
    layers_of,
    next_arm,
    next_frozen,
    stages,
    trials_of,
)
from privpart.study.store import Store
from privpart.study.study_file import Study, read_study
from privpart.training import task_data
from privpart.training.plan_file import validated
from privpart.training.task_data import PlanData, held_out_of, plan_data
from privpart.training.training import Own, training

LOOP = EngineOptions(batching="loop")


@pytest.fixture
def written(tmp_path):
    def write(*changes):
        path = tmp_path / "study.toml"
        path.write_text(changed(*changes))
        return path

    return write


class Trap:
    """In place of test examples: whoever looks at them is caught."""

    def __getattribute__(self, name):
        raise AssertionError(f"Trap: a test example was read: {name}")

    def __getitem__(self, row):
        raise AssertionError(f"Trap: a test example was read: {row}")

    def __len__(self):
        raise AssertionError("Trap: the test examples were counted")


def trapped(*_):
    return replace(digits(), test_x=Trap(), test_y=Trap())


def trained(study, folder, *, tune_only=False):
    """Run a study in this process; return its results and the errors of its cells."""
    with Runner(1, options=LOOP) as runner, Store(folder, create=True) as store:
        for cells in stages(study, store):
            trials = [cell for cell in cells if "trial" in cell.labels]
            runner.train(trials if tune_only else cells, store=store)
        return store.results(), store.errors()


def chosen(study, results):
    return {tuple(g.labels.values()): chosen_point(study, g, results) for g in study.groups}


def test_no_choice_depends_on_a_test_example(written, tmp_path, monkeypatch):
    """The trials run where test examples cannot be read; a tuning on them is caught there."""
    fewer = (("trials = 3\nrefine = 2", "trials = 2\nrefine = 1"), ("multiplier = [0.5]\n", ""))
    monkeypatch.setattr(runner_module, "read_task", trapped)
    study = read_study(written(*fewer))
    trials, errors = trained(study, tmp_path / "trapped", tune_only=True)
    assert not errors
    best = chosen(study, trials)
    assert len(best) == 2
    assert all(best.values())
    for group in study.groups:
        tried = trials_of(study, group, trials)
        scores = [trials[cells[0].key].accuracy for _, cells in tried]
        assert len(tried) == study.trials == 3
        assert best[tuple(group.labels.values())].score == max(scores)
    # the final trainings do read them, so the trap is real
    results, errors = trained(study, tmp_path / "trapped")
    assert results == trials
    assert len(errors) == 10
    assert all("Trap" in error for *_, error in errors)
    # a protocol that measured its trials on the test users would be caught
    monkeypatch.setattr(Study, "_tuned_on", {"data.held_out": 20})
    wrong = read_study(written(*fewer))
    results, errors = trained(wrong, tmp_path / "wrong", tune_only=True)
    assert not results
    assert len(errors) == 4
    assert all("Trap" in error for *_, error in errors)


def test_held_out_users_are_the_same_for_every_seed_and_train_in_none(written):
    study = read_study(written())
    group = study.groups[0]
    everyone = digits()
    tuning = study.tuning_cells(group, 0, study.points[0])[0].plan
    public = plan_data(tuning.data, tuning.model.network()).test_x
    assert len(public) == 20 * (1437 // 120)
    rows = {image.numpy().tobytes() for image in public}
    assert rows <= {image.numpy().tobytes() for image in everyone.train_x}
    for cell in [*study.final_cells(group, study.points[0])[:3]]:
        plan = cell.plan
        assert plan.data.held_out == 20
        found = plan_data(plan.data, plan.model.network())
        assert torch.equal(found.test_x, everyone.test_x)
        held = {image.numpy().tobytes() for image in found.users.x}
        # the same image may be there twice; of 1,437 digits none is
        assert not held & rows
        assert len(found.users.ids) == 100


def test_users_of_a_task_and_of_ones_own_are_held_out_by_a_fixed_draw():
    x = torch.arange(24.0).reshape(12, 2)
    users = Users(x, torch.zeros(12, dtype=torch.int64), {f"u{i}": [i] for i in range(12)})
    remaining, public = held_out_of(users, 4)
    assert isinstance(remaining, Users)
    assert sorted([*remaining.ids, *public]) == sorted(users.ids)
    assert held_out_of(users, 4)[1] == public

    class Others:
        ids = users.ids
        examples = users.examples

    other, same = held_out_of(Others(), 4)
    assert same == public
    assert list(other.ids) == list(remaining.ids)
    assert torch.equal(other.examples(other.ids[0])[0], remaining.examples(remaining.ids[0])[0])
    with pytest.raises(ConfigError, match="at least one must remain"):
        held_out_of(users, 12)


QUIET = {"rounds": 2, "clip_norm": 1.0, "noise_multiplier": 0.0, "target_epsilon": None}
PLAN = tables(privacy=QUIET) | {
    "model": {},
    "data": {"clients_per_round": 2, "held_out": 3, "measured_on": "held-out"},
}


def test_a_plan_of_ones_own_is_measured_on_held_out_users_alone():
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    users = Users(x, torch.arange(12) % 2, {i: [i] for i in range(12)})
    plan = validated(PLAN, in_python=True)
    setup = training(plan, objects=Own(torch.nn.Linear(2, 2), users), report=lambda _: None)
    assert len(setup.clients.ids) == 9
    public = [i for i in range(12) if i not in set(setup.clients.ids)]
    assert torch.equal(setup.test[0], x[public])
    assert {client for cohort in setup.cohorts for client in cohort} <= set(setup.clients.ids)

    class Named:
        ids = range(12)

        def examples(self, client):
            return {"x": x[client : client + 1]}

    with pytest.raises(ConfigError, match="name a metric of your own"):
        training(plan, objects=Own(torch.nn.Linear(2, 2), Named()), report=lambda _: None)
    with pytest.raises(ConfigError, match="the clients are elsewhere"):
        training(plan, objects=Own(torch.nn.Linear(2, 2), users), report=lambda _: None, part=True)


def test_a_task_with_users_of_its_own_holds_some_out(monkeypatch):
    users = Users(torch.arange(6.0), torch.arange(6), {f"r{i}": [i] for i in range(6)})
    whole = PlanData(users, Trap(), Trap(), ("a",))
    values = json.loads(json.dumps(PLAN))
    values["data"] |= {"task": "shakespeare", "directory": "."}
    values["model"] = {"name": "word_lm", "seed": 0}
    data = validated(values).data
    found = task_data.plan_data(data, word_lm(width=8), lambda *_: whole)
    assert len(found.users.ids) == len(found.test_x) == 3
    assert found.words == ("a",)
    kept = {float(users.x[found.users.indices[i]]) for i in found.users.ids}
    assert sorted([*kept, *found.test_x.tolist()]) == users.x.tolist()


def test_points_cover_the_space_evenly_and_are_the_same_for_every_group(written):
    tuning = read_study(written(("trials = 3", "trials = 64"))).file.tuning
    rates = sorted(point["server.learning_rate"] for point in tuning.points())
    assert rates[0] >= 0.01
    assert rates[-1] < 3.0
    shares = [torch.log(torch.tensor(r / 0.01)) / torch.log(torch.tensor(300.0)) for r in rates]
    gaps = [float(b - a) for a, b in itertools.pairwise(shares)]
    assert max(gaps) < 4 / 64
    momenta = [point["server.momentum"] for point in tuning.points()]
    assert 28 <= momenta.count(0.0) <= 36
    fewer = read_study(written()).file.tuning.points()
    assert fewer == tuning.points()[:3]  # more trials keep those that are done
    again = read_study(written(("seeds = [100]", "seed = 5\nseeds = [100]"))).file.tuning.points()
    assert again != fewer
    best = {"server.learning_rate": 0.0101, "server.momentum": 0.5}
    for near in read_study(written()).file.tuning.near(best):
        assert near["server.momentum"] == 0.5
        assert 0.01 <= near["server.learning_rate"] <= 0.0101 * 300 ** (1 / 6) * 1.01


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("seeds = [100]", "seeds = [3]"), "3 is a seed of the tuning as well"),
        (("[0, 1, 2, 3, 4]", "[0, 1, 2]"), "must be at least 5"),
        (("held_out = 20\n", ""), "held_out: is missing"),
        (("held_out = 20", 'held_out = 20\nmetric = "./a.py:b"'), "no data.metric to replace"),
        (("low = 0.01", "low = 4.0"), "must be below high"),
        (("[0.0, 0.5]", "[]"), "at least 1 item"),
        (("multiplier = [0.5]\nnone = true", ""), "has no level"),
        (("multiplier = [0.5]", "multiplier = [0.5]\nepsilon = [1.0]"), "give one of them"),
        (('"model.train" = ["*"] }', '"data.metric" = "./a.py:b" }'), "arms.full: cannot change"),
        (('["dense2.*"]', '["dense2.*"], "privacy.mechanism" = {}'), "arms.last: cannot"),
        (('["dense2.*"]', '["dense2.*"], "data.users" = 50'), "other users would be held out"),
        (('"server.momentum" = ', '"data.users" = '), "space: cannot change data.users"),
        (('"server.momentum" = ', '"privacy.target_epsilon" = '), "space: cannot change privacy"),
        (('["*"]', '["*"], "server.momentum" = 0.1'), "because arms.full does"),
        (('task = "digits"', 'task = "digits"\nheld_out = 9'), "plan: cannot set data.held_out"),
        (('last = { "model.train" = ["dense2.*"] }', ""), "at least 2 items"),
        (("trials = 3", "trials = 0"), "tuning.trials: Input should be greater"),
        (('["dense2.*"]', '["nothing.*"]'), "matches no parameter"),
        (("tree = {", "none = {"), "names the level without noise"),
        (('task = "digits"', 'task = "digits"\nmetric = "./a.py:b"'), "tuning.metric=None"),
    ],
)
def test_what_no_study_can_follow_is_refused_before_any_training(written, change, says):
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        read_study(written(change))


def test_a_metric_of_ones_own_for_tuning_is_another_one(written):
    own = ('task = "digits"', 'task = "digits"\nmetric = "./task.py:test"')
    named = ("held_out = 20", 'held_out = 20\nmetric = "./task.py:{}"')
    (written().parent / "task.py").write_text(
        "def test(m):\n    return 1\ndef public(m):\n    return 2\n"
    )
    with pytest.raises(ConfigError, match="would be chosen on the test users"):
        read_study(written(own, (named[0], named[1].format("test"))))
    study = read_study(written(own, (named[0], named[1].format("public"))))
    group = study.groups[0]
    tuning = study.tuning_cells(group, 0, study.points[0])[0].plan
    assert tuning.data.metric == "./task.py:public"
    assert "test" not in tuning.to_json().replace("digits", "")
    assert study.final_cells(group, study.points[0])[0].plan.data.metric == "./task.py:test"


def test_differences_are_paired_by_seed_and_verdicts_follow_the_interval(written):
    study = read_study(written())
    first, other = study.groups[0], study.groups[1]
    assert (first.arm, other.arm) == ("full", "last")
    base = [0.5, 0.7, 0.6, 0.9, 0.4]
    gain = [0.02, 0.01, 0.03, 0.02, 0.025]
    best = ChosenPoint(0, study.points[0], 0.5)
    reached = [
        Reached(first, best, {s: result(v) for s, v in enumerate(base)}, 1.0),
        # in another order, and with a seed that the first arm lacks
        Reached(
            other,
            best,
            {9: result(0.1)} | {s: result(base[s] + gain[s]) for s in (4, 2, 0, 1, 3)},
            1.0,
        ),
    ]
    reference, row = rows_of(study, reached)
    assert reference["verdict"] == "reference"
    expected = stats.ttest_1samp(gain, 0).confidence_interval(0.95)
    assert row["difference"] == pytest.approx(sum(gain) / 5)
    assert (row["difference_low"], row["difference_high"]) == pytest.approx(tuple(expected))
    assert row["verdict"] == "better"
    whole = stats.ttest_1samp(base, 0).confidence_interval(0.95)
    assert (reference["low"], reference["high"]) == pytest.approx(tuple(whole))
    assert Interval.of([-0.02, -0.021, -0.019]).verdict("higher") == "worse"
    assert Interval.of([-0.02, -0.021, -0.019]).verdict("lower") == "better"
    assert Interval.of([-0.02, 0.02, 0.01]).verdict("higher") == "undecided"
    assert Interval.of([0.02]) == Interval(0.02, None, None)


def test_a_lower_metric_can_be_better_and_one_that_is_not_finite_loses(written):
    study = read_study(
        written(('schema = "privpart/study/1"', 'schema = "privpart/study/1"\nbetter = "lower"'))
    )
    group = study.groups[0]
    tried = trials_of(study, group, {})
    assert chosen_point(study, group, {}) is None
    scores = dict(zip((cells[0].key for _, cells in tried), (float("nan"), 0.4, 0.6), strict=True))
    found = {key: result(score) for key, score in scores.items()}
    tried = trials_of(study, group, found)
    assert len(tried) == 5
    assert chosen_point(study, group, found) is None  # those near the best are missing
    found |= {cells[0].key: result(0.5) for _, cells in tried[3:]}
    assert chosen_point(study, group, found).trial == 1
    found = {key: result(float("nan")) for key in found}
    assert chosen_point(study, group, found) is None


SEARCH = (
    ('full = { "model.train" = ["*"] }\nlast = { "model.train" = ["dense2.*"] }\n', ""),
    ("[arms]", "[freeze]\ntolerance = 0.1"),
    ("trials = 3\nrefine = 2", "trials = 1"),
)


@given(st.lists(st.floats(0, 0.1), min_size=4, max_size=4), st.floats(0, 0.3), st.booleans())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_search_takes_the_steps_of_the_paper(written, harm, tolerance, lower):
    """On metrics that the test makes up, at two levels of noise, of which the worse one counts."""
    better = ('schema = "privpart/study/1"', 'schema = "privpart/study/1"\nbetter = "lower"')
    study = read_study(
        written(*SEARCH, *[better] * lower, ("= 0.1\n[mech", f"= {tolerance!r}\n[mech"))
    )
    layers = layers_of(small_cnn(channels=(2, 4), hidden=8, image_size=8))
    sizes = {layer: sum(p.numel() for p in named.values()) for layer, named in layers.items()}
    assert sizes == {"conv1": 20, "conv2": 76, "dense1": 136, "dense2": 90}
    costs, results, standing = dict(zip(sizes, harm, strict=True)), {}, ()
    for tried, layer in enumerate([None, *sorted(sizes, key=sizes.get, reverse=True)]):
        frozen = (*standing, *[layer] * (layer is not None))
        assert len(study.arms) == tried + 1
        arm = f"freeze {', '.join(frozen)}" if frozen else "full"
        patterns = {pattern.rpartition(".")[0] for pattern in study.arms[arm]["model.train"]}
        assert patterns == ({f"!{name}" for name in frozen} or {""})
        metric = 0.9 - sum(costs[name] for name in frozen)
        for group in study.groups:
            if group.arm == arm:
                value = metric + 0.05 * (group.level == "none") * (not frozen)
                ((_, cells),) = trials_of(study, group, results)
                results[cells[0].key] = result(-value if lower else value)
        if not frozen or metric >= 0.95 - tolerance:
            standing = frozen
        longer = next_arm(study, layers, results)
        ends = tried == len(sizes) or len(standing) + 1 == len(sizes)  # something trains
        assert (longer is None) == ends
        if ends:
            break
        assert next_arm(longer, layers, results) is None  # its trainings are missing
        study = longer


def test_a_search_is_refused_beside_arms_and_tied_parameters_count_once(written):
    with pytest.raises(ConfigError, match="leave one of the two out"):
        read_study(written(("[mechanisms]", "[freeze]\ntolerance = 0.1\n[mechanisms]")))
    for tolerance in ("-0.1", "inf"):
        with pytest.raises(ConfigError, match="tolerance"):
            read_study(written(SEARCH[0], ("[arms]", f"[freeze]\ntolerance = {tolerance}")))
    first, last = torch.nn.Embedding(7, 3), torch.nn.Linear(3, 7)
    last.weight = first.weight
    layers = layers_of(torch.nn.Sequential(first, torch.nn.LayerNorm(3), last))
    assert {layer: [*named] for layer, named in layers.items()} == {
        "0": ["0.weight"],
        "2": ["2.bias"],
    }
    assert next_frozen({"only": 3}, []) == ()
