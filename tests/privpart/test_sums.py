"""Sums: clients of one step whose clipped updates are added up without being written out."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from plans import small_plan
from small_cohorts import computed, random_users
from torch import nn

from accounting import BinaryTree
from privpart import (
    AdaptiveClipping,
    EmbeddedEngine,
    LocalTraining,
    PartialModel,
    RoundTask,
    SeededSource,
    Server,
    Users,
    fit,
)
from privpart.clip import factors
from privpart.engines import methods as local_work
from privpart.engines.frozen_prefix import Features, split
from privpart.engines.ghost_sum import GhostSum, layer_updates
from privpart.engines.methods import LocalComputation, Method
from privpart.messages import ClientUpdate, CohortSum, Reason, RefusedAnswer
from privpart.models import mcmahan_2nn, small_cnn
from privpart.secure.sums import ModularSum

SIZES = (8, 3, 5, 0, 8, 2, 8, 1)
TASK = RoundTask(3, tuple(range(len(SIZES))), 0.2, "plan")
LOCAL = LocalTraining(0.3, batch_size=8, steps=1)
GHOST = Method(ghost_sum=True)


def images(*layers):
    return lambda: nn.Sequential(*[layer() for layer in layers])


def flat_image(*layers):
    return images(nn.Flatten, *layers)


NETWORKS = {
    "cnn": lambda: small_cnn(channels=(4, 8), hidden=16, image_size=8),
    "dense": lambda: mcmahan_2nn(inputs=64, hidden=40, classes=10),
    "one layer, no bias": flat_image(lambda: nn.Linear(64, 10, bias=False)),
    "narrow": flat_image(lambda: nn.Linear(64, 2), lambda: nn.Linear(2, 10)),
    "rows and columns": images(  # a dense layer that sees more than one row of each example
        lambda: nn.Flatten(1, 2), lambda: nn.Linear(8, 30), nn.Tanh, nn.Flatten,
        lambda: nn.Linear(240, 10)),
    "norms": flat_image(lambda: nn.LayerNorm(64), lambda: nn.Linear(64, 10)),
    "nested": lambda: nn.Sequential(images(nn.Flatten, lambda: nn.Linear(64, 20))(),
                                    nn.Linear(20, 10)),
    "strides": images(lambda: nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False), nn.Flatten,
                      lambda: nn.Linear(64, 10)),
    "dilated groups": images(lambda: nn.Conv2d(1, 4, 3, dilation=2, padding="same"), nn.ReLU,
                             lambda: nn.Conv2d(4, 6, 3, groups=2, padding="valid"), nn.Flatten,
                             lambda: nn.Linear(216, 10)),
    "even filters": images(lambda: nn.Conv2d(1, 2, 2, padding="same"), nn.Flatten,
                           lambda: nn.Linear(128, 10)),
    "reflected": images(lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.Flatten,
                        lambda: nn.Linear(128, 10)),
}  # fmt: skip


def users(shape=(1, 8, 8), sizes=SIZES):
    return random_users(sizes, shape)


def work(network, data, train=("*",), local=LOCAL):
    model = PartialModel(network, train=train, seed=1)
    return LocalComputation(model, data, local=local, data_seed=5)


def one_by_one(network, data, task=TASK, train=("*",), local=LOCAL):
    """Each client's clipped update, by the loop that calls the function of a device."""
    model = PartialModel(network, train=train, seed=1)
    return computed(model, data, Method(), local, task).double()


def summed(network, data, clients=TASK.clients, task=TASK, train=("*",), local=LOCAL):
    doing = work(network, data, train, local)
    total = torch.full((doing.model.dim,), torch.nan, dtype=torch.float64)
    norms = doing.summed(task, clients, doing.model.flat.clone(), GHOST, total)
    return total, task.sum_of(clients, total, norms).unclipped


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("clip_norm", [1e-3, 0.2, 1e3])
@pytest.mark.parametrize(
    ("network", "options"),
    [
        *((name, {}) for name in NETWORKS),
        ("cnn", {"train": ["dense2.*"]}),
        ("cnn", {"train": ["conv*", "dense1.bias"]}),
        ("cnn", {"train": ["!dense1.weight"]}),
        ("dense", {"local": replace(LOCAL, batch_size=4)}),  # examples in the client's order
        ("dense", {"local": replace(LOCAL, momentum=0.9)}),
    ],
    ids=str,
)
def test_the_sum_is_that_of_the_clipped_updates(network, options, clip_norm):
    task, network = replace(TASK, clip_norm=clip_norm), NETWORKS[network]
    each = one_by_one(network, users(), task, **options)
    total, unclipped = summed(network, users(), task=task, **options)
    assert total.shape == each.shape[1:]
    assert (total - each.sum(dim=0)).norm() < 2e-5 * each.norm(dim=1).sum()
    assert unclipped == (each.norm(dim=1) < clip_norm * (1 - 1e-5)).sum()
    assert 1 <= unclipped <= len(SIZES)  # a client without examples needs no clipping


