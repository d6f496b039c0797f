"""Adaptive clipping: a clip norm that follows a quantile of the update norms, privately.

Andrew et al. (2021, "Differentially Private Learning with Adaptive Clipping"): every client adds a
bit, whether its update was no longer than the clip norm; the noised share of such bits moves the
clip norm by a factor. A client whose update is replaced by zeros changes its bit from "longer" to
"no longer", so it moves the sum of bits by up to 1 under our adjacency. (Andrew et al. centre the
bits and charge 1/2, for clients that are absent altogether.)

The clip norm changes only where a tree restarts: inside a tree it would change the sensitivity of
sums that were noised for another one.
"""

import math
from dataclasses import dataclass

from accounting import BinaryTree, Independent, Mechanism, checks
from accounting.checks import ConfigError

_RANGE = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveClipping:
    """How the clip norm follows the clients.

    Args:
        quantile: share of updates that should stay unclipped, in (0, 1).
        rate: of the geometric step, > 0; Andrew et al. use 0.2.
        bit_noise_multiplier: standard deviation of the i.i.d. noise on the sum of bits, > 0;
            a twentieth of the cohort is customary.
    """

    quantile: float = 0.5
    rate: float = 0.2
    bit_noise_multiplier: float

    def __post_init__(self) -> None:
        checks.probability("quantile", self.quantile)
        if checks.positive("rate", self.rate) > 10:
            raise ConfigError(f"rate={self.rate:g}: must be at most 10.")
        checks.positive("bit_noise_multiplier", self.bit_noise_multiplier)

    def update_noise_multiplier(self, noise_multiplier: float) -> float:
        """Return the noise multiplier left to the updates, rounded up.

        Sum and bits go through the same mechanism and are released together, so with noise
        multipliers z_u and z_b their mu is at most sens * sqrt(1/z_u^2 + 1/z_b^2): that of the
        plan's ``noise_multiplier`` z if 1/z_u^2 = 1/z^2 - 1/z_b^2 (as Andrew et al. 2021, Thm 1).

        Raises:
            ConfigError: the bits alone would cost more than the plan allows.
        """
        z, bits = noise_multiplier, self.bit_noise_multiplier
        if not bits > z * (1 + 1e-9):
            raise ConfigError(
                f"bit_noise_multiplier={bits:g}: must be above the noise multiplier {z:g}, or the "
                "bits alone cost more than the plan. A twentieth of the cohort is customary."
            )
        return z / math.sqrt((1 - z / bits) * (1 + z / bits)) * (1 + 1e-14)

    def next_clip_norm(self, clip_norm: float, unclipped: float, *, first: float) -> float:
        """Return the clip norm after a tree in which this noised share stayed unclipped.

        It stays within a factor of 10,000 of the ``first``: clients that send zeros, or a hostile
        majority, must not drive it out of the range of floats.
        """
        share = min(1.0, max(0.0, unclipped))
        wanted = clip_norm * math.exp(-self.rate * (share - self.quantile))
        return min(first * _RANGE, max(first / _RANGE, wanted))


def restarts(mechanism: Mechanism) -> frozenset[int]:
    """Return the rounds at which the clip norm may change: where nothing earlier is correlated.

    Raises:
        ConfigError: a mechanism whose noise is correlated over all rounds.
    """
    if isinstance(mechanism, Independent):
        return frozenset(range(1, mechanism.rounds))
    if isinstance(mechanism, BinaryTree) and mechanism.restart_every is not None:
        return frozenset(range(mechanism.restart_every, mechanism.rounds, mechanism.restart_every))
    raise ConfigError(
        f"adaptive clipping with {mechanism.name}: the clip norm may change only where the noise "
        "starts anew. Use a BinaryTree with restart_every, or Independent."
    )
