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

This is one file, so that the float64 values are read beside the bounds that decide for them.
"""

import hashlib
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from accounting.checks import ConfigError

BLOCK = 2**15
"""Coordinates that are computed together, in buffers that stay in the processor's cache."""

REAL_ERROR = 2.0**-40
"""Bound on the error of ``Draws.real``."""

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
"""Bound on |float64 value - z| inside a piece."""
_TAIL_ERROR = 2.0**-41
"""The same in the tail, but for what v1 adds."""
_GAP_ERROR = 2.0**-42
"""Bound on the error of a difference of exponentials, all at most 1."""
_TAIL_GAP_ERROR = 2.0**-30
"""Bound on the error of the tail's difference, while v1 and v2 are at least ``_TAIL_LEAST``."""
_TAIL_LEAST = 2.0**-20
_EDGE_ERROR = 2.0**15
"""Distance of a word from the inner edge within which its further digits decide."""
_MOST_ATTEMPTS = 64
"""Rejections in a row (probability of one: below 1/2) after which bounds decide."""
_MOST_COUNTERS = 64
"""Draws whose place in the key stream is kept, so that the next slice need not seek."""

Array = NDArray[np.float64]
Booleans = NDArray[np.bool_]
Places = NDArray[np.intp]
Words = NDArray[np.int64]
Integers = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float64]
Enclosure = tuple[Fraction, Fraction]
"""Two numbers between which a real number lies."""


