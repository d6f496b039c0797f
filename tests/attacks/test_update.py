"""An observation holds what a client computes, as ordinary PyTorch training does, and no more."""

import copy
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from scipy.stats import chi2
from subjects import normalised
from torch import nn
from torch.nn.functional import cross_entropy

from attacks import LocalSteps, Observation, cosine_tv, dlg, leakage, observe, psnr, suite
from attacks.reconstruction.reconstruct import matching_loss, matching_residual
from attacks.update import double_state, norm, ready, simulated_update

SGD, MOMENTUM = {}, {"momentum": 0.9}
ADAM = {"optimizer": "adam"}
DECAY = {"weight_decay": 0.1}


def trained(model, names, x, y, local, kind):
    """Local steps on the named parameters, as torch.optim does them."""
    twin = copy.deepcopy(model).double()
    before = {name: p.detach().clone() for name, p in twin.named_parameters()}
    active = [p for name, p in twin.named_parameters() if name in names]
    options = {name: value for name, value in kind.items() if name != "optimizer"}
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    solver = made[local.optimizer](active, lr=0.0, **{"weight_decay": 0.0} | options)
    for rate in local.rates:
        solver.param_groups[0]["lr"] = rate
        solver.zero_grad()
        cross_entropy(twin(x), y).backward()
        solver.step()
    return {name: p.detach() - before[name] for name, p in twin.named_parameters() if name in names}


@pytest.mark.parametrize(
    "kind",
    [SGD, MOMENTUM, ADAM, DECAY, MOMENTUM | DECAY, ADAM | DECAY, {"optimizer": "adamw"} | DECAY],
    ids=str,
)
@pytest.mark.parametrize("names", [["conv2.weight", "dense1.bias"], ["conv1.weight"]])
def test_local_steps_are_those_of_an_optimiser(lenet, digits, names, kind):
    x, y = digits[0][:5], digits[1][:5]
    local = LocalSteps(learning_rate=(0.3, 0.2, 0.1, 0.05), steps=4, **kind)
    expected = trained(lenet, names, x, y, local, kind)
    seen = observe(lenet, x, y, visible=names, local=local)
    assert list(seen.update) == names
    for name in names:
        assert torch.allclose(seen.update[name], expected[name], rtol=1e-10, atol=1e-15)


def test_momentum_and_adam_hide_no_more(lenet, digits):
    """dlg unrolls momentum; three steps of Adam, whose slopes are steep, yield to cosine_tv."""
    x, y = digits[0][:1], digits[1][:1]
    cosine = partial(cosine_tv, restarts=1, steps=100, tv=0.02, signed=True)
    for kind, attack in ((MOMENTUM, dlg), (ADAM, cosine)):
        local = LocalSteps(learning_rate=0.01, steps=3, **kind)
        found = attack(lenet, observe(lenet, x, y, local=local))
        assert float(psnr(found.x, x)) > 25, kind


def test_an_adam_weight_that_never_moves_stays_finite(lenet, digits):
    """A dead weight's slope of 0 has a root and a division to pass through."""
    x, y = torch.zeros(1, 1, 8, 8, dtype=torch.float64), digits[1][:1]
    local = LocalSteps(learning_rate=0.01, steps=2, **ADAM)
    seen = observe(lenet, x, y, local=local)
    assert not bool(seen.update["conv1.weight"].any())
    point = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(
        matching_loss(lenet, replace(seen, labels=y + 1), y + 1)(point), point
    )
    assert bool(slope.isfinite().all())


def test_a_label_is_read_off_several_steps(lenet, digits):
    for i in range(4):
        x, y = digits[0][i : i + 1], digits[1][i : i + 1]
        local = LocalSteps(learning_rate=0.1, steps=3)
        hidden = observe(lenet, x, y, local=local, reveal_labels=False)
        found = dlg(lenet, hidden, restarts=1, max_evaluations=1, newton_steps=0)
        assert found.labels.tolist() == y.tolist()


