"""What a guarantee says, by every method; and no number out of nonsense."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import (
    BinaryTree,
    ConfigError,
    CrossCheck,
    Guarantee,
    Participation,
    accountants,
    gaussian,
    guarantee,
    quadrature,
)
from accounting.cross_check import compare
from accounting.guarantee import mu_upper

MUS = st.floats(min_value=-4, max_value=3).map(lambda exponent: 10.0**exponent)


def test_monotone_in_everything():
    base = {"n": 64, "k": 2, "b": 8, "z": 2.0, "delta": 1e-6}

    def epsilon(**change):
        v = base | change
        run = Participation(v["n"], v["k"], v["b"])
        return guarantee(BinaryTree(v["n"]), run, noise_multiplier=v["z"]).epsilon(v["delta"])

    assert epsilon(z=4.0) < epsilon() < epsilon(k=4)
    assert epsilon(delta=1e-3) < epsilon() <= epsilon(b=1)
    assert epsilon() <= epsilon(n=128)


@given(squared=st.floats(0.1, 1e6), z=st.floats(1e-3, 1e3))
def test_mu_is_never_below_the_true_quotient(squared, z):
    with mpmath.workdps(40):
        truth = mpmath.sqrt(mpmath.mpf(squared)) / mpmath.mpf(z)
        assert truth <= mu_upper(squared, z) <= truth * (1 + mpmath.mpf("1e-15"))


def test_composition_adds_mu_squared():
    both = Guarantee(3.0).compose(Guarantee(4.0))
    assert 5.0 <= both.mu <= 5.0 * (1 + 1e-15)
    assert Guarantee(3.0).compose(Guarantee(4.0, "rdp")).method == "rdp"
    assert Guarantee(3.0, "rdp").compose(Guarantee(4.0, "pld")).method == "rdp"


def test_epsilon_and_delta_invert_each_other():
    run = Guarantee(0.7)
    assert run.delta(run.epsilon(1e-6)) == pytest.approx(1e-6, rel=1e-6)
    assert run.advantage() == pytest.approx(math.erf(0.7 / math.sqrt(8)), rel=1e-12)
    assert run.rho == pytest.approx(0.245)


@settings(max_examples=25)
@given(
    mu=st.floats(-3, 1.5).map(lambda exponent: 10.0**exponent),
    exponent=st.floats(-12, -1),
    method=st.sampled_from(["pld", "rdp"]),
)
def test_other_methods_are_never_below_exact(mu, exponent, method):
    exact, other = Guarantee(mu), Guarantee(mu, method)
    delta = 10.0**exponent
    assert other.epsilon(delta) >= exact.epsilon(delta)
    epsilon = exact.epsilon(delta)
    assert 1 >= other.delta(epsilon) >= exact.delta(epsilon)


@pytest.mark.parametrize("mu", [1e-5, 1e-2, 1.0, 50.0, 1e3, 1e4])
@pytest.mark.parametrize("method", ["rdp", "pld"])
def test_every_method_is_sound_at_the_ends_of_its_range(method, mu):
    exact = Guarantee(mu).epsilon(1e-6)
    assert exact <= Guarantee(mu, method).epsilon(1e-6) <= 1.1 * exact + 0.01


@pytest.mark.parametrize("mu", [1e-6, 1.1e4])
@pytest.mark.parametrize("method", ["rdp", "pld"])
def test_beyond_its_range_a_method_refuses(method, mu):
    with pytest.raises(ConfigError, match='Use method="exact"'):
        Guarantee(mu, method).epsilon(1e-6)
    with pytest.raises(ConfigError, match='Use method="exact"'):
        Guarantee(mu, method).delta(0.5)


def test_pld_refuses_a_delta_below_its_grid():
    with pytest.raises(ConfigError, match="it says inf"):
        Guarantee(1.0, "pld").epsilon(1e-30)


@pytest.mark.parametrize("mu", [1e-101, 1e101])
def test_mu_out_of_range(mu):
    with pytest.raises(ConfigError, match="between 1e-100 and 1e100"):
        Guarantee(mu)


@given(mu=MUS, exponent=st.floats(-12, -1e-3))
def test_true_positive_rate_is_an_upper_bound_and_tight(mu, exponent):
    fpr = 10.0**exponent
    with mpmath.workdps(60):
        below = mpmath.findroot(
            lambda x: mpmath.log(mpmath.ncdf(x)) - mpmath.log(fpr), float(-1.5 + exponent / 2)
        )
        truth = mpmath.ncdf(below + mpmath.mpf(mu))
    found = Guarantee(mu).tpr_at_fpr(fpr)
    assert truth <= found <= min(1, truth * (1 + mpmath.mpf("1e-12")))


@given(mu=st.floats(1e-3, 40), deviations=st.floats(6, 37))
def test_true_positive_rate_in_the_far_tail(mu, deviations):
    fpr = float(mpmath.ncdf(-deviations))
    with mpmath.workdps(60):
        below = mpmath.findroot(lambda x: mpmath.log(mpmath.ncdf(x)) - mpmath.log(fpr), -deviations)
        truth = mpmath.ncdf(below + mpmath.mpf(mu))
    found = Guarantee(mu).tpr_at_fpr(fpr)
    assert truth <= found <= min(1, truth * (1 + mpmath.mpf("1e-10")))


def test_advantage_is_the_best_gap_between_the_rates():
    run = Guarantee(0.7)
    rates = np.linspace(0.001, 0.999, 999)
    gaps = [run.tpr_at_fpr(fpr) - fpr for fpr in rates]
    assert max(gaps) <= run.advantage()
    assert max(gaps) == pytest.approx(run.advantage(), abs=1e-5)


@given(mu=MUS)
def test_dp_accounting_is_given_no_more_noise_than_mu_says(mu):
    event = accountants.gaussian_event(mu)
    assert mpmath.mpf(event.noise_multiplier) * mpmath.mpf(mu) <= 1
    assert event.noise_multiplier == pytest.approx(1 / mu, rel=1e-15)


@pytest.mark.parametrize(("method", "agree_to"), [("exact", 1e-7), ("pld", 1e-7), ("rdp", 0.1)])
@pytest.mark.parametrize("mu", [0.01, 0.8, 5.0])
def test_cross_check(method, agree_to, mu):
    check = Guarantee(mu, method).cross_check(1e-6)
    assert check.consistent
    assert check.agree_to <= agree_to or mu == 0.01
    assert check.epsilon == pytest.approx(Guarantee(mu).epsilon(1e-6), rel=1e-6)


@given(mu=st.floats(1e-30, 1e4), delta=st.floats(1e-300, 0.99))
def test_quadrature_and_closed_form_agree(mu, delta):
    closed = gaussian.epsilon(mu, delta)
    assert quadrature.epsilon(mu, delta) == pytest.approx(closed, rel=1e-6, abs=1e-9 * mu + 1e-12)


def test_cross_check_where_both_are_zero():
    check = Guarantee(0.01).cross_check(0.5)
    assert check == CrossCheck("quadrature", 0.0, 0.0, consistent=True)


def test_a_wrong_closed_form_is_noticed(monkeypatch):
    right = gaussian.epsilon
    monkeypatch.setattr(gaussian, "epsilon", lambda mu, delta: 0.99 * right(mu, delta))
    assert not Guarantee(1.0).cross_check(1e-6).consistent


@pytest.mark.parametrize(
    ("method", "epsilon", "second_method", "second", "consistent"),
    [
        ("exact", 1.0, "pld", 1.0009, True),
        ("exact", 1.0, "pld", 1.1, False),
        ("exact", 1.0, "pld", 0.9, False),
        ("exact", 1.0, "rdp", 1.1, True),
        ("exact", 1.0, "rdp", 0.9, False),
        ("rdp", 1.1, "exact", 1.0, True),
        ("rdp", 0.9, "exact", 1.0, False),
        ("pld", 1.1, "exact", 1.0, False),
    ],
)
def test_contradictions_are_seen(method, epsilon, second_method, second, consistent):
    check = compare(method, epsilon, second_method, second, slack=0.1)
    assert check.consistent is consistent
    assert check.epsilon == second
    assert check.agree_to == pytest.approx(abs(epsilon - second) / max(epsilon, second))


@pytest.mark.parametrize("method", ["RDP", "prv", ""])
def test_unknown_method(method):
    with pytest.raises(ConfigError, match="must be one of exact, pld, rdp"):
        Guarantee(1.0, method)
