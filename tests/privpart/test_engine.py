import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import small_cohorts
import torch
from plans import small_plan
from torch import nn

from accounting import ConfigError
from privpart import (
    EmbeddedEngine,
    LocalTraining,
    PartialModel,
    RoundTask,
    SeededSource,
    Server,
    Users,
    WorkerError,
    client_update,
    fit,
)
from privpart.engines.embedded import equal_chunks, shrinking_chunks
from privpart.engines.methods import LocalComputation, Method, client_generator
from privpart.models import mcmahan_2nn

from .hanging import lives

PART = ["conv*", "norm.*", "dense2.*"]
SIZES = (8, 3, 5, 0, 8, 2, 8, 1)  # clients of a cohort need not have equally many examples
TASK = RoundTask(3, tuple(range(len(SIZES))), 0.2, "plan")


def cnn(train):
    return PartialModel(small_cohorts.cnn, train=train, seed=1)


def dense(train):
    return PartialModel(small_cohorts.dense, train=train, seed=1)


def users(shape=(1, 8, 8)):
    return small_cohorts.random_users(SIZES, shape)


def updates(model, data, local, task=TASK, **options):
    with EmbeddedEngine(
        model, data, local=local, data_seed=5, report=lambda _: None, **options
    ) as engine:
        found = list(engine.run(task, model.flat.clone()))
    assert [u.client for u in found] == list(task.clients)
    assert {(u.round, u.plan) for u in found} == {(task.round, task.plan)}
    return torch.stack([u.update for u in found])


LOCALS = {
    "one step": LocalTraining(0.3, batch_size=8),
    "epochs": LocalTraining(0.2, epochs=2, batch_size=3),
    "steps": LocalTraining(0.2, steps=4, batch_size=3, momentum=0.9),
    "adam": LocalTraining(0.01, epochs=2, batch_size=3, optimizer="adam"),
    "decay": LocalTraining(0.2, steps=1, batch_size=8, weight_decay=0.5),
}
NETWORKS = {
    "cnn": lambda: cnn(["*"]),
    "cnn, part": lambda: cnn(PART),
    "cnn, last layer": lambda: cnn(["dense2.*"]),
    "dense": lambda: dense(["*"]),
    "dense, part": lambda: dense(["dense2.*", "dense3.*"]),
}


@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_every_way_is_the_same_training(network, local, device):
    data, model = users(), network()
    loop = updates(network(), data, local, deterministic=True)
    one_by_one = updates(network(), data, local, batching="loop", device=device)
    together = updates(network(), data, local, batching="vmap", device=device)
    chosen = updates(network(), data, local, device=device)
    tolerance = 1e-5 * TASK.clip_norm  # nothing here crosses a kink
    assert (one_by_one - loop).norm(dim=1).max() < tolerance
    assert (together - loop).norm(dim=1).max() < tolerance
    assert (chosen - loop).norm(dim=1).max() < tolerance
    assert torch.equal(loop[3], torch.zeros(model.dim))  # no examples
    assert (loop.double().norm(dim=1) <= TASK.clip_norm).all()
    assert (together.double().norm(dim=1) <= TASK.clip_norm).all()
    assert (loop.norm(dim=1) > 0.1 * TASK.clip_norm).sum() > 4  # power


STEP = LocalTraining(0.3, steps=1, batch_size=8)
TURNS = LocalTraining(0.2, epochs=2, batch_size=3, alternate=("dense?.weight", "dense?.bias"))


