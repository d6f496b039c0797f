"""Error of prefix sums at equal cost: the published tables."""

import pytest

from accounting import (
    BinaryTree,
    ConfigError,
    Participation,
    PrefixError,
    Toeplitz,
    error,
)


def test_it_is_the_scale_that_the_encoder_does_not_have():
    participation = Participation(20, 3, 4)
    once, twice = (Toeplitz(20, (scale, scale / 2)) for scale in (1, 2))
    assert error(once, participation).rmse == pytest.approx(error(twice, participation).rmse)


def test_one_round_has_one_error():
    assert error(BinaryTree(1), Participation(1)) == PrefixError(rmse=1.0, max_error=1.0)


def test_rounds_must_agree():
    with pytest.raises(ConfigError, match="rounds"):
        error(BinaryTree(8), Participation(9))
