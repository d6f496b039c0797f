"""What a client computes: gradients and local steps, against ordinary PyTorch training."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from subjects import normalised
from torch import nn
from torch.nn.functional import cross_entropy

from attacks import LocalSteps, cosine_tv, dlg, observe, psnr
from attacks.reconstruction.reconstruct import matching_loss, matching_residual
from attacks.update import double_state, ready, simulated_update

SGD, MOMENTUM = {}, {"momentum": 0.9}
ADAM = {"optimizer": "adam"}


def trained(model, names, x, y, local, kind):
    """Local steps on the named parameters, as torch.optim does them."""
    twin = copy.deepcopy(model).double()
    before = {name: p.detach().clone() for name, p in twin.named_parameters()}
    active = [p for name, p in twin.named_parameters() if name in names]
    make = torch.optim.Adam if kind == ADAM else partial(torch.optim.SGD, **kind)
    solver = make(active, lr=local.learning_rate)
    for _ in range(local.steps):
        solver.zero_grad()
        cross_entropy(twin(x), y).backward()
        solver.step()
    return {name: p.detach() - before[name] for name, p in twin.named_parameters() if name in names}


@pytest.mark.parametrize("kind", [SGD, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("names", [["conv2.weight", "dense1.bias"], ["conv1.weight"]])
def test_local_steps_are_those_of_an_optimiser(lenet, digits, names, kind):
    x, y = digits[0][:5], digits[1][:5]
    local = LocalSteps(learning_rate=0.3, steps=4, **kind)
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
