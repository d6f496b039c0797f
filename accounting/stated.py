"""What somebody states of a release beyond one (epsilon, delta): a privacy profile.

A profile is pairs of epsilon >= 0 and a delta that holds with it, in both directions of the
adjacency. The true one is convex in e^epsilon, so between two pairs it lies below the line through
them; at negative epsilons it follows from the other direction (Zhu, Dong and Wang 2022).
``accounting.composed`` composes the pair of distributions whose profile is the hull of all that.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.sensitivity import Array

_MOST_PAIRS = 500
_MOST_EPSILON = 500.0
_ROUNDED = 1 + 1e-12  # room for the rounding of a line between two pairs, and of a power


@dataclass(frozen=True)
class StatedProfile:
    """The deltas that hold with some epsilons, for a release of somebody else.

    Args:
        epsilons: ascending, each 0 to 500; 1 to 500 of them.
        deltas: as many, each in [0, 1], none greater than the one before.

    >>> StatedProfile((0.0, 1.0), (0.4, 0.1)).added(np.array([0.0, 1.0, 2.0])).round(3)
    array([0.4, 0.1, 0.1])
    """

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]

    steps: ClassVar[int] = 1

    def __post_init__(self) -> None:
        given = self.epsilons, self.deltas
        epsilons, deltas = (tuple(checks.nonnegative("profile", v) for v in vs) for vs in given)
        if not 0 < len(epsilons) == len(deltas) <= _MOST_PAIRS:
            raise ConfigError(
                f"profile: has {len(epsilons)} epsilons and {len(deltas)} deltas; must have 1 to "
                f"{_MOST_PAIRS}, and as many of each."
            )
        if epsilons[-1] > _MOST_EPSILON or any(b <= a for a, b in pairwise(epsilons)):
            raise ConfigError(f"profile: epsilons must ascend, up to {_MOST_EPSILON:g}.")
        if deltas[0] > 1 or any(b > a for a, b in pairwise(deltas)):
            raise ConfigError("profile: deltas must be at most 1, and must not grow with epsilon.")
        object.__setattr__(self, "epsilons", epsilons)
        object.__setattr__(self, "deltas", deltas)

    @property
    def reach(self) -> float:
        """Greatest loss that is told from an infinite one."""
        return max(self.epsilons[-1], 1e-6)

    @property
    def spread(self) -> float:
        """About one standard deviation of the loss: of a Gaussian with as much advantage."""
        from scipy.special import ndtri

        advantage = min(float(self._at(np.zeros(1))[0]), 1 - 1e-9)
        return max(2 * float(ndtri((1 + advantage) / 2)), self.reach / 20)

    def removed(self, epsilons: Array) -> Array:
        """Return upper bounds on delta_remove, at epsilons of any sign."""
        size = np.abs(epsilons)
        height = self._at(size)
        other = -np.expm1(-size) + np.exp(-size) * height
        return np.minimum(np.where(epsilons < 0, other, height) * _ROUNDED, 1.0)

    def added(self, epsilons: Array) -> Array:
        """Return upper bounds on delta_add, which are the same."""
        return self.removed(epsilons)

    def _at(self, epsilons: Array) -> Array:
        """Return the height of the lines at epsilons >= 0."""
        x = [0.0, *np.exp(self.epsilons)]  # at e^epsilon = 0 delta is 1
        return np.interp(np.exp(np.minimum(epsilons, 700.0)), x, [1.0, *self.deltas])


def zcdp_profile(rho: float) -> StatedProfile:
    """Return the profile of all that rho-zCDP allows, rounded up.

    Each Renyi order alpha gives a delta for every epsilon, of which the least of many orders counts
    (Canonne, Kamath and Steinke 2020, Proposition 12).
    """
    rho = checks.positive("rho", rho)
    last = rho + 2 * math.sqrt(rho * math.log(1e15))
    if last > _MOST_EPSILON:
        raise ConfigError(f"rho={rho:g}: promises nothing; must be at most about 300.")
    epsilons = np.linspace(0.0, last, 300)
    beyond = np.geomspace(1e-4, 1e8, 2000)[:, None]  # alpha - 1
    order = 1 + beyond
    logs = beyond * (order * rho - epsilons) - np.log(beyond) + order * np.log1p(-1 / order)
    deltas = np.minimum(np.exp(np.minimum(logs.min(axis=0), 0.0)) * (1 + 1e-9), 1.0)
    lowest = np.minimum.accumulate(deltas)
    return StatedProfile(tuple(epsilons.tolist()), tuple(lowest.tolist()))


def read_profile(path: Path) -> StatedProfile:
    """Return the profile in a CSV file with the columns epsilon and delta.

    Raises:
        ConfigError: the file cannot be read, or holds no profile.
    """
    pairs = checks.two_columns(path, f"profile={path}", ("epsilon", "delta"), float)
    return StatedProfile(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
