"""Sources whose draws are known, in place of the ziggurat: rational numbers, or unit vectors.

They round as ``privpart.noise.ziggurat.Draws`` does, but in exact arithmetic, and their floats are
as wrong as the ziggurat's bound allows.
"""

import hashlib
from fractions import Fraction
from math import floor

from privpart.noise.ziggurat import REAL_ERROR

PRIME = 2**61 - 1
"""Denominator of the draws: sums of them with coefficients of float64 never meet a half."""


def nearest(number):
    return floor(number + Fraction(1, 2))


def random_draw(*address, at=None, most=4, denominator=PRIME):
    """A rational number between -most and most, by its address, whose last part is ``at``."""
    digest = hashlib.sha256(repr(address if at is None else (*address, at)).encode()).digest()
    size = 2 * most * denominator
    return Fraction(int.from_bytes(digest) % size, denominator) - most


class RationalSource:
    """Draws are what ``z(stream, index, coordinate)`` returns.

    Args:
        rounding: of a real number; a twin may round otherwise.
    """

    private, identity = False, "rational"

    def __init__(self, z=random_draw, rounding=nearest):
        self.z, self.rounding = z, rounding
        self.asked = []
        self.doubts = 0

    def claim(self, stream): ...

    def salt(self):
        return b""

    def draws(self, stream, salt):
        return RationalDraws(self, stream)


class RationalDraws:
    def __init__(self, source, stream):
        self.source, self.stream = source, stream

    def _at(self, index, coordinate):
        return Fraction(self.source.z(self.stream, index, coordinate))

    def rounded(self, index, start, out, *, weight, offset=None, largest=0.0):
        assert start % 2 == 0
        self.source.asked.append((self.stream, index))
        for i in range(len(out)):
            own = Fraction(0) if offset is None else Fraction(float(offset[i]))
            assert abs(own) <= largest
            out[i] = self.source.rounding(Fraction(weight) * self._at(index, start + i) + own)

    def real(self, index, start, out):
        assert start % 2 == 0
        self.source.asked.append((self.stream, index))
        for i in range(len(out)):
            sign = 1 if random_draw("sign", index, start + i) > 0 else -1
            out[i] = float(self._at(index, start + i) + sign * Fraction(REAL_ERROR) * 15 / 16)

    def enclosure(self, index, coordinate, bits):
        self.source.doubts += 1
        low = floor(self._at(index, coordinate) * 2**bits)
        return Fraction(low, 2**bits), Fraction(low + 1, 2**bits)


def unit_vectors():
    """Draw i is the i-th unit vector: the stream then writes out its own matrix."""
    return RationalSource(lambda stream, index, coordinate: int(index == coordinate))
