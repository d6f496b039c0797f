"""Draws: their addresses, their distribution with power twins, and the secrecy of the key."""

import copy
import pickle

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy.stats import binomtest, kstest, norm

from accounting import ConfigError
from privpart import SecretSource, SeededSource
from privpart.noise.source import BLOCK, _box_muller

SOURCES = [SeededSource(0), SecretSource(bytes(32))]
LEVEL = 1e-9


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_draws_are_addressed_not_consumed(source):
    first, again, other = source.normal(5, 100), source.normal(5, 100), source.normal(6, 100)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == torch.float32
    assert source.normal(0, 101).shape == (101,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_any_slice_can_be_made_alone(source, dtype):
    whole = source.normal(3, 2 * BLOCK + 100, stream=4, out=torch.empty(2 * BLOCK + 100).to(dtype))
    for start, count in ((0, 1), (7, 50), (BLOCK - 3, 6), (BLOCK, BLOCK), (5, 2 * BLOCK + 95)):
        part = torch.empty(count, dtype=dtype)
        assert source.normal(3, count, stream=4, start=start, out=part) is part
        assert torch.equal(part, whole[start : start + count])


def test_the_number_of_threads_changes_no_bit():
    before = torch.get_num_threads()
    draws = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            draws.append(SeededSource(1).normal(0, 3 * BLOCK + 17))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


def test_every_block_is_computed_by_one_thread(monkeypatch):
    seen = []

    def block(key, counter, stddev, out):
        seen.append(torch.get_num_threads())

    monkeypatch.setattr("privpart.noise.source._gaussian_block", block)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        SeededSource(1).normal(0, BLOCK + 1)
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]


def test_no_two_addresses_share_a_draw():
    """Neighbouring streams, indices and blocks, and their carries into each other."""
    source = SeededSource(0)
    sample = torch.stack(
        [
            source.normal(index, 64, stream=stream, start=start)
            for stream in (0, 1, 2**32 - 1)
            for index in (0, 1, 2**47, 2**48 - 1)
            for start in (0, BLOCK, 2 * BLOCK)
        ]
    ).double()
    assert len(torch.unique(sample)) == sample.numel()
    correlation = (sample @ sample.T / 64).fill_diagonal_(0)
    assert correlation.abs().max() < 7.5 / 8  # 64 products each: P < 1e-9 if independent


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_draws_are_normal_with_power_twins(source):
    sample = source.normal(3, 2**20).double().numpy()
    part = sample[: 2**17]
    assert kstest(part, "norm").pvalue > LEVEL
    assert kstest(part * 1.05, "norm").pvalue < LEVEL
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        bound = -norm.ppf(LEVEL / 2) * (variance / len(sample)) ** 0.5
        assert abs((sample**power).mean() - mean) < bound
        if mean:
            assert abs(((sample * 1.05) ** power).mean() - mean) > bound
            assert abs((sample.clip(-2.5, 2.5) ** power).mean() - mean) > bound


@pytest.mark.parametrize("reach", [3.0, 4.0, 4.5])
def test_tails_hold_what_they_should_with_power_twins(reach):
    sample = SecretSource().normal(0, 2**23)
    expected = 2 * norm.sf(reach)

    def accepted(values):
        beyond = int((values.abs() > reach).sum())
        return binomtest(beyond, len(sample), expected).pvalue > LEVEL

    assert accepted(sample)
    assert not accepted(sample * 1.05)
    assert not accepted(sample.clip(-reach, reach))


