"""Sampling: stated or refused, never mixed with zero-out, and calibrated."""

import math

import dp_accounting
import pytest

from accounting import (
    BallsInBins,
    BinaryTree,
    BMinSep,
    ConfigError,
    Estimate,
    EstimatedGuarantee,
    ExampleSampling,
    Guarantee,
    Independent,
    Participation,
    PoissonSampling,
    SampledGuarantee,
    Toeplitz,
    WithReplacementSampling,
    calibrate,
    guarantee,
    participation_of,
    sampled_guarantee,
)
from accounting.calibrate import _unsampled_noise, estimated_noise, least_sampled_noise
from accounting.cohorts import SAMPLERS, cohorts, sampling_from_dict, sampling_to_dict


def test_probability():
    assert 0.1 < PoissonSampling(100, 1000).probability <= 0.1 * (1 + 1e-15)
    assert 0.4 < PoissonSampling(100, 1000, 4).probability <= 0.4 * (1 + 1e-15)
    assert PoissonSampling(100, 1000, 10).probability == 1.0
    with pytest.raises(ConfigError, match=r"Use expected_batch of 90\.9091 or less"):
        PoissonSampling(100, 1000, 11)
    with pytest.raises(ConfigError, match="expected_batch"):
        PoissonSampling(1001, 1000)


def test_banded_is_dp_sgd_of_fewer_steps():
    """Choquette-Choo et al. 2023, Theorem 4: ceil(n / b) steps, q b, noise over column norm."""
    mechanism = Toeplitz(10, (1.0, 0.5, 0.25))
    sampling = PoissonSampling(50, 1000, groups=3)
    run = sampled_guarantee(mechanism, sampling, noise_multiplier=2.0)
    assert run.steps == 4
    assert "in 3 groups that no data decided and that take turns" in run.assumptions[0].text
    assert run.probability == pytest.approx(0.15, rel=1e-15)
    exact = 2.0 / math.sqrt(1 + 0.25 + 0.0625)
    assert exact * (1 - 1e-14) <= run.noise_multiplier <= exact
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.15, dp_accounting.GaussianDpEvent(exact)), 4
    )
    judged = dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(1e-6)
    assert run.epsilon(1e-6) == pytest.approx(judged, rel=1e-6)
    assert run.delta(1.0) == pytest.approx(
        dp_accounting.pld.PLDAccountant().compose(event).get_delta(1.0), rel=1e-6
    )


def test_amplification_lowers_epsilon_and_no_sampling_gives_none():
    """At probability 1 add-or-remove has the same Gaussian as zero-out: k = ceil(n / b)."""
    banded = Toeplitz(12, (1.0, 0.5))
    full = sampled_guarantee(banded, PoissonSampling(500, 1000, 2), noise_multiplier=4.0)
    part = sampled_guarantee(banded, PoissonSampling(50, 1000, 2), noise_multiplier=4.0)
    unamplified = Guarantee(math.sqrt(6 * 1.25) / 4.0).epsilon(1e-6)
    assert full.epsilon(1e-6) == pytest.approx(unamplified, rel=1e-5)
    assert part.epsilon(1e-6) < 0.5 * unamplified


def test_small_noise_does_not_exhaust_memory():
    run = sampled_guarantee(Independent(10), PoissonSampling(1, 1000), noise_multiplier=0.02)
    assert 1000 < run.epsilon(1e-6) < math.inf


def test_a_delta_below_the_grid_is_refused():
    run = sampled_guarantee(Independent(10), PoissonSampling(100, 1000), noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="delta=1e-40"):
        run.epsilon(1e-40)


def test_a_lost_renyi_curve_is_refused():
    """dp-accounting takes a divergence that was rounded below 0 for perfect privacy."""
    run = SampledGuarantee(1e3, 1e-12, 1, "rdp")
    with pytest.raises(ConfigError, match="lost to rounding"):
        run.epsilon(1e-6)


@pytest.mark.parametrize("sampling", [None, 0.1, "poisson", 100])
def test_sampling_must_be_stated(sampling):
    with pytest.raises(ConfigError, match="must be a sampler of this package"):
        sampled_guarantee(Independent(4), sampling, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("mechanism", "groups", "message"),
    [
        (Toeplitz(10, (1.0, 0.5, 0.25)), 1, "groups=1: the encoder of toeplitz reaches further"),
        (Toeplitz(10, (1.0, 0.5, 0.25)), 2, "groups=2: the encoder of toeplitz reaches further"),
        (BinaryTree(4), 4, "only a square lower-triangular encoder"),
    ],
)
def test_an_encoder_with_more_bands_than_groups_is_refused(mechanism, groups, message):
    sampling = PoissonSampling(10, 1000, groups)
    with pytest.raises(ConfigError, match=message):
        sampled_guarantee(mechanism, sampling, noise_multiplier=1.0)


def test_it_says_what_it_is():
    run = sampled_guarantee(Independent(10), PoissonSampling(100, 1000), noise_multiplier=1.0)
    assert {a.code for a in run.assumptions} == {
        "poisson-sampling", "hidden-sample", "public-constants"
    }  # fmt: skip
    assert "probability 0.1" in run.assumptions[0].text
    zero_out = guarantee(Independent(10), Participation(10), noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="add-or-remove and zero-out do not compose"):
        zero_out.compose(run)


def test_the_grid_follows_the_loss():
    """On dp-accounting's own grid of 1e-4 this one is 0.1027, above its RDP."""
    run = SampledGuarantee(1000.0, 0.01, 10**6)
    assert run.epsilon(1e-6) < SampledGuarantee(1000.0, 0.01, 10**6, "rdp").epsilon(1e-6)
    # The central limit: a million independent small losses are one Gaussian, mu = q sqrt(T) / z.
    assert run.epsilon(1e-6) == pytest.approx(Guarantee(0.01).epsilon(1e-6), rel=2e-3)


