"""Integer noise is a function of the real mechanism's release: identities in exact arithmetic.

The draws are rational numbers of known value. What the executor adds must be what the design's
three ways of rounding say, to the last integer; twins that round otherwise are caught.
"""

import dataclasses
import math
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
from every_mechanism import BLT3, FILTERS, TREES, short
from rational_draws import RationalDraws, RationalSource, nearest, random_draw

from accounting import (
    BandedInverse,
    BufferedToeplitz,
    Dense,
    Independent,
    PrunedTree,
    Scheduled,
    Toeplitz,
)
from privpart.noise import stream as stream_module
from privpart.noise.stream import Executor

DIM = 2
STDDEVS = [3.0, 2.0**20]
ALL_STDDEVS = [
    2.0**20,
    pytest.param(3.0, marks=pytest.mark.slow),
    pytest.param(2.0**30, marks=pytest.mark.slow),
]
LONGER = [
    BufferedToeplitz(40, **BLT3),
    BufferedToeplitz(40, decay=(0.0, 1.0, 0.25), scale=(0.5, 0.25, 0.125)),
    Toeplitz.square_root(40, normalize_columns=True),
    Toeplitz.square_root(40, bands=7, normalize_columns=True),
    Toeplitz(40, (3.0, 0.7, 0.1)),
    Toeplitz(12, (0.3, 0.1, -0.2), normalize_columns=True),
    Dense(np.tril(np.random.default_rng(1).uniform(-1, 1, (20, 20)), -1) + 2 * np.eye(20)),
]
ALL_FILTERS = [m for m in FILTERS if m.noise_program().rounded != "output"] + LONGER


def run(program, stddev, source, *, dim=DIM, stream=0):
    """The program's integers, shape (rounds, dim)."""
    own = Executor(program, stddev)
    state = np.zeros((program.state_rows(), dim), own.state_type)
    out = np.zeros((program.rounds, dim), own.integers)
    for t in range(program.rounds):
        own.begin(t)
        own.run(lambda _: source.draws(stream, b""), 0, state, out[t])
    return out


def random_sums(rounds, dim=DIM):
    """Client sums of each round, whole numbers."""
    return [[int(random_draw("q", t, i, most=2**19)) for i in range(dim)] for t in range(rounds)]


# Trees, from their nodes: an account of its own, which shares only the forest with the program.


def tree_release(mechanism, sums, draw, stddev):
    """The noised prefix sum after each round, by the module's text: estimates of nodes, added up.

    Args:
        sums: of the clients' updates by round.
        draw: standard normal by number.
    """
    release, before, drawn = [], 0, 0
    for block in mechanism.blocks():
        stack = []  # height, estimate, and sum of the updates
        for leaf in range(block.rounds):
            node = (0, nearest(sums[block.first + leaf] + stddev * draw(drawn)))
            total, drawn = sums[block.first + leaf], drawn + 1
            while stack and stack[-1][0] == node[0]:
                height, left, left_total = stack.pop()
                total += left_total
                if mechanism.estimator == "vanilla":  # the largest node that ends here has the draw
                    value = total + stddev * draw(drawn - 1)
                else:
                    v = Fraction(round(2**16 / (2 - Fraction(1, 2 ** (height + 1)))), 2**16)
                    value = v * (total + stddev * draw(drawn)) + (1 - v) * (left + node[1])
                    drawn += 1
                node = height + 1, nearest(value)
            stack.append((*node, total))
            release.append(before + sum(value for _, value, _ in stack))
        before += stack[0][1]
    return release


def pruned_release(mechanism, sums, draw, stddev):
    """The same for a pruned tree: the last node of each step's prefix sum is new."""
    release, noised = [], {}
    for step in range(mechanism.rounds):
        nodes = mechanism.prefix_nodes(step)
        first, size = nodes[-1]
        noised[nodes[-1]] = nearest(sum(sums[first : first + size]) + stddev * draw(step))
        release.append(sum(noised[node] for node in nodes))
    return release


