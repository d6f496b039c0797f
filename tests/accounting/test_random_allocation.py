"""Balls in bins: against enumeration, quadrature, importance sampling, and what is known of it."""

import math

import numpy as np
import pytest
from mixtures import below_the_truth
from scipy.stats import norm

from accounting import AllocatedGuarantee, BallsInBins, ConfigError, Guarantee, random_allocation
from accounting.random_allocation import Allocation

SLOW = pytest.mark.slow


def _deltas(mu, bins, epsilon, far=None):
    allocation, at = Allocation(mu, bins, far), np.array([epsilon])
    return float(allocation.removed(at)[0]), float(allocation.added(at)[0])


def two_bins(mu, epsilon):
    """Both deltas of two bins, by the definition, on a grid of 23 million points."""
    x = np.linspace(-12, 12 + mu, 4801)
    weight = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    one = np.exp(mu * x - mu * mu / 2)
    removed = added = 0.0
    for rows in np.array_split(np.arange(len(x)), 24):
        ratio = (one[rows, None] + one) / 2
        both = np.outer(weight[rows], weight)
        removed += float((both * np.maximum(ratio - math.exp(epsilon), 0)).sum())
        added += float((both * np.maximum(1 - math.exp(epsilon) * ratio, 0)).sum())
    return removed, added


@pytest.mark.parametrize("mu", [0.1, 1.0, pytest.param(3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("factor", [-1.0, 0.0, 3.0])
def test_two_bins_are_never_below_the_truth_and_close_to_it(mu, factor):
    epsilon = factor * mu
    for found, truth in zip(_deltas(mu, 2, epsilon), two_bins(mu, epsilon), strict=True):
        assert found >= truth * (1 - 3e-5) - 1e-16  # the quadrature's own error
        assert found <= truth * (1.001 if mu <= 1 else 2) + 1e-10


@pytest.mark.parametrize(
    ("bins", "cells"), [(3, 12), *(pytest.param(*c, marks=SLOW) for c in ((5, 7), (12, 3)))]
)
@pytest.mark.parametrize("mu", [0.05, 0.7, 1.5])
def test_no_value_is_below_a_bound_that_was_enumerated(bins, cells, mu):
    epsilons = np.array([-1.0, -0.1, 0.0, 0.02, 0.3, 1.0, 2.5, 5.0])
    allocation = Allocation(mu, bins)
    bounds = (allocation.removed(epsilons), allocation.added(epsilons))
    pairs = list(zip(bounds, below_the_truth(mu, bins, 1, epsilons, cells), strict=True))
    for claimed, least in pairs:
        assert (claimed >= least * (1 - 1e-9) - 1e-15).all()
    # Its power: a tenth less is caught somewhere.
    assert any((0.9 * claimed < least).any() for claimed, least in pairs)


def simulated(mu, bins, epsilon, draws, rng):
    """Both deltas and their errors, by importance sampling: any one bin is shifted up by 0 to b."""
    b = 2 * mu + 1
    x = rng.standard_normal((draws, bins))
    without = np.exp(mu * x - mu * mu / 2).mean(axis=1)
    added = np.maximum(1 - math.exp(epsilon) * without, 0)
    x[:, 0] += rng.uniform(0, b, draws)  # whichever bin it is, both deltas are symmetric
    ratio = np.exp(x * x / 2) * (norm.cdf(x) - norm.cdf(x - b)) * math.sqrt(2 * math.pi) / b
    f = np.exp(mu * x - mu * mu / 2).mean(axis=1)
    removed = np.maximum(f - math.exp(epsilon), 0) / ratio.mean(axis=1)
    return [(v.mean(), v.std() / math.sqrt(draws)) for v in (removed, added)]


@pytest.mark.parametrize(
    ("mu", "bins", "epsilon"),
    [
        (1.0, 20, 0.7),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(1.0, 20, 0.2), (1.5, 100, 1.0), (1 / 0.7, 100, 2.17), (1.0, 1000, 0.15)]
        ),
    ],
)
def test_a_simulation_agrees_and_would_catch_a_bound_too_low(mu, bins, epsilon):
    rng, draws = np.random.default_rng(7), max(10_000, 4_000_000 // bins)
    found = _deltas(mu, bins, epsilon)
    for bound, (mean, error) in zip(found, simulated(mu, bins, epsilon, draws, rng), strict=True):
        assert bound > mean - 4.5 * error
        if mean > 10 * error:  # else the draws have missed what matters
            assert bound < mean + 4.5 * error + 0.005 * mean
    mean, error = simulated(mu, bins, epsilon, draws, rng)[0]
    if mean > 20 * error:
        assert 0.8 * found[0] < mean - 4 * error


@pytest.mark.parametrize(("mu", "bins"), [(0.3, 12), pytest.param(1.4, 20, marks=pytest.mark.slow)])
def test_a_coarser_grid_only_says_more(monkeypatch, mu, bins):
    def both():
        random_allocation._sums_above.cache_clear()
        random_allocation._sums_below.cache_clear()
        return [_deltas(mu, bins, epsilon) for epsilon in (-0.2, 0.1, 0.5, 1.0, 2.2)]

    fine = both()
    monkeypatch.setattr(random_allocation, "_MOST_POINTS", 2**11)
    monkeypatch.setattr(random_allocation, "_LEAST_POINTS", 2**11)
    coarse = both()
    monkeypatch.undo()
    both()
    assert fine != coarse
    for less, more in zip(fine, coarse, strict=True):
        assert all(a <= b * (1 + 3e-9) + 1e-12 for a, b in zip(less, more, strict=True))


def test_published_values_are_reached():
    """arXiv 2602.17284's accountant says 2.19, 2.97 and a noise of 2.28 for epsilon 2."""
    for z, rounds, most in ((0.7, 100, 2.17), (2.0, 1000, 2.96), (2.28, 1000, 1.98)):
        assert AllocatedGuarantee(z, BallsInBins(100, rounds)).epsilon(1e-5) <= most


@pytest.mark.parametrize(
    ("z", "bins"),
    [pytest.param(0.1, 8, marks=pytest.mark.slow), (0.02, 100), (1e-3, 2), (300.0, 50)],
)
def test_every_noise_has_an_answer_that_is_no_worse_than_without_bins(z, bins):
    run = AllocatedGuarantee(z, BallsInBins(bins, bins))
    assert 0 <= run.epsilon(1e-5) <= Guarantee(run.mu).epsilon(1e-5)


def test_passes_with_the_same_bins_add_up():
    """Four passes with noise 4 are one pass with noise 2; a pass cut off counts in full."""
    four = AllocatedGuarantee(4.0, BallsInBins(8, 32))
    one = AllocatedGuarantee(2.0, BallsInBins(8, 8))
    assert four.delta(0.5) == pytest.approx(one.delta(0.5), rel=1e-9)
    assert BallsInBins(8, 25).passes == 4


def test_what_is_out_of_reach_is_refused():
    with pytest.raises(ConfigError, match="delta=1e-20: must be at least 1e-11"):
        AllocatedGuarantee(4.0, BallsInBins(8, 8)).epsilon(1e-20)
    with pytest.raises(ConfigError, match="must be BallsInBins"):
        AllocatedGuarantee(4.0, 8)
    assert AllocatedGuarantee(4.0, BallsInBins(8, 8)).delta(900.0) < 1e-100
