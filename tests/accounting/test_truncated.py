"""Samples of bounded size against their definition: every draw, every cut, both directions."""

import itertools
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy.stats import binom

from accounting import (
    ComposedGuarantee,
    ConfigError,
    Estimate,
    Guarantee,
    Independent,
    Toeplitz,
    TruncatedGuarantee,
    TruncatedPoissonSampling,
    WithoutReplacementSampling,
    cohorts,
    sampled_guarantee,
)
from accounting.cohorts import SamplingChoice
from accounting.truncated import gaussian_delta

EPSILONS = np.array([-1.5, -0.4, -0.05, 0.0, 0.05, 0.4, 1.0, 2.0])
KINK = 1e-8
"""Error of a sum over the grid, whose terms have a kink."""


def sets(n, q, most):
    """Return {members of a round: probability}, by drawing and cutting in every way."""
    drawn = {}
    for joins in itertools.product((0, 1), repeat=n):
        joined = [i for i in range(n) if joins[i]]
        weight = q ** len(joined) * (1 - q) ** (n - len(joined))
        stay = list(itertools.combinations(joined, min(most, len(joined))))
        for some in stay:
            drawn[some] = drawn.get(some, 0.0) + weight / len(stay)
    return drawn


def densities(x, z, drawn, updates):
    """Return the densities of a round at x, with member 0's update and with zero in its place."""
    with_it, without = np.zeros_like(x), np.zeros_like(x)
    for some, weight in drawn.items():
        others = sum(updates[i] for i in some if i)
        own = updates[0] if 0 in some else 0.0
        bell = [np.exp(-(((x - total) / z) ** 2) / 2) for total in (others + own, others)]
        with_it += weight * bell[0] / z / math.sqrt(2 * math.pi)
        without += weight * bell[1] / z / math.sqrt(2 * math.pi)
    return with_it, without


def deltas(first, second, cell):
    """Return delta of the first against the second at every epsilon."""
    return np.array([np.maximum(first - math.exp(e) * second, 0).sum() * cell for e in EPSILONS])


@pytest.mark.parametrize(
    ("n", "q", "most", "z"),
    [(5, 0.4, 2, 1.0), (5, 0.2, 1, 0.6), (6, 0.7, 3, 2.0), (4, 1.0, 2, 1.0), (6, 1.0, 1, 3.0)],
)
def test_no_step_costs_more_than_is_claimed(n, q, most, z):
    """The twin, a step whose cut is forgotten, is below the truth."""
    claim = TruncatedGuarantee(z, q, n, most, 1)
    drawn = sets(n, q, most)
    rate = sum(weight for some, weight in drawn.items() if 0 in some)
    forgotten = TruncatedGuarantee(z, rate, n, n, 1)
    x = np.linspace(-12 * z - n, 12 * z + n, 40_001)
    caught = 0
    for updates in itertools.product((-1.0, 0.0, 1.0), repeat=n):
        if updates[0] <= 0 or list(updates[1:]) != sorted(updates[1:]):
            continue
        with_it, without = densities(x, z, drawn, updates)
        removed, added = (
            deltas(with_it, without, x[1] - x[0]),
            deltas(without, with_it, x[1] - x[0]),
        )
        assert (removed <= claim.removed(EPSILONS) + KINK).all()
        assert (added <= claim.added(EPSILONS) + KINK).all()
        caught += (removed > forgotten.removed(EPSILONS) + 1e-5).any()
    assert caught


@pytest.mark.parametrize(("q", "most"), [(0.5, 2), (1.0, 1)])
def test_steps_compose_though_others_follow_what_was_released(q, most):
    n, z = 5, 2.0
    x = np.linspace(-9 * z - n, 9 * z + n, 801)
    drawn, cell = sets(n, q, most), x[1] - x[0]
    first = densities(x, z, drawn, [1.0, -1, -1, -1, -1])
    low = densities(x, z, drawn, [1.0, 1, 1, 1, 1])
    joint = [
        one[:, None] * np.where((x < -1)[:, None], after[None, :], one[None, :])
        for one, after in zip(first, low, strict=True)
    ]
    claim = TruncatedGuarantee(z, q, n, most, 2)
    for pair in (joint, joint[::-1]):
        truth = deltas(*pair, cell * cell)
        for epsilon, delta in zip(EPSILONS[3:], truth[3:], strict=True):
            assert delta <= claim.delta(float(epsilon)) + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("q", "n", "most"), [(0.2, 30, 5), (1.0, 30, 4)])
