"""A dense layer gives its input away exactly."""

import torch
from subjects import dense
from torch import nn

from attacks import invert_dense, observe, psnr
from attacks.reconstruction.analytic import invert_first_dense


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
