"""Searches find the image: gradient matching, and cosine matching with many restarts at once."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from accounting import ConfigError
from attacks import LocalSteps, cosine_tv, dlg, observe, psnr
from attacks.networks import relu_lenet, smooth_lenet
from attacks.reconstruction.cosine import batched_update, distance_by_tensor, whole_distance
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


@pytest.fixture(scope="module")
def relu():
    return relu_lenet(torch.Generator().manual_seed(0))


class Drowned(nn.Module):
    """A network whose update is almost the same for all images: one large, constant tensor."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.shift = nn.Parameter(torch.zeros(10, dtype=torch.float64))

    def forward(self, x):
        return self.inside(x) + 30 * self.shift


def test_a_network_whose_updates_are_nearly_the_same(relu, digits):
    """It finds the image sent, and nothing of another, whatever the distance at the start is."""
    x, y = digits[0][:1], digits[1][:1]
    model = Drowned(relu)
    found = cosine_tv(model, observe(model, x, y), restarts=2, steps=100)
    assert float(psnr(found.x, x)) > 20
    assert float(psnr(found.x, digits[0][3:4])) < 12
    assert found.status == "budget"
    assert found.match == min(found.restarts)
    assert found.evaluations == 2 * 101


@pytest.mark.parametrize("local", [None, LocalSteps(learning_rate=0.1, steps=2)])
def test_restarts_are_independent_of_their_company(relu, digits, local):
    """One alone, by plain autograd, takes the same way as in a batch under vmap."""
    x, y = digits[0][:2], digits[1][:2]
    seen = observe(relu, x, y, local=local)
    options = {"steps": 5, "dtype": torch.float64, "signed": False}
    alone = cosine_tv(relu, seen, restarts=1, **options)
    together = cosine_tv(relu, seen, restarts=3, **options)
    assert together.restarts[0] == pytest.approx(alone.restarts[0], rel=1e-9)
    assert len(set(together.restarts)) == 3


def test_restarts_take_the_weights_of_the_prior_in_turn(relu, digits):
    seen = observe(relu, digits[0][:1], digits[1][:1])
    options = {"steps": 20, "dtype": torch.float64}
    none, heavy = (cosine_tv(relu, seen, restarts=2, tv=tv, **options) for tv in (0, 5.0))
    mixed = cosine_tv(relu, seen, restarts=2, tv=(0, 5.0), **options)
    assert mixed.restarts == pytest.approx((none.restarts[0], heavy.restarts[1]), rel=1e-9)
    assert mixed.match == min(mixed.restarts)


def test_the_distance_at_noise_chooses_how_directions_are_compared(relu, digits, monkeypatch):
    """By tensor where one constant tensor is nearly the whole update."""
    x, y = digits[0][:1], digits[1][:1]
    for model, by_tensor in ((relu, False), (Drowned(relu), True)):
        seen = observe(model, x, y)
        chosen = cosine_tv(model, seen, restarts=2, steps=5).restarts
        forced = []
        for limit in (0.0, 2.0):  # never by tensor, always
            with monkeypatch.context() as patch:
                patch.setattr("attacks.reconstruction.cosine._SAME_DIRECTION", limit)
                forced.append(cosine_tv(model, seen, restarts=2, steps=5).restarts)
        assert chosen == forced[by_tensor] != forced[not by_tensor]


@pytest.mark.parametrize("restarts", [1, 2])
def test_the_distance_by_hand(relu, digits, restarts):
    x, y = digits[0][:1], digits[1][:1]
    seen = observe(relu, x, y, visible=["conv2.*", "dense1.*"], clip=0.1)
    other = observe(relu, digits[0][1:2], y, visible=["conv2.*", "dense1.*"])
    pairs = list(zip(seen.update.values(), other.update.values(), strict=True))
    joint = [torch.cat([part.flatten() for part in parts]) for parts in zip(*pairs, strict=True)]
    whole, *each = (
        1 - float(a.flatten() @ b.flatten() / (a.norm() * b.norm())) for a, b in [joint, *pairs]
    )
    lengths = [float(a.norm()) for a, _ in pairs]
    points = torch.stack([x, digits[0][1:2]])[-restarts:]
    mine = batched_update(relu, seen, y, restarts, torch.float64)(points)
    target = list(seen.update.values())
    assert whole_distance(mine, target).tolist() == pytest.approx([0, whole][-restarts:], abs=1e-12)
    expected = sum(d * n for d, n in zip(each, lengths, strict=True)) / sum(lengths)
    found = distance_by_tensor(mine, target).tolist()
    assert found == pytest.approx([0, expected][-restarts:], abs=1e-12)


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_parameter_that_no_pixel_moves(digits, restarts):
    """Its gradient is a constant, which autograd refuses to differentiate; the rest counts."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    x, y = digits[0][:1], digits[1][:1]
    seen = observe(model, x, y, loss=lambda logits, labels: logits[0, labels[0]])
    found = cosine_tv(model, seen, restarts=restarts, steps=100, tv=0, signed=True)
    assert found.match < 1e-5
    assert float(psnr(found.x, x)) > 40


def test_a_label_out_of_view_is_guessed_by_matching(relu, digits):
    hidden = observe(relu, digits[0][:1], digits[1][:1], visible=["conv2.*"], reveal_labels=False)
    found = cosine_tv(relu, hidden, restarts=1, steps=30)
    assert torch.equal(found.labels, digits[1][:1])