def test_behind_a_cached_prefix():
    data, train, network = users(), ["dense3.*"], NETWORKS["dense"]
    below, above = split(PartialModel(network, train=train, seed=1))
    behind = LocalComputation(
        above, data, local=LOCAL, data_seed=5, features=Features.of(below, data.x)
    )
    total = torch.empty(above.dim, dtype=torch.float64)
    behind.summed(TASK, TASK.clients, above.flat.clone(), GHOST, total)
    each = one_by_one(network, data, train=train)
    assert (total - each.sum(dim=0)).norm() < 2e-5 * each.norm(dim=1).sum()


def cancelling(data, rows):
    """The same image, and all classes: the sum of gradients nearly vanishes."""
    data.x[rows] = data.x[rows[0]] * 1e6
    data.y[rows] = torch.arange(len(rows))


DIVERGE = {
    "infinity": lambda data, rows: data.x[rows[0]].fill_(torch.inf),
    "NaN": lambda data, rows: data.x[rows[-1], 0, 3, 3].fill_(torch.nan),
    "no class counts": lambda data, rows: data.y.index_fill_(0, rows, -100),
    "huge": lambda data, rows: data.x.index_fill_(0, rows, 3e38),
}
CASES = DIVERGE | {
    "large": lambda data, rows: data.x.index_copy_(0, rows, data.x[rows] * 1e18),
    "tiny": lambda data, rows: data.x.index_fill_(0, rows, 1e-38),
    "examples cancel": cancelling,
}


def hostile(case):
    """Data of which client 0's could break something."""
    data = users()
    CASES[case](data, data.indices[0])
    return data


def without_client_0(data):
    return Users(data.x, data.y, [torch.arange(0), *list(data.indices)[1:]], allow_empty=True)


@pytest.mark.parametrize("clip_norm", [1e-30, 0.2, 1e6])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("network", ["cnn", "dense", "rows and columns"])
def test_one_client_moves_the_sum_by_the_clip_norm_at_most(network, case, clip_norm):
    task = replace(TASK, clip_norm=clip_norm)
    with_it, _ = summed(NETWORKS[network], hostile(case), (0, 1, 4, 6), task)
    absent = without_client_0(hostile(case))
    without, _ = summed(NETWORKS[network], absent, (0, 1, 4, 6), task)
    assert with_it.isfinite().all()
    assert (with_it - without).norm() <= clip_norm * (1 + 1e-9)
    assert without.norm() > 0.3 * min(clip_norm, 0.1)  # power: the others are in it


@pytest.mark.parametrize("case", DIVERGE)
def test_a_client_that_diverges_is_absent_and_leaves_the_others_alone(case):
    network = NETWORKS["dense"]
    total, unclipped = summed(network, hostile(case), (0, 1, 2, 4))
    alone, others = summed(network, hostile(case), (0,))
    assert not alone.any()
    assert others == 1  # zeros are no longer than the clip norm
    each = one_by_one(network, users())
    assert (total - each[[1, 2, 4]].sum(dim=0)).norm() < 1e-5
    assert each[0].norm() > 0.1  # power
    assert unclipped == 1 + (each[[1, 2, 4]].norm(dim=1) < 0.2 * (1 - 1e-5)).sum()


def exact(left, right):
    """The length of left.T @ right, in long doubles."""
    product = left.T.numpy().astype("longdouble") @ right.numpy().astype("longdouble")
    return float((product**2).sum() ** 0.5)


@pytest.mark.parametrize("cancel", [0.0, 1e-2, 1e-6, 1e-12])
def test_lengths_of_products_are_never_too_short(cancel):
    generator = torch.Generator().manual_seed(1)
    came = torch.randn(1, 4, 50, generator=generator)
    came[0, 2:] = came[0, :2]
    gradient = torch.randn(1, 4, 60, generator=generator)
    gradient[0, 2:] = -gradient[0, :2] * (1 - cancel)
    change = layer_updates(nn.Linear(50, 60), ["weight", "bias"], came, gradient, 2.0)
    true = exact(2 * gradient[0].double(), came[0].double())
    found = float(change["weight"].squared_norms().sqrt())
    assert found >= true
    lengths = 2 * (came.double().norm(dim=2) * gradient.double().norm(dim=2)).sum()
    assert found <= true * (1 + 1e-6) + 1e-5 * lengths
    weights = factors(torch.tensor([found], dtype=torch.float64), 1e-3)
    assert change["weight"].weighted_sum(weights).norm() <= 1e-3


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0)


