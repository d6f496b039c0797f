"""Workloads: the matrix by its definition, and the error of models by explicit matrices."""

import numpy as np
import pytest

from accounting import (
    BandedInverse,
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Dense,
    Grouped,
    Independent,
    Participation,
    Scheduled,
    Toeplitz,
    Workload,
    error,
    optimize,
)
from accounting.error import model_variance
from accounting.mechanisms.mechanism import noise_matrix

RATES = tuple(np.random.default_rng(1).uniform(0.1, 2.0, 12))


def by_definition(rounds: int, momentum: float, rates: tuple[float, ...]) -> np.ndarray:
    rates = rates or (1.0,) * rounds
    return np.array(
        [
            [sum(rates[r] * momentum ** (r - s) for r in range(s, t + 1)) for s in range(rounds)]
            for t in range(rounds)
        ]
    )


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.999])
def test_the_matrix_is_that_of_the_definition(momentum):
    for n in range(1, 13):
        for rates in ((), RATES[:n]):
            found = Workload(momentum, rates).models(np.eye(n))
            assert found == pytest.approx(by_definition(n, momentum, rates), rel=1e-12)
        plain = Workload(momentum)
        assert plain.response(np.arange(float(n))) == pytest.approx(plain.models(np.eye(n))[:, 0])


MECHANISMS = [
    Independent(12),
    Scheduled(12, (0, 5), (1.0, 0.5)),
    BinaryTree(12),
    BinaryTree(12, estimator="online", restart_every=5),
    Toeplitz.square_root(12, normalize_columns=True),
    Toeplitz(12, (1.0, 0.5, 0.25)),
    BufferedToeplitz(12, (0.9, 0.5), (0.3, 0.2)),
    BandedInverse(12, (1.0, -0.5, -0.2), normalize_columns=True),
    optimize("dense", Participation(12)),
]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda made: type(made).__name__)
def test_the_variance_of_models_is_that_of_the_servers_noise_under_the_matrix(mechanism):
    """The noise program, which the server runs, times A by its definition."""
    noise = noise_matrix(mechanism)
    for momentum in (0.0, 0.5, 0.9):
        for rates in ((), RATES):
            models = by_definition(12, momentum, rates) @ noise
            found = model_variance(mechanism, Workload(momentum, rates))
            assert found == pytest.approx((models**2).sum(axis=1), rel=1e-9)
    plain = error(mechanism, Participation(12))
    assert error(mechanism, Participation(12), Workload()).rmse == pytest.approx(plain.rmse)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan"), float("inf")])
def test_momentum_out_of_range_is_refused(momentum):
    with pytest.raises(ConfigError, match="momentum"):
        Workload(momentum)


def test_what_has_no_error_of_models_is_refused():
    groups = Grouped(((0,), (1,)), (Independent(1), Independent(1)), (3, 4))
    with pytest.raises(ConfigError, match="for one stream"):
        model_variance(groups, Workload(0.5))
    with pytest.raises(ConfigError, match="error of models"):
        model_variance(BinaryTree(4097), Workload(0.5))
    with pytest.raises(ConfigError, match="3 of them, for 2 rounds"):
        model_variance(Dense(np.eye(2)), Workload(0.5, (1.0, 1.0, 1.0)))
    with pytest.raises(ConfigError, match="learning_rates"):
        Workload(0.5, (1.0, float("nan")))
