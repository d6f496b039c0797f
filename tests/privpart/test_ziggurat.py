"""Ziggurat: every integer against bounds, the bounds against mpmath, and the law of the draws."""

import copy
import hashlib
import itertools
import math
from fractions import Fraction
from functools import cache, partial

import mpmath
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from accounting.checks import ConfigError
from privpart.noise import enclosures, ziggurat
from privpart.noise.ziggurat import BLOCK, REAL_ERROR, Draws

KEY = bytes(range(32))
K20 = 2.0**20
E = Fraction(1, 2**53)


def drawn(count, *, index=0, start=0, weight=K20, offset=None, largest=0.0, dtype=np.int64):
    out = np.empty(count, dtype)
    Draws(KEY).rounded(index, start, out, weight=weight, offset=offset, largest=largest)
    return out


def words_of(count, *, index=0):
    counter = (index << 64).to_bytes(16, "big")
    stream = Cipher(algorithms.AES256(KEY), modes.CTR(counter)).encryptor().update(bytes(8 * count))
    return np.frombuffer(stream, np.int64)


def careful_coordinates(count, *, index=0):
    """Where the first word does not lie inside its piece."""
    words, table = words_of(count, index=index), ziggurat._table()
    return np.flatnonzero(np.abs(words.astype(float)) >= table.sure[words & 1023])


def words_beyond(count, *, index=0):
    """Where the first word lies in the lowest piece beyond the begin of the tail."""
    words = words_of(count, index=index)
    outside = np.abs(words.astype(float)) >= ziggurat._table().inner[0]
    return np.flatnonzero((words & 1023 == 0) & outside)


def wrong(coordinates, whole, *, index=0, weight=K20, offset=None):
    """Coordinates whose integer is not that between bounds."""
    draws = Draws(KEY)
    return [
        i
        for i in np.unique(coordinates).tolist()
        if whole[i]
        != enclosures.nearest_integer(
            [(partial(draws.enclosure, index, i), Fraction(weight))],
            Fraction(0 if offset is None else float(offset[i])),
        )
    ]


@pytest.mark.parametrize(
    "weight",
    [2.0**-20, 0.3, 1234.56789, K20, 3e11, 2.0**50],
)
@pytest.mark.parametrize("largest", [None, 1.0, 2.0**40])
def test_integers_are_those_between_bounds(weight, largest):
    count = 2**14
    offset = None
    if largest is not None:
        offset = np.random.default_rng(7).uniform(0 if largest == 1 else -largest, largest, count)
    if weight > 2.0**40:  # where every number is in doubt
        count = 64
        offset = None if offset is None else offset[:count]
    whole = drawn(count, weight=weight, offset=offset, largest=largest or 0.0)
    some = np.concatenate([np.arange(64), careful_coordinates(count)])
    assert not wrong(some, whole, weight=weight, offset=offset)


def test_numbers_in_doubt_are_settled_between_bounds(monkeypatch):
    """At 2^38 a bound of 2^-8 + 2^-10 leaves 0.98 % in doubt."""
    asked = []
    enclosure = Draws.enclosure
    monkeypatch.setattr(
        Draws, "enclosure", lambda self, *where: asked.append(where[1]) or enclosure(self, *where)
    )
    count, weight = 2**15, 2.0**38
    whole = drawn(count, weight=weight)
    share = 2 * (2.0**-8 + 2.0**-10)
    assert abs(len(asked) - count * share) < 5 * math.sqrt(count * share)
    assert len(set(asked)) == len(asked)
    some = np.concatenate([np.arange(200), careful_coordinates(count), asked[:200]])
    assert not wrong(some, whole, weight=weight)
    asked.clear()
    drawn(2**18)
    assert len(asked) <= 3  # 0.02 are expected


