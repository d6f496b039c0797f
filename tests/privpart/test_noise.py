"""The server's noise against the mechanism: exact linear algebra, then distribution with power."""

import tracemalloc

import numpy as np
import pytest
import torch
from every_mechanism import BLT3, LAW
from rational_draws import unit_vectors
from scipy.stats import chi2

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    Independent,
    Scheduled,
    Toeplitz,
    footprint,
)
from accounting.mechanisms import noise_matrix
from privpart import NoiseStream, SecretSource, SeededSource
from privpart.noise.stream import Executor

FINE = 2.0**30
"""Steps of a unit draw: rounding to integers is a part in a thousand million."""


def total_draws(mechanism) -> int:
    """How many different draws there are: some are made again."""
    return noise_matrix(mechanism).shape[1]


def test_the_stream_is_the_matrix_of_the_program(mechanism):
    """Row t is how the noise of round t mixes the i.i.d. draws."""
    source, dim = unit_vectors(), total_draws(mechanism)
    stream = NoiseStream(mechanism, dim=dim, stddev=FINE, source=source)
    matrix = np.stack([stream.next().numpy() / FINE for _ in range(mechanism.rounds)])
    # each draw in order, and no more than claimed
    assert list(dict.fromkeys(source.asked)) == [(0, index) for index in range(dim)]
    assert len(source.asked) == round(footprint(mechanism).draws_per_round * mechanism.rounds)
    np.testing.assert_allclose(matrix, noise_matrix(mechanism), atol=1e-7)


def test_every_round_has_a_draw_of_its_own_and_none_of_later_rounds(mechanism):
    """Adaptivity: what round t draws hides it, and was in no earlier round's noise."""
    source = unit_vectors()
    stream = NoiseStream(mechanism, dim=total_draws(mechanism), stddev=FINE, source=source)
    for _ in range(mechanism.rounds):
        before = len(set(source.asked))
        noise = stream.next()
        _, last = max(source.asked)
        assert noise[last] > 0
        assert len(set(source.asked)) > before
        assert not noise[last + 1 :].any()


@pytest.mark.parametrize(
    ("mechanism", "size"),
    [
        (BinaryTree(7, estimator="online"), 4),
        (Toeplitz.square_root(6, bands=3), 4),
        (BufferedToeplitz(5, **BLT3), 8),
    ],
    ids=repr,
)
def test_nothing_but_the_state_is_kept(mechanism, size):
    """Integers in four bytes, real numbers in eight."""
    dim = 123_457
    SeededSource(0).draws(0, b"").enclosure(0, 0, 64)  # tables, which all streams share
    tracemalloc.start()
    try:
        stream = NoiseStream(mechanism, dim=dim, stddev=2.0**20, source=SeededSource(0))
        for _ in range(mechanism.rounds):
            stream.next()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    state = size * dim * stream.state_vectors
    assert state <= held < state + dim


CELLS = 40_000
STDDEV = 2.0**20


def variance_accepted(sample: np.ndarray, variance: float) -> bool:
    """Two-sided chi-square test of the variance of centred Gaussians, at level 1e-9."""
    statistic = (sample**2).sum() / variance
    low, high = chi2.ppf([5e-10, 1 - 5e-10], sample.size)
    return low < statistic < high


@pytest.mark.parametrize("mechanism", LAW, ids=repr)
def test_distribution_and_correlation_of_the_noise_with_power_twins(mechanism):
    """Undo the filter: what remains is independent between rounds, coordinates and neighbours."""
    stream = NoiseStream(mechanism, dim=CELLS, stddev=STDDEV, source=SecretSource())
    noises = np.stack([stream.next().double().numpy() for _ in range(mechanism.rounds)])
    sums = noises.cumsum(axis=0) / STDDEV
    for sample, variance in zip(sums, mechanism.prefix_variance(), strict=True):
        assert variance_accepted(sample, variance)
        assert not variance_accepted(sample * 1.05, variance)
        assert not variance_accepted(sample / 1.05, variance)
    root = np.linalg.cholesky((a := np.diff(mechanism.decoder(), axis=0, prepend=0)) @ a.T)
    white = np.linalg.solve(root, noises) / STDDEV
    bound = 6.5 / CELLS**0.5  # P < 1e-10 each if independent
    between_rounds = white @ white.T / CELLS - np.eye(mechanism.rounds)
    assert np.abs(np.tril(between_rounds, -1)).max() < bound
    assert np.abs((white[:, 1:] * white[:, :-1]).mean(axis=1)).max() < bound
    if mechanism.rounds > 1 and not isinstance(mechanism, Independent | Scheduled):
        raw = noises / noises.std(axis=1, keepdims=True)
        assert np.abs(np.tril(raw @ raw.T / CELLS, -1)).max() > bound  # power


@pytest.mark.parametrize("stddev", [1.0, 2.0**30])
def test_the_noise_is_whole_steps_of_a_size_that_fits(mechanism, stddev):
    """Range and type follow from the program: 32 standard deviations of every register."""
    stream = NoiseStream(mechanism, dim=3, stddev=stddev, source=SeededSource(4))
    assert stream.state_vectors == footprint(mechanism).state_vectors
    limit = Executor(mechanism.noise_program(), stddev).limit
    assert stream.dtype is (torch.int32 if limit < 2**31 else torch.int64)
    noises = [stream.next() for _ in range(mechanism.rounds)]
    assert all(noise.dtype is stream.dtype for noise in noises)
    largest = max(int(noise.abs().max()) for noise in noises)
    assert largest < limit / 3
    matrix = noise_matrix(mechanism)
    assert limit > 31.99 * stddev * np.sqrt((matrix**2).sum(axis=1).max())
