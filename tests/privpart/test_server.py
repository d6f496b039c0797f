"""The server: what one client can do to the sum, and what becomes of the sum."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import small_plan

from accounting import BinaryTree, ConfigError, Independent, Participation, Workload
from privpart import (
    NoiseStream,
    PrivacyPlan,
    SecretSource,
    SeededSource,
    Server,
    ServerOptimizer,
)
from privpart.optimizer import ExactOptimizer, FlatOptimizer
from privpart.settings.client import LocalTraining

DIM = 6


def plan(rounds=4, z=0.0, k=1, b=1, **change) -> PrivacyPlan:
    fields = {"mechanism": rounds, "participation": (k, b), "report_goal": 10}
    return small_plan(**fields | {"noise_multiplier": z} | change)


def server(a_plan=None, **optimizer) -> Server:
    chosen = ServerOptimizer(**optimizer) if optimizer else None
    return Server(a_plan or plan(), torch.zeros(DIM), source=SeededSource(3), optimizer=chosen)


def run(one: Server, *updates):
    """One round with updates given as (client, value or vector)."""
    task = one.task([])
    return one.run_round(
        task.update(client, torch.full((DIM,), x) if isinstance(x, float) else x)
        for client, x in updates
    )


def test_mean_over_the_report_goal_never_over_who_came():
    one = server()
    counts = run(one, (0, 0.1), (1, 0.1))
    torch.testing.assert_close(one.parameters, torch.full((DIM,), 0.2 / 10))
    assert (counts.received, counts.counted, counts.refused) == (2, 2, 0)


def test_answers_to_another_round_or_plan_are_refused():
    one, other = server(plan(rounds=8, k=8)), server(plan(rounds=8, k=8, clip_norm=0.4))
    old = one.task([]).update(0, torch.full((DIM,), 0.1))
    assert one.run_round([old]).counted == 1
    foreign = other.task([]).update(1, torch.ones(DIM))
    replayed = [replace(foreign, round=2), old, replace(old, round=True), replace(old, plan=None)]
    counts = run(one, (2, 0.1))
    assert counts.counted == 1
    counts = one.run_round([*replayed, one.task([]).update(3, torch.zeros(DIM))])
    assert (counts.counted, counts.refused) == (1, 4)
    assert counts.refusals == {"another plan": 1, "another round": 1, "malformed": 2}


def test_an_interrupted_round_halts_the_server(monkeypatch):
    one = server(plan(z=1.0))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(one, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(one, (0, 0.1))
    with pytest.raises(ConfigError, match="halted: a round was interrupted"):
        one.task([])


def test_clients_that_fail_leave_the_round_as_it_was():
    one = server(plan(z=1.0))

    def dies():
        yield one.task([]).update(0, torch.zeros(DIM))
        raise OSError("worker died")

    with pytest.raises(OSError, match="worker died"):
        one.run_round(dies())
    assert run(one, (0, 0.1)).counted == 1


def test_below_the_minimum_cohort_nothing_changes():
    one, clean = server(plan(z=1.0, minimum_cohort=2)), server(plan(z=1.0, minimum_cohort=2))
    before = one.parameters.clone()
    counts = run(one, (0, 0.1), (0, 0.1), (1, [0.0]))
    assert (counts.received, counts.counted, counts.released) == (3, 0, False)
    assert counts.refusals == {"twice in a round": 1, "wrong shape or type": 1}
    assert counts.admitted == 1
    assert one.round == 0
    assert torch.equal(one.parameters, before)
    for each in (one, clean):  # client 0 has not used up its one participation, nor noise a draw
        assert run(each, (0, 0.1), (1, 0.1)).released
    assert torch.equal(one.parameters, clean.parameters)


def test_a_client_counts_once_per_round_and_as_often_as_planned():
    one = server(plan(rounds=8, k=2, b=3))
    reasons = []
    for expected in (1, 0, 0, 1, 0, 0, 0, 0):
        reasons.append(one.ineligible([7, 1]).get(7))
        assert 1 not in one.ineligible([7, 1])
        filler = (100 + one.round, 0.0)  # so that no round is empty
        assert run(one, (7, 0.1), (7, 0.1), filler).counted == expected + 1
    assert reasons == [None, *["separation"] * 2, None, *["participation limit"] * 4]


MALFORMED = [
    torch.zeros(DIM + 1),
    torch.zeros(DIM, 1),
    torch.zeros(DIM, dtype=torch.int64),
    torch.zeros(DIM, dtype=torch.float8_e5m2),
    torch.zeros(DIM).to_sparse(),
    torch.zeros(DIM, device="meta"),
    [0.0] * DIM,
    None,
]


@pytest.mark.parametrize("client", [math.nan, [], True, "", "x" * 257, "\ud800", np.uint64(7)])
def test_what_is_not_an_id_is_refused(client):
    one = server()
    counts = run(one, *[(client, torch.zeros(DIM))] * 3)
    assert (counts.counted, counts.refusals) == (0, {"malformed": 3})


def test_ids_are_whole_numbers_and_strings_and_no_two_are_one_client():
    ids = [0, -1, 2**63, 2**64 - 1, 1 - 2**256, "0", "-1", "ada", "Ada", "\u00e9", "e\u0301", " "]
    one = server(plan(rounds=2))
    assert run(one, *[(client, 0.01) for client in reversed(ids)]).counted == len(ids)
    assert one.cohort == (1 - 2**256, -1, 0, 2**63, 2**64 - 1, *sorted(ids[5:]))
    assert one.ineligible([*ids, 7]) == dict.fromkeys(ids, "participation limit")
    again = run(one, (7, 0.0), *[(client, 0.01) for client in ids])
    assert (again.counted, again.refusals) == (1, {"participation limit": len(ids)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_only_float32_models_so_that_the_noise_covers_every_bit(dtype):
    with pytest.raises(ConfigError, match=r"must be torch\.float32"):
        Server(plan(), torch.zeros(3, dtype=dtype), source=SeededSource(0))


def shrunk() -> torch.Tensor:
    vector = torch.zeros(DIM)
    vector.untyped_storage().resize_(0)
    return vector


@pytest.mark.parametrize("delta", [*MALFORMED, shrunk(), math.nan, math.inf])
def test_malformed_updates_and_what_is_not_finite_add_nothing_and_raise_nothing(delta):
    """What is not finite counts: else data would decide whether a round reaches its minimum."""
    finite = not isinstance(delta, float)
    one, clean = (server(plan(minimum_cohort=1 if finite else 2)) for _ in range(2))
    counts = run(one, (0, 0.1), (1, delta))
    assert run(clean, (0, 0.1), (1, 0.0)).counted == 2
    assert torch.equal(one.parameters, clean.parameters)
    assert (counts.counted, counts.refused) == ((1, 1) if finite else (2, 0))


@settings(max_examples=60)
@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 12), st.integers(1, 3))
def test_a_round_most_of_which_was_refused_releases_nothing(asked, good, bad, minimum):
    """Against the rule in words: most of those asked answered, and none of it was admitted."""
    one, clean = (server(plan(z=1.0, minimum_cohort=minimum)) for _ in range(2))
    refused = range(asked - 1, asked - 1 - bad, -1)  # some of those who come and some not asked
    updates = [(client, 0.01) for client in range(good)] + [(client, [0.0]) for client in refused]
    task = one.task(range(asked))
    counts = one.run_round(
        (task.update(c, torch.full((DIM,), x) if isinstance(x, float) else x) for c, x in updates),
        asked=range(asked),
    )
    wholly = len([client for client in refused if good <= client < asked])
    assert (counts.asked, counts.refused_clients) == (asked, wholly)
    mostly = wholly > asked / 2
    assert counts.released == (good >= minimum and not mostly)
    assert (counts.refused, counts.admitted) == (bad, good) == (sum(counts.refusals.values()), good)
    assert counts.counted == (good if counts.released else 0)
    if counts.released:
        return
    assert one.round == 0
    assert not one.parameters.any()
    assert not one.ineligible(range(8))
    for each in (one, clean):  # no noise was drawn either
        assert run(each, *[(client, 0.1) for client in range(3)]).released
    assert torch.equal(one.parameters, clean.parameters)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("mechanism", [BinaryTree(5), Independent(5), BinaryTree(5, 2)], ids=repr)
def test_the_server_adds_exactly_the_noise_of_the_stream_to_the_sum(mechanism, momentum):
    """And momentum is heavy ball over the noised sums."""
    a_plan = plan(rounds=5, z=2.0, mechanism=mechanism)
    one = server(a_plan, momentum=momentum)
    stream = NoiseStream(mechanism, dim=DIM, stddev=2.0**20, source=SeededSource(3))
    expected, velocity = (torch.zeros(DIM, dtype=torch.float64) for _ in range(2))
    for client in range(5):
        run(one, (client, 0.1))
        velocity = momentum * velocity + (0.1 + stream.next() * (2.0 * 0.5 / 2**20)) / 10
        expected += velocity
        torch.testing.assert_close(one.parameters.double(), expected, rtol=1e-5, atol=1e-6)


def test_noise_on_released_models_has_the_planned_size():
    """The whole path: z times clip_norm on the sum, divided by the goal; not scaled for a mean."""
    one = Server(plan(rounds=3, z=2.0), torch.zeros(100_000), source=SecretSource())
    for client, variance in enumerate(BinaryTree(3).prefix_variance()):
        one.run_round([one.task([]).update(client, torch.zeros(100_000))])
        expected = 2.0 * 0.5 * math.sqrt(variance) / 10
        assert float(one.parameters.double().std()) == pytest.approx(expected, rel=0.02)


TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
"""Their classes take two seconds to import when the first one is made: privpart makes none."""


def starts_and_gradients(rounds, scales):
    """Return three parts, one of them empty, and gradients of those that move in each round."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.rand(size, generator=generator) for size in (7, 0, 70_001)]
    gradients = []
    for groups in rounds:
        drawn = {g: torch.randn(len(starts[g]), generator=generator) for g in groups}
        for gradient in drawn.values():
            powers = torch.randint(-scales, scales + 1, gradient.shape, generator=generator)
            gradient.mul_(10.0**powers)
            gradient[::5] = 0.0
        gradients.append(drawn)
    return starts, gradients


