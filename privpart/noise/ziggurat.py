"""Ziggurat: standard normal draws by address, rounded to integers exactly.

``Draws.rounded`` is round(weight z + offset) for a real standard normal z: the integer that follows
if z is computed with as many digits as it takes. Nothing of the floating point in between is left
in the result, so the result is post-processing of a real Gaussian, whatever its low bits may be.

From bits to numbers: a coordinate has one 64-bit word of AES-256 in counter mode. Its low 10 bits
choose one of 1024 pieces of equal area under the density (Marsaglia and Tsang 2000, "The ziggurat
method for generating random variables"); the others are the first digits of a place u in [-1, 1) of
that piece. For 99.57 % of the words a float64 settles the integer: the place lies inside the piece
whatever its further digits are, and the value is further from a half than the error of float64 can
reach. Wedges and the tail take two further words, and their comparisons a bound on the error of exp
and log. What is then still in doubt, a few in a hundred million, is computed once more between two
bounds, with 64 further bits of u, then 128, and so on, until both bounds give the same integer.

Draws are addressed, not consumed: any slice of any draw can be made again alone, and the integers
do not depend on the machine, on the libraries' exp and log, or on the number of threads.

The errors, with e = 2^-53, for a word w, its place u and piece i of width X_i < 4.3:

- w / 2^63 is within e of u, its float64 within 1.5e.
- ``_ERROR``: in X_i u weight that counts times 4.3, as do three relative roundings (the edge, its
  product with the weight, the product with u): 4.3 (1.5 + 3) e < 20e. The constant is 128e.
- ``_rounding_error`` adds a product and a sum of numbers up to 8 weight (the tail, see below) and
  ``largest``. A float64 minus its nearest integer is exact. 2^-40 covers the bound's own rounding.
- ``sure``: a float64 u below it is inside, |u| < X_(i+1) / X_i, whatever its further digits: 2^-50
  is 8e, for the five roundings of the table; 2^12 is 4e of u, for its 1.5e. As ``sure`` is at most
  17e below the ratio, a u at or above ``sure`` and not within ``_EDGE_ERROR`` = 32e of the float64
  ratio (itself within 4e) is outside.
- ``_GAP_ERROR``: the errors of two exponentials, 2^-44 each, and below 40e for the rest (x within
  15e, the edges, v1 within e of its digits, sums of numbers up to 1): below 2^-42.
- The tail, while v1 and v2 > 2^-20: log(v) is below 14, within 2^-33 for v and 14 x 2^-44 for the
  logarithm, so beyond < 3.5 is within 2^-34.9, and -2 log(v2) - beyond^2 within 2^-31.9 + 2^-32
  < 2^-30 = ``_TAIL_GAP_ERROR``. The value r + beyond is within 2^-42 for the logarithm, 2^-54 / v1
  for v1, and 20e for the rest: below ``_TAIL_ERROR`` + 2^-50 / v1.

What is trusted: IEEE products, sums and conversions; exp and log within 2^-44 of the result, 500
times the error that libraries state; decimal's exp and ln, which are rounded correctly; AES-256,
SHA-256 and SHAKE-256 as random functions. What is not defended is timing: about 0.4 % of the values
take longer, and which ones depends on the noise.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from accounting.checks import ConfigError
from accounting.sensitivity import Array
from privpart.noise.enclosures import (
    LAYERS,
    DoubtError,
    Enclosure,
    edges,
    enclosed,
    nearest_integer,
)

BLOCK = 2**15
"""Coordinates that are computed together, in buffers that stay in the processor's cache."""

REAL_ERROR = 2.0**-40
"""Bound on the error of ``Draws.real``."""

# A signed word over _UNIT is u, but for its low 10 bits, which u does not have, and rounding.
_UNIT = 2.0**63
# Bound on |float64 value - z| inside a piece.
_ERROR = 2.0**-46
# The same in the tail, but for what v1 adds.
_TAIL_ERROR = 2.0**-41
# Bound on the error of a difference of exponentials, all at most 1.
_GAP_ERROR = 2.0**-42
# Bound on the error of the tail's difference, while v1 and v2 are at least ``_TAIL_LEAST``.
_TAIL_GAP_ERROR = 2.0**-30
_TAIL_LEAST = 2.0**-20
# Distance of a word from the inner edge within which its further digits decide.
_EDGE_ERROR = 2.0**15
# Rejections in a row (probability of one: below 1/2) after which bounds decide.
_MOST_ATTEMPTS = 64
# Draws whose place in the key stream is kept, so that the next slice need not seek.
_MOST_COUNTERS = 64
Booleans = NDArray[np.bool_]
Places = NDArray[np.intp]
Words = NDArray[np.int64]
Integers = NDArray[np.int32] | NDArray[np.int64] | Array