@pytest.mark.parametrize("removed", [True, False])
def test_a_hundred_steps_by_simulation(q, n, most, removed):
    """Others who send -1 and a member who sends 1; who forgets the cut is below the truth."""
    z, steps, draws, epsilon = 2.0, 100, 20_000, 1.0
    joined = np.arange(n)
    weights = binom.pmf(joined, n - 1, q)
    kept = q * np.minimum(1.0, most / (joined + 1))
    rows = [(-min(m, most), 0, w * (1 - k)) for m, w, k in zip(joined, weights, kept, strict=True)]
    rows += [(-min(m, most - 1), 1, w * k) for m, w, k in zip(joined, weights, kept, strict=True)]
    others, own, mass = np.array(rows, dtype=float).T
    mass /= mass.sum()
    rng, loss = np.random.default_rng(5), np.zeros(draws)

    def density(x, means):
        means, inverse = np.unique(means, return_inverse=True)
        by_mean = np.bincount(inverse, mass)
        return np.exp(-(((x[:, None] - means) / z) ** 2) / 2) @ by_mean

    for _ in range(steps):
        row = rng.choice(len(mass), draws, p=mass)
        x = others[row] + own[row] * removed + z * rng.standard_normal(draws)
        loss += np.log(density(x, others + own) / density(x, others))
    gains = np.maximum(0, -np.expm1(epsilon - (1 if removed else -1) * loss))
    truth, error = gains.mean(), gains.std() / math.sqrt(draws)
    assert truth - 4 * error < TruncatedGuarantee(z, q, n, most, steps).delta(epsilon)
    forgotten = TruncatedGuarantee(z, mass[own == 1].sum(), n, n, steps)
    assert not removed or forgotten.delta(epsilon) < truth - 4 * error


@pytest.mark.slow
def test_a_cut_that_never_comes_costs_nothing_and_a_fixed_size_more():
    plain = TruncatedGuarantee(2.0, 0.01, 1000, 1000, 50).epsilon(1e-6)
    rare = TruncatedGuarantee(2.0, 0.01, 1000, 60, 50).epsilon(1e-6)
    often = TruncatedGuarantee(2.0, 0.01, 1000, 12, 50).epsilon(1e-6)
    assert plain <= rare * (1 + 1e-6)
    assert rare < plain * 1.001 < often
    run = TruncatedGuarantee(2.0, 1.0, 1000, 12, 50)
    both = ComposedGuarantee((run, Guarantee(0.5)))
    assert both.epsilon(1e-6) > max(run.epsilon(1e-6), Guarantee(0.5).epsilon(1e-6))


@pytest.mark.parametrize(
    ("sampler", "q", "most"),
    [(TruncatedPoissonSampling(3, 5, 2), 0.6, 2), (WithoutReplacementSampling(3, 5), 1.0, 3)],
)
def test_every_set_is_as_likely_as_the_accountant_assumes(sampler, q, most):
    seen = [tuple(c.tolist()) for c in cohorts(sampler, members=5, rounds=4096, key=bytes(32))]
    expected = sets(5, q, most)
    assert set(seen) <= set(expected)
    squares = sum((seen.count(s) - 4096 * p) ** 2 / (4096 * p) for s, p in expected.items() if p)
    assert squares < 60  # chi-square of at most 15 degrees


def test_odds_of_great_populations_are_at_least_the_exact_ones():
    """scipy's tails are off by 3e-8 here, where 1e-9 was left for them."""
    n, most = 380_131_063, 2
    sampling = TruncatedPoissonSampling(2.2259462903361086, n, most)
    run = TruncatedGuarantee(1.0, sampling.probability, n, most, 1)
    claimed_free, cut, stays = (Decimal(odds) for odds in run._odds)
    with localcontext(prec=60):
        q, other = Decimal(run.probability), 1 - Decimal(run.probability)
        none = other ** (n - 2)
        free = none * other + none * q * (n - 1)  # none or one of n - 1
        above = 1 - none * (other**2 + n * q * other + Decimal(n) * (n - 1) / 2 * q * q)
        assert free <= claimed_free <= free * (1 + Decimal("1e-6"))
        assert 1 - free <= cut
        assert above * most / n <= cut * stays


def test_truncated_samples_are_drawn_with_the_accounted_probability():
    """53 bits below it were fewer cuts, and a member that stays more often, by 1e-6 of delta."""
    probability = TruncatedPoissonSampling(6.741626256003403, 729_336_098, 6).probability
    assert probability * 2**53 == int(probability * 2**53)


def test_losses_beyond_every_float_count_as_infinite():
    """Of everybody in every round, the deltas of adding were NaN, then 0, beyond 709."""
    run = TruncatedGuarantee(0.01, 1.0, 100, 100, 1)
    assert ComposedGuarantee((run,)).delta(499.0) >= 1 - 1e-9
    assert run.epsilon(1e-6) == Guarantee(run.mu).epsilon(1e-6)


def test_a_rate_below_every_other_float_has_deltas_that_are_numbers():
    epsilons = np.array([0.0, 20.0, 340.0, 700.0])
    assert np.isfinite(gaussian_delta(1.0, epsilons, 1e-300)).all()
    run = TruncatedGuarantee(100.0, 1e-300, 10, 1, 1)
    assert np.isfinite(run.removed(epsilons)).all()


def test_what_no_proof_covers_is_refused():
    sampler = WithoutReplacementSampling(2, 9)
    with pytest.raises(ConfigError, match="no proof covers correlated noise"):
        sampled_guarantee(Toeplitz.square_root(9), sampler, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="draws: this sampler is accounted for in closed form"):
        sampled_guarantee(Independent(9), sampler, noise_multiplier=1.0, estimate=Estimate(10_000))
    with pytest.raises(ConfigError, match="most: is missing"):
        SamplingChoice.parse("truncated-poisson:expected_batch=2")
    with pytest.raises(ConfigError, match="most=9: cuts no round"):
        TruncatedPoissonSampling(2, 9, 9)
    with pytest.raises(ConfigError, match="batch=10: a population of 9"):
        WithoutReplacementSampling(10, 9)