@pytest.mark.parametrize(
    ("local", "active"),
    [
        (STEP, (1, 0)), (STEP, (0,)), (LOCALS["adam"], (1, 0)), (LOCALS["adam"], (1,)),
        (TURNS, None), (TURNS, (1, 0)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_groups_and_parameters_that_take_turns_are_the_same_training(local, active, device):
    def model():
        groups, train = [["dense3.*"], ["dense1.weight", "dense2.*"]], ["!dense1.bias"]
        network = mcmahan_2nn(inputs=64, hidden=8)
        return PartialModel(network, train=train, seed=0, overwrite=True, groups=groups)

    task = replace(TASK, active=active)
    loop = updates(model(), users(), local, task, deterministic=True)
    together = updates(model(), users(), local, task, batching="vmap", device=device)
    assert loop.shape == (len(TASK.clients), model().active_dim(active))
    assert (together - loop).norm(dim=1).max() < 1e-5 * TASK.clip_norm
    assert (loop.norm(dim=1) > 0.1 * TASK.clip_norm).sum() > 4  # power
    assert (loop.double().norm(dim=1) <= TASK.clip_norm).all()


@pytest.mark.parametrize("batching", ["loop", "vmap"])
def test_parameters_that_alternate_move_in_their_own_steps_alone(batching):
    """By the definition: each step is a client's only step, from where the last one ended."""
    data, task = users(), replace(TASK, clients=(4,), clip_norm=1e9)
    turns = ("dense1.*", "dense2.*")  # dense3 moves in every step
    local = LocalTraining(0.2, batch_size=64, steps=3, alternate=turns)
    found = updates(dense(["*"]), data, local, task, batching=batching)[0]
    model = dense(["*"])
    start = model.flat.clone()
    for own in ("dense1", "dense2", "dense1"):
        step = model.views(updates(model, data, replace(local, steps=1, alternate=()), task)[0])
        moved = {n: s if n.startswith((own, "dense3")) else 0 * s for n, s in step.items()}
        model.load(model.flat + torch.cat([each.flatten() for each in moved.values()]))
    assert (found - (model.flat - start)).norm() < 1e-5 * found.norm()


def test_turns_that_nothing_could_take_are_refused():
    for wrong, says in (
        ({"alternate": ("*",)}, "at least two patterns"),
        ({"alternate": ("a", "b"), "steps": 1}, r"steps=1: is below the 2 entries of alternate"),
        ({"alternate": ("a", "b"), "optimizer": "adam"}, "only for the objective fedavg with sgd"),
        ({"alternate": ("a", "b"), "weight_decay": 0.1}, "and no momentum or weight_decay"),
    ):
        with pytest.raises(ConfigError, match=says):
            LocalTraining(0.1, **wrong)
    for batching in ("loop", "vmap"):
        typo = LocalTraining(0.1, batch_size=3, alternate=("dense1.*", "dense9.*"))
        with pytest.raises(ConfigError, match=r"alternate: 'dense9.\*' matches no parameter"):
            updates(dense(["*"]), users(), typo, batching=batching)


@pytest.mark.parametrize("batching", ["loop", "vmap"])
@pytest.mark.parametrize("local", ["one step", "epochs"])
def test_a_client_that_diverges_is_zero_and_leaves_the_others_alone(local, batching):
    data, torn = users(), users()
    owner = next(user for user, own in enumerate(data.indices) if 0 in own.tolist())
    torn.x[0] = float("inf")  # the first row of all: short batches must not be padded with it
    before = updates(dense(["*"]), data, LOCALS[local], batching=batching)
    after = updates(dense(["*"]), torn, LOCALS[local], batching=batching)
    assert after[owner].isnan().all()  # which the server counts as zeros
    assert before[owner].any()  # power
    others = [client for client in TASK.clients if client != owner]
    assert torch.equal(after[others], before[others])


def test_the_loop_is_client_update_bit_for_bit():
    data, local = users(), LOCALS["epochs"]
    found = updates(cnn(PART), data, local, deterministic=True)
    model = cnn(PART)
    generator = client_generator(5, TASK.round, 4)
    start, rows = model.flat.clone(), data.indices[4]
    one = client_update(
        model, start, (data.x[rows], data.y[rows]), local=local, clip_norm=0.2, generator=generator
    )
    assert torch.equal(found[4], one)


def test_workers_return_the_same_bits_and_leave_with_the_engine():
    data, local = users(), LOCALS["epochs"]
    alone = updates(cnn(PART), data, local, deterministic=True)
    model = cnn(PART)
    later = LocalTraining(0.05)
    schedule = {TASK.round: local, TASK.round + 1: later}.__getitem__
    then = replace(TASK, round=TASK.round + 1)
    alone_then = updates(cnn(PART), data, later, then, deterministic=True)
    with EmbeddedEngine(
        model, data, local=schedule, data_seed=5, workers=2, deterministic=True
    ) as engine:
        start = model.flat.clone()
        found = [u.update for u in engine.run(TASK, start)]
        again = [u.update for u in engine.run(TASK, start)]
        scheduled = [u.update for u in engine.run(then, start)]
        (pid,) = engine._pool.pool.pids
        assert lives(pid)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"process was ended by SIGKILL.*memory.*--resume"):
            list(engine.run(TASK, start))
        assert engine._pool is None  # the next round starts new processes
    assert not lives(pid)
    assert torch.equal(torch.stack(found), alone)
    assert torch.equal(torch.stack(again), alone)
    assert torch.equal(torch.stack(scheduled), alone_then)


@pytest.mark.usefixtures("quick_workers", "lazy_workers")
@pytest.mark.parametrize("sums", [False, True])
def test_workers_start_once_they_pay_and_nobody_waits_for_them(monkeypatch, sums):
    options = {"batching": "vmap", "sums": True} if sums else {"deterministic": True}
    model, local, done = cnn(PART), LOCALS["epochs"], []
    real = LocalComputation.summed if sums else LocalComputation.updates
    monkeypatch.setattr(
        LocalComputation, real.__name__, lambda *a: done.append(len(a[2])) or real(*a)
    )
    with EmbeddedEngine(model, users(), local=local, data_seed=5, workers=2, **options) as engine:
        start = model.flat.clone()

        def one_round():
            done.clear()
            if sums:
                return sum(part.total for part in engine.sums(TASK, start))
            return torch.stack([u.update for u in engine.run(TASK, start)])

        first = one_round()
        assert engine._pool is None  # a short job pays for no processes
        assert sum(done) == len(SIZES)
        monkeypatch.setattr("privpart.engines.embedded._ALONE", 0.0)
        monkeypatch.setattr("privpart.pool.Pool.ready", lambda _: False)
        assert torch.equal(one_round(), first)  # while they start
        assert engine._pool is not None
        assert sum(done) == len(SIZES)
        monkeypatch.undo()
        monkeypatch.setattr("privpart.engines.embedded._ALONE", 0.0)
        for _ in range(1000):
            assert (one_round() - first).norm() < 1e-6 * first.norm()
            if engine._pool.pool.ready():
                break
        assert torch.equal(one_round(), first) or sums
        assert engine._pool.pool._any_finished  # they have answered


def grouped():
    groups = [["conv*", "norm.*"], ["dense1.*"], ["dense2.*"]]
    return PartialModel(small_cohorts.cnn, seed=1, groups=groups)


MOON = LocalTraining(0.1, objective="moon", mu=1.0)
PROX = LocalTraining(0.2, batch_size=3, objective="fedprox", mu=0.3)
TAGS = LocalTraining(0.1, loss="binary_cross_entropy")


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize(
    ("network", "local", "active", "options"),
    [
        (grouped, PROX, (0, 2), {"deterministic": True}),
        (grouped, PROX, (1,), {"batching": "loop"}),
        (NETWORKS["cnn"], LOCALS["epochs"], None, {"batching": "loop", "precision": "bfloat16"}),
    ],
)
def test_the_same_bits_from_any_number_of_workers(network, local, active, options):
    data, task = users(), replace(TASK, active=active)
    alone = updates(network(), data, local, task, **options)
    assert torch.equal(updates(network(), data, local, task, **options, workers=2), alone)
    assert alone.shape[1] == network().active_dim(active)
    assert (alone.norm(dim=1) > 0.1 * TASK.clip_norm).sum() > 4  # power
    assert (alone.double().norm(dim=1) <= TASK.clip_norm).all()


@pytest.mark.parametrize(
    ("network", "batching"),
    [
        ("cnn", "loop"), ("cnn", "auto"), ("dense", "loop"), ("dense", "vmap"),
        ("dense, part", "loop"), ("dense, part", "auto"),  # behind a cached prefix
    ],
)  # fmt: skip
def test_bfloat16_is_the_same_training_roughly_and_clipped_exactly(network, batching):
    """Also on processors without its instructions, where torch rounds by itself."""
    data, local = users(), LocalTraining(0.2, epochs=2, batch_size=2)
    free = replace(TASK, clip_norm=1e9)
    exact = updates(NETWORKS[network](), data, local, free, deterministic=True)
    rounded = {"precision": "bfloat16", "batching": batching}
    found = updates(NETWORKS[network](), data, local, free, **rounded)
    assert found.dtype is torch.float32
    came = exact.norm(dim=1) > 0
    difference = ((found - exact).norm(dim=1) / exact.norm(dim=1))[came]
    assert difference.max() > 1e-4
    # rounding makes ties, of which max-pooling takes another; 0.9 with the weights of the first
    # step in every step
    assert difference.median() < (0.2 if network == "cnn" else 0.02)
    assert torch.equal(found[~came], exact[~came])
    longest = float(found.norm(dim=1).median()) / 2
    clipped = updates(NETWORKS[network](), data, local, replace(TASK, clip_norm=longest), **rounded)
    lengths, before = clipped.double().norm(dim=1), found.double().norm(dim=1)
    assert (lengths <= longest).all()
    assert ((lengths >= (1 - 1e-6) * longest) == (before >= longest)).all()
    assert (before >= longest).sum() > 3  # power
    with EmbeddedEngine(
        NETWORKS[network](), data, local=local, data_seed=5, sums=True, **rounded
    ) as engine:
        parts = engine.sums(replace(TASK, clip_norm=longest), engine.model.flat.clone())
        assert (parts is None) == (batching == "loop")
        total = sum((part.total for part in parts or ()), torch.zeros_like(clipped[0]))
        assert engine.method is None or engine.method == Method(vectorized=True, bfloat16=True)
    assert parts is None or (total - clipped.double().sum(0)).norm() < 1e-5 * longest


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batching": "vmap", "local": TAGS}, "batching=vmap: .*another loss than cross_entropy"),
        ({"batching": "vmap", "local": MOON}, "batching=vmap: .*another objective than fedavg"),
        ({"precision": "bfloat16", "local": MOON}, "precision=bfloat16: .*computed in float32"),
        ({"device": "cuda", "local": MOON}, "device=cuda: .*on the cpu"),
        ({"workers": 2, "local": MOON}, "workers=2: .*in one process"),
        ({"deterministic": True, "batching": "vmap"}, "batching=vmap: a run that can be repeated"),
        ({"deterministic": True, "device": "cuda"}, "device=cuda: does not give the same bits"),
        ({"workers": 2, "device": "cuda"}, "device=cuda: one process drives it"),
        ({"device": "cuda:99"}, "device='cuda:99': torch .* sees cpu"),
        ({"batching": "fast"}, "batching"),
        ({"workers": 0}, "workers"),
        ({"workers": 2, "worker_timeout": float("nan")}, "worker_timeout="),
        ({"worker_timeout": 5.0}, "worker_timeout=5: one process has no workers"),
    ],
)
def test_contradictions_are_refused_when_the_engine_is_made(options, says):
    """All that the docstring lists, whatever the first round would have said."""
    options = {"local": LOCALS["epochs"], "data_seed": 5} | options
    with pytest.raises(ConfigError, match=says):
        EmbeddedEngine(cnn(["*"]), users(), **options)
    with pytest.raises(TypeError, match="batchin"):
        EmbeddedEngine(cnn(["*"]), users(), local=LOCALS["epochs"], data_seed=5, batchin="loop")


