"""The report of a run says what its ledger shows, and what a fork adds."""

import json
import math
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest
import runs
import torch
from runs import Clients, add_row, server
from safetensors import safe_open
from torch import nn

from accounting import BinaryTree, ConfigError, Participation, PrivacyReport, guarantee
from privpart import (
    EmbeddedEngine,
    LocalTraining,
    PartialModel,
    PrivacyPlan,
    RunFolder,
    Server,
    Users,
    fit,
)
from privpart.run.begin import create_run, fork
from privpart.run.ledger import Ledger
from privpart.run.report import run_report, vouched
from privpart.training.verify import check_run

DIM = 4
"""Parameters of the network of ``embedded``."""
COHORTS = [[0, 1], [2, 3], [4, 5], [0, 1], [6, 7], [8, 9]]


def plan(**change) -> PrivacyPlan:
    limits = Participation(6, 2, 3)
    return runs.plan(6, **({"participation": limits, "noise_multiplier": 4.0} | change))


def train(run: RunFolder, rounds: int) -> None:
    runs.train(run, rounds, COHORTS)


@pytest.fixture
def folder(tmp_path):
    with create_run(tmp_path / "run", plan(), facts={"delta": 1e-6}) as run:
        train(run, 5)
    return tmp_path / "run"


def statuses(report: PrivacyReport) -> dict[str, str]:
    return {a.code: a.status for a in report.assumptions}


def test_a_run_that_kept_to_its_plan_has_the_plans_epsilon(folder):
    found = run_report(folder)
    assert found.guarantee.epsilon == plan().guarantee().epsilon(1e-6)
    assert (found.rounds, found.planned_rounds, found.complete) == (5, 6, False)
    assert found.realised == Participation(6, 2, 3)
    assert found.deviations == ()
    assert found.guarantee.status == "conditional"
    assert statuses(found.guarantee) == {
        "participation": "verified",
        "clipping": "enforced",
        "divisor": "enforced",
        "noise": "enforced",
        "choices": "asserted",
        "floating-point": "enforced",
    }
    assert json.loads(json.dumps(found.to_dict()))["guarantee"]["status"] == "conditional"
    assert run_report(folder, delta=1e-3).guarantee.delta == 1e-3


def test_it_holds_when_somebody_answers_for_the_rest(folder):
    found = vouched(run_report(folder), "choices")
    assert found.guarantee.status == "holds"
    with pytest.raises(ConfigError, match="vouch='clipping': must be one of choices"):
        vouched(run_report(folder), "clipping")


@pytest.mark.parametrize("stated", [{}, {"population_size": 3}])
@pytest.mark.parametrize(("delta", "status"), [(0.08, "conditional"), (0.06, "holds")])
def test_delta_is_judged_by_the_clients_that_came_if_fewer_are_stated(
    tmp_path, stated, delta, status
):
    with create_run(tmp_path / "run", plan(), facts={"delta": delta, **stated}) as run:
        runs.train(run, 3, [range(5), range(5, 10), range(10, 15)])
    found = vouched(run_report(tmp_path / "run"), "choices").guarantee
    assert found.status == status
    assert statuses(found).get("delta") == ("violated" if status == "conditional" else None)


class Summing(Clients):
    """Sums from round 2 on."""

    def sums(self, task, start):
        if task.round < 2 or task.round == 4:
            return None
        total = torch.full(start.shape, 0.2, dtype=torch.float64)
        return iter([task.sum_of(task.clients, total, [0.2] * len(task.clients))])


def embedded(kind=EmbeddedEngine, local=None):
    model = PartialModel(lambda: nn.Linear(1, 2), seed=1)
    users = Users(torch.ones(10, 1), torch.arange(10) % 2, torch.arange(10).split(1))
    local = local or LocalTraining(9.0, steps=1)
    return kind(model, users, local=local, data_seed=0, sums=True, batching="vmap")


class Longer(EmbeddedEngine):
    """One client counts 9.9 times; the length of the sum is that of ten clipped updates."""

    def sums(self, task, start):
        total = torch.zeros(DIM, dtype=torch.float64)
        total[0] = 0.99 * task.clip_norm * len(task.clients)
        return iter([task.sum_of(task.clients, total, [task.clip_norm] * len(task.clients))])


class Renamed(Longer):
    @property
    def __class__(self):
        return EmbeddedEngine


