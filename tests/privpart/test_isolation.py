"""Isolation: what one client, round or setting of the machine must not do to another's updates."""

import os
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from rewrites import REWRITES
from small_cohorts import computed, dense
from torch import nn

from accounting import ConfigError
from privpart import EmbeddedEngine, LocalTraining, PartialModel, RoundTask, Users, WorkerError
from privpart.engines import frozen_prefix
from privpart.engines.frozen_prefix import Features, split
from privpart.engines.methods import LocalComputation, Method
from privpart.engines.vectorized import BatchedLayers, nothing_kept

CLIENTS = 8
TASK = RoundTask(0, tuple(range(CLIENTS)), 0.2, "plan")
LOCAL = LocalTraining(0.3, epochs=2, batch_size=3)
LOOP, TOGETHER, GHOST = Method(), Method(vectorized=True), Method(ghost_sum=True)


def users(clients=CLIENTS):
    generator = torch.Generator().manual_seed(2)
    n = 4 * clients
    x = torch.rand(n, 64, generator=generator)
    return Users(x, torch.randint(10, (n,), generator=generator), torch.arange(n).split(4))


def words():
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(12, (CLIENTS * 4, 5), generator=generator)
    y = torch.randint(10, (CLIENTS * 4,), generator=generator)
    return Users(x, y, torch.arange(CLIENTS * 4).split(4))


def updates(network, data, method, local=LOCAL, task=TASK, train=("*",)):
    return computed(PartialModel(network, train=train, seed=1), data, method, local, task)


def run(one, task=TASK, start=None):
    """The updates of an engine's round."""
    start = one.model.flat.clone() if start is None else start
    return torch.stack([update.update for update in one.run(task, start)])


def reader(padding_idx=3):
    layers = nn.Embedding(12, 6, padding_idx=padding_idx), nn.Flatten(), nn.Linear(30, 10)
    return nn.Sequential(*layers)


class OwnLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(12, 6), nn.Linear(30, 10)

    def forward(self, x):
        return self.head(nn.functional.embedding(x, self.table.weight).flatten(1))


class DeepLookup(OwnLookup):
    def forward(self, x):
        return self.head(torch.embedding(self.table.weight, x).flatten(1))


@pytest.mark.parametrize("local", [LOCAL, LocalTraining(0.3)], ids=["steps", "one step"])
@pytest.mark.parametrize("word", [12, -1, 10**6])
def test_a_word_outside_the_table_reaches_no_other_clients_table(word, local):
    data = words()
    data.x[4] = word  # of client 1
    for method in (LOOP, TOGETHER):
        with pytest.raises(ConfigError, match=r"client 1: .*index out of range"):
            updates(reader, data, method, local)


@pytest.mark.parametrize("local", [LOCAL, LocalTraining(0.3)], ids=["steps", "one step"])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_padding_is_not_trained_in_any_clients_table(padding_idx, local):
    data, network = words(), lambda: reader(padding_idx)
    loop, together = updates(network, data, LOOP, local), updates(network, data, TOGETHER, local)
    assert (together - loop).norm(dim=1).max() < 1e-6
    trained = together[:, :72].view(-1, 12, 6).abs().sum(dim=(0, 2)).count_nonzero()
    assert trained == (12 if padding_idx is None else 11)


def test_the_sum_of_one_step_trains_no_padding_either():
    model = PartialModel(reader, seed=1)
    work = LocalComputation(model, words(), local=LocalTraining(0.3), data_seed=5)
    total = torch.empty(model.dim, dtype=torch.float64)
    work.summed(TASK, TASK.clients, model.flat.clone(), GHOST, total)
    each = updates(reader, words(), LOOP, LocalTraining(0.3))
    assert (total - each.double().sum(dim=0)).norm() < 1e-6
    assert not total[:72].view(12, 6)[3].any()
    work.users.x[4] = 12  # of client 1
    with pytest.raises(ConfigError, match=r"client 1: .*index out of range"):
        work.summed(TASK, TASK.clients, model.flat.clone(), GHOST, total)


def test_a_network_may_look_up_by_itself():
    bad = words()
    bad.x[4, 2] = 13
    loop, together = updates(OwnLookup, words(), LOOP), updates(OwnLookup, words(), TOGETHER)
    assert (together - loop).norm(dim=1).max() < 1e-6
    with pytest.raises(ConfigError, match=r"client 1: .*index out of range"):
        updates(OwnLookup, bad, TOGETHER)
    with pytest.raises(RuntimeError, match="mixes clients"):
        updates(DeepLookup, words(), TOGETHER)


