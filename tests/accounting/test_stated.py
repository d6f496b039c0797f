"""Profiles that somebody states: nowhere below the release that they are of."""

import math

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant

from accounting import ComposedGuarantee, ConfigError, Guarantee, SampledGuarantee, StatedGuarantee
from accounting.claims import plain, read_releases
from accounting.stated import StatedProfile, read_profile, zcdp_profile

STEP = PoissonSampledDpEvent(0.02, GaussianDpEvent(1.0))
POISSON = SampledGuarantee(1.0, 0.02, 500)


def stated(profile, last: float, pairs: int = 200) -> StatedProfile:
    epsilons = np.linspace(0.0, last, pairs).tolist()
    return StatedProfile(tuple(epsilons), tuple(float(profile(e)) for e in epsilons))


@pytest.mark.slow
def test_the_profile_of_another_accountant_composes_as_that_accountant_would() -> None:
    """Laplace noise on Poisson samples, for which there is no accountant here, beside two runs."""
    theirs = SelfComposedDpEvent(PoissonSampledDpEvent(0.1, LaplaceDpEvent(2.0)), 50)
    alone = PLDAccountant().compose(theirs)
    profile = stated(alone.get_delta, 6.0)
    both = ComposedGuarantee((profile, POISSON, Guarantee(0.4)))
    truth = PLDAccountant().compose(theirs)
    truth.compose(SelfComposedDpEvent(STEP, 500)).compose(GaussianDpEvent(2.5))
    for delta in (1e-3, 1e-5, 1e-7):
        assert alone.get_epsilon(delta) * (1 - 1e-3) <= ComposedGuarantee((profile,)).epsilon(delta)
        exact = truth.get_epsilon(delta)
        assert exact * (1 - 1e-4) <= both.epsilon(delta) < 1.02 * exact
    less = stated(lambda e: alone.get_delta(e + 0.2), 6.0)  # the power twin
    twin = ComposedGuarantee((less, POISSON, Guarantee(0.4)))
    assert twin.epsilon(1e-5) < truth.get_epsilon(1e-5)


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_a_gaussian_by_its_profile_is_just_above_itself(mu: float) -> None:
    exact = Guarantee(mu)
    profile = ComposedGuarantee((stated(exact.delta, 9 * mu + mu * mu / 2, 400),))
    for delta in (1e-2, 1e-6, 1e-9):
        assert exact.epsilon(delta) <= profile.epsilon(delta) < 1.02 * exact.epsilon(delta)
    assert exact.advantage() <= profile.advantage() < 1.001 * exact.advantage()


def test_one_pair_is_what_is_stated_as_one() -> None:
    pair, profile = StatedGuarantee(1.0, 1e-6), StatedProfile((1.0,), (1e-6,))
    for delta in (2e-6, 1e-4):
        both = (ComposedGuarantee((one, POISSON)).epsilon(delta) for one in (pair, profile))
        assert next(both) == pytest.approx(next(both), rel=1e-3)


@pytest.mark.parametrize("rho", [1e-3, 0.1, 2.0])
def test_zcdp_is_no_less_than_a_gaussian_of_that_rho_and_less_than_its_simplest_bound(rho) -> None:
    mu = math.sqrt(2 * rho)
    one = ComposedGuarantee((zcdp_profile(rho),))
    two = ComposedGuarantee((zcdp_profile(rho), Guarantee(mu)))
    for delta in (1e-3, 1e-6):
        simple = rho + 2 * math.sqrt(rho * math.log(1 / delta))  # Bun and Steinke 2016
        assert Guarantee(mu).epsilon(delta) <= one.epsilon(delta) <= simple
        assert Guarantee(math.sqrt(2) * mu).epsilon(delta) <= two.epsilon(delta)
        assert two.epsilon(delta) <= one.epsilon(delta / 2) + Guarantee(mu).epsilon(delta / 2)


def test_a_profile_is_read_from_a_file_and_written_with_others(tmp_path) -> None:
    (path := tmp_path / "profile.csv").write_text("epsilon,delta\n0,0.4\n1,0.1\n\n2,1e-6\n")
    profile = read_profile(path)
    assert profile == StatedProfile((0.0, 1.0, 2.0), (0.4, 0.1, 1e-6))
    assert read_releases(plain((profile, POISSON))) == (profile, POISSON)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "columns epsilon and delta"),
        ("epsilon,delta", "columns epsilon and delta"),
        ("delta,epsilon\n0,1", "columns epsilon and delta"),
        ("epsilon,delta\n0,x", "not two numbers"),
        ("epsilon,delta\n0,0.1,5", "not two numbers"),
        ("epsilon,delta\n0,nan", "profile=nan"),
        ("epsilon,delta\n0,inf", "profile=inf"),
        ("epsilon,delta\n-1,0.5", "zero or more"),
        ("epsilon,delta\n0,1.5", "at most 1"),
        ("epsilon,delta\n1,0.1\n1,0.05", "must ascend"),
        ("epsilon,delta\n0,0.1\n1,0.2", "must not grow"),
        ("epsilon,delta\n501,0", "up to 500"),
        ("epsilon,delta\n" + "".join(f"{i / 9},0.1\n" for i in range(501)), "1 to 500"),
    ],
    ids=lambda text: str(text)[:30],
)
def test_a_file_that_holds_no_profile_is_refused_in_a_sentence(tmp_path, text, why) -> None:
    (path := tmp_path / "profile.csv").write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_profile(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_profile(tmp_path / "none.csv")


@pytest.mark.parametrize("rho", [0.0, -1.0, math.nan, 1e4])
def test_a_rho_that_is_none_is_refused(rho) -> None:
    with pytest.raises(ConfigError, match="rho="):
        zcdp_profile(rho)
