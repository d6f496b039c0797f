"""Sensitivity: how far one client can move what a mechanism encodes.

A client adds a vector of length at most 1 in each round of its pattern u, so the encoded stream
moves by C x and, with X = C^T C, squared sensitivity = max over admissible u, |g_i| <= 1 of
sum_{i,j in u} X_ij <g_i, g_j>. If X_ij >= 0 that is max_u u^T X u, exactly.
"""

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from accounting.participation import Participation


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Squared L2 sensitivity at clip norm 1, and how it is known.

    Attributes:
        squared: max over participations of ||C x||^2.
        exact: False if ``squared`` is only an upper bound.
        rule: the theorem or algorithm behind it, in words.
    """

    squared: float
    exact: bool
    rule: str

    def __post_init__(self) -> None:
        if not checks.positive("sensitivity squared", self.squared) >= 1e-200:
            raise ConfigError(
                f"sensitivity squared={self.squared:g}: below 1e-200 floats no longer round up."
            )


def brute_force(encoder: NDArray[np.float64], participation: Participation) -> float:
    """Return max_u u^T |X| u by trying every admissible pattern: the judge of the fast paths.

    Exact where X = C^T C has no negative entry; an upper bound otherwise. Takes exponential time.

    Args:
        encoder: C, shape (released values, rounds).
        participation: the patterns to try; its ``rounds`` is the width of C.

    Raises:
        ConfigError: an entry that is not finite, or another width.
    """
    if encoder.ndim != 2 or encoder.shape[1] != participation.rounds:
        raise ConfigError(
            f"encoder has shape {encoder.shape}: must have {participation.rounds} columns, one "
            "for each round of the participation."
        )
    if not np.isfinite(encoder).all():
        raise ConfigError("encoder has entries that are not finite.")
    gram = np.abs(encoder.T @ encoder)
    return max(float(gram[np.ix_(u, u)].sum()) for u in participation.patterns())


def rounded_up(value: float, terms: int) -> float:
    """Return ``value``, a float64 sum of that many products of nonnegative numbers, rounded up.

    Each of the additions and multiplications lost at most half a unit in the last place.
    """
    return value * (1 + (terms + 4) * sys.float_info.epsilon)


def same_rounds(mechanism_rounds: int, participation: Participation) -> None:
    """Refuse a participation that was planned for another number of rounds than the mechanism."""
    if mechanism_rounds != participation.rounds:
        raise ConfigError(
            f"participation has rounds={participation.rounds} but the mechanism has "
            f"rounds={mechanism_rounds}: both must describe the same run."
        )