def moved_by_torch(kind, starts, gradients, **options):
    """Return the parts after steps of torch's class, and its state by part and name."""
    parts = [start.clone() for start in starts]
    torch_s = TORCH[kind](parts, lr=0.3, **options)
    for drawn in gradients:
        for group, part in enumerate(parts):
            part.grad = drawn.get(group)
        torch_s.step()
    state = {
        f"{group}.{name}": value
        for group, own in torch_s.state_dict()["state"].items()
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
    }
    return parts, state


@pytest.mark.parametrize(
    ("kind", "options"), [("sgd", {"momentum": 0.9}), ("adam", {"fused": True})]
)
def test_a_clients_steps_are_torchs_bit_for_bit(kind, options, monkeypatch):
    """With gradients from 1e-30 to 1e30, zeros and NaN."""
    starts, gradients = starts_and_gradients([(0, 1, 2)] * 5, scales=30)
    gradients[3][2][3:4] = torch.nan
    expected, state = moved_by_torch(kind, starts, gradients, **options)
    monkeypatch.delattr(torch.optim.Optimizer, "__init__")
    parts = [start.clone() for start in starts]
    local = LocalTraining(0.3, optimizer=kind, momentum=options.get("momentum", 0.0))
    one = FlatOptimizer(local, parts)
    for drawn in gradients:
        one.step(list(drawn.values()))

    def bits(tensor):
        return tensor.reshape(-1).view(torch.int32).tolist()

    assert list(map(bits, parts)) == list(map(bits, expected))
    assert sorted(map(bits, one.state)) == sorted(map(bits, state.values()))
    assert parts[2].isnan().any()  # power: the NaN came through


