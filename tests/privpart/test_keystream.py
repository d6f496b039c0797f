import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy.stats import kstest

from accounting import ConfigError
from privpart import SecretSource, SeededSource

SOURCES = [SeededSource(0), SecretSource(bytes(32))]


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_draws_are_addressed_not_consumed(source):
    first, again, other = source.normal(5, 100), source.normal(5, 100), source.normal(6, 100)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == torch.float32
    assert source.normal(0, 101).shape == (101,)


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_draws_are_normal_also_in_the_tails(source):
    sample = source.normal(3, 200_000).double().numpy()
    assert kstest(sample, "norm").pvalue > 1e-9
    assert kstest(sample * 1.05, "norm").pvalue < 1e-9
    assert 4.0 < np.abs(sample).max() < 7.0


def test_the_secret_stream_is_aes_256_in_counter_mode():
    key = bytes(range(32))
    stream = Cipher(algorithms.AES256(key), modes.CTR((7).to_bytes(8, "big") + bytes(8)))
    words = np.frombuffer(stream.encryptor().update(bytes(32)), "<u8")
    unit = (words >> 11) * 2.0**-53
    expected = np.sqrt(-2 * np.log1p(-unit[:2])) * np.cos(2 * np.pi * unit[2:])
    np.testing.assert_allclose(SecretSource(key).normal(7, 4)[:2], expected, rtol=1e-6)


def test_keys_come_from_the_system_and_stay_out_of_sight():
    one, two = SecretSource(), SecretSource()
    assert not torch.equal(one.normal(0, 10), two.normal(0, 10))
    assert (one.private, SeededSource(0).private) == (True, False)
    assert repr(SecretSource(b"k" * 32)) == "SecretSource(<key>)"


def test_zero_is_a_seed_like_any_other():
    assert not torch.equal(SeededSource(0).normal(0, 10), SeededSource(1).normal(0, 10))


@pytest.mark.parametrize("key", [b"", bytes(16), "k" * 32, 7])
def test_a_key_is_32_bytes(key):
    with pytest.raises(ConfigError, match="32 bytes"):
        SecretSource(key)


@pytest.mark.parametrize("seed", [-1, 0.5, None, b"1"])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ConfigError, match="seed"):
        SeededSource(seed)
