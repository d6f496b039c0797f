"""Features of a dense layer, and the image behind them."""

import pytest
import torch
from subjects import behind, dense
from torch import nn

from attacks import LocalSteps, dense_then_invert, infer_labels, observe, psnr
from attacks.metrics import match_batch
from attacks.reconstruction.analytic import invert_dense_rows, invert_first_dense
from attacks.reconstruction.labels import likely_labels


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