def same_bits(one, other):
    return torch.equal(one.reshape(-1).view(torch.int32), other.reshape(-1).view(torch.int32))


def move(one, gradients, piece=100_000, share=1.0):
    """Take a server's step, in pieces."""
    one.begin(gradients, share)
    for number, gradient in gradients.items():
        for start in range(0, len(gradient), piece):
            here = slice(start, min(start + piece, len(gradient)))
            one.move(number, here, gradient[here].clone().numpy())


@pytest.mark.parametrize(
    ("kind", "options"),
    [("sgd", {}), ("sgd", {"momentum": 0.9}), ("adam", {"eps": 1e-3}), ("adagrad", {"eps": 1e-3})],
)
def test_the_servers_steps_and_state_are_torchs_up_to_rounding(kind, options, monkeypatch):
    """Where parts rest in between, and the state is kept and loaded after the first round."""
    rounds = [(0, 1, 2), (0,), (0, 1, 2), (2,), (0, 1, 2)]
    starts, gradients = starts_and_gradients(rounds, scales=0)
    expected, state = moved_by_torch(kind, starts, gradients, **options)
    monkeypatch.delattr(torch.optim.Optimizer, "__init__")
    named = {"momentum": "momentum", "eps": "adaptivity"}
    settings = ServerOptimizer(
        kind=kind, learning_rate=0.3, **{named[name]: value for name, value in options.items()}
    )
    parts, pieced = ([start.clone() for start in starts] for _ in range(2))
    first, second = (ExactOptimizer(settings, parts) for _ in range(2))
    move(first, gradients[0])
    second.load(first.tensors())
    in_pieces = ExactOptimizer(settings, pieced)
    for drawn in gradients[1:]:
        move(second, drawn)
    for drawn in gradients:
        move(in_pieces, drawn, piece=997)
    assert all(map(same_bits, pieced, parts))
    assert all(map(same_bits, in_pieces.tensors().values(), second.tensors().values()))
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(parts, expected, **close)
    assert second.tensors().keys() == state.keys()
    for name, value in second.tensors().items():
        torch.testing.assert_close(value, state[name], **close)


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        ("sgd", {"-1.momentum_buffer": 7}, "sgd on this model: it has -1.momentum_buffer .7,"),
        ("sgd", {"0.momentum_buffer": 1}, "sgd on this model: it has 0.momentum_buffer .1,"),
        ("sgd", {"0.exp_avg": 7}, "is not that of sgd"),
        ("adagrad", {"0.sum": 7}, "is not that of adagrad"),
    ],
)
def test_the_state_of_another_optimiser_or_model_is_refused(kind, names, message):
    """Before a round, whose noise would be lost with it."""
    one = ExactOptimizer(ServerOptimizer(kind=kind), [torch.zeros(7)])
    with pytest.raises(ConfigError, match=message):
        one.load({name: torch.zeros(size) for name, size in names.items()})
    assert not one.tensors()