def test_comparisons_too_close_to_call_are_doubted(monkeypatch):
    """Words made for it: so near an edge, or with such v1 and v2, nothing may be decided."""
    table = ziggurat._table()

    def doubted(word, v1=0.5, v2=0.5):
        further = np.array([[int((v - 0.5) * 2.0**64) for v in (v1, v2, 0.5, 0.5)]])
        monkeypatch.setattr(Draws, "_further_words", lambda *where: further)
        return Draws(KEY)._settled(0, np.array([0]), np.array([word]))[2][0]

    outer = 2**63 - 1024
    assert not doubted(outer, 0.9, 2.0**-4)  # the tail, clearly
    assert doubted(outer, 2.0**-21, 2.0**-19)
    assert doubted(outer, 0.9, 2.0**-21)
    limit = math.log(0.9) ** 2 / table.edge[1] ** 2 / 2
    assert doubted(outer, 0.9, math.exp(-limit))
    assert not doubted(outer, 0.9, math.exp(-limit * (1 + 1e-5)))
    for layer in (1, 500, 1022):
        inner = int(table.inner[layer]) & ~1023 | layer
        assert doubted(inner)
        assert doubted(-(inner & ~1023) | layer)
        assert doubted(inner + 2**14)
        assert not doubted(inner - 2**16)
        low, high = table.density[layer], table.density[layer + 1]
        middle = int(2.0**62 * (1 + table.inner[layer] / 2.0**63)) & ~1023 | layer
        x = middle * table.edge_unit[layer]
        height = (math.exp(-x * x / 2) - low) / (high - low)
        assert doubted(middle, height)
        assert not doubted(middle, height - 1e-5)
    assert doubted(1023)  # the innermost piece has no inner edge but 0


