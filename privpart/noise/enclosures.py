"""Enclosures: the draws of the ziggurat between two bounds, with as many bits as it takes.

What float64 leaves in doubt is computed here once more, in fractions: every number is two bounds,
and a comparison whose bounds overlap asks for more bits. decimal's exp and ln are rounded
correctly; their results are widened by one unit, and quotients are rounded outwards.
"""

from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

LAYER_BITS = 10
LAYERS = 2**LAYER_BITS
"""Pieces of equal area under the density; a word's low bits choose one."""
# Where the tail begins: the value for which 1024 pieces have equal areas, see ``edges``.
_TAIL = (
    "4.0388498461095045227144234053359312047009919558945647303951182048249570325137"
    "200917695095261460484523798924103"
)
# Bits to which ``_TAIL`` is stated.
_TAIL_BITS = 340
_ZERO = Fraction(0)
Enclosure = tuple[Fraction, Fraction]
"""Two numbers between which a real number lies."""


class DoubtError(ArithmeticError):
    """Two enclosures overlap: more bits are needed to compare them."""


def enclosed(
    word: int, further: Callable[[int], Sequence[int]], digits: Callable[[str], int], bits: int
) -> Enclosure:
    """Return an enclosure of the draw that a word begins.

    Args:
        word: 64 bits, signed.
        further: the words of v1 and v2 and the next word, after so many rejections.
        digits: ``bits`` further bits of a number, by its name.
        bits: further bits of u and of each v.

    Raises:
        DoubtError: more bits are needed to say which attempt is accepted.
    """

    def continued(leading: int, size: int, name: str) -> Enclosure:
        """Return bounds of a number in [-1, 1) whose first digits are ``size`` bits of a word."""
        whole = leading << bits | digits(name)
        return Fraction(whole, 2 ** (size + bits)), Fraction(whole + 1, 2 ** (size + bits))

    attempt = drawn = 0
    while True:
        layer = word & (LAYERS - 1)
        u = continued(word >> LAYER_BITS, 63 - LAYER_BITS, f"{drawn}u")
        z = _times(u, edges(bits)[layer])
        if _less(_size(z), edges(bits)[layer + 1]):
            return z
        first, second, following, *_ = further(attempt)
        v1 = continued((first >> 11) + 2**52, 53, f"{attempt}v0")
        v2 = continued((second >> 11) + 2**52, 53, f"{attempt}v1")
        accepted = _accepted(layer, z, v1, v2, word < 0, bits)
        if accepted is not None:
            return accepted
        attempt += 1
        if layer:  # the tail keeps its word: it is tried again
            word, drawn = following, attempt


def nearest_integer(
    terms: Sequence[tuple[Callable[[int], Enclosure], Fraction]], offset: Fraction = _ZERO
) -> int:
    """Return round(offset + the sum of coefficient x draw); ends with probability 1.

    ``terms`` are, per draw, its enclosure to so many bits, and its coefficient.
    """
    bits = 64
    while True:
        low = high = offset + Fraction(1, 2)
        for enclosure, c in terms:
            ends = [c * end for end in enclosure(bits)]
            low, high = low + min(ends), high + max(ends)
        if low.__floor__() == high.__floor__():
            return low.__floor__()
        # a sum of Gaussians is a half with probability 0, so some number of bits settles it
        bits *= 2


@lru_cache(maxsize=8)
def edges(bits: int) -> list[Enclosure]:
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
                miss, other_miss = _pieces(r, bits)[1], _pieces(other, bits)[1]
                r, other = r - miss * (r - other) / (miss - other_miss), r
        narrow, wide = 1 - Fraction(1, 2**bits), 1 + Fraction(1, 2**bits)
        edges = [Fraction(x) for x in _pieces(r, bits)[0]]
    return [*((x * narrow, x * wide) for x in edges), (Fraction(0), Fraction(0))]


def _pieces(r: Decimal, bits: int) -> tuple[list[Decimal], Decimal]:
    """Return the edges for a tail that begins at r, and by how much the last piece misses 1."""
    y = (-r * r / 2).exp()
    x = [r + _tail_over_density(r, bits), r]
    area = x[0] * y
    for _ in range(LAYERS - 2):
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
    ends = edges(bits)
    if layer:
        low, high = _density(ends[layer], bits), _density(ends[layer + 1], bits)
        height = (low[0] + v1[0] * (high[0] - low[0]), low[1] + v1[1] * (high[1] - low[1]))
        return z if _less(height, _density(z, bits)) else None
    r = ends[1]
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
