"""Rounds that train some groups only: the client, the server, and a run that stops in between."""

from dataclasses import replace

import pytest
import torch
from plans import small_plan
from torch import nn

from accounting import BinaryTree, ConfigError, Grouped, Participation
from privpart import (
    AdaptiveClipping,
    EmbeddedEngine,
    LocalTraining,
    NoiseStream,
    PartialModel,
    PrivacyPlan,
    RunFolder,
    SeededSource,
    Server,
    ServerOptimizer,
    Users,
    client_update,
    fit,
)
from privpart.client import fresh_optimizer
from privpart.data.index import batch_rows
from privpart.plan import Schedule
from privpart.run.begin import create_run
from privpart.run.report import run_report

GROUPS = [["0.*"], ["2.*"], ["4.*"]]
SIZES = (9 * 6 + 6, 6 * 5 + 5, 5 * 3 + 3)
SCHEDULE = Schedule(cycles=2, rounds_per_group=2, warm_up=2, between=1).rounds(3)
ROUNDS = len(SCHEDULE)


PLAIN = LocalTraining(0.1, epochs=2, batch_size=5)
STEP = LocalTraining(0.1, batch_size=12, steps=1)


def network(**change):
    module = nn.Sequential(nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return PartialModel(module, **{"seed": 1, "overwrite": True, "groups": GROUPS} | change)


def examples(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 9, generator=generator), torch.arange(count) % 3


def grouped(schedule=SCHEDULE, build=BinaryTree):
    active = [[t for t, groups in enumerate(schedule) if g in groups] for g in range(3)]
    return Grouped(schedule, [build(len(own)) for own in active], SIZES)


def plan(z=0.0, mechanism=None, **change):
    fields = {"participation": (ROUNDS,), "noise_multiplier": z}
    return small_plan(mechanism or grouped(), **fields | change)


def server(a_plan=None, source=None, **optimizer):
    chosen = ServerOptimizer(**optimizer) if optimizer else None
    start = network().flat
    return Server(a_plan or plan(), start, source=source or SeededSource(3), optimizer=chosen)


def two_users():
    x, y = examples(24)
    return Users(x, y, [torch.arange(12), torch.arange(12, 24)])


def update_of(model, active, local=None, clip_norm=1e3, **change):
    x, y = examples()
    return client_update(
        model,
        model.flat.clone(),
        (x, y),
        local=local or PLAIN,
        clip_norm=clip_norm,
        generator=torch.Generator().manual_seed(0),
        active=active,
        **change,
    )


# The client.

OPTIMIZERS = {
    "momentum": {"momentum": 0.9},
    "adam": {"learning_rate": 0.01, "optimizer": "adam"},
    "fedprox": {"objective": "fedprox", "mu": 0.3},
    "moon": {"objective": "moon", "mu": 0.7},
}


@pytest.mark.parametrize("change", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("active", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_a_round_of_some_groups_is_training_with_the_others_frozen(change, active):
    """Bit for bit what FedPT would send that froze the other groups for ever.

    But for Adam: torch's kernel rounds the last entries of a vector in another way than the others,
    and which these are depends on how many vectors there are.
    """
    local = replace(PLAIN, **change)
    previous = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(5))
    sent = update_of(network(), active, local, previous=previous.clone())
    frozen = network(train=[p for g in active for p in GROUPS[g]])
    parts = torch.split(previous, SIZES)
    own = torch.cat([parts[g] for g in active])
    if local.objective == "moon":  # its frozen part would otherwise be another previous model
        parts = [part if g in active else start for g, (part, start) in enumerate(
            zip(parts, torch.split(network().flat, SIZES), strict=True))]  # fmt: skip
        sent = update_of(network(), active, local, previous=torch.cat(parts))
    found = update_of(frozen, None, local, previous=own.clone())
    if local.optimizer == "adam":
        torch.testing.assert_close(sent, found, rtol=1e-5, atol=1e-7)
    else:
        assert torch.equal(sent, found)
    assert len(sent) == sum(SIZES[g] for g in active)
    assert sent.abs().max() > 1e-3


def test_inactive_groups_have_no_gradient():
    model = network()
    update_of(model, (1,))
    trained = [name for name, p in model.module.named_parameters() if p.requires_grad]
    assert trained == ["2.weight", "2.bias"]
    update_of(model, None)  # the next round is full again
    assert all(p.requires_grad for p in model.module.parameters())


def test_the_state_of_a_clients_optimiser_is_that_of_the_active_part():
    model = network()
    optimizer, into = fresh_optimizer(LocalTraining(0.1, optimizer="adam"), model, (0, 2))
    optimizer.step(into)
    # of each part: two running means, and how many steps
    sizes = [tensor.numel() for tensor in optimizer.state]
    assert sizes == [SIZES[0], SIZES[2]] * 2 + [1, 1]


def test_all_active_groups_are_clipped_together():
    sent = update_of(network(), (0, 2), clip_norm=0.01)
    assert sent.norm() == pytest.approx(0.01, rel=1e-5)
    whole = update_of(network(), (0, 2))
    torch.testing.assert_close(sent / sent.norm(), whole / whole.norm())


# Objectives.


def test_fedprox_is_the_gradient_of_its_term_over_the_active_part():
    model, start = network(), network().flat.clone()
    span = model.spans((1,))[0]
    local = LocalTraining(0.1, batch_size=5, steps=2, objective="fedprox", mu=0.8)
    x, y = examples()
    flat = start.clone()
    order = list(batch_rows(local, 12, torch.Generator().manual_seed(0)))
    for batch in order:
        leaf = flat.clone().requires_grad_()
        logits = torch.func.functional_call(model.module, model.views(leaf), (x[batch],))
        term = 0.8 / 2 * (leaf - start).square().sum()  # over everything: the rest is zero
        (nn.functional.cross_entropy(logits, y[batch]) + term).backward()
        flat[span] -= 0.1 * leaf.grad[span]
    sent = update_of(model, (1,), local)
    torch.testing.assert_close(sent, flat[span] - start[span], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(sent, update_of(network(), (1,), replace(local, mu=1e-9)), rtol=1e-3)


def test_moon_is_the_gradient_of_its_term():
    model, start = network(), network().flat.clone()
    previous = start + torch.randn(len(start), generator=torch.Generator().manual_seed(9))
    local = replace(STEP, objective="moon", mu=2.0, temperature=0.2)
    x, y = examples()

    def features(flat):
        parts = model.views(flat)
        hidden = x
        for layer in ("0", "2"):
            hidden = (hidden @ parts[f"{layer}.weight"].T + parts[f"{layer}.bias"]).relu()
        return hidden, hidden @ parts["4.weight"].T + parts["4.bias"]

    leaf = start.clone().requires_grad_()
    own, logits = features(leaf)
    near, far = (
        torch.exp(torch.cosine_similarity(own, features(flat)[0].detach(), dim=1) / 0.2)
        for flat in (start, previous)
    )
    term = -torch.log(near / (near + far)).mean()
    (nn.functional.cross_entropy(logits, y) + 2.0 * term).backward()
    for active in ((0,), (1,), (0, 1)):
        sent = update_of(network(), active, local, previous=previous.clone())
        expected = torch.cat([-0.1 * leaf.grad[span] for span in model.spans(active)])
        torch.testing.assert_close(sent, expected, rtol=1e-3, atol=1e-6)
    without = update_of(network(), (0, 1), STEP)
    assert not torch.allclose(sent, without, rtol=1e-2)
    # the head is above the features: the term does not reach it
    head = update_of(network(), (2,), local, previous=previous.clone())
    torch.testing.assert_close(head, update_of(network(), (2,), STEP))


def test_moon_without_a_last_time_is_fedavg():
    local = replace(STEP, objective="moon", mu=2.0)
    plain = update_of(network(), None, STEP)
    torch.testing.assert_close(update_of(network(), None, local), plain, rtol=1e-4, atol=1e-7)


def test_each_simulated_device_remembers_its_own_model():
    def engine():
        local = LocalTraining(0.1, objective="moon", mu=5.0)
        return EmbeddedEngine(network(), two_users(), local=local, data_seed=0)

    def last_update(forget):
        one, used = server(), engine()
        fit(one, used, [[0, 1]] * 2)
        used = engine() if forget else used
        return [u.update for u in used.run(one.task([0, 1]), one.parameters)]

    for kept, lost in zip(last_update(False), last_update(True), strict=True):
        assert not torch.allclose(kept, lost, rtol=1e-3)


def test_an_engine_that_begins_late_says_that_memories_are_lost():
    moon, said = LocalTraining(0.1, objective="moon", mu=5.0), []

    def engine():
        return EmbeddedEngine(network(), two_users(), local=moon, data_seed=0, report=said.append)

    first, late, idle, one = engine(), engine(), engine(), server(plan())
    fit(one, first, [[0, 1]])
    list(first.run(one.task([0, 1]), one.parameters))
    assert not said
    list(late.run(one.task([0, 1]), one.parameters))
    assert said.pop().startswith("engine: begins with round 1, so moon's clients")
    list(idle.run(replace(one.task([]), round=0), one.parameters))
    list(idle.run(one.task([0, 1]), one.parameters))
    assert not said  # a round without anybody is no round that was missed


# The server.


def spans(t):
    return network().spans(SCHEDULE[t])


def step(one, *values):
    """A round in which client i sends a vector full of values[i]."""
    task = one.task(range(len(values)))
    dim = sum(SIZES[g] for g in task.active)
    return one.run_round(task.update(c, torch.full((dim,), v)) for c, v in enumerate(values))


def test_tasks_carry_the_schedule_and_the_plan_s_hash_fixes_it():
    one = server()
    asked = []
    for _ in range(ROUNDS):
        asked.append(one.task([]).active)
        step(one, 0.01)
    assert tuple(asked) == SCHEDULE
    assert one.task([]).active == ()
    with pytest.raises(ConfigError, match="planned rounds are done"):
        step(one, 0.01)
    moved = (SCHEDULE[0], SCHEDULE[1], *SCHEDULE[3:6], SCHEDULE[2], *SCHEDULE[6:])
    assert plan(mechanism=grouped(moved)).hash != plan().hash
    assert server(small_plan(4)).task([]).active is None


def test_exactly_the_active_vector_is_accepted():
    one = server()
    for groups in SCHEDULE:
        task, dim = one.task([]), sum(SIZES[g] for g in groups)
        shapes = {*SIZES, sum(SIZES), SIZES[0] + SIZES[1], dim + 1, 0} - {dim}
        wrong = [task.update(9 + i, torch.ones(shape)) for i, shape in enumerate(shapes)]
        wrong.append(task.update(50, torch.ones(dim, 1)))
        counts = one.run_round([*wrong, task.update(0, torch.ones(dim))])
        assert (counts.counted, counts.refused) == (1, len(wrong))


@pytest.mark.parametrize(
    "optimizer", [{"momentum": 0.9}, {"kind": "adam"}, {"kind": "adagrad"}], ids=str
)
@pytest.mark.parametrize("z", [0.0, 1.0])
def test_only_active_coordinates_move_ever(optimizer, z):
    one = server(plan(z), **optimizer)
    for t in range(ROUNDS):
        before = one.parameters.clone()
        step(one, 0.1, -0.02)
        moved = one.parameters != before
        inside = torch.zeros(sum(SIZES), dtype=torch.bool)
        for span in spans(t):
            inside[span] = True
        assert not moved[~inside].any()
        assert moved[inside].float().mean() > 0.99


def test_the_noise_of_the_model_is_the_stream_of_the_mechanism():
    z, clip_norm = 2.0, 0.5
    a_plan = plan(z, clip_norm=clip_norm)
    fields = {"dim": sum(SIZES), "stddev": 2.0**20, "source": SeededSource(3), "stream": 2}
    one, noise = server(a_plan), NoiseStream(a_plan.mechanism, **fields)
    total = network().flat.clone().double()
    for t in range(ROUNDS):
        step(one, 0.0)
        own = torch.split(
            noise.next() * (z * clip_norm / 2**20) / 4, [s.stop - s.start for s in spans(t)]
        )
        for span, part in zip(spans(t), own, strict=True):
            total[span] += part
        torch.testing.assert_close(one.parameters.double(), total, rtol=1e-5, atol=1e-6)


def test_the_control_a_client_that_clips_each_group_alone_is_clipped_jointly_again():
    """A full round of M groups, each at the clip norm: M times what one client may do, squared."""
    one = server(plan(clip_norm=0.5))
    before = one.parameters.clone()
    task = one.task([0])
    parts = [torch.ones(size) / size**0.5 * task.clip_norm for size in SIZES]
    assert torch.cat(parts).norm() == pytest.approx(3**0.5 * task.clip_norm)
    one.run_round([task.update(0, torch.cat(parts))])
    assert (one.parameters - before).norm() * 4 == pytest.approx(task.clip_norm, rel=1e-5)


def test_a_model_without_the_plan_s_groups_and_adaptive_clipping_are_refused():
    with pytest.raises(ConfigError, match="the plan's groups have 113"):
        Server(plan(), torch.zeros(112), source=SeededSource(0))
    with pytest.raises(ConfigError, match="grouped"):
        plan(1.0, adaptive_clipping=AdaptiveClipping(bit_noise_multiplier=5.0))


# Runs.

COHORTS = [[0, 1]] * ROUNDS


def engine():
    local = LocalTraining(0.1)
    return EmbeddedEngine(network(), two_users(), local=local, data_seed=0, deterministic=True)


@pytest.mark.parametrize("kind", [{"momentum": 0.9}, {"kind": "adam"}], ids=str)
def test_resumed_in_the_middle_of_a_cycle_bit_for_bit(kind, tmp_path):
    a_plan, optimizer = plan(1.0), ServerOptimizer(**kind)
    whole = server(a_plan, **kind)
    fit(whole, engine(), COHORTS)
    create_run(tmp_path / "run", a_plan, seed=3, facts={"delta": 1e-5}).close()
    for stop in (1, 4, 5, 9, ROUNDS):
        with RunFolder.open(tmp_path / "run") as folder:
            start, source = network().flat, folder.source()
            one = Server(folder.plan, start, source=source, optimizer=optimizer)
            folder.restore(one)
            fit(one, engine(), COHORTS[:stop], commit=folder.commit)
    assert torch.equal(one.parameters, whole.parameters)
    found = run_report(tmp_path / "run")
    assert found.complete
    assert not found.deviations
    assert found.guarantee.mechanism == "grouped"
    assert found.guarantee.mu == pytest.approx(a_plan.guarantee().mu)


def test_the_plan_survives_json_and_says_what_it_costs():
    a_plan = plan(1.5, participation=Participation(ROUNDS))
    again = PrivacyPlan.from_dict(a_plan.to_dict())
    assert again.hash == a_plan.hash
    assert again.guarantee().mu == a_plan.guarantee().mu
    assert a_plan.mechanism.sensitivity(Participation(ROUNDS)).squared == 3  # seven rounds a group
