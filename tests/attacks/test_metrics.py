"""Scores, pairing and re-identification, by hand and by brute force."""

import itertools
import math

import pytest
import torch

from attacks import observe, psnr, reid_rank, ssim
from attacks.metrics import baseline_images, feature_error, match_batch, wilson
from attacks.networks import smooth_lenet, smooth_mlp


def test_psnr_by_hand():
    truth = torch.zeros(3, 1, 2, 2)
    guess = torch.stack([torch.full((1, 2, 2), v) for v in (1.0, 0.1, 0.01)]).double()
    assert psnr(guess, truth).tolist() == pytest.approx([0.0, 20.0, 40.0])
    guess[0] = torch.tensor([[[0.3, 0.4], [0.0, 0.0]]])
    assert float(psnr(guess, truth)[0]) == pytest.approx(-10 * math.log10(0.25 / 4))


def test_baselines_by_hand():
    truth = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]], [[[0.2, 0.2], [0.2, 0.2]]]]).double()
    mean, means = torch.full((1, 2, 2), 0.3), torch.full((2, 1, 2, 2), 0.1)
    images = baseline_images(truth, mean, means)
    scores = {name: psnr(image, truth).tolist() for name, image in images.items()}
    assert list(scores) == ["grey", "own mean", "noise", "dataset mean", "class mean"]
    assert scores["grey"] == pytest.approx([-20 * math.log10(0.5), -20 * math.log10(0.3)])
    assert scores["own mean"] == pytest.approx([-20 * math.log10(0.5), 313.07], abs=0.01)
    known = [-10 * math.log10((0.3**2 + 0.7**2) / 2), 20.0]
    assert scores["dataset mean"] == pytest.approx(known, abs=1e-5)
    assert scores["class mean"][1] == pytest.approx(20.0, abs=1e-5)
    colours = torch.tensor([0.1, 0.5, 0.9]).reshape(1, 3, 1, 1).expand(1, 3, 4, 4)
    assert float(psnr(baseline_images(colours)["own mean"], colours)) > 100


def test_ssim_against_the_formula_position_by_position():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 1, 2, 13, 14, generator=generator, dtype=torch.float64)
    line = torch.arange(11).double() - 5
    bell = torch.exp(-(line**2) / 4.5)
    w = bell.outer(bell) / bell.sum() ** 2
    scores = []
    for c in range(2):
        for i in range(3):
            for j in range(4):
                p, q = a[0, c, i : i + 11, j : j + 11], b[0, c, i : i + 11, j : j + 11]
                mp, mq = (w * p).sum(), (w * q).sum()
                vp, vq = (w * (p - mp) ** 2).sum(), (w * (q - mq) ** 2).sum()
                cov = (w * (p - mp) * (q - mq)).sum()
                top = (2 * mp * mq + 1e-4) * (2 * cov + 9e-4)
                scores.append(float(top / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4))))
    assert float(ssim(a, b)) == pytest.approx(sum(scores) / len(scores), abs=1e-12)


def test_ssim_of_an_image_with_itself():
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert ssim(x, x).tolist() == pytest.approx([1, 1, 1])
    assert float(ssim(x, 1 - x).max()) < 0


def test_feature_error_by_hand():
    assert feature_error(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.8)


def test_wilson_against_the_root_of_its_own_equation():
    for k, n in ((0, 10), (3, 10), (10, 10), (77, 200)):
        for end in wilson(k, n):
            assert (k / n - end) ** 2 == pytest.approx(1.96**2 * end * (1 - end) / n, abs=1e-12)


def test_the_pairing_is_the_best_of_all():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        found, truth = torch.rand(2, 4, 1, 3, 3, generator=generator)
        order = match_batch(found, truth)
        cost = float((found[order] - truth).square().sum())
        every = [
            float((found[list(p)] - truth).square().sum()) for p in itertools.permutations(range(4))
        ]
        assert cost == pytest.approx(min(every))
        assert sorted(order.tolist()) == [0, 1, 2, 3]


def test_the_last_layer_alone_tells_who_it_was(lenet, digits):
    x, y = digits
    seen = observe(lenet, x[:1], y[:1], visible=["dense2.*"])
    assert reid_rank(lenet, seen, x[:1], x[1:], y) == 1
    rest = torch.cat([x[:1], x[2:]])
    assert reid_rank(lenet, seen, x[1:2], rest, y[[1, 0, *range(2, 10)]]) > 1
    # with the true label another image is not taken for the truth, whatever the decoys' labels are
    assert reid_rank(lenet, seen, x[1:2], rest, y[[0, 1, *range(2, 10)]]) > 1


@pytest.mark.parametrize("build", [smooth_lenet, smooth_mlp])
def test_networks_come_from_their_generator_alone(build):
    before = torch.get_rng_state()
    first, again, other = (build(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.dense1.weight, again.dense1.weight)
    assert not torch.equal(first.dense1.weight, other.dense1.weight)
    assert float(first.dense1.weight.detach().abs().max()) <= first.dense1.in_features**-0.5
