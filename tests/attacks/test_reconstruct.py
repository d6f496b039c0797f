"""Gradient matching finds the image, by matching alone."""

import math
from dataclasses import replace

import pytest
import torch

from accounting import ConfigError
from attacks import cosine_tv, dlg, observe, psnr
from attacks.networks import smooth_lenet
from attacks.reconstruction.reconstruct import matching_loss, total_variation
from attacks.reconstruction.solvers import quasi_newton


def one(digits, i=0):
    return digits[0][i : i + 1], digits[1][i : i + 1]


def test_the_restart_with_the_least_residual_wins(lenet, digits):
    seen = observe(lenet, *one(digits))
    found = dlg(lenet, seen, restarts=4, max_evaluations=12, newton_steps=0)
    assert len(set(found.restarts)) == 4
    assert found.match == min(found.restarts)
    assert found.status == "budget"
    assert matching_loss(lenet, seen, seen.labels)(found.x).item() == found.match


@pytest.mark.parametrize("budget", [1, 2, 17])
def test_evaluations_are_counted_exactly(lenet, digits, budget):
    seen = observe(lenet, *one(digits))
    calls = []
    lenet.register_forward_hook(lambda *_: calls.append(1))
    found = dlg(lenet, seen, restarts=2, max_evaluations=budget, newton_steps=0)
    assert found.evaluations == len(calls) == 2 * budget


def test_the_residual_is_relative_to_the_visible_update(lenet, digits):
    (x, y), (guess, _) = one(digits), one(digits, 1)
    seen = observe(lenet, x, y, visible=["conv2.*"])
    there = observe(lenet, guess, y, visible=["conv2.*"]).update
    gap = sum((there[name] - value).square().sum() for name, value in seen.update.items())
    size = sum(value.square().sum() for value in seen.update.values())
    assert matching_loss(lenet, seen, y)(guess).item() == pytest.approx(float(gap / size))


def test_parameters_are_paired_by_name(lenet, digits):
    x, y = one(digits)
    seen = observe(lenet, x, y)
    turned = replace(seen, update=dict(reversed(seen.update.items())))
    assert matching_loss(lenet, turned, y)(x).item() < 1e-28
    assert float(psnr(dlg(lenet, turned).x, x)) > 60


def test_weights_come_from_the_observation_in_any_precision(lenet, digits):
    x, y = one(digits)
    seen = observe(lenet, x, y)
    single = replace(seen, state={name: value.float() for name, value in seen.state.items()})
    stranger = smooth_lenet(torch.Generator().manual_seed(99))
    assert torch.equal(dlg(stranger, seen).x, dlg(lenet, seen).x)
    assert float(psnr(dlg(stranger, single).x, x)) > 60


def test_the_attacker_clips_as_the_client_did(lenet, digits):
    x, y = one(digits)
    seen = observe(lenet, x, y, clip=0.01)
    assert matching_loss(lenet, seen, y)(x).item() < 1e-28
    assert matching_loss(lenet, replace(seen, clip=None), y)(x).item() > 1


def cosine(model, seen, **options):
    return cosine_tv(model, seen, restarts=2, steps=5, **options)


def matching(model, seen, **options):
    return dlg(model, seen, restarts=1, max_evaluations=5, newton_steps=0, **options)


@pytest.mark.parametrize("attack", [matching, cosine])
def test_a_loss_that_overflows_is_diverged_not_a_number(lenet, digits, attack):
    seen = observe(lenet, *one(digits))
    with pytest.raises(ConfigError, match="not finite"):
        replace(seen, state={name: value * math.nan for name, value in seen.state.items()})
    found = attack(lenet, replace(seen, loss=lambda logits, _: logits.sum() * math.nan))
    assert (found.status, found.match) == ("diverged", math.inf)
    assert bool(found.x.isfinite().all())


@pytest.mark.parametrize("attack", [matching, cosine])
def test_same_seed_same_image(lenet, digits, attack):
    seen = observe(lenet, *one(digits), visible=["dense2.*"])
    first, again, other = (attack(lenet, seen, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(first.x, again.x)
    assert first.match == again.match
    assert not torch.allclose(first.x, other.x)


def test_gauss_newton_goes_on_where_the_first_solver_stops(lenet, digits):
    x, y = one(digits)
    seen = observe(lenet, x, y)
    options = {"restarts": 1, "max_evaluations": 2}
    assert float(psnr(dlg(lenet, seen, newton_steps=0, **options).x, x)) < 20
    found = dlg(lenet, seen, **options)
    assert float(psnr(found.x, x)) > 100
    assert len(found.restarts) == 2
    assert found.evaluations > 2 + 64


def test_priors_in_turn_start_where_the_last_one_ended_and_share_the_evaluations(lenet, digits):
    seen = observe(lenet, *one(digits))
    options = {"restarts": 1, "newton_steps": 0}
    match = matching_loss(lenet, seen, seen.labels)
    smooth = dlg(lenet, seen, tv=0.5, max_evaluations=6, **options)
    second = quasi_newton(match, smooth.x, 6)
    both = dlg(lenet, seen, tv=(0.5, 0.0), max_evaluations=12, **options)
    assert torch.equal(both.x, second.x)
    assert (both.match, both.evaluations) == (second.value, 12)
    last, plain = (dlg(lenet, seen, tv=t, max_evaluations=1, **options) for t in ((0.5, 0.0), 0))
    assert torch.equal(last.x, plain.x)


def test_a_prior_changes_the_image_but_not_what_match_means(lenet, digits):
    x, y = one(digits)
    seen = observe(lenet, x, y, visible=["dense2.*"])
    plain, smooth = dlg(lenet, seen), dlg(lenet, seen, tv=0.1, max_evaluations=200)
    assert total_variation(smooth.x) < total_variation(plain.x) / 2
    assert smooth.match == pytest.approx(matching_loss(lenet, seen, y)(smooth.x).item())
