"""The choice of a method: what it costs a round, what it keeps, checks, remembers and says."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from privpart import EmbeddedEngine, LocalTraining, PartialModel, RoundTask, Users
from privpart.client import ClientOptimizer
from privpart.engines import choice as module
from privpart.engines import vectorized
from privpart.engines.methods import LocalComputation, Method
from privpart.models import mcmahan_2nn, small_cnn

NETWORKS = {
    "dense": lambda: mcmahan_2nn(inputs=64, hidden=12, classes=10),
    "cnn": lambda: small_cnn(channels=(4, 8), hidden=16, image_size=8),
}


@pytest.fixture(autouse=True)
def _nothing_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVPART_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def counted(monkeypatch):
    """Rows that clients trained on, in order, as (method, rows of each client)."""
    calls = []

    def counting(name):
        real = getattr(LocalComputation, name)

        def run(self, task, clients, *others):
            method = others[1] if name == "updates" else Method(ghost_sum=True)
            lengths = [len(self.users.indices[client]) for client in clients]
            calls.append((method, [module._rows(self.local, n) if n else 0 for n in lengths]))
            return real(self, task, clients, *others)

        monkeypatch.setattr(LocalComputation, name, run)

    counting("updates")
    counting("sum")
    return calls


def made(network="dense", examples=20, clients=12, local=None, **options):
    n = examples * clients
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(n, 1, 8, 8, generator=generator)
    y = torch.randint(10, (n,), generator=generator)
    users = Users(x, y, torch.arange(n).split(examples))
    model = PartialModel(NETWORKS.get(network, network), seed=1)
    local = local or LocalTraining(0.1, batch_size=2)
    said = []
    options = {"report": said.append, "explain": True, "data_seed": 5} | options
    engine = EmbeddedEngine(model, users, local=local, **options)
    return engine, RoundTask(0, tuple(range(clients)), 0.2, "plan"), said


def rows(calls):
    return sum(sum(each) for _, each in calls)


CASES = [
    ("dense", 1, True), ("cnn", 1, True), ("dense", 1, False), ("cnn", 2, False),
    ("dense", 5, False), ("dense", 12, False), ("cnn", 6, False),
]  # fmt: skip


@pytest.mark.parametrize(("network", "steps", "sums"), CASES)
@pytest.mark.parametrize(("slow", "health"), [(False, False), (True, False), (False, True)])
def test_a_round_throws_the_work_of_two_clients_away_at_most(
    network, steps, sums, slow, health, counted, monkeypatch
):
    """And the first one starts at once: all else that was computed by then is its own."""
    if slow:  # every row takes three seconds
        monkeypatch.setattr(module, "clock", lambda _: 3.0 * rows(counted))
    local = LocalTraining(0.1, batch_size=2, steps=steps)
    engine, task, _ = made(network, 2 * steps, local=local, sums=sums, health=health)
    client, start = 2 * steps, engine.model.flat.clone()
    for round_ in range(3):
        counted.clear()
        one = replace(task, round=round_)
        answers = engine.sums(one, start) or engine.run(one, start)
        came = [c for a in answers for c in (a.clients if hasattr(a, "clients") else [a.client])]
        assert sorted(came) == list(task.clients)
        assert rows(counted) / client - len(task.clients) <= 2 + 1e-9
        assert not health or len(engine.health().norms) == len(task.clients)


_seconds = module._Trial.seconds


def _quick(trial, method, *others):
    return _seconds(trial, method, *others) * (1e-9 if method.ghost_sum else 1.0)


def test_a_summed_round_is_the_round_with_what_was_timed(monkeypatch):
    engine, task, _ = made("cnn", 2, local=LocalTraining(0.1, batch_size=2, steps=1), sums=True)
    task = replace(task, clip_norm=0.05, sum_clip_norm=0.049)
    start = engine.model.flat.clone()
    loop, _, _ = made("cnn", 2, local=LocalTraining(0.1, batch_size=2, steps=1), batching="loop")
    each, free = (
        torch.stack([u.update for u in loop.run(replace(task, clip_norm=most), start)]).double()
        for most in (0.049, 9.0)
    )
    monkeypatch.setattr(module._Trial, "seconds", _quick)
    parts = list(engine.sums(task, start))
    assert sorted(c for part in parts for c in part.clients) == list(task.clients)
    assert (sum(part.total for part in parts) - each.sum(dim=0)).norm() < 1e-5
    assert sum(part.unclipped for part in parts) == int((free.norm(dim=1) <= 0.05).sum())


def test_what_was_timed_is_the_round_and_nobody_is_missing(counted):
    engine, task, _ = made()
    start = engine.model.flat.clone()
    task = replace(task, clients=(3, 0, 7, 2, 1, 11, 4, 5, 6, 8, 9, 10, 3))
    found = list(engine.run(task, start))
    assert [update.client for update in found] == list(task.clients)
    assert any(method.vectorized for method, _ in counted)
    loop, _, _ = made(batching="loop")
    each = list(loop.run(task, start))
    for one, other in zip(found, each, strict=True):
        assert (one.update - other.update).norm() < 1e-5 * task.clip_norm
    assert min(update.update.norm() for update in each) > 0.05


def test_figures_are_remembered_and_only_the_fastest_is_checked(counted, tmp_path):
    engine, task, said = made()
    start = engine.model.flat.clone()
    list(engine.run(task, start))
    chosen = engine.method
    assert chosen.vectorized
    counted.clear()
    again, _, repeated = made(local=LocalTraining(0.3, batch_size=2))  # another rate
    list(again.run(task, start))
    assert again.method == chosen
    assert {method for method, each in counted if 20 in each} == {chosen}
    assert "remembered" in repeated[0]
    assert "remembered" not in said[0]
    another, _, fresh = made(local=LocalTraining(0.3, batch_size=4))
    list(another.run(task, start))
    assert "remembered" not in fresh[0]
    (first, _) = sorted((tmp_path / "cache" / "fits").iterdir(), key=lambda p: p.stat().st_mtime)
    for damage in ("", "{", "[]", '{"key": {}, "value": {}}', "null", "\x00" * 10):
        first.write_text(damage)
        engine, _, said = made()
        assert len(list(engine.run(task, start))) == len(task.clients)
        assert "remembered" not in said[0]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "1", None, [0]])
def test_a_damaged_figure_is_measured_again(seconds, tmp_path):
    engine, task, said = made()
    start = engine.model.flat.clone()
    list(engine.run(task, start))
    (path,) = (tmp_path / "cache" / "fits").iterdir()
    held = json.loads(path.read_text())
    held["value"] = dict.fromkeys(held["value"], seconds)
    path.write_text(json.dumps(held))
    engine, _, said = made()
    list(engine.run(task, start))
    assert "remembered" not in said[0]


class FirstStepOnly(ClientOptimizer):
    """Keeps nothing from one step to the next."""

    def step(self):
        super().step()
        self._first = []


@pytest.mark.parametrize("fault", ["state", "last batch", "length"])
def test_a_method_that_is_wrong_only_later_or_only_before_the_clip_is_dropped(fault, monkeypatch):
    local = LocalTraining(0.1, batch_size=6, momentum=0.9 if fault == "state" else 0.0)
    real = vectorized._gradients

    def wrong(logits, parts, moving, x, y):
        gradients, losses = real(logits, parts, moving, x, y)
        factor = 1.5 if fault == "length" else 1.5 if x.shape[1] == 2 else 1.0
        return tuple(factor * gradient for gradient in gradients), losses

    monkeypatch.setattr(module._Trial, "seconds", lambda *_: 1e-9)
    if fault == "state":
        monkeypatch.setattr(vectorized, "ClientOptimizer", FirstStepOnly)
    else:
        monkeypatch.setattr(vectorized, "_gradients", wrong)
    engine, task, said = made(examples=38, local=local)  # six full batches, and one of two
    task = replace(task, clip_norm=1e-3)
    list(engine.run(task, engine.model.flat.clone()))
    assert "vectorized (vmap) deviates" in said[0]


def test_a_round_is_looked_at_once_also_by_an_engine_that_makes_tasks_anew(counted, monkeypatch):
    """As the engine with canaries does, and that of several kinds of devices."""
    monkeypatch.setattr(module._Trial, "_sums_agree", lambda _: False)
    monkeypatch.setattr(LocalComputation, "sums_each", lambda *_: False)
    local = LocalTraining(0.1, batch_size=4, steps=1)
    engine, task, _ = made("dense", 4, local=local, sums=True)
    start = engine.model.flat.clone()
    assert engine.sums(replace(task), start) is None
    assert len(list(engine.run(replace(task), start.clone()))) == len(task.clients)
    assert rows(counted) / 4 <= len(task.clients) + 2
    assert len(counted) > 1


class Branches(nn.Module):
    """With ``branch``, it does something that vmap cannot follow."""

    branch = False

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(64, 10)

    def forward(self, x):
        out = self.dense(x.flatten(1))
        return 2 * out if self.branch and out.sum() > 0 else out


def test_what_was_remembered_is_checked_again(monkeypatch):
    monkeypatch.setattr(module._Trial, "seconds", lambda *_: 1e-9)
    engine, task, said = made(Branches)
    start = engine.model.flat.clone()
    list(engine.run(task, start))
    assert engine.method.vectorized
    monkeypatch.setattr(Branches, "branch", True)
    engine, _, said = made(Branches)
    list(engine.run(task, start))
    assert engine.method == Method()
    assert said[0].endswith("vectorized (vmap) fails")


def test_a_method_is_taken_only_if_it_is_clearly_faster(monkeypatch):
    times = {}
    monkeypatch.setattr(module._Trial, "one_by_one", lambda _, method: times[str(method)])
    monkeypatch.setattr(module._Trial, "seconds", lambda _, method, *__: times[str(method)])
    plain, last = str(Method()), str(Method(channels_last=True))
    for faster, wanted in ((0.97, Method()), (0.9, Method(channels_last=True))):
        times.update({plain: 1.0, last: faster})
        monkeypatch.setattr(module.fit_cache, "read_cached", lambda *_: None)
        engine, task, _ = made("cnn")
        monkeypatch.setattr(
            module, "candidates", lambda *_, **__: [Method(), Method(channels_last=True)]
        )
        list(engine.run(task, engine.model.flat.clone()))
        assert engine.method == wanted


def test_nothing_is_said_unless_asked(capsys):
    engine, task, _ = made(report=None, explain=False)
    list(engine.run(task, engine.model.flat.clone()))
    assert capsys.readouterr() == ("", "")
    for options, says in (
        ({"batching": "loop"}, "one client after another: as the options say"),
        (
            {"local": LocalTraining(0.1, batch_size=20, augment=lambda b: b)},
            "batches are augmented",
        ),
        (
            {"local": LocalTraining(0.1, batch_size=20, objective="moon", mu=1.0)},
            "clients keep models",
        ),
    ):
        engine, task, said = made(**options)
        for _ in range(2):
            list(engine.run(task, engine.model.flat.clone()))
        assert len(said) == 1
        assert says in said[0]


def test_groups_and_changing_cohorts_are_followed():
    """A round may have few clients to try methods on, or none; and a later one other groups."""
    groups = [["conv*", "norm.*"], ["dense1.*"], ["dense2.*"]]
    network = PartialModel(NETWORKS["cnn"], seed=1, groups=groups)
    users = Users(torch.rand(40, 1, 8, 8), torch.arange(40) % 10, torch.arange(40).split(4))
    local = LocalTraining(0.1, batch_size=2)
    engine = EmbeddedEngine(network, users, local=local, data_seed=0)
    start = network.flat.clone()
    rounds = [((), None), ((1,), (0,)), ((), None), ((0, 2), None), (tuple(range(10)), (1, 2))]
    for round_, (clients, active) in enumerate(rounds):
        task = RoundTask(round_, clients, 0.2, "plan", active=active)
        assert [u.client for u in engine.run(task, start)] == list(clients)