def test_coordinates_are_independent_of_their_neighbours_and_partners():
    """Also in their squares, which share the radius of Box and Muller."""
    sample = SecretSource().normal(0, 2 * BLOCK).double().view(2, 2, BLOCK // 2)
    for left, right in (
        (sample[:, 0], sample[:, 1]),  # cosine and sine of one pair
        (sample[..., 1:], sample[..., :-1]),
        (sample[0], sample[1]),
    ):
        for power, variance in ((1, 1), (2, 4)):
            product = (left**power - power + 1) * (right**power - power + 1)
            assert abs(float(product.mean())) < 6.2 * (variance / product.numel()) ** 0.5


def words(radius, angle):
    return torch.tensor([radius, angle], dtype=torch.int64)


def exact(pair):
    """The same transform, in float64 from the integers."""
    w, angle = pair.double().numpy()
    radius = np.sqrt(-2 * np.log(np.abs(w) * 2.0**-63 + 2.0**-64))
    turn = np.pi * 2.0**-63 * angle
    return np.stack([radius * np.cos(turn), radius * np.sin(turn)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tails_end_at_nine_and_extremes_are_finite(dtype):
    least, most = -(2**63), 2**63 - 1
    out = torch.empty(10, dtype=dtype)
    _box_muller(words([0, 1, least, most, 0], [0, 0, 0, 0, most]), 1.0, out)
    assert torch.isfinite(out).all()
    assert out[0] == pytest.approx((128 * np.log(2)) ** 0.5)
    assert out[1] == pytest.approx((2 * (64 - np.log2(3)) * np.log(2)) ** 0.5)
    assert abs(out[2]) < 1e-6
    assert abs(out[3]) < 1e-6
    assert out[4] == pytest.approx(-out[0].item())


def test_the_tail_is_as_fine_as_floats_are():
    """Radius words of every size: the result is right to a few float32 roundings, everywhere."""
    rng = np.random.default_rng(0)
    size = 2.0 ** rng.uniform(0, 63, 4096)
    pair = words((size * rng.choice([-1, 1], 4096)).astype(np.int64).tolist(), [0] * 4096)
    pair[1] = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, 4096))
    out = torch.empty(2 * 4096)
    _box_muller(pair, 1.0, out)
    error = np.abs(out.view(2, -1).double().numpy() - exact(pair))
    assert (np.abs(exact(pair)) > 6).sum() > 1000
    assert error.max() < 9.42 * np.pi * 2**-23  # two roundings of the angle, at the largest radius


@pytest.mark.parametrize("stddev", [1e-15, 0.3, 1e15])
def test_the_standard_deviation_scales_the_same_numbers(stddev):
    unit = SeededSource(0).normal(0, BLOCK)
    scaled = SeededSource(0).normal(0, BLOCK, stddev=stddev)
    torch.testing.assert_close(scaled / stddev, unit, rtol=1e-5, atol=0)


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_both_precisions_are_the_same_numbers(source):
    fine = source.normal(0, BLOCK, out=torch.empty(BLOCK, dtype=torch.float64))
    assert (source.normal(0, BLOCK).double() - fine).abs().max() < 1e-4
    assert (source.normal(0, BLOCK).double() - fine).abs().median() < 1e-6
    assert len(torch.unique(fine)) == BLOCK


def test_the_secret_stream_is_aes_256_in_counter_mode():
    key = bytes(range(32))
    start = b"\0\0\0\3" + b"\0\0\0\0\0\7" + (BLOCK // 2).to_bytes(6, "big")
    stream = Cipher(algorithms.AES256(key), modes.CTR(start)).encryptor()
    pair = np.frombuffer(stream.update(bytes(8 * BLOCK)), "<i8").reshape(2, -1)
    draw = SecretSource(key).normal(7, BLOCK, stream=3, start=BLOCK)
    np.testing.assert_allclose(
        draw.view(2, -1), exact(torch.from_numpy(pair.copy())), rtol=0, atol=1e-4
    )


def test_keys_come_from_the_system_and_stay_out_of_sight():
    one, two = SecretSource(), SecretSource()
    assert not torch.equal(one.normal(0, 10), two.normal(0, 10))
    assert (one.private, SeededSource(0).private) == (True, False)
    source = SecretSource(b"k" * 32)
    assert repr(source) == "SecretSource(<key>)"
    assert "kkkk" not in source.identity
    assert b"k".hex() * 4 not in source.identity


def test_identity_tells_sources_apart():
    assert SecretSource(bytes(32)).identity == SecretSource(bytes(32)).identity
    identities = {SecretSource().identity, SecretSource().identity, SeededSource(0).identity}
    assert len({*identities, SeededSource(1).identity}) == 4


@pytest.mark.parametrize("leak", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_secret_source_is_never_copied(leak):
    with pytest.raises(TypeError, match="never copied or pickled"):
        leak(SecretSource())
    assert torch.equal(copy.copy(SeededSource(3)).normal(0, 4), SeededSource(3).normal(0, 4))


def test_zero_is_a_seed_like_any_other():
    assert not torch.equal(SeededSource(0).normal(0, 10), SeededSource(1).normal(0, 10))


def test_global_randomness_is_neither_used_nor_moved():
    state = torch.get_rng_state()
    first = SeededSource(0).normal(0, 10)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(first, SeededSource(0).normal(0, 10))
    torch.set_rng_state(state)


def test_a_stream_of_a_secret_source_is_claimed_once():
    source = SecretSource()
    source.claim(0)
    source.claim(1)
    with pytest.raises(ConfigError, match="stream=1: this SecretSource already feeds"):
        source.claim(1)
    SecretSource().claim(1)


@pytest.mark.parametrize("key", [b"", bytes(16), "k" * 32, 7])
def test_a_key_is_32_bytes(key):
    with pytest.raises(ConfigError, match="32 bytes"):
        SecretSource(key)


@pytest.mark.parametrize("seed", [-1, 0.5, None, b"1", True])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ConfigError, match="seed"):
        SeededSource(seed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("index", -1),
        ("index", 2**48),
        ("index", 0.5),
        ("count", 0),
        ("count", True),
        ("stream", -1),
        ("stream", 2**32),
        ("start", -1),
        ("stddev", 0.0),
        ("stddev", 1e16),
        ("stddev", float("nan")),
        ("out", torch.empty(5)),
        ("out", torch.empty(4, dtype=torch.float16)),
        ("out", torch.empty(8)[::2]),
        ("out", torch.empty(4, device="meta")),
    ],
)
@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_bad_addresses(source, name, value):
    with pytest.raises(ConfigError, match=name):
        source.normal(**({"index": 0, "count": 4} | {name: value}))