def test_vmap_is_refused_in_the_round_of_a_schedule_where_it_would_be_ignored():
    schedule, model = [LOCALS["epochs"], PROX].__getitem__, dense(["*"])
    engine = EmbeddedEngine(model, users(), local=schedule, data_seed=5, batching="vmap")
    start = model.flat.clone()
    assert len(list(engine.run(replace(TASK, round=0), start))) == len(TASK.clients)
    with pytest.raises(ConfigError, match="batching=vmap: clients that select, or have another"):
        list(engine.run(replace(TASK, round=1), start))


@pytest.mark.usefixtures("quick_workers")
def test_workers_share_the_features_of_a_frozen_prefix_and_say_what_failed():
    data, local = users(), LOCALS["epochs"]
    alone = updates(dense(["dense3.*"]), data, local, deterministic=True)
    model = dense(["dense3.*"])
    with EmbeddedEngine(
        model, data, local=local, data_seed=5, workers=2, batching="vmap", report=lambda _: None
    ) as engine:
        assert engine._computation_of(local).features is not None
        found = torch.stack([u.update for u in engine.run(TASK, model.flat.clone())])
        assert (found - alone).norm(dim=1).max() < 1e-6
        assert engine._computation.features._known.all()
        with pytest.raises(ConfigError, match=r"^client 99: is not among the 8 clients"):
            list(engine.run(replace(TASK, clients=(99,)), model.flat.clone()))


