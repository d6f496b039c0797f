"""Paired replay: tight on sound noise, loud on faulty noise, and exact on the real server."""

import numpy as np
import pytest
import torch

from accounting import BinaryTree, BufferedToeplitz, Participation, gaussian, guarantee
from attacks import Canaries, paired, round_covariance, worst_view
from privpart import ClientUpdate, PrivacyPlan, SeededSource, Server

DELTA = 1e-5
AT = {"noise_multiplier": 1.0}
TREE = BinaryTree(16)
COVARIANCE = round_covariance(TREE.decoder())
ROOT = np.linalg.cholesky(COVARIANCE)
DIM = 4096
FIRST = np.outer(np.eye(16)[0], np.eye(DIM)[7])


def noise(seed: int, z: float = 1.0) -> np.ndarray:
    draws = np.random.default_rng(seed).standard_normal((16, DIM))
    return z * (ROOT @ draws)


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 10.0])
def test_sound_noise_gives_the_accountants_epsilon_to_a_percent(epsilon):
    z = np.sqrt(5.0) / gaussian.mu(epsilon, DELTA)  # the tree's squared sensitivity is 5
    found = paired(FIRST, noise(1, z), COVARIANCE, noise_multiplier=z)
    assert (found.faults, found.off_plan) == ((), "")
    assert found.signal == pytest.approx(np.sqrt(5.0))
    assert found.draws == 16 * DIM
    assert 0.985 * epsilon < found.bound(DELTA).epsilon < epsilon


def test_bounds_and_tests_of_sound_noise_are_wrong_as_often_as_they_say():
    """Of 400 replays: more bounds above the truth at 5 %, or alarms at 5 % each, once in 10^4."""
    rng = np.random.default_rng(2)
    sizes = {"weight": 27, "bias": 4, "shift": 1}
    found = [
        paired(
            FIRST[:, :32], ROOT @ rng.standard_normal((16, 32)), COVARIANCE, **AT,
            tensors=sizes, false_alarm=0.1,
        )
        for _ in range(400)
    ]  # fmt: skip
    assert 2 <= sum(r.bound(DELTA).mu > np.sqrt(5.0) for r in found) <= 43
    assert sum(bool(r.faults) for r in found) < 40
    assert sum(bool(r.off_plan) for r in found) < 40


def test_noise_of_another_deviation_than_the_plans_is_named_and_its_bound_is_kept():
    found = paired(FIRST, noise(3, 0.98), COVARIANCE, **AT)
    assert found.bound(DELTA).mu > np.sqrt(5.0)
    assert found.faults == ()
    assert "0.9776" in found.off_plan
    assert "the plan says 1" in found.off_plan
    few = paired(FIRST[:, :750], noise(3, 0.95)[:, :750], COVARIANCE, **AT)  # 12,000 draws
    assert few.off_plan
    assert paired(FIRST, noise(3, 1.05), COVARIANCE, **AT).off_plan


@pytest.mark.parametrize("t", range(16))
@pytest.mark.parametrize(("size", "share"), [(3, 0.0), (10, 0.02), (100, 0.45), (1000, 0.75)])
def test_a_tensor_with_less_noise_in_one_round_is_named(t, size, share):
    """Also where whitening hides it: under a tree, round 1 without noise looks like round 0."""
    residual = noise(7)
    residual[t, 2000 : 2000 + size] *= share
    sizes = {"before": 2000, "bias": size, "after": DIM - 2000 - size}
    found = paired(FIRST, residual, COVARIANCE, **AT, tensors=sizes, rounds=range(20, 36))
    assert any(f"The noise of bias in round {20 + t} has" in fault for fault in found.faults)
    assert not paired(FIRST, noise(7), COVARIANCE, **AT, tensors=sizes).faults


def broken(kind: str) -> np.ndarray:
    residual = noise(4)
    if kind == "reused":  # round 9 repeats the fresh draws of round 3
        draws = np.random.default_rng(4).standard_normal((16, DIM))
        draws[9] = draws[3]
        return ROOT @ draws
    if kind == "weak round":
        draws = np.random.default_rng(4).standard_normal((16, DIM))
        draws[5] *= 0.8
        return ROOT @ draws
    if kind == "independent":  # of the right variance on average, without the tree's correlations
        return np.random.default_rng(4).standard_normal((16, DIM)) * 1.4
    if kind == "selected":  # parameter 100 gets none
        residual[:, 100] = 0.0
    return residual


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("reused", "rounds 3 and 9"),
        ("weak round", "round 5"),
        ("independent", "apart"),
        ("selected", "missing"),
    ],
)
def test_noise_that_is_not_the_mechanisms_is_named(kind, says):
    found = paired(FIRST, broken(kind), COVARIANCE, **AT)
    assert any(says in fault for fault in found.faults)


