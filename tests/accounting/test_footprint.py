"""What streaming costs, against the stream itself where there is one."""

import pytest

from accounting import (
    BandedInverse,
    BinaryTree,
    BufferedToeplitz,
    Dense,
    Independent,
    Toeplitz,
    footprint,
)


@pytest.mark.parametrize(
    ("mechanism", "state", "draws"),
    [
        (Independent(5), 0, 1),
        (BinaryTree(1), 1, 1),
        (BinaryTree(7), 3, 1),
        (BinaryTree(8), 3, 1),
        (BinaryTree(8, estimator="online"), 3, 15 / 8),
        (BinaryTree(12, restart_every=3), 2, 1),
        (Toeplitz(8, (1.0, 0.5, 0.25)), 2, 1),
        (BufferedToeplitz(8, (0.9, 0.5), (0.1, 0.2)), 2, 1),
        (BandedInverse(8, (1.0, -0.5)), 0, 15 / 8),
        (BandedInverse.square_root(100, 4), 0, 3.94),
        (BandedInverse.square_root(100, 4, normalize_columns=True), 0, 3.94),
        (Dense([[1.0, 0.0], [0.5, 1.0]]), 1, 1),
    ],
    ids=repr,
)
def test_state_and_draws(mechanism, state, draws):
    assert footprint(mechanism).state_vectors == state
    assert footprint(mechanism).draws_per_round == pytest.approx(draws)


def test_an_unknown_mechanism_is_an_error():
    with pytest.raises(TypeError, match="not a mechanism"):
        footprint(object())
