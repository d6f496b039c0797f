"""Buffered linear Toeplitz (BLT): coefficients that are a sum of a few geometric sequences.

c_0 = 1 and c_j = sum_i scale_i decay_i^(j-1) for j >= 1, so that noise needs one buffer per term,
whatever the number of rounds (Dvijotham et al. 2024, "Efficient and near-optimal noise generation
for streaming differential privacy"; many participations: McMahan et al. 2024, arXiv 2408.08868).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import record
from accounting.mechanisms.program import OUT, NoiseProgram, Op
from accounting.mechanisms.toeplitz import (
    Array,
    Loss,
    Objective,
    Toeplitz,
    coefficient_loss,
    minimized,
)
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

    Coefficients are rounded down to float32, the type of the server's noise. A decay that noise and
    accountant rounded differently would be off by 6e-8, and its n-th power by n times that.

    Raises:
        ConfigError: a value is out of range, or the lengths differ.

    >>> BufferedToeplitz(4, decay=(0.5,), scale=(0.25,)).toeplitz().coefficients
    (1.0, 0.25, 0.125, 0.0625)
    """

    rounds: int
    decay: tuple[float, ...]
    scale: tuple[float, ...]

    name = "blt"
    groups = None
    restart_every = None
    prefix_only = False
    fitted = True

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

    @classmethod
    def from_options(
        cls,
        participation: Participation,
        *,
        buffers: int | None = None,
        decay: tuple[float, ...] | None = None,
        scale: tuple[float, ...] | None = None,
    ) -> "BufferedToeplitz":
        """Return the BLT of these buffers, or the best one for the participation with up to 3.

        Raises:
            ConfigError: decay without scale, buffers as well as decay, or a value out of range.
        """
        if (decay is None) != (scale is None):
            raise ConfigError("decay and scale of a BLT belong together: give both, or neither.")
        if decay is None or scale is None:
            return fit_blt(participation, 3 if buffers is None else buffers, "rmse")
        if buffers is not None:
            raise ConfigError(f"buffers={buffers}: decay and scale already say how many.")
        return cls(participation.rounds, decay, scale)

    @property
    def buffers(self) -> int:
        """Number of buffers, each the size of the update."""
        return len(self.decay)

    def to_dict(self) -> dict[str, Any]:
        """Every field, for JSON; see ``mechanism_from_dict``."""
        return record(self)

    def toeplitz(self) -> Toeplitz:
        """Return the same encoder by its n coefficients."""
        powers = np.array(self.decay)[:, None] ** np.arange(self.rounds - 1)
        return Toeplitz(self.rounds, (1.0, *(np.array(self.scale) @ powers)))

    def encoder(self) -> NDArray[np.float64]:
        """C, shape (n, n)."""
        return self.toeplitz().encoder()

    def decoder(self) -> NDArray[np.float64]:
        """B = A C^-1, shape (n, n)."""
        return self.toeplitz().decoder()

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """That of its coefficients: exact if they never rise, else a labelled upper bound."""
        return self.toeplitz().sensitivity(participation)

    def noise_program(self) -> NoiseProgram:
        """y_t = z_t - sum_i omega_i s_i, then s_i <- theta_i s_i + y_t; s_i is 0 at first."""
        noise = [(i, -omega) for i, omega in enumerate(self.scale)]
        buffers = [Op(i, [(i, theta), (OUT, 1.0)]) for i, theta in enumerate(self.decay)]
        return NoiseProgram(
            self.rounds,
            ops=lambda t: [Op(OUT, noise, [(t, 1.0)]), *buffers],
            rows=lambda rounds: self.buffers if rounds else 0,
            spread=self._spread,
            rounded="buffers",
            filter_error=self._filter_error,
        )

    def _spread(self) -> float:
        """Standard deviation after all rounds: the norms of the responses to one draw."""
        decay, scale = np.array(self.decay), np.array(self.scale)
        held, squares, out, squared = np.zeros(self.buffers), np.zeros(self.buffers), 1.0, 0.0
        for _ in range(self.rounds):
            squared += out * out
            held = decay * held + out
            squares += held**2
            out = -float(scale @ held)
            if not squared < 1e300:
                raise ConfigError("scale: this filter's noise grows without bound.")
        return math.sqrt(max(squared, float(squares.max())))

    def _filter_error(self) -> float:
        """Two roundings per buffer and round, which decay as it does; 2 per buffer in the sum."""
        decay = np.array(self.decay)
        with np.errstate(divide="ignore"):
            rounds_held = np.minimum(self.rounds, 1 / (1 - decay))
        return float(np.array(self.scale) @ (2 * rounds_held + 2 * self.buffers + 2))

    def prefix_variance(self) -> NDArray[np.float64]:
        """That of its coefficients, in O(n^2)."""
        return self.toeplitz().prefix_variance()