def test_a_run_is_private_only_with_secret_noise():
    start = torch.zeros(2)
    secret = Server(plan(z=1.0), start, source=SecretSource())
    assert secret.private
    assert secret.report(1e-6).noise_source == "os"
    assert not server(plan(z=1.0)).private
    assert server(plan(z=1.0)).report(1e-6).status == "not-private"
    assert not Server(plan(z=0.0), start, source=SecretSource()).private
    with pytest.raises(ConfigError, match="Without noise there is no guarantee"):
        plan(z=0.0).guarantee()


def test_no_round_beyond_the_plan():
    one = server(plan(rounds=1))
    run(one, (0, 0.1))
    with pytest.raises(ConfigError, match="all 1 planned rounds are done"):
        one.run_round([])


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (plan, "clip_norm", 1e-38),
        (plan, "noise_multiplier", np.inf),
        (plan, "participation", Participation(9)),
        (server, "momentum", np.nan),
        (server, "momentum", "0.9"),
        (server, "weight_decay", None),
        (server, "learning_rate", 0),
    ],
)
def test_bad_plans_and_servers(make, field, value):
    with pytest.raises(ConfigError, match=field.split("_")[0]):
        make(**{field: value})


def test_a_round_does_not_run_inside_a_round():
    """Its updates would be in two sums, and count once."""
    one = server(plan(z=1.0))

    def nested():
        one.run_round([one.task([]).update(2, torch.ones(DIM))])
        yield one.task([]).update(1, torch.ones(DIM))

    with pytest.raises(ConfigError, match="must not run another round"):
        one.run_round(nested())
    assert one.round == 0
    run(one, (2, 0.1))
    assert one.round == 1


def test_a_copy_would_repeat_the_noise():
    one = server(plan(z=1.0))
    for value in (one, one._noise):
        with pytest.raises(TypeError, match="never copied"):
            copy.copy(value)


def test_a_state_whose_rounds_disagree_is_refused_and_halts_the_server():
    one = server(plan(z=1.0))
    run(one, (0, 0.1))
    tensors, values = one.state_dict()
    fresh = server(plan(z=1.0))
    with pytest.raises(ConfigError, match="is that of round 0, its noise that of round 1"):
        fresh.load_state_dict(tensors, values | {"round": 0}, {})
    with pytest.raises(ConfigError, match="halted"):
        fresh.task([])
    with pytest.raises(ConfigError, match="the server has begun"):
        one.load_state_dict(tensors, values, {})


def test_a_state_is_not_taken_between_a_task_and_its_round():
    one = server(plan(z=1.0))
    task = one.task([0])
    with pytest.raises(ConfigError, match="under way"):
        one.state_dict()
    one.run_round([task.update(0, torch.zeros(DIM))])
    one.state_dict()


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_models_are_what_the_workload_makes_of_the_sums(momentum):
    """The error that ``privpart mechanisms`` shows is that of this optimiser's steps."""
    draws = np.random.default_rng(2)
    shares = tuple(draws.uniform(0.1, 1.0, 9))
    gradients = draws.normal(size=(9, 4)).astype(np.float32)
    settings = ServerOptimizer(learning_rate=0.25, momentum=momentum)
    model = torch.zeros(4)
    optimizer, models = ExactOptimizer(settings, [model]), []
    for gradient, share in zip(gradients, shares, strict=True):
        move(optimizer, {0: torch.from_numpy(gradient)}, share=share)
        models.append(model.numpy().copy())
    expected = -0.25 * Workload(momentum, shares).models(gradients)
    assert np.array(models) == pytest.approx(expected, rel=1e-5, abs=1e-6)
