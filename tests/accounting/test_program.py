"""Noise programs: the matrix that each one makes, against the encoder that the accountant reads."""

import dataclasses

import numpy as np
import pytest
from every_mechanism import FILTERS as COMMON
from every_mechanism import TREES, short

from accounting import (
    BandedInverse,
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Dense,
    Grouped,
    Independent,
    Participation,
    PrunedTree,
    Toeplitz,
    brute_force,
    footprint,
)
from accounting.mechanisms import noise_matrix
from accounting.mechanisms.mechanism import prefix_sums

FILTERS = [
    *COMMON,
    BufferedToeplitz(9, (0.0, 0.5, 1.0), (0.5, 0.25, 0.125)),
    BandedInverse(1, (1.0,)),
    BandedInverse(9, (2.0, -0.7)),
    BandedInverse.square_root(9, 4),
    BandedInverse(1, (0.3,), normalize_columns=True),
    BandedInverse(9, (0.4, -0.1, 0.0, -0.3), normalize_columns=True),
    BandedInverse.square_root(9, 9, normalize_columns=True),
    Dense([[2.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [0.5, 0.25, 3.0]]),
]
GROUPED = Grouped(
    [(0, 1), (0,), (1,), (0, 1)],
    [BinaryTree(3, estimator="online"), Toeplitz.square_root(3)],
    [2, 5],
)


def noises_of_the_sums(mechanism, matrix):
    """A N: how the draws enter each prefix sum."""
    return prefix_sums(mechanism.rounds) @ matrix


def agrees(mechanism, matrix):
    """Whether the prefix sums' noise has the covariance that the accountant assumes."""
    noise, decoder = noises_of_the_sums(mechanism, matrix), mechanism.decoder()
    return np.allclose(noise @ noise.T, decoder @ decoder.T, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mechanism", FILTERS, ids=short)
def test_the_program_inverts_the_encoder(mechanism):
    """N C = I: the released sums are N (C x + z), so they are post-processing of C x + z."""
    product = noise_matrix(mechanism) @ mechanism.encoder()
    np.testing.assert_allclose(product, np.eye(mechanism.rounds), atol=1e-12)


@pytest.mark.parametrize("mechanism", FILTERS + TREES, ids=short)
def test_the_program_has_the_covariance_and_the_variance_of_the_decoder(mechanism):
    matrix = noise_matrix(mechanism)
    assert agrees(mechanism, matrix)
    variance = (noises_of_the_sums(mechanism, matrix) ** 2).sum(axis=1)
    np.testing.assert_allclose(variance, mechanism.prefix_variance(), rtol=1e-9)


def test_the_program_of_groups_inverts_their_joint_encoder():
    matrix, cells = noise_matrix(GROUPED), GROUPED.cells()
    before = [[float(g == h and s <= t) for s, h in cells] for t, g in cells]
    noise, decoder = np.array(before) @ matrix, GROUPED.decoder()
    np.testing.assert_allclose(noise @ noise.T, decoder @ decoder.T, atol=1e-12)
    with pytest.raises(ConfigError, match="one program per group"):
        GROUPED.noise_program()


@pytest.mark.parametrize("mechanism", FILTERS + TREES, ids=short)
def test_the_encoder_behind_the_program_is_no_more_sensitive_than_the_claim(mechanism):
    """N z = L w in law, with L lower triangular, so the release is L^-1 x + w."""
    matrix, n = noise_matrix(mechanism), mechanism.rounds
    encoder = np.linalg.inv(np.linalg.cholesky(matrix @ matrix.T))
    if mechanism in FILTERS:
        norms = [np.linalg.norm(c, axis=0) for c in (encoder, mechanism.encoder())]
        np.testing.assert_allclose(*norms, rtol=1e-9)
    for k, b in ((1, 1), (2, 1), (3, 2), (2, 4)):
        if n > (k - 1) * b:
            claimed = mechanism.sensitivity(Participation(n, k, b))
            found = brute_force(encoder, Participation(n, k, b))
            attained = (encoder.T @ encoder > -1e-9).all()  # else brute force only bounds it
            assert found <= claimed.squared * (1 + 1e-9) or not attained
            if claimed.exact and mechanism in FILTERS:
                assert found == pytest.approx(claimed.squared, rel=1e-9)


def mutated(program, wrong, factor):
    """The program with the coefficients of one round multiplied."""

    def ops(t):
        by = factor if t == wrong else 1.0
        for op in program.round(t):
            terms, draws = ([(r, c * by) for r, c in pairs] for pairs in (op.terms, op.draws))
            yield op._replace(terms=terms, draws=draws)

    return dataclasses.replace(program, ops=ops)


@pytest.mark.parametrize("mechanism", FILTERS + TREES, ids=short)
def test_a_wrong_coefficient_is_seen(mechanism):
    program = mechanism.noise_program()
    for t in range(mechanism.rounds):
        assert agrees(mechanism, mutated(program, t, 1.0).matrix())
        assert not agrees(mechanism, mutated(program, t, 1.001).matrix())


def live_rows(program):
    """State registers that a later round reads before it writes them, after 0, 1, ... rounds."""
    live, after = set(), [set()]
    for t in reversed(range(1, program.rounds)):
        for target, terms, _ in reversed(program.round(t)):
            if target in live:
                live.remove(target)
            elif target >= 0:
                continue
            live |= {r for r, _ in terms if r >= 0}
        after.append(set(live))
    return [set(), *reversed(after)]


@pytest.mark.parametrize("mechanism", FILTERS + TREES, ids=short)
def test_every_row_that_a_later_round_reads_is_kept_and_no_other_if_trees_are_full(mechanism):
    tight = [*FILTERS, BinaryTree(8), BinaryTree(16), BinaryTree(8, estimator="online")]
    program, most = mechanism.noise_program(), footprint(mechanism).state_vectors
    assert program.rows(0) == 0
    kept = live_rows(program)
    for rounds, live in enumerate(kept):
        assert live <= set(range(program.rows(rounds)))
        assert program.rows(rounds) <= most
        if mechanism in tight and 0 < rounds < program.rounds:
            assert live == set(range(program.rows(rounds)))
    if mechanism in tight and mechanism.rounds > 1:
        assert most == max(map(len, kept))


@pytest.mark.parametrize("mechanism", FILTERS + TREES, ids=short)
def test_draws_are_numbered_as_they_are_first_made(mechanism):
    program = mechanism.noise_program()
    made = [i for t in range(program.rounds) for op in program.ops(t) for i, _ in op.draws]
    first = list(dict.fromkeys(made))
    assert first == list(range(len(first)))
    assert len(first) == len(made) or program.draws_again
    if program.draws_again and mechanism in TREES:  # once, and once more to be taken away
        assert all(made.count(i) <= 2 for i in first)
        assert len(first) == program.rounds
    assert len(made) == program.draws()
    assert footprint(mechanism).draws_per_round == len(made) / program.rounds


def test_counting_draws_reads_no_coefficient():
    """So the footprint of a filter with ten thousand bands takes no hundred million steps."""
    assert footprint(Toeplitz.square_root(10_000)).state_vectors == 9_999
    with pytest.raises(TypeError, match="not a mechanism"):
        footprint(object())


@pytest.mark.parametrize("mechanism", [m for m in FILTERS if m.name == "banded-inverse"], ids=short)
def test_a_row_is_the_row_of_the_matrix(mechanism):
    program, matrix = mechanism.noise_program(), noise_matrix(mechanism)
    for t in range(program.rounds):
        row = np.zeros(matrix.shape[1])
        for index, c in program.row(t).items():
            row[index] = float(c)
        np.testing.assert_allclose(row, matrix[t], atol=1e-13)


def spreads(program):
    """Standard deviation of every register, whenever it is written, at unit draws."""
    last = max(i for t in range(program.rounds) for op in program.ops(t) for i, _ in op.draws)
    registers, found = {}, []
    for t in range(program.rounds):
        for target, terms, draws in program.round(t):
            value = np.zeros(last + 1)
            for register, c in terms:
                value = value + c * registers.get(register, np.zeros(last + 1))
            for index, c in draws:
                value[index] += c
            registers[target] = value
            found.append(np.linalg.norm(value))
    return found


@pytest.mark.parametrize("mechanism", FILTERS + TREES, ids=short)
def test_no_register_varies_more_than_the_program_says(mechanism):
    program = mechanism.noise_program()
    assert max(spreads(program)) <= program.spread() * (1 + 1e-9)
    assert program.spread() <= 20 * max(spreads(program))


def operations(program):
    return [op for t in range(program.rounds) for op in program.round(t)]


@pytest.mark.parametrize("mechanism", FILTERS + TREES, ids=short)
def test_it_rounds_where_it_may_and_its_products_are_exact_or_their_error_is_charged(mechanism):
    program = mechanism.noise_program()
    at_output = isinstance(mechanism, BandedInverse)
    kind = "buffers" if isinstance(mechanism, BufferedToeplitz) else "draws"
    assert program.rounded == ("output" if at_output else kind)
    weights = [abs(c) for op in operations(program) for _, c in op.terms]
    if isinstance(mechanism, BinaryTree | PrunedTree | Independent):
        assert program.filter_error() == 0
    if at_output:  # a term is no larger than a register
        draws = [abs(c) for op in operations(program) for _, c in op.draws]
        assert max([0, *weights]) <= 1
        assert max(draws) <= program.spread()
        return
    assert all(len(op.draws) <= 1 for op in operations(program))  # each is rounded by itself
    if not program.filter_error():
        assert all((c * 2.0**program.weight_bits).is_integer() for c in weights)


@pytest.mark.parametrize("mechanism", FILTERS + TREES, ids=short)
def test_kept_draws_are_what_the_rows_hold(mechanism):
    """A state that is not saved is made again from these."""
    program = mechanism.noise_program()
    if program.kept_draws is None:
        return
    registers = {}
    for t in range(program.rounds):
        for target, terms, draws in program.round(t):
            held = dict(draws)
            for register, c in terms:
                for index, own in registers.get(register, {}).items():
                    held[index] = held.get(index, 0.0) + c * own
            registers[target] = {index: c for index, c in held.items() if c}
        kept = program.kept_draws(t + 1)
        assert len(kept) == program.rows(t + 1)
        assert [registers[row] for row in range(len(kept))] == [{index: 1.0} for index in kept]
        assert all(index <= t for index in kept)
    assert program.kept_draws(0) == []
