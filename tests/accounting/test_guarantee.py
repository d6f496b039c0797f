"""Published budgets, safe calibration, and no number out of nonsense."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st

from accounting import (
    BinaryTree,
    ConfigError,
    Guarantee,
    Independent,
    Participation,
    PrivacyReport,
    calibrate,
    guarantee,
)

STACK_OVERFLOW = BinaryTree(1600), Participation(1600)


@pytest.mark.parametrize(
    ("noise_multiplier", "published", "exact"),
    [
        (1.13, 18.71, 17.667),
        (2.33, 7.83, 7.342),
        (4.03, 4.19, 3.920),
        (6.21, 2.60, 2.424),
        (8.83, 1.77, 1.649),
    ],
)
def test_fedpt_table_5(noise_multiplier, published, exact):
    """Sidahmed et al. 2022, Table 5: StackOverflow, 1600 rounds, delta 1e-6, one participation."""
    rdp = guarantee(*STACK_OVERFLOW, noise_multiplier=noise_multiplier, method="rdp")
    assert round(rdp.epsilon(1e-6), 2) == published
    ours = guarantee(*STACK_OVERFLOW, noise_multiplier=noise_multiplier)
    assert round(ours.epsilon(1e-6), 3) == exact


@pytest.mark.parametrize("mu", [0.1, 0.3953, 1.0, 2.935])
def test_exact_agrees_with_an_independent_accountant(mu):
    """dp-accounting's PLD is pessimistic by its grid: it may lie a little above, never below."""
    pld = PLDAccountant().compose(GaussianDpEvent(1 / mu))
    assert Guarantee(mu).epsilon(1e-6) == pytest.approx(pld.get_epsilon(1e-6), rel=1e-4)
    assert Guarantee(mu).delta(1.0) == pytest.approx(pld.get_delta(1.0), rel=1e-4)


@given(
    n=st.integers(1, 3000),
    tree=st.booleans(),
    target=st.floats(0.05, 50),
    exponent=st.floats(-12, -2),
)
def test_calibration_is_safe_and_tight(n, tree, target, exponent):
    mechanism = BinaryTree(n) if tree else Independent(n)
    delta = 10.0**exponent
    z = calibrate(mechanism, Participation(n), target_epsilon=target, delta=delta)
    reached = guarantee(mechanism, Participation(n), noise_multiplier=z).epsilon(delta)
    assert target * (1 - 1e-4) <= reached <= target


@pytest.mark.parametrize("target", [0.5, 2.0, 18.71])
def test_rdp_calibration_is_safe_and_tight(target):
    z = calibrate(*STACK_OVERFLOW, target_epsilon=target, delta=1e-6, method="rdp")
    reached = guarantee(*STACK_OVERFLOW, noise_multiplier=z, method="rdp").epsilon(1e-6)
    assert target * (1 - 1e-4) <= reached <= target


def test_rdp_out_of_reach_says_so():
    with pytest.raises(ConfigError, match='Use method="exact"'):
        calibrate(*STACK_OVERFLOW, target_epsilon=0.005, delta=1e-9, method="rdp")


def test_monotone_in_everything():
    base = {"n": 64, "k": 2, "b": 8, "z": 2.0, "delta": 1e-6}

    def epsilon(**change):
        v = base | change
        run = Participation(v["n"], v["k"], v["b"])
        return guarantee(BinaryTree(v["n"]), run, noise_multiplier=v["z"]).epsilon(v["delta"])

    assert epsilon(z=4.0) < epsilon() < epsilon(k=4)
    assert epsilon(delta=1e-3) < epsilon() <= epsilon(b=1)
    assert epsilon() <= epsilon(n=128)


def test_composition_adds_mu_squared():
    both = Guarantee(3.0).compose(Guarantee(4.0))
    assert 5.0 <= both.mu <= 5.0 * (1 + 1e-15)
    assert Guarantee(3.0).compose(Guarantee(4.0, "rdp")).method == "rdp"


def test_epsilon_and_delta_invert_each_other():
    run = Guarantee(0.7)
    assert run.delta(run.epsilon(1e-6)) == pytest.approx(1e-6, rel=1e-6)
    assert run.advantage() == pytest.approx(math.erf(0.7 / math.sqrt(8)), rel=1e-12)
    assert run.rho == pytest.approx(0.245)


NONSENSE = [float("nan"), float("inf"), -float("inf"), 0, -1, None, "1", True, np.nan]


@pytest.mark.parametrize("value", NONSENSE)
def test_nonsense_never_becomes_a_number(value):
    with pytest.raises(ConfigError, match="noise_multiplier"):
        guarantee(*STACK_OVERFLOW, noise_multiplier=value)
    with pytest.raises(ConfigError, match="mu"):
        Guarantee(value)
    with pytest.raises(ConfigError, match="delta"):
        Guarantee(1.0).epsilon(value)
    with pytest.raises(ConfigError, match="target_epsilon"):
        calibrate(*STACK_OVERFLOW, target_epsilon=value, delta=1e-6)
    with pytest.raises(ConfigError, match="delta"):
        calibrate(*STACK_OVERFLOW, target_epsilon=1.0, delta=value)
    if value != 0 or value is True:
        with pytest.raises(ConfigError, match="epsilon"):
            Guarantee(1.0).delta(value)


@pytest.mark.parametrize("method", ["RDP", "prv", ""])
def test_unknown_method(method):
    with pytest.raises(ConfigError, match="must be one of exact, pld, rdp, zcdp"):
        guarantee(*STACK_OVERFLOW, noise_multiplier=1.0, method=method)


def test_report_never_states_epsilon_alone():
    report = PrivacyReport.of(*STACK_OVERFLOW, noise_multiplier=1.13, delta=1e-6).to_dict()
    assert report["schema"] == "privpart/epsilon/1"
    assert (report["unit"], report["adjacency"]) == ("client", "zero-out")
    assert report["delta"] == 1e-6
    assert {a["code"] for a in report["assumptions"]} >= {"participation", "clipping", "choices"}
    assert report["effective_noise_multiplier"] == pytest.approx(1.13 / math.sqrt(11))
