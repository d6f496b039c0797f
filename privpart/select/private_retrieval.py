"""Private retrieval: a client fetches records from two stores without telling them which.

Chor, Goldreich, Kushilevitz and Sudan 1995, "Private Information Retrieval", the scheme for two
servers: the first store receives a uniformly random set of records, the second the same set with
the wanted record added or removed. Each store answers with the XOR of its set, and the XOR of both
answers is the wanted record. Each query alone is uniform whatever the key, so privacy is perfect
against stores that do not collude. Both queries together reveal the key.

The scheme does not hide how many records a client requests, and does not detect false answers.
"""

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError

Bits = NDArray[np.uint8]
"""Packed queries, shape (m, ceil(K / 8)), one bit per record; or records, shape (m, size)."""

# bytes of records per pass: all queries read them while they are cached
_CACHE = 1 << 18


def queries(keys: Sequence[int], size: int) -> tuple[Bits, Bits]:
    """Return the queries for the first and for the second store, shape (m, ceil(size / 8)).

    ``keys`` are the m wanted records, each from 0 to size - 1, of ``size`` records.
    """
    width = (checks.count("size", size) + 7) // 8
    wanted = np.array([checks.count("key", key, minimum=0) for key in keys], np.int64)
    if not len(wanted) or not wanted.max() < size:
        raise ConfigError(f"{len(wanted)} keys: must be at least one, and each below {size}.")
    # secret coins, not a seed's: a store that knew them would know the key
    coins = secrets.token_bytes(len(wanted) * width)
    first = np.frombuffer(coins, np.uint8).reshape(len(wanted), width)
    # one bit differs; each query alone is uniform
    second = first.copy()
    second[np.arange(len(wanted)), wanted // 8] ^= (1 << (wanted % 8)).astype(np.uint8)
    return first, second


def products(records: Bits, asked: Bits) -> Bits:
    """Return, per query, the XOR of the records in its set, shape (m, size).

    ``records`` are all of the store, shape (K, size). Queries have shape (m, ceil(K / 8)); bits
    beyond K are ignored.
    """
    count, size = _shape("records", records)
    if _shape("asked", asked)[1] != (count + 7) // 8:
        raise ConfigError(f"asked of shape {asked.shape}: must have {(count + 7) // 8} bytes each.")
    words = _as_words(records)
    out = np.zeros((len(asked), words.shape[1]), np.uint64)
    # a multiple of 8: each piece begins at a whole byte of the queries
    step = 8 * max(1, _CACHE // (64 * words.shape[1]))
    for start in range(0, count, step):
        piece = words[start : start + step]
        bits = asked[:, start // 8 : (start + step) // 8]
        chosen = np.unpackbits(bits, axis=1, count=len(piece), bitorder="little").astype(np.bool_)
        for query, rows in enumerate(chosen):
            out[query] ^= np.bitwise_xor.reduce(piece[rows], axis=0)
    return out.view(np.uint8)[:, :size]


def decode(first: Bits, second: Bits) -> Bits:
    """Return the wanted records, shape (m, size), from the answers of both stores."""
    if _shape("first", first) != _shape("second", second):
        raise ConfigError(f"answers of shapes {first.shape} and {second.shape}: must be equal.")
    return first ^ second


def _as_words(records: Bits) -> NDArray[np.uint64]:
    """Return the bytes as 64-bit words, padded with zeros."""
    count, size = records.shape
    if size % 8:
        # whole words, of which XOR takes eight bytes at a time
        padded = np.zeros((count, -(-size // 8) * 8), np.uint8)
        padded[:, :size] = records
        records = padded
    return np.ascontiguousarray(records).view(np.uint64)


def _shape(name: str, array: Bits) -> tuple[int, int]:
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 2:
        raise ConfigError(f"{name}: must be a matrix of bytes (uint8).")
    if 0 in array.shape:
        raise ConfigError(f"{name} of shape {array.shape}: must not be empty.")
    return array.shape
