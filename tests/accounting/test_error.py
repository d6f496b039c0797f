"""Error of prefix sums at equal cost: the published tables."""

import pytest

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Independent,
    Participation,
    PrefixError,
    Toeplitz,
    error,
)

BLT_2 = ((0.894772, 0.997434), (0.325393, 0.076382))
BLT_3 = ((0.703864, 0.970182, 0.998105), (0.295937, 0.131099, 0.057899))

# reference/mechanisms.md section 4: mechanism, max error, rmse
SINGLE = [
    (Independent(1600), 40.0, 28.29),
    (BinaryTree(1600), 10.488, 7.535),
    (BinaryTree(1600, estimator="online"), 7.990, 5.728),
    (Toeplitz.square_root(1600), 3.415, 3.252),
    (BufferedToeplitz(1600, *BLT_2), 3.573, 3.239),
    (BufferedToeplitz(1600, *BLT_3), 3.503, 3.202),
    (Independent(2048), 45.25, 32.01),
    (BinaryTree(2048), 11.489, 8.124),
    (BinaryTree(2048, estimator="online"), 8.697, 6.150),
    (Toeplitz.square_root(2048), 3.493, 3.331),
]
# the same section: k = 5, b = 320; squared sensitivity, max error, rmse
FIVE = [
    (Independent(1600), 5, 89.4, 63.3),
    (BinaryTree(1600), 70, 26.46, 19.01),
    (BinaryTree(1600, estimator="online"), 70, 20.15, 14.45),
    (Toeplitz.square_root(1600), 27.67, 9.72, 9.26),
    # dense optimum calibration: n = 200, k = 5, b = 40
    (Toeplitz.square_root(200), None, 8.185, 7.703),
    (BinaryTree(200), None, 19.62, 14.22),
    (BinaryTree(200, estimator="online"), None, 15.38, 11.09),
]


@pytest.mark.parametrize(("mechanism", "largest", "rmse"), SINGLE)
def test_one_participation(mechanism, largest, rmse):
    found = error(mechanism, Participation(mechanism.rounds))
    assert found.max_error == pytest.approx(largest, rel=2e-4)
    assert found.rmse == pytest.approx(rmse, rel=2e-4)


@pytest.mark.parametrize(("mechanism", "squared", "largest", "rmse"), FIVE)
def test_five_participations(mechanism, squared, largest, rmse):
    participation = Participation(mechanism.rounds, 5, mechanism.rounds // 5)
    found = error(mechanism, participation)
    assert found.max_error == pytest.approx(largest, rel=6e-4)
    assert found.rmse == pytest.approx(rmse, rel=6e-4)
    if squared is not None:
        claimed = mechanism.sensitivity(participation)
        assert claimed.exact
        assert claimed.squared == pytest.approx(squared, rel=2e-4)


def test_it_is_the_scale_that_the_encoder_does_not_have():
    participation = Participation(20, 3, 4)
    once, twice = (Toeplitz(20, (scale, scale / 2)) for scale in (1, 2))
    assert error(once, participation).rmse == pytest.approx(error(twice, participation).rmse)


def test_one_round_has_one_error():
    assert error(BinaryTree(1), Participation(1)) == PrefixError(rmse=1.0, max_error=1.0)


def test_rounds_must_agree():
    with pytest.raises(ConfigError, match="rounds"):
        error(BinaryTree(8), Participation(9))