@pytest.mark.parametrize("stddev", STDDEVS)
@pytest.mark.parametrize("mechanism", TREES, ids=short)
def test_a_tree_s_integers_are_its_rounded_nodes(mechanism, stddev):
    program = mechanism.noise_program()
    exact = pruned_release if isinstance(mechanism, PrunedTree) else tree_release
    sums, noise = random_sums(mechanism.rounds), run(program, stddev, RationalSource())
    for i in range(DIM):
        own = [row[i] for row in sums]
        release = exact(mechanism, own, partial(random_draw, 0, at=i), Fraction(stddev))
        expected = [b - a for a, b in zip([0, *release], release, strict=False)]
        assert [q + int(w) for q, w in zip(own, noise[:, i], strict=True)] == expected


def test_a_half_is_rounded_alike_whatever_the_sum():
    """round(q + u) = q + round(u): true for floor(u + 1/2), and for no rounding that looks at q."""

    def moved(rounding):
        """round(q + 1/2) - q for a whole q that the draw holds."""
        sources = (
            RationalSource(lambda s, index, i, q=q: q + Fraction(1, 2), rounding)
            for q in range(-4, 4)
        )
        program = Independent(1).noise_program()
        return {
            int(run(program, 1.0, source, dim=1)[0, 0]) - q
            for q, source in zip(range(-4, 4), sources, strict=True)
        }

    assert moved(nearest) == {1}
    assert moved(round) == moved(math.trunc) == {0, 1}


# Filters: w = round(b z - f(w)), f to within the error that is charged: C w is b z and rounding.


class Dictated(RationalDraws):
    """Draws that come out as the history that a test dictates; notes the filter's value."""

    def __init__(self, history):
        self.history, self.filtered, self.weights = history, [], []

    def rounded(self, index, start, out, *, weight, offset=None, largest=0.0):
        self.filtered.append(np.zeros(len(out)) if offset is None else offset.copy())
        self.weights.append(weight)
        assert np.abs(self.filtered[-1]).max() <= largest
        out[:] = self.history[len(self.filtered) - 1]


def filter_errors(mechanism, program, stddev, limit):
    """Error of -f(w) by round and history, as the executor computes it, and the draws' weights."""
    history = adversarial(mechanism, limit)
    draws = Dictated(history)
    released = run(program, stddev, SimpleNamespace(draws=lambda *_: draws), dim=history.shape[1])
    assert (released == history).all()  # what a draw is rounded to, and nothing else
    errors = [
        [Fraction(float(a)) - b for a, b in zip(values, exact, strict=True)]
        for t, values in enumerate(draws.filtered)
        for exact in [exact_filter(exact_encoder(mechanism), history, t)]
    ]
    return errors, draws.weights


def precisely(number):
    """An mpmath number to 300 bits, as a fraction."""
    return Fraction(int(mpmath.floor(number * mpmath.mpf(2) ** 250)), 2**250)


@cache
def exact_encoder(mechanism):
    """C of the accountant's definition, in rationals (norms: to 250 bits)."""
    n = mechanism.rounds
    if isinstance(mechanism, Dense):
        return [[Fraction(c) for c in row] for row in mechanism.matrix.tolist()]
    if isinstance(mechanism, Independent):
        return [[Fraction(int(i == j)) for j in range(n)] for i in range(n)]
    if isinstance(mechanism, Scheduled):
        sizes = [Fraction(s) for s in mechanism.noise_per_round().tolist()]
        return [[(i == j) / sizes[i] for j in range(n)] for i in range(n)]
    if isinstance(mechanism, BufferedToeplitz):
        pairs = [
            (Fraction(a), Fraction(b))
            for a, b in zip(mechanism.decay, mechanism.scale, strict=True)
        ]
        column = [Fraction(1)] + [sum(o * d**j for d, o in pairs) for j in range(n - 1)]
    else:
        column = [Fraction(c) for c in mechanism.coefficients]
        column += [Fraction(0)] * (n - len(column))
    matrix = [[column[i - j] if i >= j else Fraction(0) for j in range(n)] for i in range(n)]
    if not getattr(mechanism, "normalize_columns", False):
        return matrix
    norms = exact_norms(mechanism)
    return [[c / norms[j] for j, c in enumerate(row)] for row in matrix]