def test_embeddings_that_look_at_the_batch_are_not_followed():
    with BatchedLayers(), pytest.raises(RuntimeError, match="scale_grad_by_freq"):
        nn.Embedding(4, 2, scale_grad_by_freq=True)(torch.tensor([1]))


class Counting(nn.Module):
    """Remembers how many examples it has seen."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("seen", torch.arange(4.0).flip(0))

    def forward(self, x):
        self.seen += len(x)
        return self.head(x) * self.seen.mean()


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x):
        with torch.no_grad():
            self.body.bias += 0.1
        return self.head(self.body(x))


def test_clients_together_share_no_memory():
    with pytest.raises(RuntimeError, match="writes to its buffers"):
        updates(Counting, users(), TOGETHER)
    with pytest.raises(ConfigError, match=r"frozen parameter 'body\.bias' was written to"):
        updates(Writing, users(), TOGETHER, train=["head.*"])
    found = updates(Counting, users(), LOOP)  # each client begins with none seen
    alone = updates(Counting, users(), LOOP, task=replace(TASK, clients=(7,)))
    assert torch.equal(found[7], alone[0])


class Rewriting(nn.Module):
    def __init__(self, rewrite):
        super().__init__()
        self.one, self.other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.head, self.rewrite = nn.Linear(64, 10), rewrite

    def forward(self, x):
        self.rewrite(self.one.weight, self.other.weight, float(x.mean()))
        return self.head(self.one(x) - self.other(x))


def test_a_frozen_part_that_a_client_rewrites_by_data_is_refused(rewrite):
    once = {"local": LocalTraining(0.3, steps=1), "task": replace(TASK, clients=(0,))}
    with pytest.raises(ConfigError, match=r"written to through \.data|'one\.weight' was moved"):
        updates(lambda: Rewriting(rewrite), users(), LOOP, train=["head.*"], **once)


@pytest.mark.parametrize("kind", ["permute", "replace"])
def test_clients_together_do_not_write_to_buffers_by_data(kind):
    class Ranks(Counting):
        def forward(self, x):
            REWRITES[kind](self.seen, None, 1.0)
            return self.head(x) * self.seen.mean()

    model = PartialModel(Ranks, seed=1)
    with pytest.raises(RuntimeError, match="writes to its buffers"), nothing_kept(model):
        model.module(users().x)


def engine(network=dense, data=None, **options):
    options = {"local": LOCAL, "data_seed": 5, "report": lambda _: None} | options
    return EmbeddedEngine(PartialModel(network, seed=1), data or users(), **options)


def test_features_that_would_not_fit_are_not_kept(monkeypatch):
    def network():
        return nn.Sequential(nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 10))

    below, _ = split(PartialModel(network, train=["2.*"], seed=1))
    x = users().x
    kept = 4 * len(x) * 9
    monkeypatch.setattr(frozen_prefix, "_free_memory", lambda _: 2 * kept)
    assert Features.of(below, x) is not None
    monkeypatch.setattr(frozen_prefix, "_free_memory", lambda _: 2 * kept - 2)
    assert Features.of(below, x) is None


def test_a_layer_that_makes_one_row_of_the_batch_is_no_function_of_the_example():
    network = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Linear(8, 10))
    below, _ = split(PartialModel(network, train=["2.*"], seed=1, overwrite=True))
    assert len(below) == 1


@pytest.mark.usefixtures("quick_workers")
def test_answers_to_a_round_that_was_left_open_are_never_anothers():
    """Answers still in the pipes were once taken for those of the next round."""
    data = users(clients=40)
    first = replace(TASK, clients=tuple(range(40)))
    second = replace(first, round=1)
    with engine(data=data, workers=2, deterministic=True) as one:
        start = one.model.flat.clone()
        left_open = one.run(first, start)
        next(left_open)
        found = run(one, second, start + 0.5)
        model = PartialModel(dense, seed=1)
        model.load(start + 0.5)
        out = computed(model, data, LOOP, LOCAL, second)
        assert torch.equal(found, out)
        with pytest.raises(WorkerError, match="another round began"):
            list(left_open)
        again = one.run(second, start + 0.5)
        assert torch.equal(next(again).update, out[0])  # the new processes are still there
        again.close()
        assert torch.equal(run(one, second, start + 0.5), out)


def wide():
    return nn.Sequential(nn.Linear(64, 20_000), nn.Tanh(), nn.Linear(20_000, 10))


@pytest.mark.usefixtures("quick_workers")
def test_the_same_bits_whatever_the_number_of_threads():
    def updates_with(threads=2, local=LocalTraining(0.3), **options):  # noqa: B008
        torch.set_num_threads(threads)
        with engine(wide, data=users(clients=2), local=local, **options) as one:
            found = run(one, replace(TASK, clients=(0, 1)))
        assert torch.get_num_threads() == threads
        return found

    found = [updates_with(workers=workers, deterministic=True) for workers in (1, 2)]
    assert torch.equal(*found)
    moon = LocalTraining(0.3, objective="moon", mu=1.0)
    assert torch.equal(*(updates_with(threads, moon, deterministic=True) for threads in (1, 2)))
    if (os.cpu_count() or 1) > 1:
        assert not torch.equal(updates_with(batching="loop"), found[0])  # power: sums differ


def bracketed():
    layers = {"a[0]": nn.Linear(64, 9), "a[1]": nn.Tanh(), "a0": nn.Linear(9, 10)}
    return nn.Sequential(OrderedDict(layers))


@pytest.mark.usefixtures("quick_workers")
def test_workers_take_names_for_names_not_for_patterns():
    with engine(bracketed, workers=2, batching="loop") as one:
        assert torch.equal(run(one), updates(bracketed, users(), LOOP))


def test_moon_s_clients_remember_only_rounds_that_ended():
    local = LocalTraining(0.3, batch_size=4, objective="moon", mu=1.0)
    with engine(local=local) as one, engine(local=local) as other:
        broken_off = one.run(TASK, one.model.flat.clone())
        next(broken_off)
        broken_off.close()
        assert torch.equal(run(one), run(other))
        later = replace(TASK, round=1)
        remembered = run(one, later)
    with engine(local=local) as one:
        assert not torch.equal(remembered, run(one, later))  # power


def test_a_client_of_moon_that_diverges_once_is_not_lost():
    data = users()
    data.x[0] = torch.inf
    local = LocalTraining(0.3, batch_size=4, objective="moon", mu=1.0)
    with engine(data=data, local=local) as one:
        task = replace(TASK, clients=(0,))
        first, _ = run(one, task), run(one, task)
        data.x[0] = 0.5
        second = run(one, replace(task, round=1))
    assert first.isnan().all()
    assert second.isfinite().all()
    assert second.any()


@pytest.mark.parametrize(
    ("options", "local"),
    [
        ({"batching": "vmap"}, LocalTraining(1e-3, steps=1, batch_size=8)),
        ({"batching": "loop"}, LocalTraining(1e-3, steps=2, batch_size=8)),
        ({"batching": "vmap", "cache_prefix": True}, LocalTraining(1e-3, steps=1, batch_size=8)),
        ({"sums": True}, LocalTraining(1e-3, steps=1, batch_size=64)),
    ],
    ids=["one pass", "loop", "cached, one pass", "sums"],
)
def test_what_one_client_holds_is_no_rounding_of_the_others(options, local):
    """At kinks of theirs it would be other updates, each as far away as the clip norm."""
    generator = torch.Generator().manual_seed(0)

    def network():
        return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))

    weights = PartialModel(network, seed=1).module[0].weight.detach().double()
    null = torch.linalg.svd(weights, full_matrices=True)[2][200:]
    kink = (torch.randn(1, len(null), generator=generator).double() @ null * 1e8).float()
    n = local.batch_size
    x = torch.cat([torch.rand(n, 784, generator=generator), kink.expand(24, -1)])
    y = torch.cat([torch.arange(n) % 10, torch.full((24,), 3)])
    task = replace(TASK, clients=tuple(range(25)), clip_norm=1.0)
    found = []
    for held in (0, 1, 2, n):
        rows = [torch.arange(held), *torch.arange(n, n + 24).split(1)]
        data = Users(x, y, rows, allow_empty=True)
        train = ["2.*"] if "cache_prefix" in options else ["*"]
        model = PartialModel(network, train=train, seed=1)
        quiet = options | {"report": lambda _: None}
        with EmbeddedEngine(model, data, local=local, data_seed=5, **quiet) as one:
            if "sums" in options:  # of which the client may move its own clip norm
                one._agrees[Method(ghost_sum=True)] = True  # two clients at kinks do not agree
                parts = list(one.sums(task, model.flat.clone()))
                assert {len(part.clients) for part in parts} == {3, 4}  # whatever a client holds
                found.append(sum(part.total for part in parts)[None])
                continue
            found.append(run(one, task)[1:])
    assert found[0].norm(dim=1).min() > 1e-6  # power
    for other in found[1:]:
        assert (other - found[0]).norm() < (1.0 if "sums" in options else 1e-6)
