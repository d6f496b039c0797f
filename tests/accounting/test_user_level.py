"""Users with several examples: against sums over draws and a grid, and against simulation."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_mixture_gaussian_mechanism
from mixtures import adaptive as follows
from mixtures import delta_of, deltas
from scipy.stats import binom

from accounting import (
    ConfigError,
    ExampleSampling,
    Guarantee,
    Independent,
    Toeplitz,
    UserGuarantee,
    cohorts,
    sampled_guarantee,
)
from accounting.claims import plain, read_releases
from accounting.cohorts import participation_of, sampled_claim
from accounting.user_level import _ROUNDED

EPSILONS = [0.0, 0.2, 0.8, 2.0]


def rows(q, per_user, rounds):
    """Return {examples sampled in each round: probability}."""
    chances = binom.pmf(range(per_user + 1), per_user, q)
    return {
        counts: math.prod(chances[k] for k in counts)
        for counts in itertools.product(range(per_user + 1), repeat=rounds)
    }


@pytest.mark.parametrize(
    ("z", "q", "per_user", "rounds", "points"),
    [
        (2.0, 0.2, 3, 1, 20_001),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (1.0, 0.02, 8, 1, 20_001),
                (4.0, 0.5, 12, 1, 20_001),
                (3.0, 0.3, 4, 2, 701),
                (3.0, 0.2, 2, 3, 121),
            ]
        ),
    ],
)
@pytest.mark.parametrize("adaptive", [False, True])
def test_no_value_is_below_the_sum_over_draws(z, q, per_user, rounds, points, adaptive):
    """Also with updates that follow what was released; whoever forgets an example is caught."""
    update = follows if adaptive else None
    truth = deltas(np.eye(rounds), rows(q, per_user, rounds), z, EPSILONS, points, update)
    run = UserGuarantee(z, q, per_user, rounds)
    claim = np.array([run.delta(e) for e in EPSILONS])
    assert (claim >= truth * (1 - 1e-4)).all()
    assert adaptive or (claim[:2] <= truth.max(axis=0)[:2] * 1.002).all()
    less = UserGuarantee(z, q, per_user - 1, rounds)
    assert adaptive or less.delta(0.2) < truth.max(axis=0)[1]


def test_examples_in_many_directions_cost_no_more():
    """Two examples with gradients at a right angle: four draws, in the plane."""
    z, q = 1.5, 0.4
    axis = np.linspace(-8, 9, 341) / z
    x, y = np.meshgrid(axis, axis)
    weight = np.exp(-(x * x + y * y) / 2) / (2 * math.pi) * (axis[1] - axis[0]) ** 2
    ratio = sum(
        q ** (a + b) * (1 - q) ** (2 - a - b)
        * np.exp((a * x + b * y) / z - (a * a + b * b) / (2 * z * z))
        for a, b in itertools.product((0, 1), repeat=2)
    )  # fmt: skip
    run = UserGuarantee(z, q, 2, 1)
    for epsilon in EPSILONS:
        removed = (weight * np.maximum(ratio - math.exp(epsilon), 0)).sum()
        added = (weight * np.maximum(1 - math.exp(epsilon) * ratio, 0)).sum()
        assert max(removed, added) <= run.delta(epsilon) + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("z", "q", "per_user", "steps", "epsilon"),
    [(2.0, 0.01, 4, 1000, 2.0), (4.0, 0.05, 6, 200, 3.0)],
)
def test_many_steps_by_simulation(z, q, per_user, steps, epsilon):
    rng, draws = np.random.default_rng(3), 20_000
    counts = np.arange(per_user + 1)
    chances = np.array(binom.pmf(range(per_user + 1), per_user, q))
    claim = UserGuarantee(z, q, per_user, steps).delta(epsilon)
    truths = []
    for removed in (1, 0):
        loss = np.zeros(draws)
        for _ in range(steps):
            x = rng.standard_normal(draws) + removed * rng.binomial(per_user, q, draws) / z
            powers = np.exp(np.multiply.outer(x, counts) / z - counts**2 / (2 * z * z))
            loss += np.log(powers @ chances)
        truths.append(delta_of(loss, epsilon, removed))
        assert truths[-1][0] - 4 * truths[-1][1] < claim
    worst, error = max(truths)
    assert claim < worst + 4 * error + 0.01 * worst
    less = UserGuarantee(z, q, per_user - 1, steps)
    assert less.delta(epsilon) < worst - 4 * error


def test_a_report_counts_every_example_where_the_sample_is_known():
    sampler = ExampleSampling(20, 1000, 4)
    run = sampled_guarantee(Independent(10), sampler, noise_multiplier=8.0)
    assert (run.per_user, run.mu) == (4, pytest.approx(4 * math.sqrt(10) / 8))
    assert run.epsilon(1e-6) < Guarantee(run.mu).epsilon(1e-6)
    assert read_releases(plain((run,))) == (run,)
    claim = sampled_claim(run, 1e-6)
    assert (claim.clips, claim.parameters["per_user"]) == (4, 4)
    assert participation_of(sampler, 10).max_participations == 10


def test_examples_are_drawn_and_no_user_has_more_than_the_accountant_assumes():
    sampler = ExampleSampling(50, 200, 4)
    owners = [i // 4 for i in range(200)]
    drawn = list(cohorts(sampler, members=200, rounds=400, key=bytes(32), owners=owners))
    together = np.array([np.bincount(some // 4, minlength=50) for some in drawn]).ravel()
    seen = np.bincount(together, minlength=5) / len(together)
    assert seen == pytest.approx(binom.pmf(range(5), 4, 0.25), abs=0.01)
    for given, why in (
        (None, "owners: none for 200 examples"),
        (owners[1:], "owners: 199 for 200 examples"),
        ([0, *owners[:-1]], "owners: 0 has 5 examples, and per_user=4"),
    ):
        with pytest.raises(ConfigError, match=why):
            cohorts(sampler, members=200, rounds=4, key=bytes(32), owners=given)


def test_chances_of_a_thousand_examples_are_as_exact_as_the_room_for_rounding():
    chances = [chance for chance, _ in UserGuarantee(1.0, 0.3, 1000, 1)._mixture]
    assert 1e-14 < abs(math.fsum(chances) - 1) < _ROUNDED / 2


@pytest.mark.slow
def test_little_noise_costs_what_it_costs_unhidden_and_hardly_any_is_refused():
    run = UserGuarantee(0.3, 1.0, 3, 3)
    assert run.epsilon(1e-6) == Guarantee(run.mu).epsilon(1e-6)
    for steps in (10, 100):
        with pytest.raises(ConfigError, match=r"no finite profile|promises nothing"):
            UserGuarantee(0.01, 0.5, 100, steps).epsilon(1e-6)


def test_what_no_proof_covers_is_refused():
    sampler = ExampleSampling(20, 1000, 4)
    with pytest.raises(ConfigError, match="no proof covers correlated noise with several examples"):
        sampled_guarantee(Toeplitz.square_root(9), sampler, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="expected_batch=30: at most all examples, 20"):
        ExampleSampling(30, 20, 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", [(1.0, 0.02, 8, 1), (2.0, 0.01, 1, 500), (3.0, 0.3, 4, 20)])
def test_another_accountant_says_as_much(case):
    z, q, per_user, steps = case
    run = UserGuarantee(*case)
    other = from_mixture_gaussian_mechanism(
        z,
        range(per_user + 1),
        binom.pmf(range(per_user + 1), per_user, q),
        value_discretization_interval=1e-4 * run.spread,
    ).self_compose(steps)
    assert run.epsilon(1e-6) == pytest.approx(other.get_epsilon_for_delta(1e-6), rel=1e-3)
