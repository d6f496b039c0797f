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
and log. What is then still in doubt, a few in a hundred million, is computed once more in interval
arithmetic, with 64 further bits of u, then 128, and so on, until both ends of the interval give the
same integer.

Draws are addressed, not consumed: any slice of any draw can be made again alone, and the integers
do not depend on the machine, on the libraries' exp and log, or on the number of threads.

What is trusted: IEEE products and sums; exp and log within 2^-44 of the result, 500 times the error
that libraries state; mpmath's intervals; AES-256, SHA-256 and SHAKE-256 as random functions. What is
not defended is timing: about 0.4 % of the values take longer, and which ones depends on the noise.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import mpmath
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from mpmath.ctx_iv import MPIntervalContext
from numpy.typing import NDArray

BLOCK = 2**15
"""Coordinates that are computed together, in buffers that stay in the processor's cache."""

_LAYER_BITS = 10
_LAYERS = 2**_LAYER_BITS
_UNIT = 2.0**63
"""A signed word over _UNIT is u, but for its low 10 bits, which u does not have, and rounding."""
_TAIL = (
    "4.0388498461095045227144234053359312047009919558945647303951182048249570325137"
    "200917695095261460484523798924103"
)
"""Where the tail begins: the value for which 1024 pieces have equal areas, see ``_edges``."""
_TAIL_BITS = 340
"""Bits to which ``_TAIL`` is stated."""
_ERROR = 2.0**-46
"""Bound on |float64 value - z| inside a piece: 4 times 7 roundings of numbers up to 4.2."""
_GAP_ERROR = 2.0**-44
"""Bound on the error of a difference of exponentials, all at most 1."""
_MOST_ATTEMPTS = 64
"""Rejections in a row (probability of one: below 1/2) after which intervals decide."""

Array = NDArray[np.float64]
Words = NDArray[np.int64]
Enclosure = tuple[Fraction, Fraction]
"""Two numbers between which a real number lies."""


class DoubtError(ArithmeticError):
    """Two intervals overlap: more bits are needed to compare them."""


