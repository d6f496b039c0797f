"""Error of the prefix sums, at noise that costs every mechanism the same.

Two mechanisms give the same guarantee when sensitivity / noise_multiplier is the same, so the fair
comparison is sensitivity x sqrt(variance of a prefix sum): the noise at effective noise multiplier
1 and clip norm 1. Multiply by 1 / mu for that of any other guarantee.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.mechanisms import Mechanism
from accounting.participation import Participation


@dataclass(frozen=True, slots=True)
class PrefixError:
    """Noise of the prefix sums, per coordinate, at mu = 1 and clip norm 1.

    Attributes:
        rmse: root of the mean variance over the n prefix sums.
        max_error: root of the largest variance.
    """

    rmse: float
    max_error: float

    def __post_init__(self) -> None:
        checks.positive("rmse", self.rmse)
        checks.positive("max_error", self.max_error)


def error(mechanism: Mechanism, participation: Participation) -> PrefixError:
    """Return the error of a mechanism's prefix sums at mu = 1.

    An upper bound if the mechanism's sensitivity is one.

    >>> from accounting import Independent
    >>> error(Independent(1600), Participation(1600)).max_error
    40.0
    """
    squared = mechanism.sensitivity(participation).squared
    return prefix_error(squared, mechanism.prefix_variance())


def prefix_error(sensitivity_squared: float, variance: NDArray[np.float64]) -> PrefixError:
    """Return the error at mu = 1 of prefix sums with this variance at noise multiplier 1."""
    return PrefixError(
        rmse=math.sqrt(sensitivity_squared * float(variance.mean())),
        max_error=math.sqrt(sensitivity_squared * float(variance.max())),
    )
