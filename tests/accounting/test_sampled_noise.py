"""Noise for a target under sampling: met, near it, and by one independent estimate."""

import pytest

from accounting import (
    BallsInBins,
    BMinSep,
    ConfigError,
    Estimate,
    EstimatedGuarantee,
    Independent,
    Participation,
    PoissonSampling,
    Toeplitz,
    calibrate,
    participation_of,
    sampled_guarantee,
)
from accounting.calibrate import estimated_noise, least_sampled_noise
from accounting.cohorts import SAMPLERS, cohorts, sampling_from_dict, sampling_to_dict

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
    with pytest.raises(ConfigError, match="leave out"):
        sampled_guarantee(
            Independent(9), PoissonSampling(3, 12), noise_multiplier=1.0, estimate=Estimate(10_000)
        )
    with pytest.raises(ConfigError, match="the mechanism has 9"):
        sampled_guarantee(Independent(9), BallsInBins(2, 8), noise_multiplier=1.0)
    with pytest.raises(ConfigError, match=", ".join(SAMPLERS)):
        sampling_from_dict({"name": "shuffle"})
    with pytest.raises(ConfigError, match="bins"):
        sampling_from_dict({"name": "balls-in-bins", "rounds": 8})