def test_features_are_computed_once_and_only_of_those_who_came(device):
    model, data = cnn(["dense2.*"]), users()
    engine = EmbeddedEngine(
        model, data, local=LOCALS["epochs"], data_seed=5, batching="vmap", device=device,
    )  # fmt: skip
    calls, work = [], engine._computation_of(LOCALS["epochs"])
    work.features._below.register_forward_hook(lambda _m, inputs, _o: calls.append(len(inputs[0])))
    for _ in range(3):
        list(engine.run(replace(TASK, clients=(1, 2)), model.flat.clone()))
    assert calls == [8]  # both clients', filled up to a power of two; once
    assert int(work.features._known.sum()) == SIZES[1] + SIZES[2]
    assert work.features.values.device.type == work.model.flat.device.type == device
    assert model.flat.is_cpu


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_cached_prefix_and_workers_go_when_the_frozen_part_changes(workers):
    local, task = LOCALS["epochs"], replace(TASK, clients=(1, 2))
    model, plain = cnn(["dense2.*"]), cnn(["dense2.*"])
    options = {"workers": workers, "batching": "vmap"}
    with EmbeddedEngine(model, users(), local=local, data_seed=5, **options) as engine:
        start = model.flat.clone()
        before = torch.stack([u.update for u in engine.run(task, start)])
        assert engine._computation.features is not None
        for network in (model, plain):
            with torch.no_grad():
                network.module.dense1.weight.mul_(2)
        after = torch.stack([u.update for u in engine.run(task, start)])
    wanted = updates(plain, users(), local, task, deterministic=True)
    assert (after - wanted).norm() < 1e-6
    assert (after - before).norm() > 1e-3


