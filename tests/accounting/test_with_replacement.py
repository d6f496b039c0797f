"""Batches with replacement against their definition: every draw of every place, both directions."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import binom

from accounting import (
    ComposedGuarantee,
    ConfigError,
    Guarantee,
    Independent,
    ReplacedGuarantee,
    Toeplitz,
    TruncatedGuarantee,
    WithReplacementSampling,
    cohorts,
    sampled_guarantee,
)
from accounting.claims import plain, read_releases

EPSILONS = np.array([-1.5, -0.4, 0.0, 0.05, 0.4, 1.0, 2.0, 4.0])


def densities(x, z, batch, updates):
    """Return the densities of a round at x, with member 0's update and with zero in its place."""
    n, sums = len(updates), Counter()
    for places in itertools.product(range(n), repeat=batch):
        others = round(sum(updates[i] for i in places if i), 6)
        sums[others, places.count(0)] += n**-batch
    with_it, without = np.zeros_like(x), np.zeros_like(x)
    for (others, own), weight in sums.items():
        bells = (
            weight * np.exp(-(((x - total) / z) ** 2) / 2) / z / math.sqrt(2 * math.pi)
            for total in (others + own * updates[0], others)
        )
        with_it += next(bells)
        without += next(bells)
    return with_it, without


def deltas(first, second, cell):
    return np.array([np.maximum(first - math.exp(e) * second, 0).sum() * cell for e in EPSILONS])


@pytest.mark.parametrize(
    ("n", "batch", "z"), [(3, 2, 1.0), (4, 3, 0.7), (6, 4, 2.0), (2, 2, 1.0), (5, 5, 3.0)]
)
def test_no_step_costs_more_than_is_claimed(n, batch, z):
    """Nor is the claim far off; who counts a member that has several places once is below."""
    claim = ReplacedGuarantee(z, batch, n, 1)
    once = TruncatedGuarantee(z, 1 - (1 - 1 / n) ** batch, n, n, 1)
    x = np.linspace(-10 * z - batch, 10 * z + batch, 20_001)
    caught, least = 0, math.inf
    for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), n - 1):
        pair = densities(x, z, batch, [1.0, *others])
        for first, second, bounds, other in (
            (*pair, claim.removed, once.removed),
            (*pair[::-1], claim.added, once.added),
        ):
            truth = deltas(first, second, x[1] - x[0])
            bound = bounds(EPSILONS)
            assert (truth <= bound + 1e-8).all()
            caught += (truth > other(EPSILONS) + 1e-5).any()
            if (truth > 1e-6).any():
                least = min(least, (bound / np.maximum(truth, 1e-300))[truth > 1e-6].min())
    assert caught
    assert 1 - 1e-6 <= least < 1.6


@pytest.mark.slow
@pytest.mark.parametrize("removed", [True, False])
def test_a_hundred_steps_by_simulation(removed):
    """Others who send -1; one place of a member too few is below the truth."""
    n, batch, z, steps, draws, epsilon = 30, 6, 2.0, 100, 20_000, 2.0
    counts = np.arange(batch + 1)
    chances = binom.pmf(counts, batch, 1 / n)
    rng, loss = np.random.default_rng(5), np.zeros(draws)
    for _ in range(steps):
        own = rng.binomial(batch, 1 / n, draws)
        x = own - batch + own * removed + z * rng.standard_normal(draws)
        ratios = [
            np.exp(-(((x[:, None] + batch - (1 + sent) * counts) / z) ** 2) / 2) @ chances
            for sent in (1, 0)
        ]
        loss += np.log(ratios[0] / ratios[1])
    gains = np.maximum(0, -np.expm1(epsilon - (1 if removed else -1) * loss))
    truth, error = gains.mean(), gains.std() / math.sqrt(draws)
    assert truth - 4 * error < ReplacedGuarantee(z, batch, n, steps).delta(epsilon)
    once = TruncatedGuarantee(z, 1 - chances[0], n, n, steps)
    assert not removed or once.delta(epsilon) < truth - 4 * error


def test_losses_far_below_zero_overflow_nothing():
    """Nor is anything printed beside the answer."""
    assert ReplacedGuarantee(0.5, 100, 1000, 300).delta(5.0) > 0.99


def test_places_are_drawn_on_their_own():
    sampler = WithReplacementSampling(3, 5)
    drawn = [c.tolist() for c in cohorts(sampler, members=5, rounds=4000, key=bytes(32))]
    assert all(len(places) == 3 and places == sorted(places) for places in drawn)
    seen = np.bincount([places.count(0) for places in drawn], minlength=4)
    expected = 4000 * binom.pmf(range(4), 3, 0.2)
    assert ((seen - expected) ** 2 / expected).sum() < 25  # chi-square of 3 degrees
    with pytest.raises(ConfigError, match="batch=6: must be at most 5"):
        WithReplacementSampling(6, 5)


@pytest.mark.slow
def test_it_composes_and_correlated_noise_is_refused():
    sampler = WithReplacementSampling(2, 100)
    run = sampled_guarantee(Independent(4), sampler, noise_multiplier=2.0)
    assert run.mu == pytest.approx(2.0)
    assert read_releases(plain((run,))) == (run,)
    both = ComposedGuarantee((run, Guarantee(0.5))).epsilon(1e-6)
    assert both > max(run.epsilon(1e-6), Guarantee(0.5).epsilon(1e-6))
    with pytest.raises(ConfigError, match="no proof covers correlated noise"):
        sampled_guarantee(Toeplitz.square_root(4), sampler, noise_multiplier=2.0)
