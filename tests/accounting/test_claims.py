"""What a report says of amplified runs, alone and beside earlier ones, by brute force."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from mixtures import deltas, grid

from accounting import (
    AllocatedGuarantee,
    BallsInBins,
    ComposedGuarantee,
    ConfigError,
    EstimatedGuarantee,
    Guarantee,
    Independent,
    Participation,
    PrivacyReport,
    SampledGuarantee,
    StatedGuarantee,
    TruncatedGuarantee,
)
from accounting.claims import claim_of, earlier_runs, known, plain, read_releases, samplers

POINTS = 101
POISSON = SampledGuarantee(1.0, probability=0.3, steps=2)
RATES = (1e-3, 0.01, 0.1, 0.5)


def claimed(run, delta=1e-3, earlier=None, rounds=2) -> PrivacyReport:
    mechanism = Independent(rounds)
    return PrivacyReport.of(
        mechanism,
        Participation(rounds, rounds),
        noise_multiplier=1.0,
        delta=delta,
        earlier=None if earlier is None else known(earlier.releases),
        sampled=claim_of(run, delta, earlier),
    )


def rows(q: float) -> dict[tuple[int, ...], float]:
    """Rounds of a member: two on Poisson samples, then one of an earlier Gaussian run."""
    each = [(1 - q, 0), (q, 1)]
    return {(first, second, 1): p * r for p, first in each for r, second in each}


def best_tests(mu: float, rates) -> tuple[list[float], float]:
    """Detection rates of the best tests, the worse direction, and the greatest advantage."""
    scale = np.array([1.0, 1.0, mu])
    released, masses = grid(3, POINTS)
    ratio = np.zeros(released.shape[1])
    for joined, weight in rows(POISSON.probability).items():
        means = np.array(joined) * scale
        ratio += weight * np.exp(means @ released - (means @ means) / 2)
    powers = []
    for with_member, without in ((ratio * masses, masses), (masses, ratio * masses)):
        order = np.argsort(-(with_member / without))
        false, true = np.cumsum(without[order]), np.cumsum(with_member[order])
        powers.append([float(true[np.searchsorted(false, rate) - 1]) for rate in rates])
    advantage = float(np.maximum(ratio - 1, 0) @ masses)
    return [max(pair) for pair in zip(*powers, strict=True)], advantage


def test_the_attackers_lines_of_two_composed_runs_are_just_above_the_best_tests() -> None:
    """Two Poisson steps after a Gaussian run; a mu of 10 % less is below the truth."""
    earlier = ComposedGuarantee((Guarantee(0.7),))
    report = claimed(POISSON, earlier=earlier)
    powers, advantage = best_tests(0.7, RATES)
    for rate, power in zip(RATES, powers, strict=True):
        assert power <= report.cost.tpr_at_fpr(rate) * (1 + 1e-9) < 1.03 * power
    assert advantage <= report.advantage * (1 + 1e-6) < 1.005 * advantage
    less = claimed(POISSON, earlier=ComposedGuarantee((Guarantee(0.63),)))
    assert less.advantage < advantage
    assert all(less.cost.tpr_at_fpr(r) < p for r, p in zip(RATES, powers, strict=True))


def test_epsilon_of_two_composed_runs_is_the_brute_forces_in_both_directions() -> None:
    encoder = np.diag([1.0, 1.0, 0.7])
    for epsilon in (0.2, 0.8, 1.6):
        truth = deltas(encoder, rows(POISSON.probability), 1.0, [epsilon], POINTS).max()
        report = claimed(POISSON, delta=float(truth), earlier=ComposedGuarantee((Guarantee(0.7),)))
        assert epsilon <= report.epsilon * (1 + 2e-5) < epsilon * 1.01  # the grid's own error
        assert report.epsilon < report.guarantee.epsilon(report.delta)


@pytest.mark.slow
def test_a_run_and_those_before_it_are_dp_accountings_composition() -> None:
    run = SampledGuarantee(0.8, probability=0.02, steps=300)
    earlier = ComposedGuarantee((Guarantee(0.4), SampledGuarantee(1.2, 0.1, 50)))
    other = PLDAccountant().compose(GaussianDpEvent(2.5))
    for part in (run, earlier.releases[1]):
        step = PoissonSampledDpEvent(part.probability, GaussianDpEvent(part.noise_multiplier))
        other.compose(SelfComposedDpEvent(step, part.steps))
    report = claimed(run, delta=1e-5, earlier=earlier)
    assert report.epsilon == pytest.approx(other.get_epsilon(1e-5), rel=0.02)
    assert (report.samplers, report.earlier_sampling) == (("poisson",), ("poisson",))
    assert max(run.epsilon(1e-5), earlier.epsilon(1e-5)) < report.epsilon
    assert report.epsilon < run.epsilon(5e-6) + earlier.epsilon(5e-6)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(SampledGuarantee(1.0, 0.01, 100), marks=pytest.mark.slow),
        TruncatedGuarantee(1.0, probability=0.01, population=1000, most=40, steps=100),
        AllocatedGuarantee(1.0, BallsInBins(20, 20)),
    ],
    ids=lambda run: type(run).__name__,
)
def test_an_amplified_run_alone_helps_the_attacker_less_than_mu_would(run) -> None:
    report = claimed(run, delta=1e-5, rounds=20)
    assert report.epsilon == run.epsilon(1e-5)
    assert run.delta(0.0) * (1 - 1e-3) <= report.advantage <= run.delta(0.0) * 1.01
    assert report.advantage < Guarantee(report.mu).advantage() / 2
    for rate, most in report.tpr_at_fpr:
        assert rate < most <= math.exp(report.epsilon) * rate + 1e-5
        assert most < Guarantee(report.mu).tpr_at_fpr(rate)
    assert "that does not know who was sampled" in report.statement()


def test_where_a_profile_overflows_the_lines_are_of_the_runs_own_accountant() -> None:
    run = SampledGuarantee(1e-3, 0.5, 1)
    report = claimed(run, delta=1e-5)
    assert report.epsilon == run.epsilon(1e-5)
    # Who was sampled is told for sure, and half are not.
    assert 0.55 <= report.tpr_at_fpr[0][1] <= 0.6 + 1e-6
    with pytest.raises(ConfigError, match="no finite profile"):
        ComposedGuarantee((SampledGuarantee(1e-3, 0.5, 1),)).epsilon(1e-5)


def test_of_an_estimate_one_pair_is_known_and_no_composition() -> None:
    bins = BallsInBins(4, 8)
    run = EstimatedGuarantee(4.0, bins, Independent(8), 10_000, 1)
    report = claimed(run, rounds=8)
    pair = StatedGuarantee(report.epsilon, 1e-3)
    assert report.advantage <= ComposedGuarantee((pair,)).advantage() * (1 + 1e-6)
    at = math.tanh(report.epsilon / 2)  # of randomised response
    assert report.advantage >= min(at, Guarantee(run.mu).advantage())
    with pytest.raises(ConfigError, match="no proof composes it"):
        claim_of(run, 1e-3, ComposedGuarantee((Guarantee(1.0),)))


def test_gaussian_runs_alone_need_no_claim_beyond_mu() -> None:
    assert claim_of(Guarantee(1.0), 1e-5) is None
    assert claim_of(Guarantee(1.0), 1e-5, ComposedGuarantee((Guarantee(2.0),))) is None


def test_releases_are_read_back_and_name_their_samplers() -> None:
    releases = (
        Guarantee(3.0),
        SampledGuarantee(1.0, 0.01, 100),
        Guarantee(4.0),
        TruncatedGuarantee(1.0, probability=0.01, population=1000, most=40, steps=100),
        AllocatedGuarantee(1.0, BallsInBins(20, 20)),
    )
    again = read_releases(plain(releases))
    assert samplers(again) == samplers(releases)
    assert samplers(again) == ("balls-in-bins", "poisson", "truncated-poisson")
    assert read_releases(plain(again)) == again
    both = ComposedGuarantee(releases).epsilon(1e-5)
    assert ComposedGuarantee(again).epsilon(1e-5) == pytest.approx(both, rel=1e-9)


@pytest.mark.parametrize(
    "values",
    [
        None, [], [1.0], [{}], [{"mu": math.nan}], [{"mu": "1"}], [{"mu": True}], [{"mu": -1.0}],
        [{"steps": 5}], [{"mu": 1.0, "steps": 5}], [{"bins": 1, "own": 1.0}], [{"mu": 1.0}] * 201,
        [{"epsilon": 1.0, "delta": 0.0}],
    ],
    ids=lambda values: str(values)[:40],
)  # fmt: skip
def test_costs_of_earlier_runs_that_are_none_are_refused(values) -> None:
    with pytest.raises(ConfigError):
        earlier_runs(values)