MUTANTS = {
    "an edge": ("edge_unit", 512, 1e-9),
    "the first edge": ("edge_unit", 0, 1e-9),
    "the table of what is inside": ("sure", slice(None), 3e-4),
    "the density": ("density", slice(None), -1e-2),
    "where the tail begins": ("edge", 1, 1e-7),
    "a bound of zero": None,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_table_or_bound_is_found(name, monkeypatch):
    count, weight = 2**17, 2.0**30 if MUTANTS[name] else 2.0**38
    right = drawn(count, weight=weight)
    if MUTANTS[name]:
        attribute, where, change = MUTANTS[name]
        table = copy.deepcopy(ziggurat._table())
        getattr(table, attribute)[where] *= 1 + change
        monkeypatch.setattr(ziggurat, "_table", lambda: table)
    else:
        monkeypatch.setattr(ziggurat, "_ERROR", 0.0)
        monkeypatch.setattr(ziggurat, "_rounding_error", lambda weight, largest: 0.0)
    changed = np.flatnonzero(right != drawn(count, weight=weight))
    assert len(changed)
    assert not wrong(changed[:20], right, weight=weight)


def test_integers_are_the_same_on_every_machine():
    for (index, weight, largest), digest in FROZEN.items():
        offset = np.arange(2**17) % 97 / 128 * largest if largest else None
        whole = drawn(2**17, index=index, weight=weight, offset=offset, largest=largest)
        whole = whole.astype("<i8")
        assert hashlib.sha256(whole.tobytes()).hexdigest()[:32] == digest


def test_slices_are_slices_of_the_whole_in_any_order():
    count = 3 * BLOCK + 11
    whole = drawn(count, index=5)
    draws, generator = Draws(KEY), np.random.default_rng(1)
    for turn in range(40):
        start = 2 * int(generator.integers(0, count // 2))
        size = min(int(generator.integers(0, 2 ** int(generator.integers(1, 17)))), count - start)
        out = np.empty(size, np.int64)
        draws.rounded(5, start, out, weight=K20)
        assert (out == whole[start : start + size]).all()
        draws.rounded(turn % 3, start, np.empty(5, np.int64), weight=3.0)
    for index in range(100):  # more than are kept
        draws.rounded(index, 0, np.empty(2, np.int64), weight=1.0)
    parts = [np.empty(1000, np.int64) for _ in range(4)]
    for i, part in enumerate(parts):  # continued, with another draw in between
        draws.rounded(5, 1000 * i, part, weight=K20)
        draws.rounded(6, 1000 * i, np.empty(1000), weight=K20)
    assert (np.concatenate(parts) == whole[:4000]).all()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1])
def test_any_length_and_type_and_an_offset_that_is_overwritten_are_one_draw(count):
    offset = np.random.default_rng(3).uniform(0, 1, count)
    whole = drawn(2 * BLOCK, weight=4.0)[:count]
    expected = drawn(count, weight=4.0, offset=offset)
    for dtype in (np.int32, np.int64, np.float64):
        assert (drawn(count, weight=4.0, dtype=dtype) == whole).all()
    Draws(KEY).rounded(0, 0, offset, weight=4.0, offset=offset)
    assert (offset == expected).all()
    assert count < 8 or (expected != whole).any()
    out = np.empty(count)
    Draws(KEY).real(0, 0, out)
    assert np.isfinite(out).all()


def test_what_is_refused():
    with pytest.raises(ConfigError, match="start=3: must be even"):
        drawn(4, start=3)
    for weight in (2.0**-21, 2.0**51, -1.0, np.nan):
        with pytest.raises(ConfigError, match="weight="):
            drawn(4, weight=weight)
    with pytest.raises(ConfigError, match="weight="):
        drawn(4, largest=np.nan)
    with pytest.raises(ValueError, match="NaN"):
        drawn(4, offset=np.full(4, np.nan), dtype=np.float64)


def in_many_digits(index, coordinate):  # noqa: C901 (one rule, whole)
    """A draw written once more, in 1000 bits: 700 further bits of each word, mpmath."""
    careful = hashlib.sha256(b"privpart wedge and tail|" + KEY).digest()

    def more(word, size, name):
        data = careful + f"privpart digits|{index}|{coordinate}|{name}".encode()
        low = int.from_bytes(hashlib.shake_256(data).digest(88)[:87], "big")
        return mpmath.ldexp(word * 2**696 + low, -size - 696)

    def further(attempt, part):
        block = (index << 32 | attempt << 8 | part).to_bytes(8, "big") + coordinate.to_bytes(
            8, "big"
        )
        stream = Cipher(algorithms.AES256(careful), modes.ECB()).encryptor().update(block)
        return [int.from_bytes(stream[i : i + 8], "little", signed=True) for i in (0, 8)]

    def density(x):
        return mpmath.exp(-x * x / 2)

    word = int(words_of(coordinate + 1, index=index)[coordinate])
    edges = edges_in_many_digits()
    for attempt in itertools.count():
        layer, u = word % 1024, more(word >> 10, 53, f"{attempt}u")
        z = u * edges[layer]
        if abs(z) < edges[layer + 1]:
            return z
        if layer == 0:
            break
        v1 = more((further(attempt, 0)[0] >> 11) + 2**52, 53, f"{attempt}v0")
        if density(edges[layer]) * (1 - v1) + density(edges[layer + 1]) * v1 < density(z):
            return z
        word = further(attempt, 1)[0]
    v1 = v2 = mpmath.mpf(1)
    while not -2 * mpmath.log(v2) > (mpmath.log(v1) / edges[1]) ** 2:
        one, other = further(attempt, 0)
        v1 = more((one >> 11) + 2**52, 53, f"{attempt}v0")
        v2 = more((other >> 11) + 2**52, 53, f"{attempt}v1")
        attempt += 1
    return mpmath.sign(u) * (edges[1] - mpmath.log(v1) / edges[1])


@cache
def edges_in_many_digits():
    """The edges of pieces of equal area in more than 200 digits, by a secant of its own."""
    r, other = mpmath.mpf("4.03884984610950"), mpmath.mpf("4.03884984610951")
    while abs(r - other) > mpmath.mpf(10) ** -200:
        here, there = missed(r)[1], missed(other)[1]
        r, other = r - here * (r - other) / (here - there), r
    return [*missed(r)[0], mpmath.mpf(0)]


def missed(r):
    y = mpmath.exp(-r * r / 2)
    area = r * y + mpmath.sqrt(mpmath.pi / 2) * mpmath.erfc(r / mpmath.sqrt(2))
    x = [area / y, r]
    for _ in range(1022):
        y += area / x[-1]
        x.append(mpmath.sqrt(-2 * mpmath.log(y)))
    return x, y + area / x[-1] - 1


def as_mp(a):
    return mpmath.mpf(a.numerator) / a.denominator


def exact(a):
    sign, mantissa, exponent, _ = a._mpf_
    return (-1) ** sign * int(mantissa) * Fraction(2) ** exponent


@pytest.fixture
def digits():
    with mpmath.workdps(220):
        yield


def test_bounds_enclose_the_draw_written_once_more(digits):
    draws = Draws(KEY)
    some = [(0, i) for i in [*range(20), *careful_coordinates(2**14)[:20].tolist()]]
    some += [(11, i) for i in words_beyond(2**19, index=11).tolist()]  # some are rejected
    for index, i in some:
        z = exact(in_many_digits(index, i))
        widths = []
        for bits in (8, 64, 128) if i < 2**14 else (64,):
            low, high = draws.enclosure(index, i, bits)
            assert low <= z <= high
            widths.append(high - low)
            assert 0 < widths[-1] <= Fraction(1, 2**bits)
        assert widths[-1] < Fraction(1, 2**64)


def test_real_draws_are_within_their_bound():
    count = 2**16
    z = np.empty(count)
    draws = Draws(KEY)
    draws.real(0, 0, z)
    where = [*range(200), *careful_coordinates(count), *np.flatnonzero(np.abs(z) > 4.03)]
    for i in map(int, where):
        low, high = draws.enclosure(0, i, 64)
        assert max(abs(Fraction(z[i]) - low), abs(Fraction(z[i]) - high)) < REAL_ERROR
    assert (np.abs(np.rint(z * 1024.0) - drawn(count, weight=1024.0)) == 0).mean() > 0.999


def test_logarithms_and_densities_are_enclosed():
    generator = np.random.default_rng(2)
    for bits in (64, 128):
        for _ in range(100):
            size = int(generator.integers(1, 60))
            digits = int(generator.integers(1, 2**size)) << bits
            whole = 2 ** (size + bits)
            close_to_one = (Fraction(whole - 1, whole), Fraction(1))
            for v in ((Fraction(digits, whole), Fraction(digits + 1, whole)), close_to_one):
                low, high = enclosures._minus_log(v, bits)
                with mpmath.workprec(3 * bits + 200):
                    assert low < -exact(mpmath.log(as_mp(v[1]))) or v[1] == 1
                    assert low <= -exact(mpmath.log(as_mp(v[1])))
                    assert high > -exact(mpmath.log(as_mp(v[0])))
                assert high - low < Fraction(2, digits) * 2**0 + Fraction(1, 2**bits)
                a = (5 * v[0], 5 * v[1]) if generator.integers(2) else (-5 * v[1], -5 * v[0])
                low, high = enclosures._density(a, bits)
                with mpmath.workprec(3 * bits + 200):
                    for end in a:
                        assert low < exact(mpmath.exp(-(as_mp(end) ** 2) / 2)) < high
    low, high = enclosures._density((Fraction(-1, 9), Fraction(1, 10)), 64)
    assert low < Fraction(math.exp(-1 / 162)) + E
    assert high > 1


def test_a_comparison_without_enough_bits_is_not_decided():
    with pytest.raises(enclosures.DoubtError):
        enclosures._minus_log((Fraction(0), Fraction(1, 2)), 64)
    with pytest.raises(enclosures.DoubtError):
        enclosures._less((Fraction(0), Fraction(2)), (Fraction(1), Fraction(3)))
    with pytest.raises(enclosures.DoubtError):
        enclosures._less((Fraction(0), Fraction(1)), (Fraction(1), Fraction(3)))
    assert enclosures._size((Fraction(-2), Fraction(1))) == (0, 2)
    assert enclosures._size((Fraction(-2), Fraction(-1))) == (1, 2)


@pytest.mark.parametrize("bits", [68, 84, 132, 260, pytest.param(620, marks=pytest.mark.slow)])
def test_edges_are_enclosed(bits, digits):
    """With them the tail's begin, and its area over the density."""
    r = edges_in_many_digits()[1]
    assert abs(r - mpmath.mpf(enclosures._TAIL)) < mpmath.mpf(2) ** -enclosures._TAIL_BITS
    for (low, high), x in zip(enclosures.edges(bits), edges_in_many_digits(), strict=True):
        assert low <= exact(x) <= high
        assert high - low == 2 * (low + high) / 2 / 2**bits


def test_a_word_below_sure_is_inside_whatever_its_digits():
    table, edges = ziggurat._table(), enclosures.edges(84)
    slack = Fraction(1.5) * E
    for i in range(1023):
        ratio = edges[i + 1][0] / edges[i][1]
        sure, inner = Fraction(table.sure[i]) / 2**63, Fraction(table.inner[i]) / 2**63
        assert sure + slack < ratio
        assert ratio - sure < 17 * E
        assert abs(inner - ratio) < 4 * E
        assert table.edge[i] < 4.3
        assert abs(Fraction(table.edge[i]) / edges[i][0] - 1) <= E * 1.01
    assert table.sure[1023] < 0
    assert Fraction(ziggurat._EDGE_ERROR) / 2**63 == 32 * E


def test_float64_values_are_within_the_error_stated():
    generator = np.random.default_rng(4)
    words = generator.integers(-(2**63), 2**63, 2000) >> generator.integers(0, 63, 2000)
    words[500:] = words[500:] & ~1023 | generator.integers(0, 8, 1500)  # the widest pieces
    words[:2] = 2**63 - 1024, -(2**63)
    table, edges = ziggurat._table(), enclosures.edges(84)
    for weight in (1.0, 1.7, math.pi * 2**20):
        x = words.astype(float) * (table.edge_unit * weight)[words & 1023]
        worst = 0
        for word, value in zip(words.tolist(), x.tolist(), strict=True):
            edge = edges[word & 1023][0]
            for n in (word >> 10, (word >> 10) + 1):
                worst = max(worst, abs(Fraction(value) / Fraction(weight) - edge * n / 2**53))
        assert 3 * E < worst < 20 * E


def test_uniform_numbers_are_within_the_error_stated():
    words = np.random.default_rng(5).integers(-(2**63), 2**63, 1000)
    words[:4] = -(2**63), -(2**63) + 2**11, 2**63 - 1, 0
    for word, v in zip(words.tolist(), ziggurat._in_unit_interval(words).tolist(), strict=True):
        digits = (word >> 11) + 2**52
        assert 0 < v <= 1
        assert -E <= Fraction(v) - digits * E <= 2 * E
        assert abs(Fraction(v) - (digits + 1) * E) <= E


def test_draws_have_the_law_of_a_normal():
    sample = drawn(2**20, index=9) / K20
    some = np.sort(sample[: 2**19])
    assert stats.kstest(some, stats.norm.cdf).pvalue > 1e-3
    assert stats.kstest(some, stats.norm(0, 1.02).cdf).pvalue < 1e-9
    square = sample * sample
    powers = {1: sample, 2: square, 3: square * sample, 4: square**2, 6: square**3}
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        spread = math.sqrt((math.prod(range(2 * power - 1, 0, -2)) - moment**2) / len(sample))
        assert abs(powers[power].mean() - moment) < 4.5 * spread


def test_a_word_beyond_the_tail_begins_gives_a_number_beyond():
    """The lowest piece beyond r has the area of the tail, so a rejection there chooses no piece."""
    count = 2**22
    words, places = words_of(count, index=11), words_beyond(count, index=11)
    whole = drawn(count, index=11)[places]
    assert 150 < len(places) < 300  # 224 are expected, of which 12 are rejected at least once
    assert (np.abs(whole) > 4.0388 * K20).all()
    assert (np.sign(whole) == np.sign(words[places])).all()
    assert not wrong(places, drawn(count, index=11), index=11)


@pytest.mark.parametrize("parts", [2, pytest.param(64, marks=pytest.mark.slow)])
def test_tails_are_those_of_a_normal(parts):
    beyond = dict.fromkeys((3.5, 4.03, 4.04, 4.05, 4.5, 5.0), 0)
    tails, size, positive = [], 2**21 * parts, 0
    for part in range(parts):
        z = drawn(2**21, index=10 + part) / K20
        positive += int((z > 0).sum())
        z = np.abs(z)
        z = z[z > 3.5]
        for at in beyond:
            beyond[at] += int((z > at).sum())
        tails.append(z[z > 4.04])
    for at, found in beyond.items():
        expected = size * 2 * stats.norm.sf(at)
        assert abs(found - expected) < 4.5 * math.sqrt(expected) + 1, at
    tail, law = np.concatenate(tails), stats.truncnorm(4.04, np.inf)
    assert stats.kstest(tail, law.cdf).pvalue > 1e-3
    assert stats.kstest(tail - 0.05, law.cdf).pvalue < 1e-6
    assert abs(positive - size / 2) < 4.5 * math.sqrt(size) / 2


FROZEN = {
    (0, K20, 0.0): "4833c1ab8347c58e2ebc47b8583070a8",
    (1, 1234567.875, 1.0): "e8cfbe039b723ad2c22e833cd1ee8f92",
    (2, 2.0**36, 2.0**30): "92d22181a4fd9bebd3d8d9849ff8a16f",
    (2**32 - 1, 0.75, 1.0): "3780976b14d393294c7f96da7fe59e2d",
}
"""Digests of the integers by index, weight and largest offset."""
