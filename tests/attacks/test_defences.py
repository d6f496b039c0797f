"""Clip and noise on the same axes as the attack."""

import pytest
from subjects import seeded

from attacks import ImageAudit, defences, suite
from attacks.networks import smooth_lenet

FAST = suite(newton_steps=0, steps=0, tv=0)


@pytest.fixture(scope="module")
def points(digits):
    model = smooth_lenet(seeded(0))
    return defences(audit(model, digits), clips=[None, 0.1], noise_multipliers=[0, 1e-4, 1.0])


def audit(model, digits, **options):
    x, y = digits[0][:2], digits[1][:2]
    return ImageAudit(model=model, x=x, y=y, views={"v": ["conv2.*"]}, attacks=FAST, **options)


def test_noise_hides_at_the_accountants_epsilon_and_clipping_alone_does_not(points):
    best = {(p.clip, p.noise_multiplier): max(p.scores) for p in points}
    assert set(best) == {(None, 0), (0.1, 0), (0.1, 1e-4), (0.1, 1.0)}
    assert min(best[None, 0], best[0.1, 0]) > 60
    assert best[0.1, 0] > best[0.1, 1e-4] > best[0.1, 1.0]
    epsilon = {p.noise_multiplier: p.epsilon for p in points}
    assert epsilon[0] is None
    assert epsilon[1.0] == pytest.approx(4.37717, abs=1e-4)
    assert epsilon[1e-4] > 1e6


def test_points_share_a_store_and_not_their_results(points, lenet, digits):
    """A sweep taken up again must not take one clip's or noise's result for another."""
    done = {}
    sweep = audit(lenet, digits, done=done)
    defences(sweep, clips=[0.1], noise_multipliers=[1.0])
    kept = dict(done)
    again = defences(sweep, clips=[0.1], noise_multipliers=[1e-4, 1.0])
    assert again == points[2:]
    assert (len(kept), len(done)) == (2, 4)
    assert all(done[key] is found for key, found in kept.items())
