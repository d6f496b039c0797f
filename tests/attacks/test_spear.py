"""SPEAR: batches come out of a dense layer before a ReLU, and out of LoRA on it."""

from dataclasses import replace

import pytest
import torch
from subjects import LoRA, dense, seeded

from attacks import observe, psnr, spear
from attacks.metrics import match_batch
from attacks.reconstruction.analytic import invert_first_dense

BATCH = 8


def decibels(found, x):
    """Return the PSNR of each image; two images of one label come in any order."""
    return psnr(found.x[match_batch(found.x, x)], x)


@pytest.fixture
def net():
    return dense()


def test_a_batch_of_which_few_images_have_a_neuron_of_their_own(net, digits):
    """Sent in float32."""
    x, y = digits[0][:BATCH], digits[1][:BATCH]
    seen = observe(net, x, y, visible=["1.*"])
    rounded = {name: value.float() for name, value in seen.update.items()}
    seen = type(seen)(rounded, seen.state, seen.shape, seen.labels)
    found = spear(net, seen)
    assert float(decibels(found, x).min()) > 60
    rows = invert_first_dense(net, seen)
    assert int((decibels(rows, x) > 60).sum()) < BATCH


def test_random_values_hold_no_images(net, digits):
    """Neither where they have the rank of a batch, nor where they have a higher one."""
    generator = seeded(0)
    seen = observe(net, digits[0][:4], digits[1][:4], visible=["1.*"])
    bias = torch.randn(128, generator=generator)
    for rank in (4, 64):
        mixed = torch.randn(128, rank, generator=generator)
        weight = mixed @ torch.randn(rank, 64, generator=generator)
        noise = {"1.weight": weight.double(), "1.bias": bias.double()}
        assert spear(net, replace(seen, update=noise), draws=5000) is None


def test_lora_lets_a_batch_out_up_to_scale(digits):
    """The images' brightest pixel is 1, which is what the missing bias would have told."""
    brightest = digits[0].flatten(1).amax(1) == 1
    x, y = digits[0][brightest][:4], digits[1][brightest][:4]
    model = LoRA()
    found = spear(model, observe(model, x, y, visible=["lora_*"]))
    assert float(decibels(found, x).min()) > 120
    assert spear(model, observe(model, x, y, visible=["lora_B.*"])) is None
    with torch.no_grad():
        model.lora_B.weight.zero_()
    assert spear(model, observe(model, x, y, visible=["lora_*"])) is None


def test_equal_images_are_one(net, digits):
    x, y = digits[0][[0, 0, 1]], digits[1][[0, 0, 1]]
    found = spear(net, observe(net, x, y))
    assert int((decibels(found, x) > 100).sum()) == 1 + 1  # one of the two, and the other image
