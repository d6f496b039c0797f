"""Epsilon and delta against 60-digit arithmetic: never below the truth, and tight."""

import math

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import gaussian

MUS = st.floats(min_value=-4, max_value=3).map(lambda exponent: 10.0**exponent)


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


@pytest.mark.parametrize(("mu", "epsilon"), [(1.0, 5000.0), (1e-3, 10.0), (100.0, 40000.0)])
def test_far_tail_underflows_upwards(mu, epsilon):
    assert gaussian.delta(mu, epsilon) >= 5e-324


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