@pytest.mark.parametrize(
    ("below", "options"),
    [
        ((nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 4)), {"train": ["head.*"]}),
        ((nn.Flatten(), nn.Linear(64, 4)), {}),
        ((nn.Flatten(),), {"train": ["head.*"]}),
        ((nn.Flatten(), nn.Linear(64, 4)), {"groups": [["1.*"], ["head.*"]]}),
    ],
    ids=["random", "trained below", "nothing to keep", "another's turn"],
)
def test_no_cache_where_it_would_not_be_exact(below, options):
    network = nn.Sequential(*below)
    network.add_module("head", nn.Linear(4 if len(below) > 1 else 64, 10))
    model = PartialModel(network, seed=0, overwrite=True, **options)
    if "groups" in options:
        model.train_only([1])  # as during a round of the last group
    one = EmbeddedEngine(model, users(), local=LOCALS["epochs"], data_seed=5)
    assert one._computation_of(LOCALS["epochs"]).features is None


def test_a_frozen_layer_that_works_in_place_leaves_the_examples_as_they_are():
    x = torch.full((4, 6), -1.0)
    layers = nn.ReLU(inplace=True), nn.Linear(6, 5), nn.Linear(5, 3)
    model = PartialModel(nn.Sequential(*layers), train=["2.*"], seed=1, overwrite=True)
    data = Users(x, torch.zeros(4, dtype=torch.int64), torch.arange(4).split(2))
    updates(model, data, LocalTraining(0.1), replace(TASK, clients=(0, 1)))
    assert bool((x == -1).all())


def test_a_layer_that_comes_twice_is_in_the_frozen_prefix_twice():
    """``named_children`` names it once: behind such a prefix was another network."""
    found, again = [], nn.ReLU()
    for options in ({"deterministic": True}, {}):
        layers = nn.Linear(64, 9), again, nn.Linear(9, 9), again, nn.Linear(9, 10)
        network = nn.Sequential(nn.Flatten(), *layers)
        model = PartialModel(network, train=["5.*"], seed=1, overwrite=True)
        found.append(updates(model, users(), LOCALS["epochs"], **options))
    assert (found[0] - found[1]).norm(dim=1).max() < 1e-6
    assert found[0].norm() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_memory_is_flat_over_a_thousand_rounds(workers):
    rounds, data = 1000, users()
    model = cnn(["*"])
    plan = small_plan(rounds, (rounds, 1), clip_norm=0.2, noise_multiplier=1.0)
    server = Server(plan, model.flat, source=SeededSource(1))
    seen = []

    def measure(record):
        if record.round in (200, 999):
            own = engine._pool.pool.pids if engine._pool else []
            seen.append([_resident(pid) for pid in ["self", *own]])

    with EmbeddedEngine(
        model, data, local=LOCALS["epochs"], data_seed=5, workers=workers, report=lambda _: None
    ) as engine:
        fit(server, engine, [range(len(SIZES))] * rounds, callbacks=[measure])
    early, late = seen
    assert len(early) == workers
    for before, after in zip(early, late, strict=True):
        assert after - before < 2 * 2**20  # bytes; what a participation list needs is far less


def _resident(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("clients", "workers"), [(0, 2), (1, 2), (20, 2), (7, 3), (1000, 2)])
def test_chunks_are_the_cohort_in_order_and_of_one_size_or_smaller_and_smaller(clients, workers):
    cohort = range(clients)
    chunks = [list(chunk) for chunk in equal_chunks(cohort, 128, workers)]
    assert [client for chunk in chunks for client in chunk] == list(cohort)
    sizes = [len(chunk) for chunk in chunks]
    assert all(0 < size <= 128 for size in sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    chunks = shrinking_chunks(cohort, 9, workers)
    assert [client for chunk in chunks for client in chunk] == list(cohort)
    sizes = [len(chunk) for chunk in chunks]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes, default=0) <= 9
    assert sizes[-1:] in ([], [1])