class Words(nn.Module):
    def forward(self, x):
        return (x * 8).long()


def tied():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 10), nn.Linear(10, 10))
    network[3].weight = network[2].weight
    return network


def test_networks_that_may_mix_clients_are_not_summed():
    flat, dense = nn.Flatten(), nn.Linear(64, 10)
    words = nn.Embedding(9, 4, scale_grad_by_freq=True)
    for layers in (
        (flat, dense, *[nn.Linear(10, 10)] * 2),
        (tied(),),
        (flat, nn.Dropout(0.5), dense),
        (flat, Words(), words, nn.Flatten()),
        (flat, dense, nn.ReLU(inplace=True)),
        (nn.Conv2d(1, 2, 3), Centred(), flat),
    ):
        model = PartialModel(nn.Sequential(*layers), seed=1, overwrite=True)
        assert not GhostSum.supports(model), layers


HOOKS = {
    "forward": lambda layer: layer.register_forward_hook(lambda _, came, left: left * 2),
    "before": lambda layer: layer.register_forward_pre_hook(lambda _, came: (came[0] * 2,)),
    "backward": lambda layer: layer.register_full_backward_hook(lambda _, came, left: None),
    "mask": lambda layer: layer.weight.register_hook(lambda gradient: gradient * 0.5),
    "own forward": lambda layer: setattr(layer, "forward", torch.tanh),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_hooked_layers_are_not_summed(hook):
    model = PartialModel(flat_image(lambda: nn.Linear(64, 10)), seed=1)
    assert GhostSum.supports(model)
    hook(model.module[1])
    assert not GhostSum.supports(model)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(6, 6, 1), (5,)),
        (nn.Conv2d(6, 6, 1), (5, 5)),
        (nn.LayerNorm((6, 5)), (5,)),
    ],
)
def test_a_layer_that_would_take_the_batch_for_its_own_dimension(layer, shape):
    """Three clients of two examples are six rows, which such a layer would mix."""
    network = nn.Sequential(layer, nn.Flatten(), nn.Linear(25 if shape == (5, 5) else 5, 10))
    model = PartialModel(network, train=["2.*"], seed=1, overwrite=True)
    data = users(shape, sizes=[2, 2, 2])
    work = LocalComputation(
        model, data, local=LocalTraining(0.3, steps=1, batch_size=2), data_seed=5
    )
    total = torch.empty(model.dim, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="takes the batch for one of its own dimensions"):
        work.summed(replace(TASK, clients=(0, 1, 2)), (0, 1, 2), model.flat.clone(), GHOST, total)


def engine(network=NETWORKS["dense"], data=None, local=LOCAL, **options):
    model = PartialModel(network, seed=1)
    options = {"sums": True, "data_seed": 5, "report": lambda _: None} | options
    return EmbeddedEngine(model, data or users(), local=local, **options)


@pytest.mark.usefixtures("quick_workers")
def test_every_client_is_in_one_sum_for_any_number_of_workers(monkeypatch):
    monkeypatch.setattr(local_work, "LARGEST_PASS", 16)  # more chunks than workers have slots
    data = users(sizes=[2] * 100)
    task = replace(TASK, clients=tuple(range(7, 90)))
    each = one_by_one(NETWORKS["dense"], data, task).sum(dim=0)
    for workers in (1, 2):
        with engine(data=data, workers=workers) as one:
            start = one.model.flat.clone()
            sums = list(one.sums(task, start))
            again = list(one.sums(task, start))
            updates = list(one.run(replace(task, clients=(7, 8, 9)), start))  # not mixed up
        assert [c for part in sums for c in part.clients] == list(task.clients)
        assert len(sums) == 42
        assert {(p.round, p.plan, p.clip_norm) for p in sums} == {(3, "plan", 0.2)}
        assert sum(p.total for p in sums).sub(each).norm() < 2e-5 * 0.2 * 83
        for one_part, same in zip(sums, again, strict=True):
            assert torch.equal(one_part.total, same.total)
        assert [u.client for u in updates] == [7, 8, 9]


