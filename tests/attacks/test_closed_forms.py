"""Closed forms: what dense layers, LoRA and vision transformers give away exactly."""

from dataclasses import replace

import pytest
import torch
from subjects import LoRA, Transformer, behind, dense, filled, seeded
from torch import nn

from attacks import (
    LocalSteps,
    april,
    dense_then_invert,
    infer_labels,
    invert_dense,
    observe,
    psnr,
    spear,
)
from attacks.metrics import match_batch
from attacks.reconstruction.analytic import invert_dense_rows, invert_first_dense
from attacks.reconstruction.labels import likely_labels


def test_it_is_least_squares_not_a_mean_of_ratios():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(50, generator=generator, dtype=torch.float64)
    gb = torch.randn(40, generator=generator, dtype=torch.float64)
    gw = gb.outer(x) + 1e-3 * torch.randn(40, 50, generator=generator, dtype=torch.float64)
    expected = torch.linalg.lstsq(gb[:, None], gw).solution[0]
    assert torch.allclose(invert_dense(gw, gb), expected, rtol=1e-12)
    ratios = (gw / gb[:, None]).mean(0)
    assert (invert_dense(gw, gb) - x).norm() < 0.1 * (ratios - x).norm()


def test_a_wide_layer_that_does_not_see_the_pixels_is_not_believed(digits):
    model = dense(64, nn.Tanh(), bound=0.2, seed=0)
    x, y = digits[0][:1], digits[1][:1]
    deeper = observe(model, x, y, visible=["3.*"])
    assert invert_first_dense(model, deeper).match > 1e-3
    assert float(psnr(invert_first_dense(model, observe(model, x, y)).x, x)) > 140


def test_a_layer_that_is_not_used_is_passed_over(mlp, digits):
    mlp.idle = nn.Identity()
    mlp.idle.spare = nn.Linear(64, 3)
    seen = observe(mlp, digits[0][:1], digits[1][:1])
    assert not seen.update["idle.spare.weight"].any()
    assert invert_first_dense(mlp, seen).status == "exact"


def test_local_steps_above_a_frozen_part_do_not_hide_it(digits):
    x, y = digits[0][:1], digits[1][:1]
    model = behind(nn.LeakyReLU())
    local = LocalSteps(learning_rate=0.1, steps=5)
    seen = observe(model, x, y, visible=["3.*", "5.*"], local=local, clip=1e-3)
    assert float(psnr(dense_then_invert(model, seen).x, x)) > 60


def test_a_batch_through_relu_is_copied_out(digits):
    """No order is promised, yet images and labels pair, or the residual would not vanish."""
    wide, batch = dense(512, bound=0.2, seed=0), 8
    x, y = digits[0][:batch], digits[1][:batch]
    seen = observe(wide, x, y)
    rows = invert_dense_rows(seen.update["1.weight"], seen.update["1.bias"], batch)
    gaps = torch.cdist(x.flatten(1), rows)
    assert float(gaps.min(1).values.max()) < 1e-9
    found = invert_first_dense(wide, seen)
    assert found.match < 1e-20
    order = match_batch(found.x, x)
    assert float(psnr(found.x[order], x).min()) > 140
    assert torch.equal(found.labels[order], y)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_labels_of_a_batch_with_repeats(lenet, digits, batch):
    generator = torch.Generator().manual_seed(batch)
    right = 0
    for _ in range(20):
        rows = torch.randint(10, (batch,), generator=generator)
        seen = observe(lenet, digits[0][rows], digits[1][rows])
        found = infer_labels(None, seen.update["dense2.bias"], batch)
        right += found.tolist() == digits[1][rows].sort().values.tolist()
    assert right >= 19


def test_a_label_that_fits_almost_as_well_is_a_doubt():
    mean = torch.tensor([0.1, 0.5, 0.3, 0.1])
    near, sure = torch.tensor([-0.4, 0.125, 0.175, 0.1]), torch.tensor([-0.4, 0.0, 0.3, 0.1])
    assert len(likely_labels(near, 2, mean_prediction=mean)) > 1
    assert [one.tolist() for one in likely_labels(sure, 2, mean_prediction=mean)] == [[0, 1]]
    too_many = torch.tensor([-0.4, -0.1, -0.1, 0.6])  # three labels of two images
    assert len(likely_labels(too_many, 2, mean_prediction=mean)) > 1


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


EMBEDDINGS = ["patch.*", "position"]
ATTENTION = ["attention.in_proj_*"]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("visible", [["*"], EMBEDDINGS, ATTENTION])
def test_one_image_in_closed_form(norm, visible, digits):
    x, y = digits[0][:1], digits[1][:1]
    model = Transformer(norm=norm)
    found = april(model, observe(model, x, y, visible=visible))
    assert float(psnr(found.x, x)) > 120
    assert found.match < 1e-18


def test_april_where_nothing_bypasses_the_attention(digits):
    """Tokens as many as their width: the span alone tells nothing."""
    x, y = digits[0][:1], digits[1][:1]
    model = Transformer(width=18, norm=False, skip=False)
    seen = observe(model, x, y, visible=[*ATTENTION, "position"])
    assert float(psnr(april(model, seen).x, x)) > 100
    assert float(psnr(april(model, seen.restrict(["attention.in_proj_weight"])).x, x)) < 30


@pytest.mark.slow
def test_a_hugging_face_vit_without_a_wrapper(digits):
    transformers = pytest.importorskip("transformers")
    x, y = digits[0][:1], digits[1][:1]
    config = transformers.ViTConfig(
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 10},
        **{"intermediate_size": 32, "image_size": 8, "patch_size": 2, "num_channels": 1},
    )
    model = filled(transformers.ViTForImageClassification(config).eval(), seed=0)
    for visible in (["*embeddings.*"], ["vit.layers.0.attention.q_proj.weight"]):
        found = april(model, observe(model, x, y, visible=visible))
        assert float(psnr(found.x, x)) > 100
