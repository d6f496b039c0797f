"""An observation holds the true update, by name, and nothing more."""

import copy
import math
from dataclasses import fields

import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.nn.functional import cross_entropy

from attacks import Observation, observe


def norm(update):
    return math.sqrt(sum(float(value.square().sum()) for value in update.values()))


def test_the_update_is_the_clients_own_gradient(lenet, digits):
    x, y = digits[0][:2], digits[1][:2]
    client = copy.deepcopy(lenet).double()
    cross_entropy(client(x), y).backward()
    seen = observe(lenet, x, y)
    assert list(seen.update) == [name for name, _ in client.named_parameters()]
    for name, parameter in client.named_parameters():
        assert torch.allclose(seen.update[name], parameter.grad, rtol=1e-12, atol=1e-15)


def test_it_carries_no_image(lenet, digits):
    x, y = digits[0][:1], digits[1][:1]
    seen = observe(lenet, x, y, visible=["conv2.*"], reveal_labels=False)
    assert {field.name for field in fields(Observation)} == {
        *("update", "state", "shape", "labels", "clip", "noise_std", "loss"),
        *("local", "training", "sent", "buffers"),
    }
    assert set(seen.update) == {"conv2.weight", "conv2.bias"}
    assert set(seen.state) == set(lenet.state_dict())
    assert seen.shape == (1, 1, 8, 8)
    assert seen.labels is None


def test_the_model_is_left_alone(digits):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10))
    model[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = observe(model, digits[0][:3].float(), digits[1][:3])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == [False] * 2 + [True] * 4
    assert all(p.grad is None for p in model.parameters())
    assert model[0].weight.dtype == torch.float32
    assert seen.update["0.weight"].dtype == torch.float64


def test_clipping_is_joint_over_the_visible_parameters(lenet, digits):
    x, y = digits[0][:1], digits[1][:1]
    view = ["conv2.*", "dense2.*"]
    raw = observe(lenet, x, y, visible=view).update
    bound = norm(raw) / 3
    for name, value in observe(lenet, x, y, visible=view, clip=bound).update.items():
        assert torch.allclose(value, raw[name] / 3, rtol=1e-12)
    loose = observe(lenet, x, y, visible=view, clip=norm(raw) * 2).update
    assert all(torch.equal(loose[name], raw[name]) for name in raw)


@pytest.mark.parametrize(("actual", "accepted"), [(1.0, True), (1.05, False)])
def test_noise_has_the_stated_scale(lenet, digits, actual, accepted):
    x, y = digits[0][:1], digits[1][:1]
    clean = observe(lenet, x, y, clip=0.5)
    generator = torch.Generator().manual_seed(3)
    statistic, count = 0.0, 0
    for _ in range(10):
        noisy = observe(lenet, x, y, clip=0.5, noise_multiplier=actual * 0.3, generator=generator)
        assert noisy.noise_std == pytest.approx(actual * 0.15)
        for name, value in noisy.update.items():
            statistic += float(((value - clean.update[name]) / 0.15).square().sum())
            count += value.numel()
    assert (1e-4 < float(chi2.cdf(statistic, count)) < 1 - 1e-4) is accepted