def test_parameters_may_be_read_in_parts(monkeypatch):
    whole = paired(FIRST[:, :70], noise(1)[:, :70], COVARIANCE, **AT)
    monkeypatch.setattr("attacks.lower_bounds.replay._PART", 16 * 9)
    parts = paired(torch.from_numpy(FIRST[:, :70]), noise(1)[:, :70], COVARIANCE, **AT)
    assert parts.bound(DELTA).mu == pytest.approx(whole.bound(DELTA).mu)


def test_rounding_of_the_releases_adds_nothing_to_the_signal():
    """The two runs round differently at every parameter, by more in all than the client sends."""
    error = np.random.default_rng(5).uniform(-0.03, 0.03, (16, DIM))
    most = 3 * np.linalg.norm(error, axis=0)
    found = paired(
        FIRST + error, noise(1), COVARIANCE, **AT, along=FIRST[:, 7],
        rounding=most,
    )  # fmt: skip
    assert found.signal == pytest.approx(np.sqrt(5.0))
    other = np.roll(9 * FIRST, 1, axis=1)  # what a fault sends another way still counts
    found = paired(other, noise(1), COVARIANCE, **AT, along=other[:, 7], rounding=1 / 64)
    assert found.signal == pytest.approx(9 * np.sqrt(5.0) - 1)


def test_a_single_round_with_a_draw_of_zero_is_sound():
    """On the server's grid one draw of a few million is 0."""
    residual = np.random.default_rng(6).standard_normal((1, 1000))
    residual[0, 3] = 0.0
    client = np.eye(1000)[:1]
    assert paired(client, residual, np.eye(1), **AT).faults == ()


@pytest.mark.parametrize("confidence", [1e-17, 1 - 2.0**-53])
def test_any_confidence_gives_a_finite_bound(confidence):
    found = paired(FIRST[:, :9], noise(1)[:, :9], COVARIANCE, **AT)
    assert np.isfinite(found.bound(DELTA, confidence).epsilon)


def rounds_sums(mechanism, z, present, updates, canary):
    """Return the noised sums of the real server, in clip norms, from its released models."""
    clip_norm, n = 0.5, mechanism.rounds
    plan = PrivacyPlan(
        mechanism=mechanism,
        participation=Participation(n),
        clip_norm=clip_norm,
        noise_multiplier=z,
        report_goal=1,
    )
    server = Server(plan, torch.zeros(DIM), source=SeededSource(5))
    released = [server.parameters.double()]
    for t in range(n):
        sent = [*updates[t], *([canary] if present and t == 0 else [])]
        server.run_round(
            ClientUpdate(100 * t + i, update, t, plan.hash) for i, update in enumerate(sent)
        )
        released.append(server.parameters.double())
    return torch.stack(released).diff(dim=0) / clip_norm


@pytest.mark.parametrize(
    "mechanism",
    [BinaryTree(8), BufferedToeplitz(8, decay=(0.7, 0.97), scale=(0.3, 0.13))],
    ids=["tree", "blt"],
)
def test_the_real_server_shows_what_the_accountant_says(mechanism):
    z, n = 2.0, 8
    covariance = round_covariance(mechanism.decoder())
    worst = worst_view(covariance, Participation(n), z)
    assert worst.rounds == (0,)
    rng = torch.Generator().manual_seed(6)
    updates = [[0.1 * torch.randn(DIM, generator=rng) for _ in range(2)] for _ in range(n)]
    clipped = torch.stack([sum(u * min(1, 0.5 / float(u.norm())) for u in own) for own in updates])
    canary = Canaries(0, 1, DIM).update(0, 0.5)
    alone, joined = (rounds_sums(mechanism, z, p, updates, canary) for p in (False, True))
    found = paired(joined - alone, alone - clipped / 0.5, covariance, noise_multiplier=z)
    truth = guarantee(mechanism, Participation(n), noise_multiplier=z)
    assert found.faults == ()
    assert found.signal == pytest.approx(worst.mu * z, rel=1e-3)
    assert found.sigma == pytest.approx(z, rel=0.02)
    assert 0.97 * truth.mu < found.bound(DELTA).mu <= truth.mu
