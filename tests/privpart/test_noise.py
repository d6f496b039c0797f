"""The server's noise against the mechanism: exact linear algebra, then distribution with power."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from accounting import BinaryTree, ConfigError, Independent
from accounting.mechanisms.mechanism import prefix_sums
from privpart import NoiseStream, SecretSource, SeededSource

MECHANISMS = [
    *(BinaryTree(n) for n in (1, 2, 3, 8, 13, 16)),
    BinaryTree(13, restart_every=5),
    BinaryTree(12, restart_every=4),
    Independent(7),
]


class UnitVectors:
    """Draw i is the i-th unit vector: the stream then writes out its own matrix."""

    private = False

    def claim(self) -> None: ...

    def normal(self, index: int, dim: int) -> torch.Tensor:
        return torch.eye(dim)[index]


def noising_matrix(mechanism, stddev: float = 1.0) -> np.ndarray:
    """N, shape (n, n): row t is how the noise of round t mixes the i.i.d. draws."""
    stream = NoiseStream(mechanism, dim=mechanism.rounds, stddev=stddev, source=UnitVectors())
    return np.stack([stream.next().double().numpy() for _ in range(mechanism.rounds)])


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_covariance_of_the_stream_is_that_of_the_decoder(mechanism):
    """The released prefix sums carry z C B w: same covariance as what the accountant assumed."""
    stream = prefix_sums(mechanism.rounds) @ noising_matrix(mechanism, stddev=3.0)
    decoder = mechanism.decoder()
    np.testing.assert_allclose(stream @ stream.T, 9 * decoder @ decoder.T, atol=1e-5)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_the_stream_inverts_an_encoder_no_more_sensitive_than_the_claim(mechanism):
    """N is lower triangular and invertible; C = N^-1 is what is released, and it moves at most as
    far as the accounted encoder for one participation, and for all of them."""
    matrix = noising_matrix(mechanism)
    assert np.array_equal(matrix, np.tril(matrix))
    encoder = np.linalg.inv(matrix)
    claimed = mechanism.encoder()
    columns = (encoder**2).sum(axis=0)
    assert columns.max() == pytest.approx((claimed**2).sum(axis=0).max())
    assert (columns <= (claimed**2).sum(axis=0) + 1e-9).all()
    assert (encoder.T @ encoder <= claimed.T @ claimed + 1e-9).all()


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_cumulative_is_the_sum_of_the_parts(mechanism):
    stream = NoiseStream(mechanism, dim=50, stddev=2.0, source=SeededSource(1))
    total = torch.zeros(50, dtype=torch.float64)
    for _ in range(mechanism.rounds):
        total += stream.next()
        torch.testing.assert_close(stream.cumulative().double(), total, rtol=1e-4, atol=1e-4)


CELLS = 100_000


def variance_accepted(sample: np.ndarray, variance: float) -> bool:
    """Two-sided chi-square test of the variance of centred Gaussians, at level 1e-9."""
    statistic = (sample**2).sum() / variance
    low, high = chi2.ppf([5e-10, 1 - 5e-10], sample.size)
    return low < statistic < high


@pytest.mark.parametrize("make_source", [lambda: SeededSource(7), SecretSource])
@pytest.mark.parametrize("mechanism", [BinaryTree(7), Independent(3)], ids=repr)
def test_distribution_of_the_noise_with_a_power_twin(mechanism, make_source):
    stream = NoiseStream(mechanism, dim=CELLS, stddev=2.5, source=make_source())
    for variance in mechanism.prefix_variance():
        stream.next()
        sample = stream.cumulative().double().numpy()
        assert variance_accepted(sample, 2.5**2 * variance)
        assert not variance_accepted(sample * 1.05, 2.5**2 * variance)
        assert not variance_accepted(sample / 1.05, 2.5**2 * variance)


def test_rounds_and_coordinates_are_independent_draws():
    stream = NoiseStream(Independent(2), dim=CELLS, stddev=1.0, source=SecretSource())
    first, second = stream.next(), stream.next()
    for one, other in ((first, second), (first[1:], first[:-1]), (first[::2], first[1::2])):
        correlation = float((one * other).mean())
        assert abs(correlation) < 6.2 / len(one) ** 0.5  # P = 6e-10 if independent


def test_no_noise_beyond_the_plan():
    stream = NoiseStream(BinaryTree(3), dim=4, stddev=1.0, source=SeededSource(0))
    for _ in range(3):
        stream.next()
    with pytest.raises(ConfigError, match="all 3 planned rounds is used up"):
        stream.next()


def test_memory_is_a_logarithm_of_the_rounds():
    stream = NoiseStream(BinaryTree(1000), dim=1, stddev=1.0, source=SeededSource(0))
    for _ in range(1000):
        stream.next()
        assert len(stream._nodes) <= 10


@pytest.mark.parametrize("bad", [{"dim": 0}, {"stddev": 0.0}, {"stddev": float("nan")}])
def test_bad_streams(bad):
    fields = {"dim": 3, "stddev": 1.0} | bad
    with pytest.raises(ConfigError, match=next(iter(bad))):
        NoiseStream(BinaryTree(3), source=SeededSource(0), **fields)


def test_a_secret_source_feeds_one_stream_only():
    source = SecretSource()
    NoiseStream(BinaryTree(3), dim=3, stddev=1.0, source=source)
    with pytest.raises(ConfigError, match="already feeds a noise stream"):
        NoiseStream(BinaryTree(3), dim=3, stddev=1.0, source=source)