Renamed.__module__, Renamed.__name__, Renamed.__qualname__ = (
    EmbeddedEngine.__module__, "EmbeddedEngine", "EmbeddedEngine"
)  # fmt: skip


class Turning(Longer):
    def sums(self, task, start):
        found = super().sums(task, start)
        self.__class__ = EmbeddedEngine
        return found


def foreign(how, patched):
    """An engine that is not this package's, or not any more, and seems to be."""
    if how == "class":
        patched.setattr(EmbeddedEngine, "sums", Longer.sums)
        return embedded()
    if how == "schedule":  # replaces a method of its engine in the round

        def local(_):
            one._sums = longer
            return LocalTraining(9.0, steps=1)

        one = embedded(local=local)
        return one
    if how == "object":
        one = embedded()
        one.sums = Longer.sums.__get__(one)
        return one
    return embedded({"renamed": Renamed, "turning": Turning}.get(how, Longer))


def longer(*arguments):
    """In place of ``EmbeddedEngine._sums``."""
    work, start = arguments[-3:-1]
    return Longer.sums(None, work.task, start)


class NoCanaries:
    ids = ()

    def clients(self, round_):
        return ()


def committed(path, engine, canaries=None):
    """A run of one round of ten clients: its row, its report and what is checked of it."""
    promised = runs.plan(1, noise_multiplier=4.0, report_goal=10)
    with create_run(path, promised, facts={"delta": 1e-6}) as run:
        fit(server(run, DIM), engine, [list(range(10))], canaries=canaries, commit=run.commit)
    (row,) = Ledger(path).rows()
    clipping = next(a for a in run_report(path).guarantee.assumptions if a.code == "clipping")
    checked = next(check.says for check in check_run(path) if check.what == "guarantee")
    ((clipped_by, count),) = row.clipped_by.items()
    assert count == 10
    return clipped_by, clipping, "clipping" in checked


@pytest.mark.parametrize("canaries", [None, NoCanaries()])
def test_clipping_in_this_packages_engine_is_enforced_and_the_ledger_names_it(tmp_path, canaries):
    row, clipping, open_ = committed(tmp_path / "run", embedded(), canaries)
    assert (row, clipping.status, open_) == ("EmbeddedEngine", "enforced", False)
    assert clipping.evidence.startswith("in 1 of 1 rounds this package's EmbeddedEngine clipped")


@pytest.mark.parametrize("how", ["subclass", "renamed", "turning", "class", "object", "schedule"])
def test_clipping_in_any_other_engine_is_asserted(tmp_path, monkeypatch, how):
    row, clipping, open_ = committed(tmp_path / "run", foreign(how, monkeypatch))
    assert (row, clipping.status, open_) == ("another engine", "asserted", True)
    assert "not this package's, or was changed" in clipping.evidence


class Subclass(Server):
    pass


@pytest.mark.parametrize("how", ["subclass", "class", "object"])
def test_what_another_server_does_is_asserted(tmp_path, monkeypatch, how):
    kind, real = Subclass if how == "subclass" else Server, Server.run_round
    with (
        monkeypatch.context() as patch,
        create_run(tmp_path / "run", plan(), facts={"delta": 1e-6}) as run,
    ):
        other = kind(run.plan, torch.zeros(runs.DIM), source=run.source())
        if how == "object":
            other.run_round = other.run_round
        if how == "class":

            def wrapped(*given, **more):
                return real(*given, **more)

            patch.setattr(Server, "run_round", wrapped)
        fit(other, Clients(), COHORTS[:2], commit=run.commit)
    found = statuses(run_report(tmp_path / "run").guarantee)
    assert found == dict.fromkeys(found, "asserted") | {"participation": "verified"}
    assert Ledger(tmp_path / "run").rows()[0].clipped_by == {"another server": 2}


def test_another_server_is_named_whoever_summed_for_it(tmp_path):
    with create_run(tmp_path / "run", plan(), facts={"delta": 1e-6}) as run:
        other = Subclass(run.plan, torch.zeros(DIM), source=run.source())
        fit(other, embedded(), [[0, 1], [2, 3]], commit=run.commit)
    found = statuses(run_report(tmp_path / "run").guarantee)
    assert found == dict.fromkeys(found, "asserted") | {"participation": "verified"}


