"""Statistics of a whole-path replay: copies, missing draws, samplers, the most visible client."""

import itertools

import numpy as np
import pytest

from accounting import BinaryTree, BufferedToeplitz, Participation
from attacks.lower_bounds.canaries import round_covariance, worst_view
from attacks.lower_bounds.repeats import gaussian, missing, repeats
from attacks.lower_bounds.replayed_clients import ReplayedClients, visible, worst_allocation
from attacks.lower_bounds.sampler import least_rate, sampler

RNG = np.random.default_rng(5)
NOISE = RNG.standard_normal((6, 2000))
OTHER = RNG.standard_normal((4, 900))


def copies(name):
    noise = NOISE.copy()
    if name == "negated half":
        noise[:, 1000:] = -noise[:, :1000]
    if name == "reversed half":
        noise[:, 1000:] = noise[:, 999::-1]
    if name == "shifted from round to round":
        noise[1:] = np.roll(noise[:-1], 77, axis=1)
    if name == "rounds in reverse":
        noise[3:] = noise[2::-1, ::-1]
    if name == "one round in two blocks":
        noise[4, :900] = OTHER[1]
    return noise


@pytest.mark.parametrize(
    "name",
    ["negated half", "reversed half", "shifted from round to round", "rounds in reverse",
     "one round in two blocks"],
)  # fmt: skip
def test_copies_of_noise_are_found_wherever_they_are(name):
    assert repeats([("one", copies(name)), ("other", OTHER)], 1e-6).faults
    assert not repeats([("one", NOISE), ("other", OTHER)], 1e-6).faults


def test_sound_noise_fails_as_often_as_the_level_says():
    rng = np.random.default_rng(6)
    failed = np.zeros(3)
    for _ in range(200):
        noise = rng.standard_normal((4, 500))
        blocks = [("one", noise), ("other", rng.standard_normal((3, 900)))]
        found = (
            repeats(blocks, 0.05),
            gaussian(blocks, 0.05),
            missing(noise, {"weight": 490, "bias": 10}, range(4), 0.05),
        )
        failed += [bool(check.faults) for check in found]
    assert failed.max() <= 23  # at 5 % each, more has probability 1e-4


def test_noise_that_is_not_gaussian_or_is_missing_is_named():
    assert gaussian([("one", np.sign(NOISE))], 1e-6).faults
    assert "zero" in gaussian([("one", NOISE * (RNG.random(NOISE.shape) < 0.98))], 1e-6).faults[-1]
    noise = NOISE.copy()
    noise[2, 1990:1995] = 0
    (fault,) = missing(noise, {"weight": 1990, "bias": 10}, range(6), 1e-6).faults
    assert fault == "5 of 10 draws of the noise of bias in round 2 are missing."


def drawn(rng, rounds=20, population=500, q=0.1):
    return [np.flatnonzero(rng.random(population) < q) for _ in range(rounds)]


def test_a_sampler_is_compared_with_its_probability():
    about = {"expected": [50.0] * 20, "population": 500, "independent": True, "apart": 20}

    def found(draws, level=1e-6):
        return sampler(draws, **about, false_alarm=level).faults

    rng = np.random.default_rng(7)
    assert not found([drawn(rng) for _ in range(20)])
    assert found([drawn(rng, q=0.11) for _ in range(20)])
    assert found([[drawn(rng, 1)[0]] * 20 for _ in range(20)])
    assert found([drawn(rng)] * 20)
    alarms = sum(bool(found([drawn(rng) for _ in range(5)], 0.05)) for _ in range(100))
    assert alarms <= 14
    wrong = sum(least_rate(float(rng.poisson(400)), 400.0, 0.05) >= 1 for _ in range(400))
    assert wrong <= 40


def test_the_most_visible_client_of_one_group_is_the_accountants_worst():
    for mechanism in (BinaryTree(8), BufferedToeplitz(8, (0.9,), (0.3,))):
        limits = Participation(8, 3, 2)
        covariance = round_covariance(mechanism.decoder())
        found = worst_allocation([covariance], [range(8)], limits)
        mu = np.sqrt(visible(found, [covariance], [range(8)]))
        assert mu == pytest.approx(worst_view(covariance, limits, 1.0).mu)
        accounted = np.sqrt(mechanism.sensitivity(limits).squared)
        # Prefix sums of a tree show less than its nodes, all of which are accounted for.
        assert mu == pytest.approx(accounted if mechanism.name != "tree" else 4.2426407)


def test_the_most_visible_client_spans_groups_as_well_as_brute_force():
    rounds = [[0, 1, 3], [0, 2, 3]]
    covariances = [round_covariance(BinaryTree(3).decoder())] * 2
    limits = Participation(4, 2, 2)
    found = visible(worst_allocation(covariances, rounds, limits), covariances, rounds)
    angles = np.linspace(0, np.pi / 2, 60)
    best = 0.0
    for i, j in itertools.combinations(range(4), 2):
        if j - i < 2:
            continue
        for a, b in itertools.product(angles, angles):
            sent = np.zeros((4, 2))
            for t, angle in ((i, a), (j, b)):
                active = [g for g in range(2) if t in rounds[g]]
                sent[t, active] = (np.cos(angle), np.sin(angle)) if len(active) > 1 else 1.0
            best = max(best, visible(sent, covariances, rounds))
    assert found >= best - 1e-6


def test_what_the_plan_gives_a_client_is_computed_here():
    clients = ReplayedClients(
        Participation(6, 2, 3), [slice(0, 40)], [(0,)] * 6, np.zeros((6, 1)), 24, 0
    )
    assert (clients.planned(1), clients.planned(5)) == ([1, 4], [5])
    assert clients.planned(24) == []
    update = clients.update(0, 0, 0.5)
    assert np.linalg.norm(update) == pytest.approx(2.0)  # four clip norms of 0.5
    assert np.linalg.norm(clients.contribution(0, [0])) == pytest.approx(1.0)
    assert not clients.contribution(3, [9]).any()  # not finite
    assert set(clients.ids) >= {1, "1", "worst"}
    assert not update[::2].any()
