"""Canaries against dense algebra, brute force over patterns, and the accountant."""

import hashlib
from itertools import product

import numpy as np
import pytest
import torch

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    FixedOrder,
    Independent,
    Mechanism,
    Participation,
    Toeplitz,
    guarantee,
)
from attacks import Canaries, drifting_view, round_covariance, view, worst_view

Z = 1.3


def mechanisms(n: int) -> list[Mechanism]:
    return [
        Independent(n),
        BinaryTree(n),
        BinaryTree(n, restart_every=3),
        BinaryTree(n, estimator="online"),
        BufferedToeplitz(n, decay=(0.7, 0.97), scale=(0.3, 0.13)),
    ]


def participations(n: int) -> list[Participation]:
    limits = [(1, 1), (2, 2), (3, 1), (2, 3), (n, 1)]
    return [*(Participation(n, k, b) for k, b in limits), FixedOrder(n, 2, 2)]


@pytest.mark.parametrize(
    ("count", "dim", "within"), [(7, 50, None), (3, 40, (11, 29)), (5, 5, None)]
)
def test_directions_are_orthonormal_and_projected_at_once(count, dim, within):
    canaries = Canaries(4, count, dim, within)
    directions = torch.stack([canaries.update(j) for j in range(count)]).double()
    assert torch.allclose(
        directions @ directions.T, torch.eye(count, dtype=torch.float64), atol=1e-6
    )
    assert bool((directions.count_nonzero(0) <= 1).all())  # supports are disjoint
    start, end = within or (0, dim)
    assert not directions[:, :start].any()
    assert not directions[:, end:].any()
    assert int(directions.count_nonzero()) == end - start
    vector = torch.randn(dim, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(canaries.project(vector), directions @ vector.double(), atol=1e-6)


def test_directions_are_those_of_the_seed():
    first, other = Canaries(1, 10, 1000), Canaries(2, 10, 1000)
    assert torch.equal(first.update(3, 0.5), Canaries(1, 10, 1000).update(3, 0.5))
    assert abs(float(first.update(3) @ other.update(3))) < 0.5
    assert float(first.update(3, 0.25).norm()) == pytest.approx(0.25)
    whole = torch.stack([first.update(j) for j in range(10)]).sign().to(torch.int8)
    # they must stay the same on every machine and in every version: runs last for months
    digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
    assert digest[:16] == "2da4f5680f07a99d"


def most_visible(covariance: np.ndarray, participation: Participation) -> float:
    gram = np.linalg.inv(covariance)
    best = 0.0
    for rounds in participation.patterns():
        for signs in product((1, -1), repeat=len(rounds) - 1):
            pattern = np.zeros(len(gram))
            pattern[list(rounds)] = (1, *signs)
            best = max(best, float(pattern @ gram @ pattern))
    return float(np.sqrt(best)) / Z


@pytest.mark.parametrize("n", [5, 8])
def test_the_worst_view_is_that_of_brute_force_and_never_above_the_accountant(n):
    for mechanism, participation in product(mechanisms(n), participations(n)):
        covariance = round_covariance(mechanism.decoder())
        found = worst_view(covariance, participation, Z)
        assert found.mu == pytest.approx(most_visible(covariance, participation), rel=1e-9)
        assert found.mu <= guarantee(mechanism, participation, noise_multiplier=Z).mu * (1 + 1e-9)
        assert found.rounds in set(participation.patterns())


def test_all_of_a_square_mechanism_and_four_sevenths_of_a_tree_are_visible():
    n, once = 64, Participation(64)
    for mechanism in (Toeplitz(n, (1.0, 0.5, 0.25)), mechanisms(n)[-1], Independent(n)):
        seen = worst_view(round_covariance(mechanism.decoder()), once, Z)
        assert seen.mu == pytest.approx(guarantee(mechanism, once, noise_multiplier=Z).mu)
    covariance = round_covariance(BinaryTree(n).decoder())
    squared = [view(covariance, np.eye(n, dtype=int)[t], 1.0).mu ** 2 for t in range(n)]
    assert worst_view(covariance, once, 1.0).rounds == (0,)
    assert max(squared) == pytest.approx(7.0)  # what the accountant says, in the first round
    assert np.median(squared) == pytest.approx(4.0)
    assert min(squared) == pytest.approx(1.0)


@pytest.mark.parametrize("mechanism", mechanisms(8))
def test_scores_are_normal_and_no_other_weights_see_more(mechanism):
    decoder, pattern = mechanism.decoder(), np.array([0, 1, 0, 0, -1, 0, 1, 0])
    covariance, sums = round_covariance(decoder), np.cumsum(pattern)
    seen = view(covariance, pattern, Z)
    assert seen.mu == pytest.approx(np.sqrt(sums @ np.linalg.pinv(decoder @ decoder.T) @ sums) / Z)
    assert Z**2 * seen.weights @ covariance @ seen.weights == pytest.approx(1.0)
    assert seen.weights @ pattern == pytest.approx(seen.mu)
    others = np.random.default_rng(0).standard_normal((1000, 8))
    power = others @ pattern / np.sqrt(np.einsum("ij,jk,ik->i", others, covariance, others)) / Z
    assert 0 < power.max() < seen.mu


def projections(strength: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Projections of 32 noised sums with a steady push, and the covariance of their noise."""
    covariance = round_covariance(BinaryTree(32).decoder())
    rng = np.random.default_rng(seed)
    noise = Z * np.linalg.cholesky(covariance) @ rng.standard_normal((32, count))
    return noise + strength * rng.standard_normal(count), covariance


def test_drift_of_the_others_is_learned_from_directions_that_nobody_sends():
    first = np.eye(32, dtype=int)[0]
    unsent, covariance = projections(0.5, 500, seed=1)
    absent, _ = projections(0.5, 4000, seed=2)
    plain, quiet = view(covariance, first, Z), drifting_view(covariance, first, Z, unsent)
    assert (plain.weights @ absent).std() > 1.5  # instead of 1: a bound would be far too low
    assert (quiet.weights @ absent).std() == pytest.approx(1.0, abs=0.07)
    assert quiet.weights @ first == pytest.approx(quiet.mu)
    assert 0.7 * plain.mu < quiet.mu < plain.mu


def test_without_drift_nothing_is_given_away():
    first = np.eye(32, dtype=int)[0]
    unsent, covariance = projections(0.0, 500, seed=3)
    quiet = drifting_view(covariance, first, Z, unsent)
    assert quiet.weights == pytest.approx(view(covariance, first, Z).weights)
    with pytest.raises(ConfigError, match="at least 64"):
        drifting_view(covariance, first, Z, unsent[:, :63])