def exact_filter(encoder, history, t):
    """-f(w) of round t: the earlier rounds, as C says."""
    own = encoder[t][t]
    return [
        -sum(encoder[t][j] * int(history[j][i]) for j in range(t)) / own
        for i in range(history.shape[1])
    ]


def largest_integer(mechanism, limit):
    """The largest constant history that leaves every register within its range."""
    held = 1.0
    if isinstance(mechanism, BufferedToeplitz):
        n = mechanism.rounds
        held = max(min(n, 1 / (1 - decay)) if decay < 1 else n for decay in mechanism.decay)
    return math.floor((limit - 2) / held)


def adversarial(mechanism, limit):
    """Integers as large as the range allows: constant, alternating, growing, random; by column."""
    n = mechanism.rounds
    random = np.random.default_rng(n)
    t = np.arange(n)
    shapes = [
        np.ones(n),
        -np.ones(n),
        (-1.0) ** t,
        np.where(t < n // 2, 1.0, -1.0),
        0.7 ** (n - 1 - t),
        np.where(t == 0, 1.0, 0.0),
        *random.uniform(-1, 1, (4, n)),
        *np.sign(random.uniform(-1, 1, (4, n))),
    ]
    return np.trunc(np.stack(shapes, axis=1) * largest_integer(mechanism, limit))


@pytest.mark.parametrize("stddev", ALL_STDDEVS)
@pytest.mark.parametrize("mechanism", ALL_FILTERS, ids=short)
def test_the_filter_is_the_encoder_s_within_the_error_that_is_charged(mechanism, stddev):
    """e(w) - e(w') is then at most twice that, for all integers w and w' in range."""
    program = mechanism.noise_program()
    own, encoder = Executor(program, stddev), exact_encoder(mechanism)
    errors, weights = filter_errors(mechanism, program, stddev, own.limit)
    for t, weight in enumerate(weights):
        least = Fraction(stddev) / encoder[t][t]
        assert abs(Fraction(weight) / least - 1) < Fraction(2) ** -40
        assert own_weight(program, t) * encoder[t][t] >= 1 - Fraction(2) ** -240  # never less noise
    largest = max(abs(error) for row in errors for error in row)
    assert largest <= Fraction(own.filter_error(0.0)) / 2
    spread = max(max(row) - min(row) for row in errors)
    assert spread <= Fraction(own.filter_error(0.0))
    assert own.filter_error(0.0) <= 1e-9 * mechanism.rounds * stddev  # charged, but next to nothing
    if program.state_rows() and mechanism.rounds > 1 and largest:
        assert own.filter_error(0.0) / 2 < 300 * float(largest)  # and not by far too much


def exact_norms(mechanism):
    """Norms of the encoder's columns, to 250 bits."""
    column = [Fraction(c) for c in mechanism.coefficients]
    column += [Fraction(0)] * (mechanism.rounds - len(column))
    squares = list(accumulate(c * c for c in column))[::-1]
    with mpmath.workprec(300):
        return [precisely(mpmath.sqrt(mpmath.mpf(s.numerator) / s.denominator)) for s in squares]


def own_weight(program, t):
    ((_, weight),) = (draw for op in program.round(t) for draw in op.draws)
    return Fraction(weight)


@pytest.mark.parametrize("bands", [7, 1000])
def test_no_round_has_less_noise_than_the_norm_of_its_column(bands):
    """Else a client's effect on a round is more than the 1 that the accountant counts."""
    mechanism = Toeplitz.square_root(1000, bands, normalize_columns=True)
    program = mechanism.noise_program()
    for t, norm in enumerate(exact_norms(mechanism)):
        b = own_weight(program, t)
        assert norm <= b * (1 + Fraction(2) ** -240)
        assert b < norm * (1 + Fraction(2) ** -40)


@pytest.mark.parametrize(
    "mechanism",
    [m for m in ALL_FILTERS if m.rounds > 1 and m.noise_program().state_rows()],
    ids=short,
)
def test_coefficients_that_are_a_little_off_are_seen(mechanism):
    program = mechanism.noise_program()

    def ops(t):
        for op in program.round(t):
            copies = len(op.terms) == 1 and abs(op.terms[0][1]) == 1  # numpy refuses another factor
            terms = [(r, c * (1 + 1e-9)) for r, c in op.terms]
            yield op if copies else op._replace(terms=terms)

    wrong = dataclasses.replace(program, ops=ops)
    own = Executor(wrong, 2.0**20)
    errors, _ = filter_errors(mechanism, wrong, 2.0**20, own.limit / 2)
    assert max(abs(e) for row in errors for e in row) > Fraction(own.filter_error(0.0)) / 2


# The mechanism that rounds its output: floats first, enclosures where they leave a doubt.

OUTPUT = [
    BandedInverse(1, (0.3,)),
    BandedInverse(9, (2.0, -0.7)),
    BandedInverse(12, (0.4, -0.1, 0.0, -0.3), normalize_columns=True),
    BandedInverse.square_root(13, 9, normalize_columns=True),
]


def errors_of_floats(monkeypatch, program, stddev, dim=6):
    """(error, bound) of the real value of every coordinate and round, before it is rounded."""
    found, inner = [], Executor._sum_of_draws

    def spied(self, row, draws_of, start, to):
        real = inner(self, row, draws_of, start, to)
        bound = Fraction(self._real_error(row))
        for i, value in enumerate(real.tolist()):
            exact = Fraction(stddev) * sum(
                c * random_draw(0, index, start + i) for index, c in row.items()
            )
            found.append((abs(Fraction(value) - exact), bound))
        return real

    monkeypatch.setattr(Executor, "_sum_of_draws", spied)
    run(program, stddev, RationalSource(), dim=dim)
    return found


@pytest.mark.parametrize("stddev", ALL_STDDEVS)
@pytest.mark.parametrize("mechanism", OUTPUT, ids=short)
def test_floats_are_within_the_bound_of_the_real_output(mechanism, stddev, monkeypatch):
    """With draws that are as wrong as the ziggurat's bound allows."""
    found = errors_of_floats(monkeypatch, mechanism.noise_program(), stddev)
    assert all(error <= bound for error, bound in found)
    assert max(error for error, _ in found) > 1e-3 * max(bound for _, bound in found)
    assert all(bound < stddev * 2.0**-32 for _, bound in found)


@pytest.mark.parametrize("stddev", [2.0**20, 2.0**30])
@pytest.mark.parametrize("mechanism", OUTPUT[1:3], ids=short)
def test_a_doubt_is_settled_exactly(mechanism, stddev, monkeypatch):
    """Where floats are far from enough, the integers are the same."""
    program, dim = mechanism.noise_program(), 8

    def integers(error):
        monkeypatch.setattr(stream_module, "REAL_ERROR", error)
        source = RationalSource()
        return run(program, stddev, source, dim=dim).tolist(), source.doubts

    expected = [
        [
            nearest(
                Fraction(stddev) * sum(c * random_draw(0, index, i) for index, c in row.items())
            )
            for i in range(dim)
        ]
        for row in map(program.row, range(program.rounds))
    ]
    plain, _ = integers(2.0**-40)
    doubtful, doubts = integers(2.0**-3 / stddev)
    assert plain == doubtful == expected
    assert doubts > 0


def test_without_the_fallback_a_doubt_is_a_wrong_integer(monkeypatch):
    """The power of the test above: at 2^30 steps floats are wrong now and then."""
    program = OUTPUT[-1].noise_program()
    sound = run(program, 2.0**30, RationalSource(), dim=600)
    monkeypatch.setattr(Executor, "_real_error", lambda self, row: 0.0)
    floats = run(program, 2.0**30, RationalSource(), dim=600)
    differ = int((sound != floats).sum())
    assert 0 < differ < 0.02 * sound.size