class DoubtError(ArithmeticError):
    """Two enclosures overlap: more bits are needed to compare them."""


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
            own = None if offset is None else offset[first:last]
            whole, where = self._block.rounded(words, weight, own, 0.5 - error)
            odd.append(_Odd(first + where, words[where], _ZERO if own is None else own[where]))
            np.copyto(out[first:last], whole, casting="unsafe")
        where, words, offsets = _joined(odd)
        z, bound, doubt = self._settled(index, start + where, words)
        z *= weight
        z += offsets
        out[where] = whole = np.rint(z)
        doubt |= ~(np.abs(z - whole) <= 0.5 - (bound * weight + error))
        for i, own_offset in zip(where[doubt].tolist(), offsets[doubt].tolist(), strict=True):
            out[i] = self._exactly(index, start + i, weight, own_offset)

    def real(self, index: int, start: int, out: Array) -> None:
        """Write z, each within ``REAL_ERROR``, for coordinates ``start`` to ``start + len(out)``.

        Args:
            index: of the draw, 0 to 2^32 - 1.
            start: first coordinate, even.
            out: receives the numbers.
        """
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

    def _exactly(self, index: int, coordinate: int, weight: float, offset: float) -> int:
        """Return round(weight z + offset); ends with probability 1, as z has a density."""
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
            layer, u = words & (_LAYERS - 1), words.astype(np.float64)
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
        """Return an enclosure of z from all its words and ``bits`` further bits of each.

        Raises:
            DoubtError: more bits are needed to say which attempt is accepted.
        """
        even = coordinate - coordinate % 2
        pair = self._counter(index, even).update(bytes(16))
        word = int(np.frombuffer(pair, "<i8")[coordinate - even])
        here = np.array([coordinate])

        def further(word: int, size: int, name: str) -> Enclosure:
            """The word's lowest ``size`` bits are the first digits of a number in [-1, 1)."""
            data = f"privpart digits|{index}|{coordinate}|{name}".encode()
            digest = hashlib.shake_256(self._careful + data).digest(-(-bits // 8))
            digits = word << bits | int.from_bytes(digest, "big") >> -bits % 8
            return Fraction(digits, 2 ** (size + bits)), Fraction(digits + 1, 2 ** (size + bits))

        attempt = drawn = 0
        while True:
            layer = word & (_LAYERS - 1)
            u = further(word >> _LAYER_BITS, 63 - _LAYER_BITS, f"{drawn}u")
            z = _times(u, _edges(bits)[layer])
            if _less(_size(z), _edges(bits)[layer + 1]):
                return z
            first, second, following, _ = self._further_words(index, here, attempt)[0].tolist()
            v1 = further((first >> 11) + 2**52, 53, f"{attempt}v0")
            v2 = further((second >> 11) + 2**52, 53, f"{attempt}v1")
            accepted = _accepted(layer, z, v1, v2, word < 0, bits)
            if accepted is not None:
                return accepted
            attempt += 1
            if layer:  # the tail keeps its word: it is tried again
                word, drawn = following, attempt


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
        self, words: Words, weight: float, offset: Array | None, most: float
    ) -> tuple[Array, Places]:
        """Return the integers; and where u may lie outside, or x is more than ``most`` off."""
        if weight != self._weight:
            self._edge_unit = _table().edge_unit * weight
            self._weight = weight
        x, settled = self._values(words, self._edge_unit)
        clear, whole = self._clear[: len(words)], self._other[: len(words)]
        if offset is not None:
            x += offset
        np.rint(x, out=whole)
        x -= whole
        np.abs(x, out=x)
        np.less_equal(x, most, out=clear)
        settled &= clear
        return whole, (~settled).nonzero()[0]

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
        np.bitwise_and(words, _LAYERS - 1, out=layer)
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
        self.edge = np.array([float((low + high) / 2) for low, high in _edges(80)])
        self.edge_unit = self.edge[:-1] / _UNIT
        self.density = np.exp(-(self.edge**2) / 2)
        self.density[0] = self.density[1]
        # a word below is inside the piece, whatever the digits to come
        self.inner = self.edge[1:] / self.edge[:-1] * _UNIT
        self.sure = self.inner * (1 - 2.0**-50) - 2.0**12


@lru_cache(maxsize=1)
def _table() -> _Table:
    return _Table()


@lru_cache(maxsize=8)
def _edges(bits: int) -> list[Enclosure]:
    """Return enclosures of the edges, relative width 2^(1 - bits).

    Piece i is the rectangle of width X_i and of height f(X_{i+1}) - f(X_i), f(x) = exp(-x^2/2); all
    have the area of the lowest one, which is a rectangle of width X_1 = r and the tail beyond, and
    counts as one of width X_0 = area / f(r). The r for which the last one ends at f = 1 is found by
    the secant method. Errors grow less than 2^20-fold from there to the edges, so 2^-(bits + 40)
    in r and 60 guard bits in all else suffice.
    """
    with localcontext(Context(prec=_digits(bits))):
        r = Decimal(_TAIL)
        if bits + 40 > _TAIL_BITS:
            other = r + Decimal(2) ** -40
            while abs(r - other) > Decimal(2) ** -(bits + 40):
                here, there = _pieces(r, bits)[1], _pieces(other, bits)[1]
                r, other = r - here * (r - other) / (here - there), r
        narrow, wide = 1 - Fraction(1, 2**bits), 1 + Fraction(1, 2**bits)
        edges = [Fraction(x) for x in _pieces(r, bits)[0]]
    return [*((x * narrow, x * wide) for x in edges), (Fraction(0), Fraction(0))]


def _pieces(r: Decimal, bits: int) -> tuple[list[Decimal], Decimal]:
    """Return the edges for a tail that begins at r, and by how much the last piece misses 1."""
    y = (-r * r / 2).exp()
    x = [r + _tail_over_density(r, bits), r]
    area = x[0] * y
    for _ in range(_LAYERS - 2):
        y += area / x[-1]
        if y >= 1:
            return x, Decimal(1)
        x.append((-2 * y.ln()).sqrt())
    return x, y + area / x[-1] - 1


def _tail_over_density(r: Decimal, bits: int) -> Decimal:
    """Return the area under exp(-x^2/2) beyond r over exp(-r^2/2), r > 4: Laplace's fraction.

    n terms leave about exp(-2 r sqrt(n)), here 2^-(bits + 100) and less.
    """
    value = r
    for k in range((bits + 100) ** 2 // 100, 0, -1):
        value = r + k / value
    return 1 / value


def _accepted(
    layer: int, z: Enclosure, v1: Enclosure, v2: Enclosure, negative: bool, bits: int
) -> Enclosure | None:
    """Return z if its wedge or the tail accepts it, else None.

    The tail is Marsaglia's (1964): r - log(v1)/r, accepted if -2 log(v2) > (log(v1)/r)^2. Where a
    wedge rejects, the next word chooses a piece anew. The tail is tried until it accepts, because
    what the lowest piece has beyond r is as large as the tail itself.

    Raises:
        DoubtError: more bits are needed.
    """
    edges = _edges(bits)
    if layer:
        low, high = _density(edges[layer], bits), _density(edges[layer + 1], bits)
        height = (low[0] + v1[0] * (high[0] - low[0]), low[1] + v1[1] * (high[1] - low[1]))
        return z if _less(height, _density(z, bits)) else None
    r = edges[1]
    beyond = _times(_minus_log(v1, bits), (1 / r[1], 1 / r[0]))
    if not _less(_times(beyond, beyond), _times((Fraction(2), Fraction(2)), _minus_log(v2, bits))):
        return None
    low_end, high_end = r[0] + beyond[0], r[1] + beyond[1]
    return (-high_end, -low_end) if negative else (low_end, high_end)


def _density(a: Enclosure, bits: int) -> Enclosure:
    """Return an enclosure of exp(-a^2/2)."""
    down, up = _directed(bits)
    near, far = _size(a)
    low, high = _decimal(-far * far / 2, down).exp(down), _decimal(-near * near / 2, up).exp(up)
    return Fraction(low.next_minus(down)), Fraction(high.next_plus(up))


def _minus_log(a: Enclosure, bits: int) -> Enclosure:
    """Return an enclosure of -log(a).

    Raises:
        DoubtError: a may be zero.
    """
    if a[0] <= 0:
        raise DoubtError
    down, up = _directed(bits)
    low, high = _decimal(a[0], down).ln(down), _decimal(a[1], up).ln(up)
    return -Fraction(high.next_plus(up)), -Fraction(low.next_minus(down))


def _directed(bits: int) -> tuple[Context, Context]:
    """Return contexts that round quotients down and up; exp and ln they round to the nearest."""
    digits = _digits(bits)
    return Context(digits, ROUND_FLOOR, -9999, 9999), Context(digits, ROUND_CEILING, -9999, 9999)


def _digits(bits: int) -> int:
    """Return decimal digits that are worth more than ``bits`` + 60 bits."""
    return bits * 302 // 1000 + 20


def _decimal(a: Fraction, context: Context) -> Decimal:
    return context.divide(Decimal(a.numerator), Decimal(a.denominator))


def _times(a: Enclosure, b: Enclosure) -> Enclosure:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _size(a: Enclosure) -> Enclosure:
    low, high = sorted(map(abs, a))
    return (Fraction(0) if a[0] < 0 < a[1] else low), high


def _less(a: Enclosure, b: Enclosure) -> bool:
    """Return whether a < b.

    Raises:
        DoubtError: the enclosures overlap.
    """
    if a[1] < b[0]:
        return True
    if b[1] < a[0]:
        return False
    raise DoubtError


_ZEROS = memoryview(bytes(8 * BLOCK))