class Draws:
    """The draws of one key: real standard normals, by index and coordinate.

    Args:
        key: 32 bytes. Equal keys have equal draws.

    An instance reuses buffers: use it in one thread.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._careful = hashlib.sha256(b"privpart wedge and tail|" + key).digest()
        further = Cipher(algorithms.AES256(self._careful), modes.ECB())  # addresses differ
        self._further = further.encryptor()
        self._counters: dict[int, tuple[int, CipherContext]] = {}
        self._block = _Block()

    def rounded(
        self,
        index: int,
        start: int,
        out: Integers,
        *,
        weight: float,
        offset: Array | None = None,
        largest: float = 0.0,
    ) -> None:
        """Write round(weight z + offset) for coordinates ``start`` to ``start + len(out)``.

        Args:
            index: of the draw, 0 to 2^32 - 1.
            start: first coordinate, even.
            out: receives the integers, which must fit in.
            weight: from 2^-20 to 2^50.
            offset: exact numbers, shape of ``out``; None stands for zeros. May be ``out``.
            largest: bound on the size of every offset, if that is above 1; at most 2^50.
        """
        error = _rounding_error(weight, largest)
        odd = [_NONE]
        for first in range(0, len(out), BLOCK):
            last = min(first + BLOCK, len(out))
            words = self._words(index, start + first, last - first)
            shift = None if offset is None else offset[first:last]
            nearest, where = self._block.rounded(words, weight, shift, 0.5 - error)
            odd.append(_Odd(first + where, words[where], _ZERO if shift is None else shift[where]))
            np.copyto(out[first:last], nearest, casting="unsafe")
        where, words, offsets = _joined(odd)
        z, bound, doubt = self._settled(index, start + where, words)
        z *= weight
        z += offsets
        out[where] = nearest = np.rint(z)
        doubt |= ~(np.abs(z - nearest) <= 0.5 - (bound * weight + error))
        for i, own_offset in zip(where[doubt].tolist(), offsets[doubt].tolist(), strict=True):
            draw = partial(self.enclosure, index, start + i)
            out[i] = nearest_integer([(draw, Fraction(weight))], Fraction(own_offset))

    def real(self, index: int, start: int, out: Array) -> None:
        """Write z, within ``REAL_ERROR``, for coordinates ``start`` to ``start + len(out)``."""
        odd = [_NONE]
        for first in range(0, len(out), BLOCK):
            last = min(first + BLOCK, len(out))
            words = self._words(index, start + first, last - first)
            where = self._block.real(words, out[first:last])
            odd.append(_Odd(first + where, words[where], _ZERO))
        where, words, _ = _joined(odd)
        z, bound, doubt = self._settled(index, start + where, words)
        out[where] = z
        for i in where[doubt | (bound > REAL_ERROR)].tolist():
            low, high = self.enclosure(index, start + i, 64)
            out[i] = float((low + high) / 2)

    def enclosure(self, index: int, coordinate: int, bits: int) -> Enclosure:
        """Return two numbers, at most 2^-bits apart, between which z lies."""
        more = bits + 4
        while True:
            try:
                low, high = self._enclosed(index, coordinate, more)
                if high - low <= Fraction(1, 2**bits):
                    return low, high
            except DoubtError:
                pass
            more *= 2

    def _words(self, index: int, start: int, count: int) -> Words:
        """Return words ``start`` to ``start + count`` of a draw, in a buffer."""
        place, counter = self._counters.get(index, (-1, None))
        if counter is None or place != start:
            counter = self._counter(index, start)
        size = 8 * (count + count % 2)
        counter.update_into(_ZEROS[:size], self._block.stream)
        if len(self._counters) >= _MOST_COUNTERS:
            self._counters.clear()
        self._counters[index] = (start + size // 8, counter)
        return self._block.words[:count]

    def _counter(self, index: int, start: int) -> CipherContext:
        if start % 2:
            raise ConfigError(f"start={start}: must be even; a block of AES has two coordinates.")
        first = (index << 64 | start // 2).to_bytes(16, "big")
        return Cipher(algorithms.AES256(self._key), modes.CTR(first)).encryptor()

    def _further_words(self, index: int, coordinates: Words, attempt: int) -> Words:
        """Return further words, shape (n, 4): of v1 and v2, the next word, and a spare one."""
        address = np.empty((len(coordinates), 4), np.uint64)
        address[:, 0] = index << 32 | attempt << 8
        address[:, 2] = index << 32 | attempt << 8 | 1
        address[:, 1] = address[:, 3] = coordinates
        blocks = address.astype(">u8").tobytes()
        return np.frombuffer(self._further.update(blocks), "<i8").reshape(-1, 4)

    def _settled(
        self, index: int, coordinates: Words, words: Words
    ) -> tuple[Array, Array, Booleans]:
        """Return z, a bound on its error, and whether a comparison was too close to call."""
        table = _table()
        value, bound = np.zeros(len(words)), np.full(len(words), _ERROR)
        doubt = np.zeros(len(words), np.bool_)
        todo = np.arange(len(words))
        for attempt in range(_MOST_ATTEMPTS):
            layer, u = words & (LAYERS - 1), words.astype(np.float64)
            x = u * table.edge_unit[layer]
            value[todo] = x
            outside = (~(np.abs(u) < table.sure[layer])).nonzero()[0]
            if not len(outside):
                break
            todo, words, layer = todo[outside], words[outside], layer[outside]
            u, x = u[outside], x[outside]
            further = self._further_words(index, coordinates[todo], attempt)
            v1, v2 = _in_unit_interval(further[:, :2].T)
            low = table.density[layer]
            gap = np.exp(-x * x / 2) - (low + v1 * (table.density[layer + 1] - low))
            close = np.abs(gap) <= _GAP_ERROR
            tail = (layer == 0).nonzero()[0]
            if len(tail):
                beyond = -np.log(v1[tail]) / table.edge[1]
                gap[tail] = -2 * np.log(v2[tail]) - beyond**2
                close[tail] = np.abs(gap[tail]) <= _TAIL_GAP_ERROR
                close[tail] |= np.minimum(v1[tail], v2[tail]) <= _TAIL_LEAST
                value[todo[tail]] = np.copysign(table.edge[1] + beyond, u[tail])
                bound[todo[tail]] = _TAIL_ERROR + 2.0**-50 / v1[tail]
            close |= np.abs(np.abs(u) - table.inner[layer]) <= _EDGE_ERROR
            doubt[todo[close]] = True
            words[layer > 0] = further[layer > 0, 2]  # the tail keeps its word: it is tried again
            rejected = (~(close | (gap > 0))).nonzero()[0]
            todo, words = todo[rejected], words[rejected]
            bound[todo] = _ERROR
        else:
            doubt[todo] = True
        return value, bound, doubt

    def _enclosed(self, index: int, coordinate: int, bits: int) -> Enclosure:
        """Return an enclosure of z from ``bits`` further bits of each of its words."""
        even = coordinate - coordinate % 2
        pair = np.frombuffer(self._counter(index, even).update(bytes(16)), "<i8")

        def further(attempt: int) -> list[int]:
            words = self._further_words(index, np.array([coordinate]), attempt)
            return [int(word) for word in words[0]]

        def digits(name: str) -> int:
            data = f"privpart digits|{index}|{coordinate}|{name}".encode()
            digest = hashlib.shake_256(self._careful + data).digest(-(-bits // 8))
            return int.from_bytes(digest, "big") >> -bits % 8

        return enclosed(int(pair[coordinate - even]), further, digits, bits)


class _Odd(NamedTuple):
    """Coordinates that the fast path does not settle, with their words and offsets."""

    where: Places
    words: Words
    offsets: Array


_ZERO = np.zeros(())
_NONE = _Odd(np.empty(0, np.intp), np.empty(0, np.int64), _ZERO)


def _joined(parts: Sequence[_Odd]) -> _Odd:
    offsets = [np.broadcast_to(part.offsets, part.where.shape) for part in parts]
    return _Odd(
        np.concatenate([part.where for part in parts]),
        np.concatenate([part.words for part in parts]),
        np.concatenate(offsets),
    )


class _Block:
    """Buffers for one block: fresh memory would cost as much as the arithmetic."""

    def __init__(self) -> None:
        self.stream = bytearray(8 * BLOCK + 15)  # update_into requires room for one more block
        self.words = np.frombuffer(self.stream, "<i8", BLOCK)
        self._layer = np.empty(BLOCK, np.int64)
        self._u = self._layer.view(np.float64)
        self._x = np.empty(BLOCK)
        self._other = np.empty(BLOCK)
        self._inside = np.empty(BLOCK, np.bool_)
        self._clear = np.empty(BLOCK, np.bool_)
        self._weight = 1.0
        self._edge_unit = _table().edge_unit

    def rounded(
        self, words: Words, weight: float, offset: Array | None, margin: float
    ) -> tuple[Array, Places]:
        """Return the integers; and where u may lie outside, or x is more than ``most`` off."""
        if weight != self._weight:
            self._edge_unit = _table().edge_unit * weight
            self._weight = weight
        x, settled = self._values(words, self._edge_unit)
        clear, nearest = self._clear[: len(words)], self._other[: len(words)]
        if offset is not None:
            x += offset
        np.rint(x, out=nearest)
        x -= nearest
        np.abs(x, out=x)
        np.less_equal(x, margin, out=clear)
        settled &= clear
        return nearest, (~settled).nonzero()[0]

    def real(self, words: Words, out: Array) -> Places:
        """Write u times the edges; return where u may lie outside its piece."""
        x, inside = self._values(words, _table().edge_unit)
        out[:] = x
        return (~inside).nonzero()[0]

    def _values(self, words: Words, edge_unit: Array) -> tuple[Array, Booleans]:
        """Return u times the edges, and whether u lies inside its piece."""
        n = len(words)
        layer, u, x = self._layer[:n], self._u[:n], self._x[:n]
        sure, inside = self._other[:n], self._inside[:n]
        np.bitwise_and(words, LAYERS - 1, out=layer)
        edge_unit.take(layer, out=x, mode="clip")  # "raise" would copy
        _table().sure.take(layer, out=sure, mode="clip")
        np.copyto(u, words)
        x *= u
        np.abs(u, out=u)
        np.less(u, sure, out=inside)
        return x, inside


def are_allowed(weight: float, largest: float) -> bool:
    """Whether a draw can be rounded with such a weight, and offsets up to ``largest``."""
    return 2.0**-20 <= weight <= 2.0**50 and 0 <= largest <= 2.0**50


def _rounding_error(weight: float, largest: float) -> float:
    """Bound on the error of weight x z + offset in float64, beside that of z in the tail."""
    if not are_allowed(weight, largest):
        raise ConfigError(
            f"weight={weight:g}, largest={largest:g}: must lie from 2^-20 to 2^50, and up to 2^50."
        )
    return weight * _ERROR + (16 * weight + largest) * 2.0**-52 + 2.0**-40


def _in_unit_interval(words: Words) -> Array:
    """Return numbers in (0, 1]: a word's upper 53 bits, unsigned, and a half."""
    return np.asarray(((words >> 11) + 2.0**52 + 0.5) * 2.0**-53)


class _Table:
    """The pieces in float64. Edges X_0 > X_1 > ... > X_1024 = 0, and the density there."""

    def __init__(self) -> None:
        self.edge = np.array([float((low + high) / 2) for low, high in edges(80)])
        self.edge_unit = self.edge[:-1] / _UNIT
        self.density = np.exp(-(self.edge**2) / 2)
        self.density[0] = self.density[1]
        # a word below is inside the piece, whatever the digits to come
        self.inner = self.edge[1:] / self.edge[:-1] * _UNIT
        self.sure = self.inner * (1 - 2.0**-50) - 2.0**12


@lru_cache(maxsize=1)
def _table() -> _Table:
    return _Table()


_ZEROS = memoryview(bytes(8 * BLOCK))
