"""Frozen parameters from a seed: the same bits everywhere."""

import hashlib
import os
import platform
import subprocess
import sys
from statistics import NormalDist

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from accounting import ConfigError
from privpart import Normal, PartialModel, Uniform
from privpart.model import tensors_fingerprint
from privpart.models import small_cnn
from privpart.start_values import _quantiles, seeded_tensor

PART = ["conv*", "norm.*", "dense2.*"]
COMMITTED = {
    0: "e55858e6878588187a3a83a60a648885",
    1: "52683092de16f8cff313f3cc42cba43c",
    2**128 - 1: "3ba70a21a5fc2839e4d01e96f4d1f5ee",
}
# NumPy's groups of instructions that this machine has beyond the baseline it was built for.
FEATURES = np._core._multiarray_umath.__cpu_features__
DISPATCHED = [n for n in np._core._multiarray_umath.__cpu_dispatch__ if FEATURES[n]]
PLAIN_NUMPY = {"NPY_DISABLE_CPU_FEATURES": " ".join(DISPATCHED)}
REBUILD = (
    "import os; from numpy._core._multiarray_umath import __cpu_features__ as on\n"
    "off = os.environ.get('NPY_DISABLE_CPU_FEATURES', '').split()\n"
    "assert not any(on[name] for name in off), off\n"
    "from privpart import PartialModel; from privpart.models import small_cnn\n"
    f"for seed in {list(COMMITTED)}:\n"
    "    network = small_cnn(channels=(8, 16), hidden=64, image_size=8)\n"
    f"    print(PartialModel(network, train={PART}, seed=seed, overwrite=True).fingerprint)"
)


@pytest.mark.parametrize("seed", COMMITTED)
def test_committed_bits(seed):
    network = small_cnn(channels=(8, 16), hidden=64, image_size=8)
    model = PartialModel(network, train=PART, seed=seed, overwrite=True)
    assert model.fingerprint == COMMITTED[seed]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("threads", [pytest.param("1", marks=SLOW), "2"])
@pytest.mark.parametrize(
    "instructions",
    [
        {"ATEN_CPU_CAPABILITY": "default"} | PLAIN_NUMPY,
        pytest.param({"ATEN_CPU_CAPABILITY": "avx2"}, marks=SLOW),
        # AES without the processor's AES
        pytest.param({"OPENSSL_ia32cap": "~0x200000200000000"}, marks=SLOW),
    ],
    ids=["plain", "avx2", "plain AES"],
)
def test_same_bits_in_another_process_on_every_path(instructions, threads):
    environment = instructions | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REBUILD],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == list(COMMITTED.values())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows x86 alone by name")
def test_there_are_instructions_to_switch_off():
    assert any(name == "AVX2" or name.startswith("X86_V") for name in DISPATCHED)


def test_another_maths_library_s_quantiles_are_refused(monkeypatch):
    exact = NormalDist.inv_cdf
    monkeypatch.setattr(NormalDist, "inv_cdf", lambda self, p: exact(self, p) + 1e-6)
    with pytest.raises(RuntimeError, match="maths library computes normal quantiles that differ"):
        _quantiles.__wrapped__()


def test_the_definition_written_out():
    """Words of AES-256-CTR under SHA-256 of version, seed, shape, name; quantile times scale."""
    shape, n = (300, 500), 150_000
    key = hashlib.sha256(b"privpart-seeded-2|" + (5).to_bytes(16, "big") + b"|300,500|w").digest()
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(2 * n))
    words = np.frombuffer(stream, "<u2").astype(np.int64).reshape(shape)
    uniform = seeded_tensor(5, "w", torch.Size(shape), Uniform(65535.0)).numpy()
    assert (uniform == 2 * words - 65535).all()
    normal = seeded_tensor(5, "w", torch.Size(shape), Normal(1.0)).double().numpy()
    assert (normal * 2**20 == np.round(normal * 2**20)).all()
    order = np.argsort(words, axis=None)
    assert (np.diff(normal.flatten()[order]) >= 0).all()
    half = seeded_tensor(5, "w", torch.Size(shape), Normal(0.3)).numpy()
    assert (half == normal.astype(np.float32) * np.float32(0.3)).all()


def test_values_are_gaussian_of_the_stated_scale():
    values = seeded_tensor(0, "w", torch.Size([200_000]), Normal(0.5)).double() / 0.5
    assert abs(values.mean()) < 5 / 200_000**0.5
    assert values.std() == pytest.approx(1, abs=5 / 400_000**0.5)
    assert (values**4).mean() == pytest.approx(3, abs=5 * (96 / 200_000) ** 0.5)
    assert values.abs().max() < 4.33


@pytest.mark.parametrize("n", [1, 7, 8, 9, 65536, 65537])
def test_any_length(n):
    values = seeded_tensor(0, "w", torch.Size([n]), Uniform(1.0))
    assert values.shape == (n,)
    assert values.abs().max() <= 1
    assert len(values.unique()) > 0.4 * min(n, 65536)


def test_fingerprint_sees_every_bit_and_name():
    tensors = {"a": torch.zeros(3), "b": torch.ones(2)}
    base = tensors_fingerprint(tensors)
    assert tensors_fingerprint(dict(reversed(tensors.items()))) == base
    assert tensors_fingerprint({"a": torch.zeros(3), "c": torch.ones(2)}) != base
    assert tensors_fingerprint({"a": torch.tensor([0.0, -0.0, 0.0]), "b": torch.ones(2)}) != base
    assert tensors_fingerprint({"a": torch.zeros(3, 1), "b": torch.ones(2)}) != base


@pytest.mark.parametrize("seed", [-1, 2**128, 1.5, True, None])
def test_bad_seeds(seed):
    with pytest.raises(ConfigError, match="seed"):
        seeded_tensor(seed, "w", torch.Size([2]), Normal(1.0))
