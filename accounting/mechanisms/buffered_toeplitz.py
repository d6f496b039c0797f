"""Buffered linear Toeplitz (BLT): coefficients that are a sum of a few geometric sequences.

c_0 = 1 and c_j = sum_i scale_i decay_i^(j-1) for j >= 1, so that noise needs one buffer per term,
whatever the number of rounds (Dvijotham et al. 2024, "Efficient and near-optimal noise generation
for streaming differential privacy"; many participations: McMahan et al. 2024, arXiv 2408.08868).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import record
from accounting.mechanisms.toeplitz import Toeplitz
from accounting.participation import Participation
from accounting.sensitivity import Sensitivity


@dataclass(frozen=True, slots=True)
class BufferedToeplitz:
    """A BLT encoder: the Toeplitz encoder of ``toeplitz()``, with noise in ``len(decay)`` buffers.

    Args:
        rounds: number of rounds n, 1 to a million.
        decay: theta_i in [0, 1], one per buffer.
        scale: omega_i >= 0, as many; if they sum to at most 1 the coefficients never rise, and
            the sensitivity is exact.

    Streaming noise, with buffers s_i = 0 at first: y_t = z_t - sum_i omega_i s_i, then
    s_i <- theta_i s_i + y_t. Add y_t to the round's sum; the running sum of y is the noise of the
    prefix sum.

    Coefficients are rounded down to float32, in which the server's noise is made: a decay that the
    noise rounds otherwise than the accountant is off by 6e-8, and its n-th power by n times that.

    Raises:
        ConfigError: a value is out of range, or the lengths differ.

    >>> BufferedToeplitz(4, decay=(0.5,), scale=(0.25,)).toeplitz().coefficients
    (1.0, 0.25, 0.125, 0.0625)
    """

    rounds: int
    decay: tuple[float, ...]
    scale: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", checks.rounds(self.rounds))
        decay, scale = checks.reals("decay", self.decay), checks.reals("scale", self.scale)
        for index, value in enumerate(decay):
            if not 0 <= value <= 1:
                raise ConfigError(f"decay[{index}]={value:g}: must lie in [0, 1].")
        for index, value in enumerate(scale):
            if checks.nonnegative(f"scale[{index}]", value) > 1e30:
                raise ConfigError(f"scale[{index}]={value:g}: must be at most 1e30.")
        if len(decay) != len(scale):
            raise ConfigError(
                f"decay has {len(decay)} entries and scale {len(scale)}: one of each per buffer."
            )
        object.__setattr__(self, "decay", _float32_down(decay))
        object.__setattr__(self, "scale", _float32_down(scale))

    @property
    def name(self) -> str:
        """Short name, as on the command line."""
        return "blt"

    @property
    def buffers(self) -> int:
        """Number of buffers, each the size of the update."""
        return len(self.decay)

    def to_dict(self) -> dict[str, Any]:
        """Every field, for JSON; see ``mechanism_from_dict``."""
        return record(self)

    def toeplitz(self) -> Toeplitz:
        """The same encoder by its n coefficients."""
        powers = np.array(self.decay)[:, None] ** np.arange(self.rounds - 1)
        return Toeplitz(self.rounds, (1.0, *(np.array(self.scale) @ powers)))

    def encoder(self) -> NDArray[np.float64]:
        """C, shape (n, n)."""
        return self.toeplitz().encoder()

    def decoder(self) -> NDArray[np.float64]:
        """B = A C^-1, shape (n, n)."""
        return self.toeplitz().decoder()

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Of its coefficients: exact if they never rise, else a labelled upper bound."""
        return self.toeplitz().sensitivity(participation)

    def prefix_variance(self) -> NDArray[np.float64]:
        """Of its coefficients, in O(n^2)."""
        return self.toeplitz().prefix_variance()


def _float32_down(values: Sequence[float]) -> tuple[float, ...]:
    """Down, so that scales that sum to 1 at most still do."""
    exact = np.array(values, np.float64)
    near = exact.astype(np.float32)
    return tuple(np.where(near > exact, np.nextafter(near, np.float32(0)), near).tolist())