@pytest.mark.parametrize(
    "local", [None, *(LocalSteps(learning_rate=0.1, steps=2, **k) for k in (SGD, MOMENTUM, ADAM))]
)
@pytest.mark.parametrize("clip", [None, 0.01])
def test_the_three_ways_to_compute_an_update_agree(lenet, digits, local, clip):
    x, y = digits[0][:2], digits[1][:2]
    seen = observe(lenet, x, y, visible=["conv2.*"], local=local, clip=clip)
    guess = digits[0][2:4]
    loss = matching_loss(lenet, seen, y)(guess).item()
    residual = matching_residual(lenet, seen, y)
    assert residual(guess).square().sum().item() == pytest.approx(loss, rel=1e-10)
    net, state = ready(lenet, seen.training), double_state(lenet)
    plain = simulated_update(net, state, list(seen.update), x, y, cross_entropy, local)
    other = simulated_update(
        net, state, list(seen.update), x, y, cross_entropy, local, functional=True
    )
    assert all(torch.allclose(plain[k], other[k], atol=1e-15) for k in plain)
    batched = torch.vmap(residual)(torch.stack([guess, x]))
    assert float(batched[1].square().sum()) < 1e-25


@pytest.mark.parametrize("training", [True, False])
def test_the_attacker_uses_the_clients_mode_whatever_its_own(digits, training):
    """Statistics of the batch or running ones: the update differs, and so must the attack."""
    model, (x, y) = normalised().train(training), digits
    nn.init.constant_(model[1].running_mean, 0.5)
    client = copy.deepcopy(model).double()
    cross_entropy(client(x[:3]), y[:3]).backward()
    seen = observe(model, x[:3], y[:3])
    assert torch.allclose(seen.update["0.weight"], client[0].weight.grad, rtol=1e-10)
    assert matching_loss(model.train(not training), seen, y[:3])(x[:3]).item() < 1e-25
    wrong = replace(seen, training=not training)
    assert matching_loss(model, wrong, y[:3])(x[:3]).item() > 1e-3


def test_what_remains_in_sight_keeps_the_clip_of_the_whole(lenet, digits):
    x, y = digits[0][:1], digits[1][:1]
    part = observe(lenet, x, y, clip=0.01).restrict(["conv2.weight"])
    assert list(part.update) == ["conv2.weight"]
    assert matching_loss(lenet, part, y)(x).item() < 1e-25
    assert matching_loss(lenet, replace(part, sent=()), y)(x).item() > 0.1


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
        *("local", "training", "sent", "buffers", "transform"),
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


def test_a_client_shuffles_its_local_batches_in_each_epoch(lenet, digits):
    x, y = digits[0][:6], digits[1][:6]
    local = LocalSteps(learning_rate=0.1, steps=6, batch=2)
    rows = torch.cat(list(local.rows(6, torch.Generator().manual_seed(1))))
    assert all(sorted(epoch) == list(range(6)) for epoch in rows.view(2, 6).tolist())
    assert rows[:6].tolist() != rows[6:].tolist()
    twin = copy.deepcopy(lenet).double()
    solver = torch.optim.SGD(twin.parameters(), lr=0.1)
    for taken in rows.view(6, 2):
        solver.zero_grad()
        cross_entropy(twin(x[taken]), y[taken]).backward()
        solver.step()
    seen = observe(lenet, x, y, local=local)
    for name, value in twin.named_parameters():
        torch.testing.assert_close(seen.update[name], value.detach() - seen.state[name])


@pytest.mark.parametrize(
    ("rate", "least", "verdict"), [(0.01, 36, "recovered"), (0.1, 18, "partial")]
)
def test_local_batches_are_matched_as_a_set(lenet, digits, rate, least, verdict):
    """Nobody is told the order; the update of another one is an eighth of a percent off."""
    (x, y), local = digits, LocalSteps(learning_rate=rate, steps=6, batch=2)
    attacks = {"dlg": suite(restarts=1, max_evaluations=300, newton_steps=0)["dlg"]}
    options = {"views": {"full": ["*"]}, "local": local, "batch": 4, "dataset_mean": x[4:].mean(0)}
    report = leakage(lenet, x[:4], y[:4], **options, attacks=attacks)
    assert report.verdict == verdict
    assert min(report.rows[0].psnr) > least
    update = observe(lenet, x[:4], y[:4], local=local).update
    other = leakage(lenet, x[4:8], y[:4], **options, update=update, attacks=attacks)
    assert other.verdict in ("void", "attack failed")
