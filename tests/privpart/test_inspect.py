"""FedPart's diagnostics, on networks small enough to know the answer."""

import runpy

import pytest
import torch
from torch import nn

from accounting import ConfigError
from privpart import LocalTraining, PartialModel
from privpart.models import MODELS, resnet8

SCRIPT = runpy.run_path("examples/studies/fedpart_inspect.py")
first_kernels, step_sizes = SCRIPT["first_kernels"], SCRIPT["step_sizes"]
mask_ratio, maximal_activation = SCRIPT["mask_ratio"], SCRIPT["maximal_activation"]


def linear(groups=(("0.*",), ("1.*",))):
    return PartialModel(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), seed=2, groups=groups
    )


def examples(count=10):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 6, generator=generator), torch.arange(count) % 3


@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.5}, {"optimizer": "adam"}])
def test_step_sizes_add_up_to_the_update(optimizer):
    model = linear()
    x, y = examples()
    local = LocalTraining(0.1, steps=1, **optimizer)
    fields = {"generator": torch.Generator().manual_seed(0)}
    update, sizes = step_sizes(model, model.flat.clone(), (x, y), local=local, **fields)
    assert sizes == [pytest.approx(float(update.norm()), rel=1e-5)]
    local = LocalTraining(0.1, steps=4, **optimizer)
    update, sizes = step_sizes(
        model, model.flat.clone(), (x, y), local=local, active=(1,), **fields
    )
    assert len(sizes) == 4
    assert len(update) == model.group_sizes[1]
    assert float(update.norm()) < sum(sizes)


def test_mask_ratio_against_a_literal_loop():
    model = linear()
    x, y = examples(7)
    rows = []
    for image, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model.module(image[None]), label[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(
            loss, list(model.module.parameters()))]))  # fmt: skip
    deviation = torch.stack(rows) - torch.stack(rows).mean(0)
    expected = [float(deviation[:, span].norm(dim=1).mean()) for span in (slice(35), slice(35, 53))]
    found = mask_ratio(model, (x, y), masks=8, generator=torch.Generator().manual_seed(0))
    assert found.by_group == pytest.approx(expected, rel=1e-4)
    assert found.groups == pytest.approx(max(expected) / min(expected), rel=1e-4)
    assert found.random > 1
    assert not model.gradient.any()
    with pytest.raises(ConfigError, match="needs at least two groups"):
        mask_ratio(linear(None), (x, y), masks=8, generator=torch.Generator())


def test_the_assumption_holds_for_random_masks_and_not_for_layers():
    """As measured on ResNet-8 at its start: 1.03 for random masks, several times for layers."""
    model = PartialModel(lambda: resnet8(width=16), seed=0, groups=MODELS["resnet8"].groups)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(24, 3, 32, 32, generator=generator), torch.arange(24) % 10
    found = mask_ratio(model, (x, y), masks=10, generator=generator)
    assert 1 <= found.random < 1.1
    assert found.groups > 3


def test_maximal_activation_grows_and_leaves_the_network():
    module = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.ReLU())
    with torch.no_grad():
        module[0].weight.copy_(torch.ones(2, 1, 3, 3))
        module[0].weight[1] *= -1
    start = torch.full((1, 8, 8), 0.5)
    bright = maximal_activation(module, "0", 0, start)
    dark = maximal_activation(module, "0", 1, start)
    assert bright.min() > 0.95
    assert dark.max() < 0.05
    assert start.eq(0.5).all()
    assert torch.equal(bright, maximal_activation(module, "0", 0, start))
    assert not module[0]._forward_hooks
    assert module[0].weight.grad is None
    for layer, channel in (("2", 0), ("0", 2), ("0", -1)):
        with pytest.raises(ConfigError, match=r"layer=|channel="):
            maximal_activation(module, layer, channel, start, steps=1)


def test_first_kernels_fill_the_unit_interval():
    kernels = first_kernels(resnet8(width=4))
    assert kernels.shape == (4, 3, 7, 7)
    assert kernels.amin(dim=(1, 2, 3)).eq(0).all()
    assert kernels.amax(dim=(1, 2, 3)).eq(1).all()
    with pytest.raises(ConfigError, match="no convolution"):
        first_kernels(nn.Linear(2, 2))
