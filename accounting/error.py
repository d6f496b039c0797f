"""Error of the prefix sums, or of an optimiser's models, at noise that costs all the same.

Two mechanisms give the same guarantee when sensitivity / noise_multiplier is the same, so the fair
comparison is sensitivity x sqrt(variance of a prefix sum): the noise at effective noise multiplier
1 and clip norm 1. Multiply by 1 / mu for that of any other guarantee.
"""

import math
from dataclasses import dataclass

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms import Mechanism
from accounting.participation import Participation
from accounting.sensitivity import Array
from accounting.workload import Workload


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


def error(
    mechanism: Mechanism, participation: Participation, workload: Workload | None = None
) -> PrefixError:
    """Return the error of a mechanism's prefix sums, or of an optimiser's models, at mu = 1.

    An upper bound if the mechanism's sensitivity is one.

    >>> from accounting import Independent
    >>> error(Independent(1600), Participation(1600)).max_error
    40.0
    """
    variance = (
        mechanism.prefix_variance() if workload is None else model_variance(mechanism, workload)
    )
    return prefix_error(mechanism.sensitivity(participation).squared, variance)


MOST_ROUNDS = 4096
"""Of an error by matrices, which have as many rows."""


def round_noise(mechanism: Mechanism) -> Array:
    """Return N, shape (n, released values): the noise of each round's sum, at unit draws."""
    if mechanism.groups is not None:
        raise ConfigError(
            f"mechanism {mechanism.name}: groups of parameters rest in turns, and so does their "
            "momentum; the error of models is known for one stream."
        )
    hint = "That is for the error of models."
    checks.count("rounds", mechanism.rounds, maximum=MOST_ROUNDS, hint=hint)
    return np.diff(mechanism.decoder(), axis=0, prepend=0.0)


def model_variance(mechanism: Mechanism, workload: Workload) -> Array:
    """Return the noise variance of each model, shape (n,), at z = clip_norm = learning rate = 1.

    Raises:
        ConfigError: groups of parameters, or more than 4096 rounds.
    """
    return np.asarray((workload.models(round_noise(mechanism)) ** 2).sum(axis=1))


def prefix_error(sensitivity_squared: float, variance: Array) -> PrefixError:
    """Return the error at mu = 1 of sums or models with this variance at noise multiplier 1."""
    return PrefixError(
        rmse=math.sqrt(sensitivity_squared * float(variance.mean())),
        max_error=math.sqrt(sensitivity_squared * float(variance.max())),
    )