@pytest.mark.parametrize(
    "change",
    [
        {"summed": 0},
        {"summed_by": "EmbeddedEngine"},
        {"summed_by": "FTRLOptimizer"},
        {"counted": 3},
        {"self_clipped": -1},
        {"received": 2.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [Server, Subclass])
def test_counts_that_a_caller_changed_neither_name_who_clipped_nor_cost_the_run(
    tmp_path, kind, change
):
    with create_run(tmp_path / "run", plan(), facts={"delta": 1e-6}) as run:
        made = kind(run.plan, torch.zeros(runs.DIM), source=run.source())
        fit(made, Summing(), COHORTS[:2], commit=run.commit)

        def commit(server, counts):
            run.commit(server, replace(counts, **change))

        with suppress(ConfigError):
            fit(made, Summing(), COHORTS[:3], commit=commit)
    found = statuses(run_report(tmp_path / "run").guarantee)
    assert found["clipping"] == ("enforced" if kind is Server else "asserted")
    with RunFolder.open(tmp_path / "run") as run:
        assert run.rounds == 2


def test_a_sum_that_nobody_clipped_is_no_round_of_the_server(tmp_path):
    with create_run(tmp_path / "run", plan(), facts={"delta": 1e-6}) as run:
        made = server(run)
        fit(made, Clients(), COHORTS[:1], commit=run.commit)
        counts, (tensors, values) = made.last_counts, made.recorded()
        made.replay(tensors["sum"] * 10**6, values)
        with pytest.raises(ConfigError, match="counts: must be those"):
            run.commit(made, counts)


@pytest.mark.parametrize("how", ["fork", "subclass"])
def test_no_weaker_word_hides_that_the_sums_lie_beside_the_run(folder, tmp_path, how):
    own, kind = {"records_sums": True}, Server
    if how == "subclass":
        made, kind = create_run(tmp_path / "new", plan(), facts={"delta": 1e-6}, own=own), Subclass
    else:
        shutil.copytree(folder, parent := tmp_path / "parent")
        (parent / "key").unlink()
        made = fork(parent, tmp_path / "new", plan(), facts={"delta": 1e-6}, own=own)
    with made as run:
        server = kind(run.plan, torch.zeros(runs.DIM), source=run.source())
        run.restore(server)
        fit(server, Clients(), COHORTS[:1], commit=run.commit)
    assert statuses(run_report(tmp_path / "new").guarantee)["noise"] == "violated"


def test_it_says_in_how_many_rounds_somebody_elses_engine_summed(folder, tmp_path):
    def said(path):
        found = {a.code: a for a in run_report(path).guarantee.assumptions}
        return found["clipping"].evidence

    assert said(folder) == "the server clips every update again"
    with create_run(tmp_path / "sums", plan(), facts={"delta": 1e-6}) as run:
        summed = server(run)
        for rounds in (1, 3, 6):
            fit(summed, Summing(), COHORTS[:rounds], commit=run.commit)
    assert said(tmp_path / "sums").startswith("in 3 of 6 rounds an engine that is not this")
    assert run_report(tmp_path / "sums").guarantee.epsilon == plan().guarantee().epsilon(1e-6)


def test_a_seeded_run_is_not_private(tmp_path):
    with create_run(tmp_path / "run", plan(), seed=1) as run:
        train(run, 1)
    with pytest.raises(ConfigError, match="delta is missing"):
        run_report(tmp_path / "run")
    found = run_report(tmp_path / "run", delta=1e-6)
    assert found.guarantee.status == "not-private"
    assert statuses(found.guarantee)["noise"] == "asserted"


@pytest.mark.parametrize(
    ("clients", "clip", "sentence", "realised"),
    [
        ([0], 0.5, "a client took part 3 times, 2 allowed", Participation(6, 3, 2)),
        ([6], 0.5, "rounds of one client lie 1 apart, 3 is the least", Participation(6, 2, 1)),
        ([26], 0.7, "round 5 was clipped to 0.7, planned 0.5", Participation(6, 2, 3)),
    ],
)
def test_a_run_that_left_its_plan_claims_nothing(folder, clients, clip, sentence, realised):
    """Somebody's own server wrote a proper ledger, but did not keep the limits."""
    add_row(folder, round=5, clip_norm=clip, clients=clients)
    found = run_report(folder)
    assert sentence in found.deviations
    assert found.realised == realised
    assert found.guarantee.status == "does-not-hold"
    if clip > 0.5:
        add_row(folder, round=6, clip_norm=0.5, clients=[27])
        assert "7 rounds, 6 planned" in run_report(folder).deviations
        return
    worse = guarantee(BinaryTree(6), realised, noise_multiplier=4.0).epsilon(1e-6)
    assert found.guarantee.epsilon >= worse > plan().guarantee().epsilon(1e-6)


def test_a_fork_goes_on_from_the_model_and_adds_the_cost(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "backup")
    with RunFolder.open(folder) as run:
        train(run, 6)
    with pytest.raises(ConfigError, match="begin a fork"):
        RunFolder.open(tmp_path / "backup")
    with fork(tmp_path / "backup", tmp_path / "fork", plan(), facts={"delta": 1e-6}) as run:
        assert (run.path / "key").read_bytes() != (tmp_path / "backup" / "key").read_bytes()
        restored = server(run)
        assert restored.parameters.abs().sum() > 0  # the old model, not the plan's start
        fit(restored, Clients(), COHORTS[:2], commit=run.commit)
    with RunFolder.open(tmp_path / "fork") as run:
        train(run, 6)
    both = run_report(tmp_path / "fork").guarantee
    alone = plan().guarantee().mu
    assert both.mu == pytest.approx(alone * math.sqrt(2))
    assert both.earlier_mu == pytest.approx(alone)
    assert "An earlier run on the same data" in both.statement()
    with fork(tmp_path / "fork", tmp_path / "third", plan(), facts={"delta": 1e-6}):
        pass
    third = run_report(tmp_path / "third").guarantee
    assert third.mu == pytest.approx(alone * math.sqrt(3))


def test_what_cannot_be_forked(folder, tmp_path):
    with create_run(tmp_path / "seeded", plan(), seed=1) as run:
        train(run, 1)
    with pytest.raises(ConfigError, match="was not private"):
        fork(tmp_path / "seeded", tmp_path / "new", plan())
    with create_run(tmp_path / "fresh", plan()):
        pass
    with pytest.raises(ConfigError, match="no round is committed"):
        fork(tmp_path / "fresh", tmp_path / "new", plan())


def test_a_fork_never_starts_from_what_was_not_committed(folder, tmp_path):
    """A crash between state and ledger leaves a newer state behind: its round was not released."""
    (folder / "state-000006.safetensors").write_bytes(b"newer")
    committed = safe_open(folder / "state-000005.safetensors", "pt").get_tensor("parameters")
    with fork(folder, tmp_path / "fork", plan()) as run:
        restored = server(run)
        assert torch.equal(restored.parameters, committed)
        with pytest.raises(ConfigError, match="own"):
            fork(folder, tmp_path / "other", plan(), facts=run.facts)
    with RunFolder.open(tmp_path / "fork") as run:
        (run.path / "start.safetensors").write_bytes(b"")
        with pytest.raises(ConfigError, match="is not a safetensors file"):
            server(run)
    other = bytearray((folder / "state-000005.safetensors").read_bytes())
    other[-1] ^= 1
    (folder / "state-000005.safetensors").write_bytes(other)
    with pytest.raises(ConfigError, match="not the state that the ledger names"):
        fork(folder, tmp_path / "other", plan())
    with RunFolder.open(folder), pytest.raises(ConfigError, match="is in use"):
        fork(folder, tmp_path / "other", plan())


def test_a_fork_repeats_what_nobody_checked_about_its_parent(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "elsewhere"))
    RunFolder.open(folder, adopt=True).close()
    fork(folder, tmp_path / "fork", plan(), facts={"delta": 1e-6}).close()
    adopted, forked = (
        next(a for a in run_report(path).guarantee.assumptions if a.code == "noise")
        for path in (folder, tmp_path / "fork")
    )
    assert adopted.status == forked.status == "asserted"
    assert "a copy of the run was adopted" in adopted.evidence
    assert "asserted of the run that this one was forked from" in forked.evidence


@pytest.mark.parametrize(
    "word",
    [{"unit": "example"}, {"identity": "x"}, {"rest": None}, {"population_name": "task:digits"}],
    ids=lambda word: next(iter(word)),
)
def test_a_fork_takes_no_word_of_this_package_from_its_caller(folder, tmp_path, word):
    with pytest.raises(ConfigError, match=r"words of this package|public data"):
        fork(folder, tmp_path / "fork", plan(), facts={"delta": 1e-6} | word)
    assert not (tmp_path / "fork").exists()