@pytest.mark.parametrize("noise_multiplier", [9e-4, 2e5])
def test_noise_beyond_the_accountants_range_is_refused(noise_multiplier):
    with pytest.raises(ConfigError, match="reliable from 1e-3 to 1e5"):
        SampledGuarantee(noise_multiplier, 0.1, 10)


# Noise for a target under sampling: met, near it, and by one independent estimate.

SLOW = pytest.mark.slow
CASES = [
    (Independent(20), PoissonSampling(10, 200), "rdp"),
    pytest.param(Independent(20), PoissonSampling(10, 200), "pld", marks=SLOW),
    pytest.param(
        Toeplitz.square_root(20, 4), PoissonSampling(10, 200, groups=4), "pld", marks=SLOW
    ),
    pytest.param(Independent(20), BallsInBins(5, 20), "pld", marks=SLOW),
    (Toeplitz.square_root(20), BallsInBins(5, 20), "pld"),
]


@pytest.mark.parametrize(("mechanism", "sampling", "method"), CASES, ids=repr)
def test_the_noise_meets_the_target_closely_and_is_less_than_without(mechanism, sampling, method):
    noise = least_sampled_noise(mechanism, sampling, target_epsilon=2.0, delta=1e-6, method=method)
    run = sampled_guarantee(mechanism, sampling, noise_multiplier=noise, method=method)
    assert 2.0 * (1 - 1e-4) <= run.epsilon(1e-6) <= 2.0
    limits = participation_of(sampling, 20)
    assert noise < calibrate(mechanism, limits, target_epsilon=2.0, delta=1e-6)


@pytest.mark.parametrize(
    "sampling",
    [WithReplacementSampling(100, 10_000), ExampleSampling(100, 10**6, 100), PoissonSampling(1, 9)],
)
def test_the_search_begins_with_noise_that_the_accountant_takes(sampling):
    """A batch with replacement of 100, unhidden, needs 25,480."""
    for target in (0.5, 1e-4):
        noise = _unsampled_noise(Independent(1000), sampling, target, 1e-6)
        assert sampled_guarantee(Independent(1000), sampling, noise_multiplier=noise * 1.0001)


@pytest.mark.slow
def test_less_noise_than_the_accountant_takes_unhidden_is_found():
    sampling = WithReplacementSampling(100_000, 10**9)
    noise = least_sampled_noise(Independent(1), sampling, target_epsilon=0.5, delta=1e-6)
    run = sampled_guarantee(Independent(1), sampling, noise_multiplier=noise)
    assert 0.5 * (1 - 1e-4) <= run.epsilon(1e-6) <= 0.5
    assert noise < 1


def test_an_estimate_is_made_once_after_its_noise_was_chosen(monkeypatch):
    made = []
    usual = EstimatedGuarantee.epsilon

    def watched(self, delta):
        made.append((self.noise_multiplier, self.seed, self.samples))
        return usual(self, delta)

    monkeypatch.setattr(EstimatedGuarantee, "epsilon", watched)
    sampler = BMinSep(10, 200, 4)
    mechanism = Toeplitz.square_root(12, 4)
    found = estimated_noise(mechanism, sampler, target_epsilon=3.0, delta=1e-5, draws=100_000)
    *pilots, (noise, seed, samples) = made
    assert (noise, seed, samples) == (found.noise_multiplier, found.seed, 100_000)
    assert seed not in {own for _, own, _ in pilots}
    assert {count for *_, count in pilots} == {10_000}
    assert found.epsilon(1e-5) <= 3.0
    monkeypatch.setattr(EstimatedGuarantee, "epsilon", lambda self, _: 4.0 - (self.samples < 10**5))
    with pytest.raises(ConfigError, match="another answer"):
        estimated_noise(mechanism, sampler, target_epsilon=3.0, delta=1e-5, draws=100_000)


@pytest.mark.parametrize(
    "sampling",
    [PoissonSampling(3, 12, 3), BallsInBins(4, 10), BMinSep(2, 12, 3), PoissonSampling(12, 12)],
    ids=str,
)
def test_no_draw_breaks_the_limits_that_are_stated(sampling):
    limits = participation_of(sampling, 10)
    for number in range(20):
        drawn = cohorts(sampling, members=12, rounds=10, key=bytes([number]) * 32)
        rounds = {i: [] for i in range(12)}
        for t, members in enumerate(drawn):
            for i in members.tolist():
                rounds[i].append(t)
        found = Participation.from_log(10, rounds)
        assert found.max_participations <= limits.max_participations
        if found.max_participations > 1:
            assert found.min_separation >= limits.min_separation
    assert sampling_from_dict(sampling_to_dict(sampling)) == sampling


def test_a_sampler_needs_its_own_accountant():
    sampler = BMinSep(2, 12, 3)
    with pytest.raises(ConfigError, match="needs an estimate"):
        sampled_guarantee(Toeplitz.square_root(9, 3), sampler, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="leave them out"):
        sampled_guarantee(
            Independent(9), PoissonSampling(3, 12), noise_multiplier=1.0, estimate=Estimate(10_000)
        )
    with pytest.raises(ConfigError, match="the mechanism has 9"):
        sampled_guarantee(Independent(9), BallsInBins(2, 8), noise_multiplier=1.0)
    with pytest.raises(ConfigError, match=", ".join(SAMPLERS)):
        sampling_from_dict({"name": "shuffle"})
    with pytest.raises(ConfigError, match="bins"):
        sampling_from_dict({"name": "balls-in-bins", "rounds": 8})
