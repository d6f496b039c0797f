"""The choice of a method: the rule, and the check of what it gives against the plain loop."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_cohorts import cnn, dense
from torch import nn

from privpart import EmbeddedEngine, LocalTraining, PartialModel, RoundTask, Users
from privpart.engines import choice, vectorized
from privpart.engines.choice import fastest
from privpart.engines.ghost_sum import GhostSum
from privpart.engines.methods import LocalComputation, Method
from privpart.engines.vectorized import VectorizedTraining
from privpart.models import emnist_cnn, mcmahan_2nn

LOOP, TOGETHER, GHOST = Method(), Method(vectorized=True), Method(ghost_sum=True)
RECORDED = Method(recorded=True)
STEP, STEPS = LocalTraining(0.1, batch_size=2, steps=1), LocalTraining(0.1, batch_size=2)


def users(examples=20, clients=12, shape=(1, 8, 8)):
    n, generator = examples * clients, torch.Generator().manual_seed(2)
    x = torch.rand(n, *shape, generator=generator)
    y = torch.randint(10, (n,), generator=generator)
    return Users(x, y, torch.arange(n).split(examples))


def made(network=dense, data=None, local=STEPS, **options):
    model = PartialModel(network, seed=1)
    return EmbeddedEngine(model, data or users(), local=local, data_seed=5, **options)


TASK = RoundTask(0, tuple(range(12)), 0.2, "plan")
FEW = replace(TASK, clients=(0, 1, 2))
SOME = replace(TASK, clients=(0, 1, 2, 3, 4))
BIG = LocalTraining(0.1, batch_size=2**13)


def large():
    return nn.Sequential(nn.Conv2d(1, 64, 5, padding=2), nn.Conv2d(64, 64, 5), nn.Flatten())


def small_mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.Linear(100, 10))


@pytest.mark.parametrize(
    ("network", "local", "task", "sums", "method"),
    [
        (cnn, STEP, TASK, True, GHOST),
        (cnn, STEP, FEW, True, GHOST),
        (cnn, STEP, TASK, False, TOGETHER),
        (cnn, STEP, replace(TASK, clients=(1, 1, 2)), True, TOGETHER),  # one is refused
        (dense, STEPS, SOME, True, TOGETHER),
        (dense, STEPS, replace(TASK, clients=(0, 1, 2, 3)), True, LOOP),
        (cnn, STEPS, FEW, True, TOGETHER),  # it has more layers
        (cnn, STEPS, replace(TASK, clients=(0, 1)), True, LOOP),
        (dense, BIG, TASK, True, TOGETHER),  # as few examples as clients have
        (lambda: emnist_cnn(classes=10), STEPS, FEW, True, LOOP),
        (large, BIG, TASK, True, LOOP),
        (dense, replace(STEPS, objective="fedprox", mu=0.1), TASK, True, LOOP),
        (dense, replace(STEPS, augment=lambda batch: batch), TASK, True, LOOP),
        (lambda: nn.Sequential(nn.EmbeddingBag(9, 4)), STEPS, TASK, True, LOOP),
        (lambda: nn.Linear(2048, 2048), BIG, TASK, True, LOOP),
        (lambda: mcmahan_2nn(classes=10), STEPS, replace(TASK, clients=range(50)), True, LOOP),
        (small_mlp, STEPS, replace(TASK, clients=range(7)), True, LOOP),
        (small_mlp, STEPS, replace(TASK, clients=range(8)), True, TOGETHER),
    ],
)
def test_the_rule(network, local, task, sums, method):
    data = users(shape=(1, 8, 8) if network in (cnn, dense) else (1, 28, 28))
    work = LocalComputation(PartialModel(network, seed=1), data, local=local, data_seed=5)
    assert fastest(work, task, sums=sums) == method


@pytest.mark.parametrize(
    ("local", "sums", "method"),
    [
        (STEPS, True, RECORDED),
        (STEP, True, GHOST),
        (STEP, False, RECORDED),
        (replace(STEPS, momentum=0.9), True, TOGETHER),
    ],
)
def test_the_rule_on_a_gpu(local, sums, method):
    model = PartialModel(cnn, seed=1)
    work = LocalComputation(model, users(), local=local, data_seed=5)
    work.device = torch.device("cuda")
    assert fastest(work, TASK, sums=sums) == method


def test_only_weights_that_train_make_a_step_large():
    for train, method in (("*", LOOP), ("2.*", TOGETHER)):
        layers = nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 10)
        model = PartialModel(nn.Sequential(*layers), train=[train], seed=1, overwrite=True)
        work = LocalComputation(model, users(shape=(1024,)), local=BIG, data_seed=5)
        assert fastest(work, TASK, sums=True) == method


def test_the_size_of_each_rounds_cohort_enters_the_rule():
    one = made()
    start = one.model.flat.clone()
    for number, (task, method) in enumerate([(TASK, TOGETHER), (FEW, LOOP), (SOME, TOGETHER)]):
        list(one.run(replace(task, round=number), start))
        assert one.method == method


def both(one, data, task=TASK, local=STEPS, network=dense):
    """The updates of an engine, and those of the plain loop."""
    start = one.model.flat.clone()
    loop = made(network, data, local, batching="loop")
    return (torch.stack([u.update for u in each.run(task, start)]) for each in (one, loop))


@pytest.mark.parametrize("fault", ["state", "last batch", "length", "a fiftieth"])
def test_a_method_that_is_wrong_only_later_or_only_before_the_clip_is_dropped(fault, monkeypatch):
    local = LocalTraining(0.1, batch_size=6, momentum=0.9 if fault == "state" else 0.0)
    real = VectorizedTraining._gradients

    def wrong(self, parts, moving, x, y):
        gradients = real(self, parts, moving, x, y)
        factor = {"length": 1.5, "a fiftieth": 1.03}.get(fault, 1.5 if x.shape[1] == 2 else 1.0)
        return tuple(factor * gradient for gradient in gradients)

    if fault == "state":
        fresh = vectorized.FlatOptimizer

        def forgetful(local, parts):
            """The optimiser of a stack of clients keeps nothing from one step to the next."""
            step = lambda gradients: fresh(local, parts).step(gradients)  # noqa: E731
            return SimpleNamespace(step=step) if parts[0].dim() == 2 else fresh(local, parts)

        monkeypatch.setattr(vectorized, "FlatOptimizer", forgetful)
    else:
        monkeypatch.setattr(VectorizedTraining, "_gradients", wrong)
    one = made(data=users(38), local=local)  # six full batches, and one of two
    list(one.run(replace(TASK, clip_norm=1e-3), one.model.flat.clone()))
    assert one.method == LOOP


@pytest.mark.parametrize("part", ["sum", "norms"])
def test_ghost_clipping_that_computes_another_sum_is_dropped(part, monkeypatch):
    real = GhostSum.sum

    def wrong(self, *data, clip_norm, out):
        longer = 10.0 if part == "norms" else 1.0  # nothing is clipped
        norms = real(self, *data, clip_norm=longer * clip_norm, out=out)
        out[0] += 0.5 * clip_norm if part == "sum" else 0.0
        return norms

    one = made(cnn, local=STEP, sums=True)
    assert list(one.sums(TASK, one.model.flat.clone()))
    assert one.method == GHOST  # power
    monkeypatch.setattr(GhostSum, "sum", wrong)
    one = made(cnn, local=STEP, sums=True)
    parts = one.sums(TASK, one.model.flat.clone())
    assert parts is None
    assert len(list(one.run(TASK, one.model.flat.clone()))) == len(TASK.clients)


class Branches(nn.Module):
    """It does something that vmap cannot follow."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(64, 10)

    def forward(self, x):
        out = self.dense(x.flatten(1))
        return 2 * out if out.sum() > 0 else out


