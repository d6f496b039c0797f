"""Several bins of each member: against enumeration, sums over a grid, and importance sampling."""

import itertools
import math

import numpy as np
import pytest
from mixtures import adaptive as follows
from mixtures import below_the_truth, chosen_rows, deltas, mean_of_products

from accounting import (
    AllocatedGuarantee,
    BallsInBins,
    BinaryTree,
    ComposedGuarantee,
    ConfigError,
    EstimatedGuarantee,
    Guarantee,
    sampled_guarantee,
)
from accounting.random_allocation import Shares

slow = pytest.mark.slow


def test_the_mean_of_products_is_that_of_all_sets():
    numbers = np.random.default_rng(0).uniform(0, 2, (6, 3))
    for chosen in (1, 3, 6):
        sets = itertools.combinations(range(6), chosen)
        exact = np.mean([numbers[list(some)].prod(axis=0) for some in sets], axis=0)
        assert mean_of_products(numbers, chosen) == pytest.approx(exact)


@pytest.mark.parametrize(
    ("bins", "chosen", "cells"),
    [
        pytest.param(*case, marks=slow)
        for case in [
            (4, 2, 8),
            (5, 2, 8),
            (5, 4, 8),
            (7, 3, 5),
            (12, 5, 3),
            (12, 11, 3),
            (12, 2, 3),
        ]
    ],
)
def test_no_value_is_below_a_bound_that_was_enumerated(bins, chosen, cells):
    epsilons = np.array([0.0, 0.02, 0.3, 1.0, 2.5, 5.0])
    caught = 0
    for mu in (0.05, 0.7, 1.5):
        runs = [
            AllocatedGuarantee(1 / mu, BallsInBins(bins, bins, chosen=k))
            for k in (chosen, (chosen + 1) // 2)
        ]
        claims = [np.array([run.delta(float(e)) for e in epsilons]) for run in runs]
        for truth in below_the_truth(mu, bins, chosen, epsilons, cells):
            assert (claims[0] >= truth * (1 - 1e-9)).all()
            caught += (claims[1] < truth).any()
    assert caught  # a member who is charged for half of the bins


@pytest.mark.parametrize(
    ("bins", "chosen", "passes", "points"),
    [(3, 2, 1, 91), pytest.param(4, 2, 1, 45, marks=slow), pytest.param(2, 1, 2, 45, marks=slow)],
)
@pytest.mark.parametrize("adaptive", [False, True])
def test_no_value_is_below_the_sum_over_a_grid(bins, chosen, passes, points, adaptive):
    """Also of updates that depend on what was released; the distance shows how loose blocks are."""
    mu, epsilons = 0.8, [0.0, 0.5, 1.5]
    rows = chosen_rows(bins * passes, bins, chosen)
    update = follows if adaptive else None
    truth = deltas(np.eye(bins * passes), rows, 1 / mu, epsilons, points, update)
    run = AllocatedGuarantee(1 / mu, BallsInBins(bins, bins * passes, chosen=chosen))
    claim = np.array([run.delta(e) for e in epsilons])
    assert (claim >= truth * (1 - 1e-3)).all()
    if not adaptive and passes == 1:  # a member who is charged for one bin less
        assert (claim[:2] <= 1.5 * truth.max(axis=0)[:2]).all()
        less = AllocatedGuarantee(1 / mu, BallsInBins(bins, bins, chosen=chosen - 1))
        assert less.delta(0.0) < truth[0, 0]


def simulated(mu, bins, chosen, epsilon, tilt, draws, rng, passes=1):
    """Both deltas and their errors; every chosen round is shifted by tilt mu, or the other way."""
    results = []
    for sign in (1, -1):
        ratio, drawn = np.ones(draws), np.ones(draws)
        for _ in range(passes):
            x = rng.standard_normal((bins, draws))
            places = rng.random((bins, draws)).argsort(axis=0)[:chosen]
            shift = sign * tilt * mu
            np.put_along_axis(x, places, np.take_along_axis(x, places, 0) + shift, 0)
            ratio *= mean_of_products(np.exp(mu * x - mu * mu / 2), chosen)
            drawn *= mean_of_products(np.exp(shift * x - shift * shift / 2), chosen)
        gain = ratio - math.exp(epsilon) if sign > 0 else 1 - math.exp(epsilon) * ratio
        values = np.maximum(gain, 0) / drawn
        results.append((values.mean(), values.std() / math.sqrt(draws)))
    return results


@pytest.mark.parametrize(
    ("mu", "bins", "chosen", "passes", "epsilon", "tilt"),
    [
        pytest.param(*case, marks=slow)
        for case in [
            (0.7, 20, 4, 1, 1.0, 1.2),
            (0.7, 20, 4, 1, 2.5, 1.5),
            (1.0, 20, 7, 1, 2.0, 1.0),
            (0.7, 10, 3, 3, 2.0, 1.0),
            (1.0, 100, 5, 1, 0.5, 1.0),
            (1.0, 100, 5, 1, 3.0, 1.5),
            (1.0, 1000, 10, 1, 0.3, 1.0),
            (1.0, 1000, 10, 1, 1.5, 1.3),
            (0.2, 1000, 300, 1, 1.0, 1.0),
            (2.0, 50, 2, 1, 2.0, 1.0),
        ]
    ],
)
def test_a_simulation_agrees_and_would_catch_fewer_bins(mu, bins, chosen, passes, epsilon, tilt):
    rng, draws = np.random.default_rng(7), max(5_000, 2_000_000 // (bins * passes))
    sampling = BallsInBins(bins, bins * passes, passes > 1, chosen)
    claim = AllocatedGuarantee(1 / mu, sampling).delta(epsilon)
    found = simulated(mu, bins, chosen, epsilon, tilt, draws, rng, passes)
    worst, error = max(found)
    for mean, its_error in found:
        assert claim > mean - 4.5 * its_error
    if worst > 15 * error:  # else the draws have missed what matters
        assert claim < 2 * worst
        less = BallsInBins(bins, bins * passes, passes > 1, chosen - max(1, chosen // 10))
        assert AllocatedGuarantee(1 / mu, less).delta(epsilon) < worst - 4.5 * error


@slow
def test_blocks_of_unequal_size_cost_less_than_equal_ones_rounded_down():
    """8 of 20 bins: four blocks of two and four of three, not eight of two."""
    unequal = ComposedGuarantee((Shares(20, 0.5, chosen=8),)).epsilon(1e-6)
    assert unequal < 0.97 * ComposedGuarantee((Shares(2, 0.5, draws=8),)).epsilon(1e-6)
    # 3 of 4: a block of two, and two that hide nothing.
    block, plain = Shares(4, 0.5, chosen=3).parts()
    assert (block.bins, plain.mu) == (2, pytest.approx(math.sqrt(0.5)))


@pytest.mark.parametrize(
    ("z", "chosen"), [(0.05, 3), (0.5, 20), pytest.param(300.0, 7, marks=slow)]
)
def test_every_noise_and_number_of_bins_has_an_answer(z, chosen):
    run = AllocatedGuarantee(z, BallsInBins(20, 20, chosen=chosen))
    assert 0 <= run.epsilon(1e-6) <= Guarantee(run.mu).epsilon(1e-6)
    assert run.mu == pytest.approx(math.sqrt(chosen) / z)


def test_what_no_proof_covers_is_refused():
    several = BallsInBins(4, 8, chosen=2)
    assert several.participations == 4
    assert BallsInBins(10, 12, chosen=8).participations == 10
    for call in (
        lambda: sampled_guarantee(BinaryTree(8), several, noise_multiplier=1.0),
        lambda: EstimatedGuarantee(1.0, several, BinaryTree(8), 10_000),
    ):
        with pytest.raises(ConfigError, match="chosen: is accounted for in closed form"):
            call()
    with pytest.raises(ConfigError, match="chosen=5: must be at most 4"):
        BallsInBins(4, 8, chosen=5)
