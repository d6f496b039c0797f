"""Cross-check: compare the reported epsilon with that of a second accountant."""

import math
from dataclasses import dataclass

from accounting import checks

TOLERANCE = 1e-3
"""Relative difference allowed between two accountants of the same curve (PLD's grid costs 1e-9)."""
LOOSE = "rdp"
"""The method whose bounds lie several per cent above the exact curve."""


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """The epsilon of a second accountant, compared with the reported one.

    Attributes:
        method: name of the second accountant.
        epsilon: its epsilon at the same delta.
        agree_to: relative difference between the two epsilons.
        consistent: False if the two contradict each other: two accountants of the same curve differ
            by more than 1e-3 relatively and 1e-12 absolutely, or an upper bound lies below the
            curve that it bounds.
    """

    method: str
    epsilon: float
    agree_to: float
    consistent: bool

    def __post_init__(self) -> None:
        checks.nonnegative("cross_check epsilon", self.epsilon)
        checks.nonnegative("cross_check agree_to", self.agree_to)


def compare(
    method: str, epsilon: float, second_method: str, second: float, *, slack: float
) -> CrossCheck:
    """Compare two epsilons at the same delta; ``slack`` (mu) is the scale of the losses."""
    largest = max(epsilon, second)
    agree_to = abs(epsilon - second) / largest if largest else 0.0
    same = math.isclose(epsilon, second, rel_tol=TOLERANCE, abs_tol=TOLERANCE * slack + 1e-12)
    ordered = (method == LOOSE and epsilon >= second) or (
        second_method == LOOSE and second >= epsilon
    )
    return CrossCheck(second_method, second, agree_to, same or ordered)