class Centred(nn.Module):
    """It looks at the batch, which padding changes."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.dense(x - x.mean(dim=0))


@pytest.mark.parametrize(
    ("network", "local"), [(Branches, STEPS), (Centred, LocalTraining(0.3, steps=1, batch_size=3))]
)
def test_what_is_another_training_for_some_clients_is_dropped(network, local):
    """Padding is seen where examples are not taken one by one: only short batches tell."""
    whole = users(3)
    indices = [torch.arange(3 * k, 3 * k + 3) for k in range(11)] + [torch.arange(30, 32)]
    data = Users(whole.x, whole.y, indices)
    for sums in (False, True):
        one = made(network, data, local, sums=sums)
        assert one.sums(TASK, one.model.flat.clone()) is None
        chosen, loop = both(one, data, TASK, local, network)
        assert one.method == LOOP
        assert torch.equal(chosen, loop)


@pytest.mark.parametrize("sums", [False, True])
def test_a_method_is_checked_once_on_two_clients_that_have_examples(sums, monkeypatch):
    checked, real = [], choice.agrees

    def counting(computation, task, start, method):
        asked.clear()
        checked.append(method)
        return real(computation, task, start, method)

    asked, updates = [], LocalComputation.updates

    def noting(self, task, clients, *others):
        asked.append(list(clients))
        return updates(self, task, clients, *others)

    monkeypatch.setattr("privpart.engines.embedded.agrees", counting)
    monkeypatch.setattr(LocalComputation, "updates", noting)
    whole, none = users(4, 8), torch.arange(0)
    data = Users(whole.x, whole.y, [none] * 20 + list(whole.indices), allow_empty=True)
    rates = {0: 0.1, 1: 0.3, 2: 0.3, 3: 0.3}
    schedule = lambda round_: LocalTraining(rates[round_], batch_size=4, steps=1)  # noqa: E731
    one = made(cnn, data, schedule, sums=sums)
    start = one.model.flat.clone()
    for round_, clients in enumerate([(0, 1), range(28), range(28), (2, 3)]):
        task = replace(TASK, round=round_, clients=tuple(clients))
        answers = one.sums(task, start) or one.run(task, start)
        came = [c for a in answers for c in (a.clients if hasattr(a, "clients") else [a.client])]
        assert came == list(task.clients)
        assert one.method == ((GHOST if sums else TOGETHER) if len(clients) > 2 else LOOP)
    assert checked == [GHOST if sums else TOGETHER]
    assert all(client >= 20 for client in asked[0])
    assert len(asked[0]) <= 2
