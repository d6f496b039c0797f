"""Poisson sampling: stated or refused, and never mixed with zero-out."""

import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
import pytest

from accounting import (
    BinaryTree,
    ConfigError,
    Guarantee,
    Independent,
    Participation,
    PoissonSampling,
    SampledGuarantee,
    Sensitivity,
    guarantee,
    sampled_guarantee,
)
from accounting.mechanisms.mechanism import prefix_sums


@dataclass(frozen=True)
class Banded:
    """A lower-triangular encoder with the coefficients given, for these tests."""

    rounds: int
    coefficients: tuple[float, ...]
    name: str = "banded"
    groups = None
    prefix_only = False

    def encoder(self):
        return sum(c * np.eye(self.rounds, k=-lag) for lag, c in enumerate(self.coefficients))

    def decoder(self):
        return prefix_sums(self.rounds) @ np.linalg.inv(self.encoder())

    def sensitivity(self, participation):
        assert participation.max_participations == 1
        return Sensitivity(float((self.encoder() ** 2).sum(axis=0).max()), True, "column norm")

    def prefix_variance(self):
        return (self.decoder() ** 2).sum(axis=1)


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
    mechanism = Banded(10, (1.0, 0.5, 0.25))
    sampling = PoissonSampling(50, 1000, groups=3)
    run = sampled_guarantee(mechanism, sampling, noise_multiplier=2.0)
    assert run.steps == 4
    assert "in 3 groups that no data decided and that take turns" in run.assumptions[0].text
    assert run.probability == pytest.approx(0.15, rel=1e-15)
    exact = 2.0 / math.sqrt(1 + 0.25 + 0.0625)
    assert exact * (1 - 1e-15) <= run.noise_multiplier <= exact
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
    banded = Banded(12, (1.0, 0.5))
    full = sampled_guarantee(banded, PoissonSampling(500, 1000, 2), noise_multiplier=4.0)
    part = sampled_guarantee(banded, PoissonSampling(50, 1000, 2), noise_multiplier=4.0)
    unamplified = Guarantee(math.sqrt(6 * 1.25) / 4.0).epsilon(1e-6)
    assert full.epsilon(1e-6) == pytest.approx(unamplified, rel=1e-5)
    assert part.epsilon(1e-6) < 0.5 * unamplified


def test_rdp_is_looser_than_pld():
    pld, rdp = (SampledGuarantee(2.0, 0.01, 100, method) for method in ("pld", "rdp"))
    assert pld.epsilon(1e-6) < rdp.epsilon(1e-6)
    assert pld.delta(0.5) < rdp.delta(0.5)


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
        (Banded(10, (1.0, 0.5, 0.25)), 1, "groups=1: the encoder of banded reaches further"),
        (Banded(10, (1.0, 0.5, 0.25)), 2, "groups=2: the encoder of banded reaches further"),
        (BinaryTree(4), 4, "only a square lower-triangular encoder"),
    ],
)
def test_an_encoder_with_more_bands_than_groups_is_refused(mechanism, groups, message):
    sampling = PoissonSampling(10, 1000, groups)
    with pytest.raises(ConfigError, match=message):
        sampled_guarantee(mechanism, sampling, noise_multiplier=1.0)


def test_it_says_what_it_is():
    run = sampled_guarantee(Independent(10), PoissonSampling(100, 1000), noise_multiplier=1.0)
    assert run.adjacency == "add-or-remove"
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
