"""Balls in bins: against quadrature in two dimensions, simulation, and what is known of it."""

import math

import numpy as np
import pytest

from accounting import AllocatedGuarantee, BallsInBins, ConfigError
from accounting.random_allocation import _both, _Shares


def _deltas(mu, bins, epsilon):
    return _both(_Shares(bins, mu, 0.0), epsilon)


def two_bins(mu, epsilon):
    """Both deltas of two bins, by the definition, on a grid of 1.4 million points."""
    x = np.linspace(-12, 12 + mu, 1201)
    weight = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    one = np.exp(mu * x - mu * mu / 2)
    ratio = (one[:, None] + one) / 2
    both = np.outer(weight, weight)
    removed = both * np.maximum(ratio - math.exp(epsilon), 0)
    added = both * np.maximum(1 - math.exp(epsilon) * ratio, 0)
    return float(removed.sum()), float(added.sum())


@pytest.mark.parametrize("mu", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0, 4.0])
def test_two_bins_are_never_below_the_truth_and_close_to_it(mu, factor):
    epsilon = factor * mu
    for found, truth in zip(_deltas(mu, 2, epsilon), two_bins(mu, epsilon), strict=True):
        assert found >= truth * (1 - 1e-4) - 1e-16  # the quadrature's own error
        assert found <= truth * 1.005 + 1e-12


@pytest.mark.parametrize("epsilon", [0.2, 0.7])
def test_twenty_bins_agree_with_a_simulation(epsilon):
    rng = np.random.default_rng(7)
    mu, bins, draws = 1.0, 20, 400_000
    x = rng.standard_normal((draws, bins))
    without = np.exp(mu * x - mu * mu / 2).mean(axis=1)
    x[:, 0] += mu
    ratio = np.exp(mu * x - mu * mu / 2).mean(axis=1)
    removed, added = _deltas(mu, bins, epsilon)
    for found, values in (
        (removed, np.maximum(1 - math.exp(epsilon) / ratio, 0)),
        (added, np.maximum(1 - math.exp(epsilon) * without, 0)),
    ):
        error = values.std() / math.sqrt(draws)
        assert values.mean() - 4 * error < found < values.mean() + 4 * error + 0.01 * found


def test_a_coarser_grid_only_says_more(monkeypatch):
    from accounting import random_allocation

    fine = [_deltas(0.3, 12, epsilon) for epsilon in (0.1, 0.5, 1.0)]
    monkeypatch.setattr(random_allocation, "_POINTS", 2**14)
    random_allocation._sum.cache_clear()
    random_allocation._allocation.cache_clear()
    coarse = [_deltas(0.3, 12, epsilon) for epsilon in (0.1, 0.5, 1.0)]
    random_allocation._sum.cache_clear()
    random_allocation._allocation.cache_clear()
    assert fine != coarse
    for less, more in zip(fine, coarse, strict=True):
        assert all(a <= b * (1 + 1e-9) + 1e-15 for a, b in zip(less, more, strict=True))


def test_passes_with_the_same_bins_add_up():
    """Four passes with noise 4 are one pass with noise 2; a pass cut off counts in full."""
    four = AllocatedGuarantee(4.0, BallsInBins(8, 32))
    one = AllocatedGuarantee(2.0, BallsInBins(8, 8))
    assert four.delta(0.5) == pytest.approx(one.delta(0.5), rel=1e-9)
    assert BallsInBins(8, 25).passes == 4


def test_what_is_out_of_reach_is_refused():
    with pytest.raises(ConfigError, match="too large for the grid"):
        AllocatedGuarantee(0.5, BallsInBins(8, 8)).epsilon(1e-5)
    with pytest.raises(ConfigError, match="delta=1e-20: must be at least 1e-11"):
        AllocatedGuarantee(4.0, BallsInBins(8, 8)).epsilon(1e-20)
    with pytest.raises(ConfigError, match="must be BallsInBins"):
        AllocatedGuarantee(4.0, 8)
    assert AllocatedGuarantee(4.0, BallsInBins(8, 8)).delta(900.0) < 1e-100
