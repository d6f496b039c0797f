"""Samples of bounded size against their definition: every draw, every cut, both directions."""

import itertools
import math
from collections import Counter
from decimal import Decimal, localcontext

import numpy as np
import pytest
from mixtures import delta_of
from scipy.stats import binom

from accounting import (
    ComposedGuarantee,
    ConfigError,
    Estimate,
    Guarantee,
    Independent,
    ReplacedGuarantee,
    Toeplitz,
    TruncatedGuarantee,
    TruncatedPoissonSampling,
    WithoutReplacementSampling,
    WithReplacementSampling,
    cohorts,
    sampled_guarantee,
)
from accounting.bounded import gaussian_delta
from accounting.claims import plain, read_releases
from accounting.cohorts import SamplingChoice

EPSILONS = np.array([-1.5, -0.4, -0.05, 0.0, 0.05, 0.4, 1.0, 2.0, 4.0])
KINK = 1e-8
"""Error of a sum over the grid, whose terms have a kink."""


def sets(n, q, most):
    """Return {members of a round: probability}, by drawing and cutting in every way."""
    drawn = Counter()
    for joins in itertools.product((0, 1), repeat=n):
        joined = [i for i in range(n) if joins[i]]
        weight = q ** len(joined) * (1 - q) ** (n - len(joined))
        stay = list(itertools.combinations(joined, min(most, len(joined))))
        for some in stay:
            drawn[some] += weight / len(stay)
    return drawn


def places(n, batch):
    """Return {members of a round, some of them twice: probability}, with replacement."""
    drawn = Counter()
    for some in itertools.product(range(n), repeat=batch):
        drawn[tuple(sorted(some))] += n**-batch
    return drawn


def densities(x, z, drawn, updates):
    """Return the densities of a round at x, with member 0's update and with zero in its place."""
    with_it, without = np.zeros_like(x), np.zeros_like(x)
    for some, weight in drawn.items():
        others, own = sum(updates[i] for i in some if i), some.count(0) * updates[0]
        bell = [np.exp(-(((x - total) / z) ** 2) / 2) for total in (others + own, others)]
        with_it += weight * bell[0] / z / math.sqrt(2 * math.pi)
        without += weight * bell[1] / z / math.sqrt(2 * math.pi)
    return with_it, without


def deltas(first, second, cell):
    """Return delta of the first against the second at every epsilon."""
    return np.array([np.maximum(first - math.exp(e) * second, 0).sum() * cell for e in EPSILONS])


TRUNCATED = [(5, 0.4, 2, 1.0), (5, 0.2, 1, 0.6), (6, 0.7, 3, 2.0), (4, 1.0, 2, 1.0), (6, 1.0, 1, 3)]
REPLACED = [(3, 2, 1.0), (4, 3, 0.7), (6, 4, 2.0), (2, 2, 1.0), (5, 5, 3.0)]
CASES = [(TruncatedGuarantee(z, q, n, most, 1), sets(n, q, most)) for n, q, most, z in TRUNCATED]
CASES += [(ReplacedGuarantee(z, batch, n, 1), places(n, batch)) for n, batch, z in REPLACED]


@pytest.mark.parametrize(("claim", "drawn"), CASES, ids=lambda case: repr(case)[:60])
def test_no_step_costs_more_than_is_claimed(claim, drawn):
    """The twin, who forgets the cut or counts several places once, is below the truth."""
    n, z = claim.population, claim.noise_multiplier
    rate = min(1.0, sum(weight for some, weight in drawn.items() if 0 in some))
    twin = TruncatedGuarantee(z, rate, n, n, 1)
    x = np.linspace(-12 * z - n, 12 * z + n, 40_001)
    caught, least = 0, math.inf
    for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), n - 1):
        pair = densities(x, z, drawn, [1.0, *others])
        for first, second, bounds, other in (
            (*pair, claim.removed, twin.removed),
            (*pair[::-1], claim.added, twin.added),
        ):
            truth, bound = deltas(first, second, x[1] - x[0]), bounds(EPSILONS)
            assert (truth <= bound + KINK).all()
            caught += (truth > other(EPSILONS) + 1e-5).any()
            if (truth > 1e-6).any():
                least = min(least, (bound / np.maximum(truth, 1e-300))[truth > 1e-6].min())
    assert caught
    assert 1 - 1e-6 <= least < 1.6


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


def truncated_sums(n, q, most):
    """Yield what others who send -1 add up to, how often the member is there, and the chance."""
    for m, weight in enumerate(binom.pmf(range(n), n - 1, q)):
        stays = q * min(1.0, most / (m + 1))
        yield -min(m, most), 0, weight * (1 - stays)
        yield -min(m, most - 1), 1, weight * stays


