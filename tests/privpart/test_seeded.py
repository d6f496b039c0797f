"""Frozen parameters from a seed: the same bits everywhere."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from accounting import ConfigError
from privpart import Normal, PartialModel
from privpart.models import small_cnn
from privpart.seeded import Constant, He, default_initializers, fingerprint, seeded_tensor

PART = ["conv*", "norm.*", "dense2.*"]
COMMITTED = {
    0: "2618917fea85a85a2d9f298730f92710",
    1: "eaa964648e2d64bdb04e29c335d91f32",
    2**128 - 1: "30b3eef4d4ce3711a497e01d72851886",
}


def frozen_fingerprint(seed: int) -> str:
    network = small_cnn(channels=(8, 16), hidden=64, image_size=8)
    return PartialModel(network, train=PART, seed=seed).fingerprint


@pytest.mark.parametrize("seed", COMMITTED)
def test_committed_bits(seed):
    assert frozen_fingerprint(seed) == COMMITTED[seed]


@pytest.mark.parametrize(
    "environment",
    [
        {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
        {"NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3", "OMP_NUM_THREADS": "2"},
    ],
)
def test_same_bits_in_another_process_and_with_other_instructions(environment):
    code = (
        "from privpart import PartialModel; from privpart.models import small_cnn;"
        "network = small_cnn(channels=(8, 16), hidden=64, image_size=8);"
        f"print(PartialModel(network, train={PART}, seed=1).fingerprint)"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == COMMITTED[1]


def test_tensors_differ_by_seed_name_and_shape_but_not_by_order():
    def draw(seed=3, name="a.weight", shape=(4, 6)):
        return seeded_tensor(seed, name, torch.Size(shape), Normal(1.0)).flatten()

    assert torch.equal(draw(), draw())
    for other in (draw(seed=4), draw(name="b.weight"), draw(shape=(6, 4))):
        assert not torch.equal(draw(), other)


def test_values_are_gaussian_of_the_stated_scale():
    values = seeded_tensor(0, "w", torch.Size([200_000]), Normal(0.5)).double() / 0.5
    assert abs(values.mean()) < 5 / 200_000**0.5
    assert values.std() == pytest.approx(1, abs=5 / 400_000**0.5)
    assert (values**4).mean() == pytest.approx(3, abs=5 * (96 / 200_000) ** 0.5)
    assert values.abs().max() < 4.33


def test_default_initializers():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Embedding(5, 3))
    found = default_initializers(network)
    assert found["0.weight"] == He()
    assert found["0.bias"] == found["1.bias"] == Constant(0.0)
    assert found["1.weight"] == Constant(1.0)
    assert found["2.weight"] == Normal(1.0)


def test_fingerprint_sees_every_bit_and_name():
    tensors = {"a": torch.zeros(3), "b": torch.ones(2)}
    base = fingerprint(tensors)
    assert fingerprint(dict(reversed(tensors.items()))) == base
    assert fingerprint({"a": torch.zeros(3), "c": torch.ones(2)}) != base
    assert fingerprint({"a": torch.tensor([0.0, -0.0, 0.0]), "b": torch.ones(2)}) != base
    assert fingerprint({"a": torch.zeros(3, 1), "b": torch.ones(2)}) != base


@pytest.mark.parametrize("seed", [-1, 2**128, 1.5, True, None])
def test_bad_seeds(seed):
    with pytest.raises(ConfigError, match="seed"):
        seeded_tensor(seed, "w", torch.Size([2]), Normal(1.0))
