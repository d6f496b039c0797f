"""Buffered linear Toeplitz (BLT): coefficients that are a sum of a few geometric sequences.

c_0 = 1 and c_j = sum_i scale_i decay_i^(j-1) for j >= 1, so that noise needs one buffer per term,
whatever the number of rounds (Dvijotham et al. 2024, "Efficient and near-optimal noise generation
for streaming differential privacy"; many participations: McMahan et al. 2024, arXiv 2408.08868).
With one buffer, scale w and decay q:

        1
    C = w     1
        w q   w    1
        w q^2 w q  w  1
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import OneStream
from accounting.mechanisms.program import OUT, NoiseProgram, Op
from accounting.mechanisms.toeplitz import (
    Loss,
    Objective,
    Toeplitz,
    invertible,
    minimized,
    toeplitz_sensitivity,
)
from accounting.participation import Participation
from accounting.sensitivity import Array, Sensitivity, same_rounds
from accounting.workload import PREFIX, Workload


@dataclass(frozen=True, slots=True)
class BufferedToeplitz(OneStream):
    """A BLT encoder: the Toeplitz encoder of ``toeplitz()``, with noise in ``len(decay)`` buffers.

    Args:
        rounds: number of rounds n, 1 to a million.
        decay: theta_i in [0, 1], one per buffer.
        scale: omega_i >= 0, as many; if they sum to at most 1 the coefficients never rise, and
            the sensitivity is exact.

    Coefficients are rounded down to float32, the type of the server's noise. A decay that noise and
    accountant rounded differently would be off by 6e-8, and its n-th power by n times that.

    >>> BufferedToeplitz(4, decay=(0.5,), scale=(0.25,)).toeplitz().coefficients
    (1.0, 0.25, 0.125, 0.0625)
    """

    rounds: int
    decay: tuple[float, ...]
    scale: tuple[float, ...]

    name = "blt"
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
        objective: Objective | None = None,
        decay: tuple[float, ...] | None = None,
        scale: tuple[float, ...] | None = None,
        momentum: float | None = None,
    ) -> "BufferedToeplitz":
        """Return the BLT of these buffers, or the best one for the participation with up to 3."""
        if (decay is None) != (scale is None):
            raise ConfigError("decay and scale of a BLT belong together: give both, or neither.")
        if decay is None or scale is None:
            return fit_blt(participation, buffers, objective or "rmse", Workload(momentum or 0.0))
        given = (("buffers", buffers), ("objective", objective), ("momentum", momentum))
        for name, value in given:
            if value is not None:
                raise ConfigError(f"{name}={value}: is for a fit; leave out decay and scale.")
        return cls(participation.rounds, decay, scale)

    @property
    def buffers(self) -> int:
        """Number of buffers, each the size of the update."""
        return len(self.decay)

    def toeplitz(self) -> Toeplitz:
        """Return the same encoder by its n coefficients."""
        return Toeplitz(self.rounds, tuple(blt_coefficients(self.decay, self.scale, self.rounds)))

    def encoder(self) -> Array:
        """C, shape (n, n)."""
        return self.toeplitz().encoder()

    def decoder(self) -> Array:
        """B = A C^-1, shape (n, n)."""
        return self.toeplitz().decoder()

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """That of its coefficients: exact if they never rise, else a labelled upper bound."""
        same_rounds(self.rounds, participation)
        column = blt_coefficients(self.decay, self.scale, self.rounds)
        return toeplitz_sensitivity(column, participation)

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
        state, squares, out, squared = np.zeros(self.buffers), np.zeros(self.buffers), 1.0, 0.0
        for _ in range(self.rounds):
            squared += out * out
            state = decay * state + out
            squares += state**2
            out = -float(scale @ state)
            if not squared < 1e300:
                raise ConfigError("scale: this filter's noise grows without bound.")
        return math.sqrt(max(squared, float(squares.max())))

    def _filter_error(self) -> float:
        """Two roundings per buffer and round, which decay as it does; 2 per buffer in the sum."""
        decay = np.array(self.decay)
        with np.errstate(divide="ignore"):
            rounds_held = np.minimum(self.rounds, 1 / (1 - decay))
        return float(np.array(self.scale) @ (2 * rounds_held + 2 * self.buffers + 2))

    def prefix_variance(self) -> Array:
        """That of its coefficients, in O(n) by ``step_response``."""
        gaps = 1 - np.array(self.decay)
        with np.errstate(over="ignore", invalid="ignore"):
            response = step_response(gaps, np.array(self.scale), np.arange(float(self.rounds)))
        return np.cumsum(invertible(response) ** 2)


def _float32_down(values: Sequence[float]) -> tuple[float, ...]:
    """Round down, so that scales whose sum is at most 1 keep it."""
    exact = np.array(values, np.float64)
    near = exact.astype(np.float32)
    return tuple(np.where(near > exact, np.nextafter(near, np.float32(0)), near).tolist())


def blt_coefficients(decay: Sequence[float], scale: Sequence[float], rounds: int) -> Array:
    """Return c_0, ..., c_{n-1}. Powers by squaring: 20 times as fast as one by one."""
    column, powers = np.zeros(rounds), np.empty(rounds - 1)
    for theta, omega in zip(decay, scale, strict=True):
        powers[:1] = omega
        done = 1
        while done < len(powers):
            more = min(done, len(powers) - done)
            np.multiply(powers[:more], theta**done, out=powers[done : done + more])
            done += more
        column[1:] += powers
    column[0] = 1.0
    return column


def step_response(gaps: Array, scale: Array, t: Array, momentum: float = 0.0) -> Array:
    """Return r_t, the coefficients of 1 / ((1 - x) (1 - mx) c(x)), for c with decays 1 - ``gaps``.

    Without momentum m, the inverse filter keeps s with s_{t+1} = M s_t + sqrt(scale), and
    r_t = 1 - sqrt(scale) s_t. M is symmetric, I - M = diag(gaps) + sqrt(scale) sqrt(scale)^T, so
    its eigenvalues give r_t as a sum of geometric series. With momentum each of them, and the 1, is
    multiplied by 1 / (1 - mx). ``t`` holds whole numbers, or is so large that alternating terms
    are 0.
    """
    root = np.sqrt(scale)
    eigenvalues, vectors = np.linalg.eigh(np.diag(gaps) + np.outer(root, root))
    response = Workload(momentum).response(t)
    for gap, weight in zip(eigenvalues, (vectors.T @ root) ** 2, strict=True):
        series = _geometric_sum(gap, t)
        if momentum:  # 1 / ((1 - x) (1 - mx)) = (1 / (1 - x) - m / (1 - mx)) / (1 - m)
            series = (series - momentum * _difference(gap, momentum, t)) / (1 - momentum)
        response -= weight * series
    return response


def _difference(gap: float, momentum: float, t: Array) -> Array:
    """Return (q^t - m^t) / (q - m) for q = 1 - gap; t m^(t-1) where the two are equal."""
    q = 1 - gap
    if q <= 0:
        return np.asarray((_powers(q, t) - momentum**t) / (q - momentum))
    low, high = sorted((q, momentum))
    ratio = np.log(low / high)
    if ratio > -1e-12:
        return np.asarray(t * high ** np.maximum(t - 1, 0.0))
    return np.asarray(high**t * np.expm1(t * ratio) / (low - high))


def _geometric_sum(gap: float, t: Array) -> Array:
    """Return 1 + q + ... + q^(t-1) for q = 1 - gap."""
    if gap < 0.5:
        return np.asarray(-np.expm1(t * np.log1p(-gap)) / gap) if gap > 1e-300 else t
    return np.asarray((1 - _powers(1 - gap, t)) / gap)


def _powers(q: float, t: Array) -> Array:
    """Return q^t; 0 where the signs alternate and t is not a whole number."""
    powers = np.abs(q) ** t
    return powers if q >= 0 else np.where(t % 2 == 1, -powers, np.where(t % 2 == 0, powers, 0.0))


_MOST_BUFFERS = 5
_WORTH_A_BUFFER = 1e-5
"""Least relative decrease of the squared error for which one more buffer is kept."""
_HEAD = 512
_NODES = 24


def fit_blt(
    participation: Participation,
    buffers: int | None,
    objective: Objective,
    workload: Workload = PREFIX,
) -> BufferedToeplitz:
    """Return the best BLT encoder found with at most ``buffers`` buffers, by default 3.

    Returns:
        The best local optimum from several starts, in the logarithms of rates and weights; about a
        second for any number of rounds. Each number of buffers also starts from the best fit so
        far, and is kept only if it improves it.
    """
    limit = checks.count("buffers", 3 if buffers is None else buffers, maximum=_MOST_BUFFERS)
    n = participation.rounds
    best, _ = _best_fit(participation, limit, objective, workload.constant("blt").momentum)
    gaps, scale = _blt_parameters(best)
    order = np.argsort(-gaps)
    return BufferedToeplitz(n, tuple((1 - gaps)[order]), tuple(scale[order]))


@lru_cache(maxsize=32)
def _best_fit(
    participation: Participation, buffers: int, objective: Objective, momentum: float
) -> tuple[Array, float]:
    """Return the best logarithms found with at most so many buffers, and their loss."""
    if not buffers:
        return np.zeros(0), np.inf
    best, lowest = _best_fit(participation, buffers - 1, objective, momentum)
    n = participation.rounds
    loss = blt_loss(participation, objective, momentum)
    starts = [*_spread_starts(n, buffers), *_one_more(best, buffers, n)]
    bounds = [(np.log(0.01 / n), 2.0)] * buffers + [(-16.0, 6.0)] * buffers
    what = f"blt, {buffers} buffer{'s' if buffers > 1 else ''}"
    fits = [minimized(what, _with_gradient(loss), start, bounds) for start in starts]
    logs, value = min(fits, key=lambda fit: fit[1])
    return (logs, value) if value < lowest - _WORTH_A_BUFFER else (best, lowest)


def _blt_parameters(logs: Array) -> tuple[Array, Array]:
    """Return 1 - decay for decay = exp(-e^p), and scale = e^q / (1 + sum e^q), which sum below 1.

    A decay near 1 has its digits in the gap.
    """
    rates, weights = np.split(np.exp(logs), 2)
    return -np.expm1(-rates), weights / (1 + weights.sum())


def blt_loss(
    participation: Participation, objective: Objective, momentum: float = 0.0
) -> Callable[[Array], float]:
    """Return the log of sensitivity^2 x error^2 in the logarithms of ``_blt_parameters``.

    As ``coefficient_loss``, without a vector of n coefficients. The error is a weighted sum of
    r_t^2 over t; beyond the first ``_HEAD`` rounds, r_t is a smooth sum of few exponentials, and
    ``_sum_nodes`` of each [t, 2t) suffice. The sensitivity is that of rounds 0, b, 2b, ...: between
    round m b and the next, v is a sum of geometric sequences, whose squares have a closed form.
    """
    n, k, b = participation.rounds, participation.max_participations, participation.min_separation
    t, weights = _sum_nodes(n)
    if objective == "rmse":
        weights = weights * (n - t) / n
    starts = np.arange(1.0, k + 1)[:, None]
    lengths = np.full(k, float(b))
    lengths[-1] = n - (k - 1) * b

    def loss(logs: Array) -> float:
        rates = np.exp(logs[: len(logs) // 2])
        gaps, scale = _blt_parameters(logs)
        variance = weights @ step_response(gaps, scale, t, momentum) ** 2
        sums = scale * -np.expm1(-starts * b * rates) / -np.expm1(-b * rates)
        first = np.ones(k)
        first[1:] += sums[:-1] @ np.exp(-rates * (b - 1))
        pairs = np.add.outer(rates, rates)
        series = -np.expm1(-np.multiply.outer(lengths - 1, pairs)) / -np.expm1(-pairs)
        squared = first @ first + np.einsum("mi,mj,mij->", sums, sums, series)
        return float(np.log(squared * variance))

    return loss


def _with_gradient(loss: Callable[[Array], float]) -> Loss:
    """Return the loss with its gradient by central differences: there are ten numbers at most."""
    step = 1e-6

    def both(logs: Array) -> tuple[float, Array]:
        moves = step * np.eye(len(logs))
        slopes = [(loss(logs + move) - loss(logs - move)) / (2 * step) for move in moves]
        return loss(logs), np.array(slopes)

    return both


@lru_cache(maxsize=8)
def _sum_nodes(rounds: int) -> tuple[Array, Array]:
    """Return points and weights that sum a function over 0, ..., n-1.

    Every one of the first ``_HEAD``; then per [t, 2t) the Gauss nodes of the sum over its whole
    numbers (discrete Chebyshev polynomials), from the eigenvalues of their recurrence.
    """
    head = min(_HEAD, rounds)
    points, weights = [np.arange(float(head))], [np.ones(head)]
    start = head
    while start < rounds:
        size = float(min(start, rounds - start))
        j = np.arange(1.0, min(_NODES, size))
        off = np.sqrt(j**2 * (size**2 - j**2) / (4 * (4 * j**2 - 1)))
        middle = np.full(len(j) + 1, (size - 1) / 2)
        nodes, vectors = np.linalg.eigh(np.diag(middle) + np.diag(off, 1) + np.diag(off, -1))
        points.append(start + nodes)
        weights.append(size * vectors[0] ** 2)
        start += int(size)
    return np.concatenate(points), np.concatenate(weights)


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
