"""Guarantees by every method, published ones too, and the noise that they need for a target."""

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
    Independent,
    Participation,
    PoissonSampling,
    accountants,
    calibrate,
    gaussian,
    guarantee,
    quadrature,
    sampled_guarantee,
)
from accounting.guarantee import compare, mu_upper

DELTA = 1e-6
MUS = st.floats(min_value=-4, max_value=3).map(lambda exponent: 10.0**exponent)


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


@settings(max_examples=12)
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


@given(mu=MUS, deviations=st.floats(-2.8, 37))
def test_true_positive_rate_is_an_upper_bound_and_tight(mu, deviations):
    fpr = float(mpmath.ncdf(-deviations))
    with mpmath.workdps(60):
        below = mpmath.findroot(lambda x: mpmath.log(mpmath.ncdf(x)) - mpmath.log(fpr), -deviations)
        truth = mpmath.ncdf(below + mpmath.mpf(mu))
    slack = mpmath.mpf("1e-12" if deviations < 7 else "1e-10")
    assert truth <= Guarantee(mu).tpr_at_fpr(fpr) <= min(1, truth * (1 + slack))


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
@pytest.mark.parametrize("mu", [0.01, 0.8, 5.0, 30.0])
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


STACK_OVERFLOW = BinaryTree(1600), Participation(1600)


def epsilon(mechanism, participation, z, delta=1e-6, method="exact"):
    run = guarantee(mechanism, participation, noise_multiplier=z, method=method)
    return run.epsilon(delta)


@settings(max_examples=200)
@given(
    n=st.integers(1, 3000),
    k=st.integers(1, 6),
    tree=st.booleans(),
    target=st.floats(-2, 2).map(lambda exponent: 10.0**exponent),
    exponent=st.floats(-15, -1),
)
def test_noise_is_safe_and_tight(n, k, tree, target, exponent):
    mechanism = BinaryTree(n) if tree else Independent(n)
    run = Participation(n, min(k, n))
    delta = 10.0**exponent
    z = calibrate(mechanism, run, target_epsilon=target, delta=delta)
    reached = epsilon(mechanism, run, z, delta)
    assert target * (1 - 1e-4) <= reached <= target


@pytest.mark.parametrize(
    ("target", "method"),
    [
        pytest.param(2.0, "pld", marks=pytest.mark.slow),
        *((target, m) for target in (0.5, 2.0, 18.71) for m in ("rdp",)),
    ],
)
def test_noise_by_other_methods_is_safe_and_tight(target, method):
    z = calibrate(*STACK_OVERFLOW, target_epsilon=target, delta=1e-6, method=method)
    reached = epsilon(*STACK_OVERFLOW, z, method=method)
    assert target * (1 - 1e-4) <= reached <= target
    assert z >= calibrate(*STACK_OVERFLOW, target_epsilon=target, delta=1e-6)


@pytest.mark.parametrize("target", [1e-50, 1e-30, 1e-12, 1e12, 1e50])
@pytest.mark.parametrize("delta", [1e-320, 1e-300, 1e-17, 0.5, 1 - 1e-16])
def test_extreme_targets_are_met(target, delta):
    z = calibrate(*STACK_OVERFLOW, target_epsilon=target, delta=delta)
    assert epsilon(*STACK_OVERFLOW, z, delta) <= target


def test_rdp_out_of_reach_says_so():
    with pytest.raises(
        ConfigError, match=r'at this delta\. Use method="exact", or a greater target\.$'
    ):
        calibrate(*STACK_OVERFLOW, target_epsilon=0.005, delta=1e-9, method="rdp")


# Published budgets, each with its source; and the exact figures beside them.


@pytest.mark.parametrize(("noise_multiplier", "published"), [(1.13, 19.74), (8.83, 2.04)])
def test_kairouz_stack_overflow(noise_multiplier, published):
    """Kairouz et al. 2021, as asserted (epsilon <) by dp-accounting's and TF-Privacy's tests.

    They are the same mechanism under the conversion of Mironov 2017, Proposition 3.
    """
    run = guarantee(*STACK_OVERFLOW, noise_multiplier=noise_multiplier, method="rdp")
    assert run.epsilon(DELTA) < published
    orders = np.linspace(1.1, 200, 2000)
    mironov = run.rho * orders - math.log(DELTA) / (orders - 1)
    assert mironov.min() == pytest.approx(published, abs=0.006)


def sgd(z, q, steps, method="pld"):
    return sampled_guarantee(
        Independent(steps), PoissonSampling(q * 1000, 1000), noise_multiplier=z, method=method
    )


def test_opacus_accountants():
    """Opacus, tests/accountants_test.py: z = 1.5, q = 0.04, delta 1e-5; its RDP orders differ."""
    assert sgd(1.5, 0.04, 2250, "rdp").epsilon(1e-5) == pytest.approx(7.32911117143, abs=3e-4)
    found = sgd(1.5, 0.04, 2249).epsilon(1e-5)
    assert found == pytest.approx(6.76705, abs=1e-4)
    assert found <= 6.777395712150674  # PRV, which states its error as 0.01
    assert found >= 6.777395712150674 - 2 * 0.01


# The closed form, against 60-digit arithmetic: never below the truth, and tight.


def true_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@given(mu=MUS, fraction=st.floats(min_value=0, max_value=4))
def test_delta_is_an_upper_bound_and_tight(mu, fraction):
    epsilon = fraction * (mu + mu * mu)
    truth = true_delta(mu, epsilon)
    found = gaussian.delta(mu, epsilon)
    assert found >= truth
    # Small mu is a difference of nearly equal terms: its error bound grows as 1 / mu.
    slack = mpmath.mpf("1e-9") + 1e-12 / mu
    assert found <= min(1, truth * (1 + slack) + mpmath.mpf("1e-323"))


@given(mu=MUS, exponent=st.floats(min_value=-30, max_value=-0.5))
def test_epsilon_is_an_upper_bound_and_tight(mu, exponent):
    delta = 10.0**exponent
    epsilon = gaussian.epsilon(mu, delta)
    assert true_delta(mu, epsilon) <= delta
    assert gaussian.log_delta(mu, epsilon) <= math.log(delta)  # by our own, pessimistic, measure
    if epsilon > 0:
        assert true_delta(mu, epsilon * (1 - 1e-7)) > delta


@given(
    epsilon=st.floats(min_value=1e-3, max_value=1e3),
    exponent=st.floats(min_value=-30, max_value=-0.5),
)
def test_mu_is_a_lower_bound_and_tight(epsilon, exponent):
    delta = 10.0**exponent
    mu = gaussian.mu(epsilon, delta)
    assert true_delta(mu, epsilon) <= delta
    assert true_delta(mu * (1 + 1e-7), epsilon) > delta


def test_epsilon_zero_is_enough_when_delta_is_the_total_variation():
    assert gaussian.epsilon(0.1, gaussian.delta(0.1, 0.0) * (1 + 1e-12)) == 0.0
    assert math.isclose(gaussian.delta(1.0, 0.0), math.erf(1 / math.sqrt(8)), rel_tol=1e-12)


@pytest.mark.parametrize("x", [1e9, 1e12, 1e100])
def test_the_furthest_tail_is_bounded_by_its_exponent(x):
    """delta(epsilon) < Phi(-x) < e^(-x^2/2), and within a millionth of it in the exponent."""
    mu = 1.0
    epsilon = mu * (x + mu / 2)
    assert -x * x / 2 * (1 + 1e-8) <= gaussian.log_delta(mu, epsilon)
    assert gaussian.log_delta(mu, epsilon) <= -x * x / 2 * (1 - 1e-6)
