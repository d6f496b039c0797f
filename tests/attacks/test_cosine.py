"""Cosine matching with many restarts at once."""

import pytest
import torch
from torch import nn

from attacks import LocalSteps, cosine_tv, observe, psnr
from attacks.networks import relu_lenet
from attacks.reconstruction.cosine import batched_update, distance_by_tensor, whole_distance


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
