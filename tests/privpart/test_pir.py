"""Private retrieval: right records, and views that do not depend on the key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import ConfigError
from privpart.select import private_retrieval


@st.composite
def tables(draw):
    count, size = draw(st.integers(1, 40)), draw(st.integers(1, 20))
    seed = draw(st.integers(0, 2**31))
    records = np.random.default_rng(seed).integers(256, size=(count, size), dtype=np.uint8)
    keys = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6))
    return records, keys


@given(tables())
def test_both_answers_together_are_the_wanted_records(problem):
    records, keys = problem
    one, two = private_retrieval.queries(keys, len(records))
    assert one.shape == two.shape == (len(keys), -(-len(records) // 8))
    found = private_retrieval.decode(
        private_retrieval.products(records, one), private_retrieval.products(records, two)
    )
    assert np.array_equal(found, records[keys])


@given(tables())
def test_an_answer_is_the_xor_of_the_asked_set_one_record_after_another(problem):
    records, keys = problem
    asked, _ = private_retrieval.queries(keys, len(records))
    for query, answer in zip(asked, private_retrieval.products(records, asked), strict=True):
        expected = np.zeros(records.shape[1], np.uint8)
        for key in range(len(records)):
            if query[key // 8] >> (key % 8) & 1:
                expected ^= records[key]
        assert np.array_equal(answer, expected)


def test_records_that_exceed_the_cache_are_answered_in_pieces(monkeypatch):
    records = np.random.default_rng(0).integers(256, size=(50, 11), dtype=np.uint8)
    asked, _ = private_retrieval.queries([1, 2, 3], 50)
    whole = private_retrieval.products(records, asked)
    monkeypatch.setattr(private_retrieval, "_CACHE", 64)
    assert np.array_equal(private_retrieval.products(records, asked), whole)


@pytest.mark.parametrize("key", range(8))
def test_each_store_sees_every_query_equally_often_whatever_the_key(key, monkeypatch):
    """All 256 outcomes of the coins, K = 8: both views run through each byte exactly once."""
    views = []
    for coins in range(256):
        monkeypatch.setattr(
            private_retrieval.secrets, "token_bytes", lambda n, c=coins: bytes([c]) * n
        )
        one, two = private_retrieval.queries([key], 8)
        views.append((int(one[0, 0]), int(two[0, 0])))
    assert sorted(one for one, _ in views) == list(range(256))
    assert sorted(two for _, two in views) == list(range(256))
    # the twin: together, colluding, they give the key away every time
    assert {one ^ two for one, two in views} == {1 << key}


def test_coins_are_fresh_for_every_key_and_every_call():
    seen = {bytes(q) for _ in range(8) for q in private_retrieval.queries([0, 0], 128)[0]}
    assert len(seen) == 16


@pytest.mark.parametrize("keys", [[], [8], [-1], [0.5], [True]])
def test_impossible_keys_are_refused(keys):
    with pytest.raises(ConfigError):
        private_retrieval.queries(keys, 8)


RECORDS = np.ones((9, 4), np.uint8)


@pytest.mark.parametrize(
    ("records", "asked"),
    [
        (RECORDS, np.ones((1, 1), np.uint8)),
        (RECORDS, np.ones((1, 3), np.uint8)),
        (RECORDS, np.ones(2, np.uint8)),
        (RECORDS, np.ones((0, 2), np.uint8)),
        (RECORDS.astype(np.float32), np.ones((1, 2), np.uint8)),
        (RECORDS, [[1, 2]]),
    ],
)
def test_stores_refuse_what_is_not_a_query(records, asked):
    with pytest.raises(ConfigError):
        private_retrieval.products(records, asked)
    with pytest.raises(ConfigError, match="must be equal"):
        private_retrieval.decode(np.ones((1, 4), np.uint8), np.ones((1, 5), np.uint8))
    assert private_retrieval.products(RECORDS, np.ones((1, 2), np.uint8)).shape == (1, 4)


def test_bits_beyond_the_last_record_do_nothing():
    asked = np.array([[1, 0b11111110]], np.uint8)
    assert np.array_equal(private_retrieval.products(RECORDS, asked), RECORDS[:1])
