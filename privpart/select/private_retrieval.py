"""Private retrieval: a client fetches records from two stores that learn nothing about which.

Chor, Goldreich, Kushilevitz and Sudan 1995, "Private Information Retrieval", the scheme for two
servers: the first store receives a uniformly random set of records, the second the same set with
the wanted record added or removed; each answers the XOR of its set, and the XOR of both answers is
the record. Each query alone is uniform whatever the key, so the privacy is perfect, but only
against stores that do not collude: who holds both queries reads the key off them.

Not hidden: how many records a client asks for. Not detected: a store that answers falsely.
"""

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError

Bits = NDArray[np.uint8]
"""Queries, packed, shape (m, ceil(K / 8)): which records to add up; or records, shape (m, size)."""

_CACHE = 1 << 18  # bytes of records at a time, so that all queries meet them in the cache


def queries(keys: Sequence[int], size: int) -> tuple[Bits, Bits]:
    """Return what to send to the first and to the second store.

    Args:
        keys: the wanted records, each from 0 to size - 1.
        size: K, number of records.

    Returns:
        Per store, shape (len(keys), ceil(size / 8)). The random bits are the operating system's.
    """
    width = (checks.count("size", size) + 7) // 8
    wanted = np.array([checks.count("key", key, minimum=0) for key in keys], np.int64)
    if not len(wanted) or not wanted.max() < size:
        raise ConfigError(f"{len(wanted)} keys: must be at least one, and each below {size}.")
    coins = secrets.token_bytes(len(wanted) * width)
    first = np.frombuffer(coins, np.uint8).reshape(len(wanted), width)
    second = first.copy()
    second[np.arange(len(wanted)), wanted // 8] ^= (1 << (wanted % 8)).astype(np.uint8)
    return first, second


def answers(records: Bits, asked: Bits) -> Bits:
    """Return, per query, the XOR of the records in its set.

    Args:
        records: shape (K, size), size bytes each.
        asked: what one store received, shape (m, ceil(K / 8)); bits beyond K are ignored.

    Returns:
        Shape (m, size).

    Raises:
        ConfigError: other shapes or types.
    """
    count, size = _shape("records", records)
    if _shape("asked", asked)[1] != (count + 7) // 8:
        raise ConfigError(f"asked of shape {asked.shape}: must have {(count + 7) // 8} bytes each.")
    words = _as_words(records)
    out = np.zeros((len(asked), words.shape[1]), np.uint64)
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


def query_bytes(size: int) -> int:
    """Return what one key costs upwards, to both stores together, in bytes."""
    return 2 * ((checks.count("size", size) + 7) // 8)


def most_keys(size: int, record_bytes: int) -> int:
    """Return for how many keys private retrieval takes fewer bytes than sending everything.

    A key takes ``query_bytes`` up and two records down; everything is all K records, down. With
    small records that allows about four keys per byte of a record, however large K is; with large
    ones about K / 2 keys.

    Args:
        size: K, number of records.
        record_bytes: of one record.

    >>> most_keys(10_000, 384), most_keys(64, 103_556)
    (1175, 31)
    """
    whole = checks.count("size", size) * checks.count("record_bytes", record_bytes)
    return (whole - 1) // (query_bytes(size) + 2 * record_bytes)


def _as_words(records: Bits) -> NDArray[np.uint64]:
    """The same bytes eight at a time, filled up with zeros."""
    count, size = records.shape
    if size % 8:
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