MANY = [
    (TruncatedGuarantee(2.0, 0.2, 30, 5, 100), truncated_sums(30, 0.2, 5), 1.0),
    (TruncatedGuarantee(2.0, 1.0, 30, 4, 100), truncated_sums(30, 1.0, 4), 1.0),
    (ReplacedGuarantee(2.0, 6, 30, 100),
     ((j - 6, j, chance) for j, chance in enumerate(binom.pmf(range(7), 6, 1 / 30))), 2.0),
]  # fmt: skip
MANY = [(claim, np.array(sorted(sums, key=lambda row: row[1])).T, at) for claim, sums, at in MANY]


@pytest.mark.slow
@pytest.mark.parametrize(("claim", "sums", "epsilon"), MANY, ids=["cut", "fixed", "replaced"])
@pytest.mark.parametrize("removed", [True, False])
def test_a_hundred_steps_by_simulation(claim, sums, epsilon, removed):
    """Others who send -1 and a member who sends 1; the same twin is below the truth."""
    others, own, mass = sums[0], sums[1], sums[2] / sums[2].sum()
    z, n, draws = claim.noise_multiplier, claim.population, 20_000
    rng, loss = np.random.default_rng(5), np.zeros(draws)

    def density(x, means):
        means, inverse = np.unique(means, return_inverse=True)
        by_mean = np.bincount(inverse, mass)
        return np.exp(-(((x[:, None] - means) / z) ** 2) / 2) @ by_mean

    for _ in range(claim.steps):
        row = rng.choice(len(mass), draws, p=mass)
        x = others[row] + own[row] * removed + z * rng.standard_normal(draws)
        loss += np.log(density(x, others + own) / density(x, others))
    truth, error = delta_of(loss, epsilon, removed)
    assert truth - 4 * error < claim.delta(epsilon)
    twin = TruncatedGuarantee(z, mass[own > 0].sum(), n, n, claim.steps)
    assert not removed or twin.delta(epsilon) < truth - 4 * error


@pytest.mark.slow
def test_a_cut_that_never_comes_costs_nothing_and_a_fixed_size_more():
    plain, rare, often = (
        TruncatedGuarantee(2.0, 0.01, 1000, most, 50).epsilon(1e-6) for most in (1000, 60, 12)
    )
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


def test_places_are_drawn_on_their_own():
    sampler = WithReplacementSampling(3, 5)
    drawn = [c.tolist() for c in cohorts(sampler, members=5, rounds=4000, key=bytes(32))]
    assert all(len(some) == 3 and some == sorted(some) for some in drawn)
    seen = np.bincount([some.count(0) for some in drawn], minlength=4)
    expected = 4000 * binom.pmf(range(4), 3, 0.2)
    assert ((seen - expected) ** 2 / expected).sum() < 25  # chi-square of 3 degrees


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


def test_losses_beyond_every_float_count_as_infinite_and_far_below_zero_overflow_nothing():
    """Of everybody in every round, the deltas of adding were NaN, then 0, beyond 709."""
    run = TruncatedGuarantee(0.01, 1.0, 100, 100, 1)
    assert ComposedGuarantee((run,)).delta(499.0) >= 1 - 1e-9
    assert run.epsilon(1e-6) == Guarantee(run.mu).epsilon(1e-6)
    assert ReplacedGuarantee(0.5, 100, 1000, 300).delta(5.0) > 0.99


def test_a_rate_below_every_other_float_has_deltas_that_are_numbers():
    epsilons = np.array([0.0, 20.0, 340.0, 700.0])
    assert np.isfinite(gaussian_delta(1.0, epsilons, 1e-300)).all()
    run = TruncatedGuarantee(100.0, 1e-300, 10, 1, 1)
    assert np.isfinite(run.removed(epsilons)).all()


@pytest.mark.slow
def test_batches_with_replacement_compose():
    run = sampled_guarantee(Independent(4), WithReplacementSampling(2, 100), noise_multiplier=2.0)
    assert run.mu == pytest.approx(2.0)
    assert read_releases(plain((run,))) == (run,)
    both = ComposedGuarantee((run, Guarantee(0.5))).epsilon(1e-6)
    assert both > max(run.epsilon(1e-6), Guarantee(0.5).epsilon(1e-6))


SAMPLER = WithoutReplacementSampling(2, 9)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        *(
            (lambda of=of: sampled_guarantee(Toeplitz.square_root(9), of, noise_multiplier=1.0),
             "no proof covers correlated noise")
            for of in (SAMPLER, WithReplacementSampling(2, 9))
        ),
        (lambda: sampled_guarantee(
            Independent(9), SAMPLER, noise_multiplier=1.0, estimate=Estimate(10_000)
        ), "draws: this sampler is accounted for in closed form"),
        (lambda: SamplingChoice.parse("truncated-poisson:expected_batch=2"), "most: is missing"),
        (lambda: TruncatedPoissonSampling(2, 9, 9), "most=9: cuts no round"),
        (lambda: WithoutReplacementSampling(10, 9), "batch=10: a population of 9"),
        (lambda: WithReplacementSampling(6, 5), "batch=6: must be at most 5"),
    ],
)  # fmt: skip
def test_what_no_proof_covers_is_refused(call, why):
    with pytest.raises(ConfigError, match=why):
        call()
