"""Bounds: coverage on scores of known mu, power, null canaries, and what each assumption is for."""

import math
from functools import partial

import mpmath
import numpy as np
import pytest
from scipy import stats
from scipy.optimize import linprog

from accounting import ConfigError, Guarantee, gaussian
from attacks import clopper_pearson, guesses, one_run, one_run_gdp, pooled_t
from attacks.lower_bounds.bounds import _gdp_refuted, epsilon_below, from_mu, one_run_p_value

DELTA = 1e-5
SEEDS = 400
GDP = [one_run_gdp, partial(guesses, claimed_mu=0.925), clopper_pearson, pooled_t]
NAMES = ["one_run_gdp", "guesses", "clopper_pearson", "pooled_t"]


def scored(mu: float, m: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    present = rng.random(m) < 0.5
    return rng.standard_normal(m) + mu * present, present


def most_failures(trials: int, rate: float) -> int:
    """So many failures at this rate or more have a probability of one in a million."""
    return int(stats.binom.isf(1e-6, trials, rate))


@pytest.mark.parametrize("bound", GDP, ids=NAMES)
@pytest.mark.parametrize("epsilon", [0.0, 4.0])
def test_a_bound_of_95_percent_is_above_the_truth_in_at_most_5_percent(bound, epsilon):
    rng = np.random.default_rng(11)
    mu = gaussian.mu(epsilon, DELTA) if epsilon else 0.0
    found = [bound(*scored(mu, 300, rng), delta=DELTA) for _ in range(SEEDS)]
    above = sum(b.epsilon > epsilon for b in found)
    exact = bound is GDP[1]  # its level is 5 % to the last digit: see the next test
    assert above <= (most_failures(SEEDS, 0.05) if exact else 0.05 * SEEDS)
    if epsilon:
        assert np.mean([b.epsilon for b in found]) > 0.3 * epsilon
        assert all(b.mu <= mu for b in found if b.epsilon <= epsilon)


@pytest.mark.parametrize("mu", [0.0, 0.268, 0.925, 2.0, 4.0])
def test_guesses_are_above_the_truth_with_at_most_5_percent_exactly(mu):
    """Of every number of right guesses, whether its bound is too high, and how probable it is."""
    m = 200
    present = np.ones(m, dtype=bool)
    too_high = 0.0
    for right in range(m + 1):
        scores = np.where(np.arange(m) < right, 1.0, -1.0)
        if guesses(scores, present, delta=DELTA, claimed_mu=0.0).mu > mu:
            too_high += stats.binom.pmf(right, m, stats.norm.cdf(mu / 2))
    assert 0.01 < too_high <= 0.05


def test_the_bound_without_assumptions_holds_for_randomised_response_and_is_tight_there(
    monkeypatch,
):
    """Each coin is told truly with probability q = e^eps / (1 + e^eps): no run leaks more."""
    rng = np.random.default_rng(13)
    m, epsilon = 1000, 1.5
    told_truly = 1 / (1 + math.exp(-epsilon))
    right = rng.binomial(m, told_truly, size=20_000)
    levels, counts = np.unique(right, return_counts=True)
    refuted = np.array([one_run_p_value(m, m, int(r), epsilon, DELTA) <= 0.05 for r in levels])
    assert 0.03 < counts[refuted].sum() / counts.sum() <= 0.05 + 0.006
    present = rng.random(m) < 0.5
    told = np.where(rng.random(m) < told_truly, present, ~present)
    monkeypatch.setattr("attacks.lower_bounds.bounds._SHARES", (1.0,))
    found = one_run(told + 0.0, present, delta=DELTA)
    assert 1.0 < found.epsilon < epsilon
    assert found.mu is None
    assert found.assumption == "none"


def test_the_bound_without_assumptions_pays_for_delta():
    """A run that tells all coins with probability delta is (0, delta)-DP."""
    m, delta = 100, 1e-3
    assert one_run_p_value(m, m, m, 0.0, delta) >= delta
    assert one_run_p_value(m, m, m, 0.0, 1e-12) < 1e-9
    assert one_run_p_value(m, m, 0, 0.0, delta) == 1.0


def most_probable(m: int, guessed: int, right: int, mu: float) -> float:
    """The greatest probability of so many right guesses that the theorem's inequalities allow.

    A linear program over the probabilities of 0, 1, ... right guesses; the trade-off function is
    replaced by tangents, so the result is high by about 1e-4.
    """
    counts = np.arange(guessed + 1)
    rows, limits = [], []
    for i in range(1, guessed + 1):
        correct = np.where(counts >= i, counts / m, 0.0)
        wrong = np.where(counts >= i - 1, (guessed - counts) / m, 0.0)
        for x in np.linspace(-8, 8, 200):
            slope = math.exp(-mu * x - mu * mu / 2)
            scale = max(1.0, slope)
            rows.append((correct - slope * wrong) / scale)
            limits.append((stats.norm.cdf(x + mu) - slope * stats.norm.cdf(x)) / scale)
    found = linprog(
        -(counts >= right).astype(float),
        A_ub=np.array(rows),
        b_ub=limits,
        A_eq=np.ones((1, guessed + 1)),
        b_eq=[1],
        bounds=(0, 1),
    )
    return float(-found.fun)


@pytest.mark.parametrize(
    ("m", "guessed", "right", "mu"), [(12, 12, 9, 0.5), (12, 6, 6, 1.0), (8, 8, 7, 0.1)]
)
def test_the_bound_for_dependent_canaries_refutes_what_is_impossible_and_no_more(
    m, guessed, right, mu
):
    most = most_probable(m, guessed, right, mu)
    assert _gdp_refuted(m, guessed, right, mu, most)
    assert not _gdp_refuted(m, guessed, right, mu, most * 0.998)


def dependent(m: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One public coin for all: in a tenth of the runs each canary is told with probability .95."""
    present = rng.random(m) < 0.5
    told_truly = 0.95 if rng.random() < 0.1 else 0.5
    told = np.where(rng.random(m) < told_truly, present, ~present)
    return told + 0.0, present


def mu_of_dependent() -> float:
    """The least mu such that the run of ``dependent`` is mu-GDP, from its privacy profile."""
    odds = 0.95 / 0.05
    grid = np.linspace(0.0, math.log(odds) - 1e-6, 2000)
    return max(gaussian.mu(e, 0.1 * (0.95 - math.exp(e) * 0.05)) for e in grid) * (1 + 1e-3)


def test_dependent_canaries_break_the_bounds_that_say_so_and_not_the_others():
    rng = np.random.default_rng(14)
    truth = mu_of_dependent()
    assert 0.9 < truth < 1.6
    runs = [dependent(300, rng) for _ in range(1000)]
    above = [one_run_gdp(*run, delta=DELTA).mu > truth for run in runs[:SEEDS]]
    assert sum(above) <= 0.05 * SEEDS
    naive = partial(guesses, claimed_mu=1.0, delta=DELTA)
    assert sum(naive(*run).mu > truth for run in runs) > most_failures(1000, 0.05)
    assert "independent" in naive(*runs[0]).assumption
    assert "independent" not in one_run_gdp(*runs[0], delta=DELTA).assumption


def test_scores_that_are_not_gaussian_break_pooled_t_and_not_the_others():
    """A squashed Gaussian: 2-GDP as before, but its means are 2.2 standard deviations apart."""
    rng = np.random.default_rng(15)
    samples = [scored(2.0, 5000, rng) for _ in range(20)]
    squashed = [(np.tanh(scores - 1.0), present) for scores, present in samples]
    assert sum(pooled_t(*s, delta=DELTA).mu > 2.0 for s in squashed) > 15
    for bound in (one_run_gdp, partial(guesses, claimed_mu=0.0), clopper_pearson):
        assert sum(bound(*s, delta=DELTA).mu > 2.0 for s in squashed) <= 5


@pytest.mark.parametrize("bound", [one_run, *GDP], ids=["one_run", *NAMES])
def test_null_canaries_prove_nothing(bound):
    rng = np.random.default_rng(16)
    found = [bound(*scored(0.0, 1000, rng), delta=DELTA).epsilon for _ in range(20)]
    assert sorted(found)[18] == 0.0
    worse = bound(*scored(-1.0, 1000, rng), delta=DELTA)
    assert worse.epsilon == 0.0
    assert not worse.mu


def test_epsilon_of_a_bound_is_rounded_down_and_close():
    for mu in (0.002, 0.01, 0.3, 1.0, 4.0, 30.0):
        for delta in (1e-12, 1e-5, 0.4):
            high = Guarantee(mu).epsilon(delta)
            low = epsilon_below(mu, delta)
            assert low == high == 0 or high * (1 - 1e-5) - 1e-7 < low < high
            if low:
                assert gaussian.delta(mu, low) > delta
    assert epsilon_below(0.0, 0.1) == 0.0
    assert from_mu("m", "a", -3.0, delta=DELTA).mu == 0.0
    with pytest.raises(ConfigError, match="finite"):
        from_mu("m", "a", math.nan, delta=DELTA)


@pytest.mark.parametrize("confidence", [1e-17, 1 - 2.0**-53])
@pytest.mark.parametrize("bound", GDP, ids=NAMES)
def test_any_confidence_gives_a_finite_bound(bound, confidence):
    found = bound(*scored(2.0, 200, np.random.default_rng(1)), delta=DELTA, confidence=confidence)
    assert math.isfinite(found.epsilon)


@pytest.mark.parametrize("delta", [1e-300, 1e-16])
@pytest.mark.parametrize("mu", [1e-3, 1e-2])
def test_epsilon_is_rounded_down_where_both_are_small(mu, delta):
    epsilon = mpmath.mpf(epsilon_below(mu, delta))
    with mpmath.workdps(60):
        at = [-epsilon / mu + mu / 2, -epsilon / mu - mu / 2]
        least = mpmath.ncdf(at[0]) - mpmath.exp(epsilon) * mpmath.ncdf(at[1])
    assert least >= delta