@pytest.mark.parametrize(
    "changes",
    [{"sums": False}, {"deterministic": True}, {"batching": "loop"}],
)
def test_no_sums_where_they_were_not_asked_for(changes):
    with engine(lambda: mcmahan_2nn(inputs=64, hidden=400), **changes) as one:
        assert one.sums(TASK, one.model.flat.clone()) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": None},  # how many steps depends on what they hold
        {"steps": 2},
        {"optimizer": "adam"},
        {"weight_decay": 0.1},
        {"objective": "fedprox", "mu": 0.1},
        {"loss": "binary_cross_entropy"},
        {"batch_size": 257},
    ],
)
def test_no_sums_where_they_would_be_another_training(changes):
    doing = work(NETWORKS["dense"], users(), local=replace(LOCAL, **changes))
    assert doing.clients_per_ghost_sum(TASK) == 0


def test_what_is_summed_at_once_is_public():
    doing = work(NETWORKS["dense"], users())
    for change, most in (
        ({}, 32),
        ({"clients": (3,)}, 32),
        ({"active": (0,)}, 0),
        ({"clients": (1, 2, 1)}, 0),  # one of them is refused
    ):
        assert doing.clients_per_ghost_sum(replace(TASK, **change)) == most
    large = work(lambda: nn.Sequential(nn.Embedding(60_000, 64), nn.Linear(64, 10)), users())
    assert large.clients_per_ghost_sum(TASK) == 1
    wide = users((3, 300, 300), sizes=[1, 1])
    assert work(NETWORKS["cnn"], wide).clients_per_ghost_sum(TASK) == 15 // 8


@pytest.mark.usefixtures("quick_workers")
def test_workers_of_a_round_without_examples_make_room_for_sums():
    data = Users(
        users().x, users().y, [torch.arange(0), *users(sizes=[2] * 16).indices], allow_empty=True
    )
    task = replace(TASK, clients=tuple(range(17)))
    network = lambda: mcmahan_2nn(inputs=64, hidden=400)  # noqa: E731
    with engine(network, data, workers=2) as one:
        start = one.model.flat.clone()
        assert one.sums(replace(TASK, clients=(0,)), start) is None
        assert not next(one.run(replace(TASK, clients=(0,)), start)).update.any()
        one.run(task, start).close()
        sums = one.sums(task, start)
        total = sum(part.total for part in sums)
    each = one_by_one(network, data, task).sum(dim=0)
    assert (total - each).norm() < 1e-4


def test_after_groups_took_turns_all_train():
    model = PartialModel(lambda: mcmahan_2nn(inputs=64, hidden=40), seed=1)
    doing = LocalComputation(model, users(), local=LOCAL, data_seed=5)
    start, total = model.flat.clone(), torch.empty(model.dim, dtype=torch.float64)
    doing.summed(TASK, TASK.clients, start, GHOST, total)
    for parameter in model.module.parameters():
        parameter.requires_grad_(False)  # as another round may leave them
    again = torch.empty_like(total)
    doing.summed(TASK, TASK.clients, start, GHOST, again)
    assert torch.equal(again, total)


@pytest.mark.parametrize("workers", [1, 2])
def test_vectorized_clients_of_many_steps_are_summed(workers, quick_workers):
    local = LocalTraining(0.3, epochs=2, batch_size=3)
    task = replace(TASK, sum_clip_norm=0.199)
    each = one_by_one(NETWORKS["cnn"], users(), replace(task, clip_norm=0.199), local=local)
    options = {"batching": "vmap", "workers": workers, "local": local}
    with engine(NETWORKS["cnn"], **options) as one:
        start = one.model.flat.clone()
        parts = list(one.sums(task, start))
        assert one.sums(replace(task, clients=(1, 1)), start) is None  # the server must see both
    assert [client for part in parts for client in part.clients] == list(task.clients)
    total = sum(part.total for part in parts)
    assert (total - each.sum(dim=0)).norm() < 2e-5 * each.norm(dim=1).sum()
    assert sum(part.unclipped for part in parts) == (each.norm(dim=1) < 0.199 * 0.999).sum()


def plan(**change):
    adaptive = AdaptiveClipping(bit_noise_multiplier=2.0)
    fields = {"mechanism": BinaryTree(6, 2), "participation": (6,), "adaptive_clipping": adaptive}
    fields |= {"clip_norm": 0.2, "noise_multiplier": 0.5, "report_goal": 8}
    return small_plan(**fields | change)


