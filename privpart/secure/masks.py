"""Masks: uniform numbers modulo 2^k from a 256-bit key, and vectors of them as bytes."""

from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

_PART = 2**16

Vector = NDArray[np.unsignedinteger[Any]]


def derived(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose, by HKDF-SHA256 (RFC 5869)."""
    return HKDF(SHA256(), 32, salt, b"privpart/secure/1 " + purpose).derive(secret)


def residues_of(numbers: NDArray[np.int64], bits: int) -> Vector:
    """Return whole numbers modulo 2^bits, in the narrowest of 32 and 64 bits; a copy."""
    wide: NDArray[np.int64] = numbers & (2**bits - 1)
    return wide.astype(np.uint32) if bits <= 32 else wide.astype(np.uint64)


def zeros(length: int, bits: int) -> Vector:
    """Return a vector of zeros that sums modulo 2^bits can be added up in."""
    return residues_of(np.zeros(length, np.int64), bits)


def add_mask(total: Vector, key: bytes, *, sign: int) -> None:
    """Add or subtract the mask of a key in place, modulo the 32 or 64 bits of ``total``.

    The mask is the key stream of AES-256 in counter mode. 2^k divides 2^32 and 2^64, so its
    numbers modulo 2^k are as uniform as its bits, and ``reduced`` may follow at the end.

    Args:
        total: shape (d,), changed.
        key: 32 bytes, used for one mask only.
        sign: +1 or -1.
    """
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    nothing = bytes(_PART * total.itemsize)
    for start in range(0, len(total), _PART):
        part = total[start : start + _PART]
        mask = np.frombuffer(stream.update(nothing[: part.nbytes]), part.dtype)
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def reduced(total: Vector, bits: int) -> Vector:
    """Return numbers modulo 2^bits, in place."""
    total &= total.dtype.type(2**bits - 1)
    return total


def packed_bytes(length: int, bits: int) -> int:
    """Return the length of a packed vector: k bytes for 8 numbers of k bits."""
    return -(-length // 8) * bits


def pack(numbers: Vector, bits: int) -> bytes:
    """Return numbers below 2^bits as bits, the lowest first, filled up with zeros to 8 numbers.

    >>> pack(np.array([1, 2, 3], np.uint32), 4).hex()
    '21030000'
    """
    eights = np.zeros((-(-len(numbers) // 8), 8), numbers.dtype)
    eights.reshape(-1)[: len(numbers)] = numbers
    out = np.zeros((len(eights), bits), np.uint8)
    for number in range(8):
        for byte in range(number * bits // 8, -(-(number + 1) * bits // 8)):
            shift = number * bits - 8 * byte
            column = eights[:, number]
            moved = column << shift if shift >= 0 else column >> -shift
            out[:, byte] |= (moved & 255).astype(np.uint8)
    return out.tobytes()


def unpack(data: bytes, length: int, bits: int) -> Vector | None:
    """Return the numbers that ``pack`` wrote; None if it cannot have written the bytes."""
    if len(data) != packed_bytes(length, bits):
        return None
    columns = np.frombuffer(data, np.uint8).reshape(-1, bits)
    eights = zeros(8 * len(columns), bits).reshape(-1, 8)
    for number in range(8):
        for byte in range(number * bits // 8, -(-(number + 1) * bits // 8)):
            shift = 8 * byte - number * bits
            wide: Vector = columns[:, byte].astype(eights.dtype)
            eights[:, number] |= wide << shift if shift >= 0 else wide >> -shift
    numbers = reduced(eights.reshape(-1), bits)
    return None if numbers[length:].any() else numbers[:length]
