"""Networks come from their generator alone."""

import pytest
import torch

from attacks.networks import smooth_lenet, smooth_mlp


@pytest.mark.parametrize("build", [smooth_lenet, smooth_mlp])
def test_weights_come_from_the_generator(build):
    before = torch.get_rng_state()
    first, again, other = (build(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.dense1.weight, again.dense1.weight)
    assert not torch.equal(first.dense1.weight, other.dense1.weight)
    bound = first.dense1.in_features**-0.5
    for parameter in (first.dense1.weight, first.dense1.bias):
        assert 0.8 * bound < float(parameter.detach().abs().max()) <= bound
