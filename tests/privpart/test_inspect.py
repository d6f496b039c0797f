"""FedPart's diagnostics, on networks small enough to know the answer."""

import runpy

import pytest
import torch
from torch import nn

from accounting import ConfigError
from privpart import LocalTraining, PartialModel

SCRIPT = runpy.run_path("examples/studies/fedpart_inspect.py")
step_sizes, mask_ratio = SCRIPT["step_sizes"], SCRIPT["mask_ratio"]


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