@pytest.mark.usefixtures("quick_workers")
def test_a_run_with_sums_is_the_run_without():
    found = []
    for one in (engine(deterministic=True), engine(workers=2)):
        server = Server(plan(), one.model.flat.clone(), source=SeededSource(0))
        with one:
            records = fit(server, one, [list(TASK.clients)] * 6)
        found.append((server.parameters, server.clip_norm, [r.counts for r in records]))
    (loop, norm, counts), (sums, other_norm, other_counts) = found
    assert (sums - loop).norm() < 1e-4 * (loop - one.model.flat).norm()
    assert norm == other_norm != 0.2  # the bits were the same, and moved the clip norm
    own = {"summed": len(SIZES), "summed_by": "EmbeddedEngine"}
    assert [replace(c, **own) for c in counts] == other_counts
    assert (counts[0].summed, counts[0].counted) == (0, len(SIZES))


DIM = 6


def a_server(**change):
    fields = {"noise_multiplier": 0.0, "adaptive_clipping": None, "participation": (2,)}
    return Server(plan(**(fields | change)), torch.zeros(DIM), source=SeededSource(0))


def a_sum(server, clients=(1, 2, 3), **change):
    total = torch.full((DIM,), 0.2, dtype=torch.float64)
    return replace(server.task(()).sum_of(clients, total, [0.2, 0.1, 0.2]), **change)


def test_a_sum_counts_for_each_client_in_it_and_is_no_update():
    """Only the operator has the other door."""
    one = a_server()
    assert one.run_round([a_sum(one), one.task(()).update(7, torch.zeros(DIM))]).counted == 1
    assert not one.parameters.any()
    one = a_server()
    for refused in (0, 0, 3):  # each may take part twice
        counts = one.run_round(
            [one.task(()).update(9 + one.round, torch.zeros(DIM))], sums=[a_sum(one)]
        )
        assert (counts.received, counts.refused) == (4, refused)
    torch.testing.assert_close(one.parameters, torch.full((DIM,), 2 * 0.2 / 8))
    assert one.ineligible([1, 2, 3, 4]).keys() == {1, 2, 3}


@pytest.mark.parametrize(
    "change",
    [
        {"round": 1},
        {"plan": "another"},
        {"clip_norm": 0.3},
        {"clients": (1, 2, 2)},
        {"clients": (1, 2, 7)},  # 7 has sent an update of its own
        {"unclipped": 4},
        {"unclipped": 1.5},
        {"round": False},
        {"not_finite": 3},  # more than were not clipped
        {"clients": (1, 2, 2**256)},
        {"clients": (1, 2, torch.tensor(3))},
        {"clients": (1, 2, 8)},  # 8 has taken part as often as it may
        {"total": torch.full((DIM,), 0.2, dtype=torch.float64).to_sparse()},
        {"total": torch.zeros(DIM, dtype=torch.float64, device="meta")},
        {"total": torch.zeros(DIM + 1, dtype=torch.float64)},
        {"total": torch.zeros(DIM)},
        {"total": torch.full((DIM,), 0.25, dtype=torch.float64)},  # longer than three of 0.2
        {"total": torch.full((DIM,), torch.nan, dtype=torch.float64)},
    ],
)
def test_a_sum_that_cannot_be_is_refused_whole(change):
    one = a_server()
    one._participations = {8: [-9, -8]}
    own = one.task(()).update(7, torch.zeros(DIM))
    counts = one.run_round([own], sums=[a_sum(one, **change)])
    assert (counts.counted, counts.refused) == (1, 3)
    assert sum(counts.refusals.values()) == 3
    assert not one.parameters.any()
    assert one.cohort == (7,)


def test_no_content_of_an_answer_raises_an_error():
    """Half-made objects too: what an engine of somebody's own hands over is anything."""
    kinds = {CohortSum: 7, ModularSum: 6, RefusedAnswer: 2, ClientUpdate: 4}
    odd = [None, 7, [], {}, "malformed", (1, [2]), torch.ones(2), torch.tensor(torch.nan)]
    sent = [*odd, *(kind.__new__(kind) for kind in kinds)]
    sent += [kind(*[value] * count) for kind, count in kinds.items() for value in odd]
    for server in (a_server(), a_server(noise_multiplier=0.5)):
        own = server.task(()).update(7, torch.zeros(DIM))
        secure = sent if server.plan.noise_multiplier else ()
        counts = server.run_round([own, *sent], sums=sent, secure=secure)
        assert (counts.received - counts.refused, counts.counted) == (1, 1)
        assert counts.refusals.keys() <= set(get_args(Reason))
