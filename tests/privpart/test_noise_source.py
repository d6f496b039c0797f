"""The source of draws: addresses and salts, the secrecy of the key, who may draw."""

import copy
import pickle

import numpy as np
import pytest
import torch

from accounting import ConfigError
from privpart import SecretSource, SeededSource

SOURCES = [SeededSource(0), SecretSource(bytes(32))]
SALT = bytes(range(16))
CELLS = 2**16


def integers(source, count=100, *, index=5, stream=0, salt=b"", start=0):
    """Draws in steps of 2^-20."""
    out = np.zeros(count, np.int64)
    source.draws(stream, salt).rounded(index, start, out, weight=2.0**20)
    return out


@pytest.mark.parametrize("source", SOURCES, ids=repr)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"stream": 0}, {"stream": 1}),
        ({"salt": SALT}, {"salt": SALT[::-1]}),
        ({"salt": b""}, {"salt": SALT}),
        ({"index": 5}, {"index": 6}),
        ({"start": 0}, {"start": 2}),
        ({"stream": 1, "salt": b"1|" + SALT[2:]}, {"stream": 11, "salt": b"|" + SALT[2:]}),
    ],
    ids=repr,
)
def test_unlike_addresses_are_uncorrelated(source, one, other):
    """Also in their squares, so that no magnitude is shared."""
    a, b = (integers(source, CELLS, **address) / 2.0**20 for address in (one, other))
    bound = 6.5 / CELLS**0.5
    assert abs((a * b).mean()) < bound
    assert abs(((a**2 - 1) * (b**2 - 1)).mean()) < 2 * bound
    assert abs((a * a).mean()) > bound  # power


def test_salts_are_fresh_for_secrets_and_empty_for_simulations():
    source = SecretSource()
    salts = {source.salt() for _ in range(100)}
    assert len(salts) == 100
    assert {len(salt) for salt in salts} == {16}
    assert len({SecretSource(bytes(32)).salt() for _ in range(5)}) == 5  # not from the key
    assert SeededSource(0).salt() == b""


def test_the_kinds_of_sources_share_no_draws():
    """A seed's key is derived, so that no secret key is a seed by chance."""
    sources = (*SOURCES, SeededSource(1), SecretSource(b"1" * 32), SecretSource(), SecretSource())
    for source in sources:
        assert np.array_equal(integers(source), integers(source))  # not consumed
    assert len({tuple(integers(source).tolist()) for source in sources}) == 6
    assert len({source.identity for source in sources}) == 6
    assert SecretSource(bytes(32)).identity == SecretSource(bytes(32)).identity


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda stream=stream, source=source: source.draws(stream, b""), "stream")
          for stream in (-1, 2**32, 0.5, "0", True, None) for source in SOURCES),
        *((lambda key=key: SecretSource(key), "32 bytes") for key in (b"", bytes(16), "k" * 32, 7)),
        *((lambda seed=seed: SeededSource(seed), "seed") for seed in (-1, 0.5, None, b"1", True)),
    ],
)  # fmt: skip
def test_streams_keys_and_seeds_of_another_kind_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_keys_come_from_the_system_and_stay_out_of_sight():
    source = SecretSource(b"k" * 32)
    assert (source.private, SeededSource(0).private) == (True, False)
    assert repr(source) == "SecretSource(<key>)"
    assert "kkkk" not in source.identity
    assert b"k".hex() * 4 not in source.identity


@pytest.mark.parametrize("leak", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_secret_source_is_never_copied(leak):
    with pytest.raises(TypeError, match="never copied or pickled"):
        leak(SecretSource())
    assert np.array_equal(integers(copy.copy(SeededSource(3))), integers(SeededSource(3)))


def test_global_randomness_is_neither_used_nor_moved():
    state, first = torch.get_rng_state(), integers(SeededSource(0))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert np.array_equal(first, integers(SeededSource(0)))
