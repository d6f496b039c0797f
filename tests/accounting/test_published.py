"""Published budgets, each with its source; and the exact figures beside them."""

import math

import numpy as np
import pytest

from accounting import (
    BinaryTree,
    Guarantee,
    Independent,
    Participation,
    PoissonSampling,
    guarantee,
    sampled_guarantee,
)

STACK_OVERFLOW = BinaryTree(1600), Participation(1600)
DELTA = 1e-6


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


@pytest.mark.parametrize("mu", [1e-3, 0.1, 0.3953, 1.0, 2.935, 30.0])
def test_exact_agrees_with_an_independent_accountant(mu):
    assert Guarantee(mu, "pld").epsilon(DELTA) == pytest.approx(
        Guarantee(mu).epsilon(DELTA), rel=1e-7
    )