class Draws:
    """The draws of one key: real standard normals, by index and coordinate.

    Args:
        key: 32 bytes. Equal keys have equal draws.

    An instance reuses buffers: use it in one thread.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._careful = hashlib.sha256(b"privpart wedge and tail|" + key).digest()
        self._counters: dict[int, tuple[int, CipherContext]] = {}
        self._block = _Block()

    def rounded(
        self,
        index: int,
        start: int,
        out: Array,
        *,
        weight: float,
        offset: Array | None = None,
        largest: float = 0.0,
    ) -> None:
        """Write round(weight z + offset) for coordinates ``start`` to ``start + len(out)``.

        Args:
            index: of the draw, 0 to 2^32 - 1.
            start: first coordinate, even.
            out: receives the integers.
            weight: from 2^-20 to 2^50.
            offset: exact numbers, shape of ``out``; None stands for zeros. May be ``out``.
            largest: bound on the size of every offset.
        """
        error = _rounding_error(weight, largest)
        odd: list[_Odd] = []
        for first in range(0, len(out), BLOCK):
            last = min(first + BLOCK, len(out))
            words = self._words(index, start + first, last - first)
            own = None if offset is None else offset[first:last]
            where = self._block.rounded(words, weight, own, 0.5 - error, out[first:last])
            odd.append(_Odd(first + where, words[where], None if own is None else own[where]))
        where, words, offsets = _joined(odd)
        z, bound, doubt = self._settled(index, start + where, words)
        z *= weight
        z += offsets
        out[where] = whole = np.rint(z)
        doubt |= np.abs(z - whole) > 0.5 - (bound * weight + error)
        for i, own_offset in zip(where[doubt].tolist(), offsets[doubt].tolist(), strict=True):
            out[i] = self._exactly(index, start + i, weight, own_offset)

    def real(self, index: int, start: int, out: Array) -> None:
        """Write z, each within ``REAL_ERROR``, for coordinates ``start`` to ``start + len(out)``.

        Args:
            index: of the draw, 0 to 2^32 - 1.
            start: first coordinate, even.
            out: receives the numbers.
        """
        odd: list[_Odd] = []
        for first in range(0, len(out), BLOCK):
            last = min(first + BLOCK, len(out))
            words = self._words(index, start + first, last - first)
            where = self._block.real(words, out[first:last])
            odd.append(_Odd(first + where, words[where], None))
        where, words, _ = _joined(odd)
        z, bound, doubt = self._settled(index, start + where, words)
        out[where] = z
        for i in where[doubt | (bound > REAL_ERROR)].tolist():
            low, high = self.enclosure(index, start + i, 64)
            out[i] = float((low + high) / 2)

    def enclosure(self, index: int, coordinate: int, bits: int) -> Enclosure:
        """Return two numbers, about 2^-bits apart, between which z lies."""
        while True:
            try:
                return self._enclosed(index, coordinate, bits)
            except DoubtError:
                bits *= 2

    def _exactly(self, index: int, coordinate: int, weight: float, offset: float) -> int:
        shift = Fraction(offset) + Fraction(1, 2)
        bits = 64
        while True:
            low, high = self.enclosure(index, coordinate, bits)
            floor = (low * Fraction(weight) + shift).__floor__()
            if floor == (high * Fraction(weight) + shift).__floor__():
                return floor
            bits *= 2

    def _words(self, index: int, start: int, count: int) -> Words:
        """Return words ``start`` to ``start + count`` of a draw, in a buffer."""
        place, counter = self._counters.get(index, (-1, None))
        if counter is None or place != start:
            first = (index << 64 | start // 2).to_bytes(16, "big")
            counter = Cipher(algorithms.AES256(self._key), modes.CTR(first)).encryptor()
        size = 8 * (count + count % 2)
        counter.update_into(_ZEROS[:size], self._block.stream)
        self._counters[index] = (start + size // 8, counter)
        return self._block.words[:count]

    def _further_words(self, index: int, coordinates: Words, attempt: int, part: int) -> Words:
        """Return two further words of each coordinate, shape (n, 2)."""
        address = np.empty((len(coordinates), 2), ">u8")
        address[:, 0] = index << 32 | attempt << 8 | part
        address[:, 1] = coordinates
        cipher = Cipher(algorithms.AES256(self._careful), modes.ECB())  # noqa: S305 (addresses differ)
        return np.frombuffer(cipher.encryptor().update(address.tobytes()), np.int64).reshape(-1, 2)

    def _settled(
        self, index: int, coordinates: Words, words: Words
    ) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Return z, a bound on its error, and whether a comparison was too close to call."""
        table = _table()
        value, bound = np.zeros(len(words)), np.full(len(words), _ERROR)
        doubt = np.zeros(len(words), np.bool_)
        todo = np.arange(len(words))
        for attempt in range(_MOST_ATTEMPTS):
            layer, u = words & (_LAYERS - 1), words.astype(np.float64)
            x = u * table.edge_unit[layer]
            value[todo] = x
            outside = np.flatnonzero(np.abs(u) >= table.sure[layer])
            if not len(outside):
                break
            todo, layer, u, x = todo[outside], layer[outside], u[outside], x[outside]
            further = self._further_words(index, coordinates[todo], attempt, 0)
            v1, v2 = _in_unit_interval(further[:, 0]), _in_unit_interval(further[:, 1])
            low, high = table.density[layer], table.density[layer + 1]
            gap = np.exp(-x * x / 2) - (low + v1 * (high - low))
            close = np.abs(gap) < _GAP_ERROR
            tail = np.flatnonzero(layer == 0)
            if len(tail):
                beyond = -np.log(v1[tail]) / table.edge[1]
                gap[tail] = -2 * np.log(v2[tail]) - beyond**2
                close[tail] = np.abs(gap[tail]) < _GAP_ERROR * 2**14
                close[tail] |= np.minimum(v1[tail], v2[tail]) < 2.0**-20
                value[todo[tail]] = np.copysign(table.edge[1] + beyond, u[tail])
                bound[todo[tail]] = 2.0**-44 + 2.0**-50 / v1[tail]
            # so close to the edge, the digits to come decide whether u is inside
            close |= np.abs(np.abs(u) - table.edge[layer + 1] / table.edge[layer] * _UNIT) < 2**15
            doubt[todo[close]] = True
            rejected = np.flatnonzero(~(close | (gap > 0)))
            todo = todo[rejected]
            bound[todo] = _ERROR
            words = self._further_words(index, coordinates[todo], attempt, 1)[:, 0]
        else:
            doubt[todo] = True
        return value, bound, doubt

    def _enclosed(self, index: int, coordinate: int, bits: int) -> Enclosure:
        """Return an enclosure of z from all its words and ``bits`` further bits of each.

        Raises:
            DoubtError: more bits are needed to say which attempt is accepted.
        """
        even = coordinate - coordinate % 2
        counter = (index << 64 | even // 2).to_bytes(16, "big")
        cipher = Cipher(algorithms.AES256(self._key), modes.CTR(counter)).encryptor()
        word = int(np.frombuffer(cipher.update(bytes(16)), np.int64)[coordinate - even])
        here = np.array([coordinate])

        def further(word: int, size: int, name: str) -> Enclosure:
            """The word's lowest ``size`` bits are the first digits of a number in [-1, 1)."""
            data = f"privpart digits|{index}|{coordinate}|{name}".encode()
            digest = hashlib.shake_256(self._careful + data).digest(-(-bits // 8))
            digits = word << bits | int.from_bytes(digest, "big") >> -bits % 8
            return Fraction(digits, 2 ** (size + bits)), Fraction(digits + 1, 2 ** (size + bits))

        attempt = 0
        while True:
            layer = word & (_LAYERS - 1)
            u = further(word >> _LAYER_BITS, 63 - _LAYER_BITS, f"{attempt}u")
            z = _times(u, _edges(bits)[layer])
            if _less(_size(z), _edges(bits)[layer + 1]):
                return z
            first = self._further_words(index, here, attempt, 0)[0].tolist()
            v1, v2 = (further((w >> 11) + 2**52, 53, f"{attempt}v{i}") for i, w in enumerate(first))
            accepted = _accepted(layer, z, v1, v2, word < 0, bits)
            if accepted is not None:
                return accepted
            word = int(self._further_words(index, here, attempt, 1)[0, 0])
            attempt += 1


REAL_ERROR = 2.0**-40
"""Bound on the error of ``Draws.real``."""


class _Odd(NamedTuple):
    """Coordinates that the fast path does not settle, with their words and offsets."""

    where: NDArray[np.intp]
    words: Words
    offsets: Array | None


def _joined(parts: Sequence[_Odd]) -> tuple[NDArray[np.intp], Words, Array]:
    where = np.concatenate([part.where for part in parts])
    offsets = [np.zeros(0) if part.offsets is None else part.offsets for part in parts]
    whole = np.concatenate(offsets)
    return (
        where,
        np.concatenate([part.words for part in parts]),
        whole if len(whole) == len(where) else np.zeros(len(where)),
    )


class _Block:
    """Buffers for one block: fresh memory would cost as much as the arithmetic."""

    def __init__(self) -> None:
        self.stream = bytearray(8 * BLOCK + 15)  # update_into requires room for one more block
        self.words = np.frombuffer(self.stream, np.int64, BLOCK)
        self._layer = np.empty(BLOCK, np.int64)
        self._u = np.empty(BLOCK)
        self._x = np.empty(BLOCK)
        self._other = np.empty(BLOCK)
        self._outside = np.empty(BLOCK, np.bool_)
        self._far = np.empty(BLOCK, np.bool_)
        self._weight = 0.0
        self._edge_unit = np.empty(0)

    def rounded(
        self, words: Words, weight: float, offset: Array | None, most: float, out: Array
    ) -> NDArray[np.intp]:
        """Write the integers; return where u may lie outside, or x further than ``most`` off."""
        if weight != self._weight:
            self._edge_unit = _table().edge_unit * weight
            self._weight = weight
        x, outside = self._inside(words, self._edge_unit)
        far = self._far[: len(words)]
        if offset is not None:
            x += offset
        whole = self._other[: len(words)]
        np.rint(x, out=whole)
        np.copyto(out, whole, casting="unsafe")
        x -= whole
        np.abs(x, out=x)
        np.greater(x, most, out=far)
        np.logical_or(far, outside, out=far)
        return self._chosen(far)

    def real(self, words: Words, out: Array) -> NDArray[np.intp]:
        """Write u times the edges; return where u may lie outside its piece."""
        x, outside = self._inside(words, _table().edge_unit)
        out[:] = x
        return self._chosen(outside)

    def _chosen(self, rare: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Return where ``rare`` is true; eight at a time, since numpy looks at each for a ns."""
        if len(rare) % 8:
            return rare.nonzero()[0]
        eights = (rare.view(np.uint64) != 0).nonzero()[0]
        near = (8 * eights[:, None] + np.arange(8)).ravel()
        return near[rare[near]]

    def _inside(self, words: Words, edge_unit: Array) -> tuple[Array, NDArray[np.bool_]]:
        n = len(words)
        layer, u, x = self._layer[:n], self._u[:n], self._x[:n]
        sure, outside = self._other[:n], self._outside[:n]
        np.bitwise_and(words, _LAYERS - 1, out=layer)
        np.copyto(u, words)
        edge_unit.take(layer, out=x, mode="clip")  # "raise" would copy
        np.multiply(x, u, out=x)
        _table().sure.take(layer, out=sure, mode="clip")
        np.abs(u, out=u)
        np.greater_equal(u, sure, out=outside)
        return x, outside


def _rounding_error(weight: float, largest: float) -> float:
    """Bound on the error of weight x z + offset in float64, beside that of z in the tail."""
    return weight * _ERROR + (16 * weight + largest) * 2.0**-52 + 2.0**-40


def _in_unit_interval(words: Words) -> Array:
    """Return numbers in (0, 1): a word's upper 53 bits, unsigned, and a half."""
    return np.asarray(((words >> 11) + 2.0**52 + 0.5) * 2.0**-53)


class _Table:
    """The pieces in float64. Edges X_0 > X_1 > ... > X_1024 = 0, and the density there."""

    def __init__(self) -> None:
        self.edge = np.array([float((low + high) / 2) for low, high in _edges(80)])
        self.edge_unit = self.edge[:-1] / _UNIT
        self.density = np.exp(-(self.edge**2) / 2)
        self.density[0] = self.density[1]
        # a word below is inside the piece, whatever the digits to come
        self.sure = self.edge[1:] / self.edge[:-1] * _UNIT * (1 - 2.0**-50) - 2.0**12


@lru_cache(maxsize=1)
def _table() -> _Table:
    return _Table()


@lru_cache(maxsize=8)
def _edges(bits: int) -> list[Enclosure]:
    """Return enclosures of the edges, relative width 2^-bits.

    Piece i is the rectangle of width X_i and of height f(X_{i+1}) - f(X_i), f(x) = exp(-x^2/2); all
    have the area of the lowest one, which is a rectangle of width X_1 = r and the tail beyond, and
    counts as one of width X_0 = area / f(r). The r for which the last one ends at f = 1 is found by
    the secant method.
    """
    with mpmath.workprec(bits + 60):
        r = mpmath.mpf(_TAIL)
        if bits + 40 > _TAIL_BITS:
            other = r + mpmath.mpf(2) ** -40
            while abs(r - other) > mpmath.mpf(2) ** -(bits + 40):
                here, there = _pieces(r)[1], _pieces(other)[1]
                r, other = r - here * (r - other) / (here - there), r
        wide, narrow = 1 + Fraction(1, 2**bits), 1 - Fraction(1, 2**bits)
        exact = [_fraction(x) for x in _pieces(r)[0]]
        return [*((x * narrow, x * wide) for x in exact), (Fraction(0), Fraction(0))]


def _pieces(r: Any) -> tuple[list[Any], Any]:  # noqa: ANN401 (mpmath has no types)
    """Return the edges for a tail that begins at r, and by how much the last piece misses 1."""
    tail = mpmath.sqrt(mpmath.pi / 2) * mpmath.erfc(r / mpmath.sqrt(2))
    y = mpmath.exp(-r * r / 2)
    area = r * y + tail
    x = [area / y, r]
    for _ in range(_LAYERS - 2):
        y += area / x[-1]
        if y >= 1:
            return x, mpmath.mpf(1)
        x.append(mpmath.sqrt(-2 * mpmath.log(y)))
    return x, y + area / x[-1] - 1


def _fraction(x: Any) -> Fraction:  # noqa: ANN401 (mpmath has no types)
    sign, mantissa, exponent, _ = x._mpf_
    return Fraction((-1) ** sign * int(mantissa)) * Fraction(2) ** exponent


def _times(a: Enclosure, b: Enclosure) -> Enclosure:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _size(a: Enclosure) -> Enclosure:
    low, high = sorted(map(abs, a))
    return (Fraction(0) if a[0] < 0 < a[1] else low), high


def _less(a: Enclosure, b: Enclosure) -> bool:
    """Return whether a < b.

    Raises:
        DoubtError: the intervals overlap.
    """
    if a[1] < b[0]:
        return True
    if b[1] < a[0]:
        return False
    raise DoubtError


def _accepted(
    layer: int, z: Enclosure, v1: Enclosure, v2: Enclosure, negative: bool, bits: int
) -> Enclosure | None:
    """Return z if its wedge or the tail accepts it, else None.

    The tail is Marsaglia's (1964): r - log(v1)/r, accepted if -2 log(v2) > (log(v1)/r)^2.

    Raises:
        DoubtError: more bits are needed.
    """
    iv: Any = MPIntervalContext()
    iv.prec = bits + 60
    edges = _edges(bits)

    def interval(a: Enclosure) -> Any:  # noqa: ANN401 (mpmath has no types)
        low, high = (iv.mpf(end.numerator) / iv.mpf(end.denominator) for end in a)
        return iv.mpf([low.a, high.b])

    def enclosed(x: Any) -> Enclosure:  # noqa: ANN401 (mpmath has no types)
        return _fraction(mpmath.mpf(x.a)), _fraction(mpmath.mpf(x.b))

    def density(a: Enclosure) -> Any:  # noqa: ANN401 (mpmath has no types)
        return iv.exp(-(interval(a) ** 2) / 2)

    if layer:
        low = density(edges[layer])
        height = low + interval(v1) * (density(edges[layer + 1]) - low)
        return z if _less(enclosed(height), enclosed(density(z))) else None
    beyond = -iv.log(interval(v1)) / interval(edges[1])
    if not _less(enclosed(beyond**2), enclosed(-2 * iv.log(interval(v2)))):
        return None
    low, high = enclosed(interval(edges[1]) + beyond)
    return (-high, -low) if negative else (low, high)


_ZEROS = memoryview(bytes(8 * BLOCK))
