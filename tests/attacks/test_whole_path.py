"""Statistics of a whole-path replay: copies, missing draws, samplers, the most visible client."""

import itertools

import numpy as np
import pytest
import torch

from accounting import BinaryTree, BufferedToeplitz, Participation
from attacks.lower_bounds.canaries import round_covariance, worst_view
from attacks.lower_bounds.repeats import gaussian, low_bits, missing, repeats
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
    assert not gaussian([("one", NOISE)], 1e-6).faults
    some = gaussian([("one", NOISE * (RNG.random(NOISE.shape) < 0.98))], 1e-6).faults
    assert "are below 0.0001" in some[-1]
    cut = gaussian([("one", RNG.standard_normal((6, 20_000)).clip(-3.3, 3.3))], 1e-6).faults
    assert " 0 of 120,000 draws are beyond 3.5" in cut[-1]
    noise = NOISE.copy()
    noise[2, 1990:1995] = 0
    (fault,) = missing(noise, {"weight": 1990, "bias": 10}, range(6), 1e-6).faults
    assert fault == "5 of 10 draws of the noise of bias in round 2 are missing."


def test_noise_in_coarser_steps_than_the_grids_is_named():
    steps = np.rint(NOISE * 2.0**20)
    assert not low_bits(steps, 0.5, 1e-6).faults
    assert low_bits(np.floor(steps / 64) * 64, 0.5, 1e-6).faults
    assert low_bits(NOISE.astype(np.float16).astype(np.float64) * 2.0**20, 0.5, 1e-6).faults
    # A release that is rounded to so few digits shows nothing of it, and is no fault.
    assert not low_bits(np.rint(steps / 2**14) * 2**14, 2.0**14, 1e-6).faults


def drawn(rng, rounds=20, population=500, q=0.1):
    """Return cohorts in which each member comes with chance q."""
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
    often = np.where(np.arange(500) % 10, 0.1 * 8 / 9, 0.2)
    assert "of single members" in "".join(found([drawn(rng, q=often) for _ in range(40)]))
    both = [[np.union1d(c, c ^ 1) for c in drawn(rng, q=0.0513)] for _ in range(40)]
    assert "pairs of members 1 apart" in "".join(found(both))
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


def test_no_client_of_a_tree_shows_more_than_the_one_that_is_found():
    """Whatever it sends: a bound over all patterns and directions, by |K^-1|, is attained."""
    for mechanism, limits in (
        (BinaryTree(8), Participation(8, 2, 4)),
        (BinaryTree(8), Participation(8, 8, 1)),
        (BinaryTree(8, restart_every=4), Participation(8, 8, 1)),
    ):
        covariance = round_covariance(mechanism.decoder())
        sizes = np.abs(np.linalg.inv(covariance))
        most = 0.0
        for rounds in itertools.product((0, 1), repeat=8):
            chosen = np.flatnonzero(rounds)
            if len(chosen) <= limits.max_participations and not np.any(
                np.diff(chosen) < limits.min_separation
            ):
                most = max(most, sizes[np.ix_(chosen, chosen)].sum())
        sent = worst_allocation([covariance], [range(8)], limits)
        assert visible(sent, [covariance], [range(8)]) == pytest.approx(most)
        assert most < mechanism.sensitivity(limits).squared  # of the nodes, which are not released


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
    assert 2 <= update.norm() < 4  # four clip norms of 0.5, or somewhat more
    types = {clients.update(i, 5, 0.5).dtype for i in range(24)}
    assert types == {torch.float32, torch.float64, torch.bfloat16}
    places, entries = clients.direction(14, 5)
    sent = clients.update(14, 5, 0.3)
    assert sent.dtype is torch.bfloat16
    sent = sent.double().numpy()[places[entries != 0]]
    assert sent / np.linalg.norm(sent) == pytest.approx(entries[entries != 0], abs=1e-15)
    assert np.linalg.norm(clients.contribution(0, [0])) == pytest.approx(1.0)
    assert not clients.contribution(3, [9]).any()  # not finite
    assert set(clients.ids) >= {1, "1", "worst"}
    assert not update[::2].any()
