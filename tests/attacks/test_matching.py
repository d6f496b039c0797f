"""Pairing and re-identification, by hand and by brute force."""

import itertools

import pytest
import torch

from attacks import observe, reid_rank
from attacks.metrics import match_batch
from attacks.networks import smooth_lenet, smooth_mlp


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


def test_ties_count_against_the_attacker(lenet, digits):
    x, y = digits[0][:1], digits[1][:1]
    seen = observe(lenet, x, y)
    assert reid_rank(lenet, seen, x, x.expand(4, -1, -1, -1), y.expand(5)) == 5


@pytest.mark.parametrize("build", [smooth_lenet, smooth_mlp])
def test_networks_come_from_their_generator_alone(build):
    before = torch.get_rng_state()
    first, again, other = (build(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.dense1.weight, again.dense1.weight)
    assert not torch.equal(first.dense1.weight, other.dense1.weight)
    assert float(first.dense1.weight.detach().abs().max()) <= first.dense1.in_features**-0.5