def _float32_down(values: Sequence[float]) -> tuple[float, ...]:
    """Round down, so that scales whose sum is at most 1 keep it."""
    exact = np.array(values, np.float64)
    near = exact.astype(np.float32)
    return tuple(np.where(near > exact, np.nextafter(near, np.float32(0)), near).tolist())


_MOST_BUFFERS = 5
_MOST_ROUNDS = 32_768
"""A fit of so many takes three minutes on one processor: O(rounds^2) per step."""
_WORTH_A_BUFFER = 1e-5
"""Least relative decrease of the squared error for which one more buffer is kept."""


def fit_blt(participation: Participation, buffers: int, objective: Objective) -> BufferedToeplitz:
    """Return the best buffered Toeplitz encoder found with at most ``buffers`` buffers.

    Args:
        participation: rounds, and how often one client may take part.
        buffers: 1 to 5; two or three come within a few percent of the best matrix.
        objective: as in ``fit_toeplitz``.

    Returns:
        The best local optimum from several starts, in the logarithms of rates and weights. Each
        number of buffers also starts from the best fit so far, and is kept only if it improves it.

    Raises:
        ConfigError: a value is out of range.
    """
    most = checks.count("buffers", buffers, maximum=_MOST_BUFFERS)
    n = checks.count(
        "rounds",
        participation.rounds,
        maximum=_MOST_ROUNDS,
        hint="That is for fitting a BLT; for more rounds give its decay and scale, or use a tree.",
    )
    loss = coefficient_loss(participation, objective)
    best, lowest = np.zeros(0), np.inf
    for count in range(1, most + 1):
        starts = [*_spread_starts(n, count), *_one_more(best, count, n)]
        bounds = [(np.log(0.01 / n), 2.0)] * count + [(-16.0, 6.0)] * count
        fits = [minimized(_blt_loss(loss, n), start, bounds) for start in starts]
        found, value = min(fits, key=lambda fit: fit[1])
        if value < lowest - _WORTH_A_BUFFER:
            best, lowest = found, value
    decay, scale = _blt_parameters(best)
    order = np.argsort(decay)
    return BufferedToeplitz(n, tuple(decay[order]), tuple(scale[order]))


def _blt_parameters(logs: Array) -> tuple[Array, Array]:
    """Return decay = exp(-e^p), in (0, 1), and scale = e^q / (1 + sum e^q), which sum below 1."""
    rates, weights = np.split(np.exp(logs), 2)
    return np.exp(-rates), weights / (1 + weights.sum())


def _blt_loss(loss: Loss, rounds: int) -> Loss:
    """Return the loss and its gradient in the logarithms of ``_blt_parameters``."""
    lags = np.arange(rounds - 1)

    def from_logs(logs: Array) -> tuple[float, Array]:
        decay, scale = _blt_parameters(logs)
        powers = np.exp(-np.outer(np.exp(logs[: len(decay)]), lags))
        value, gradient = loss(np.concatenate([[1.0], scale @ powers]))
        by_scale = powers @ gradient[1:]
        by_rate = -scale * (powers @ (lags * gradient[1:]))
        by_weight = scale * (by_scale - scale @ by_scale)
        return value, np.concatenate([by_rate * np.exp(logs[: len(decay)]), by_weight])

    return from_logs


def _spread_starts(rounds: int, count: int) -> list[Array]:
    """Return rates spread evenly in the logarithm, from about 1 down to 4/n or 1/n.

    1/sqrt(j) is the integral of e^(-s j) s^(-1/2) ds: scales go as the square root of the rate.
    """
    starts = []
    for slowest in (4 / rounds, 1 / rounds):
        rates = np.geomspace(0.5, min(0.4, slowest), 2 * count + 1)[1::2]
        starts.append(np.concatenate([np.log(rates), np.log(0.7 * np.sqrt(rates))]))
    return starts


def _one_more(fit: Array, count: int, rounds: int) -> list[Array]:
    """Return the best fit so far with one more buffer, faster or slower than all others."""
    if len(fit) != 2 * (count - 1) or not len(fit):  # the best fit has fewer buffers than that
        return []
    rates, weights = np.split(fit, 2)
    return [
        np.concatenate([rates, [rate], weights, [-5.0]])
        for rate in (rates.max() + 1.0, max(rates.min() - 1.5, np.log(0.1 / rounds)))
    ]
