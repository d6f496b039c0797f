r"""Random allocation: every member is in one bin of T, drawn once; bin t is round t of each pass.

This is balls-in-bins sampling (Chua et al. 2024, arXiv 2412.16802). With independent noise, on
whatever the rounds depend, it is dominated by one release in T coordinates: N(0, s^2 I) without the
member, and with it the uniform mixture of N(e_t, s^2 I). E passes with the same bins add up to
s = noise_multiplier / sqrt(E). Let f be the likelihood ratio of the two,

    f = (l_1 + ... + l_T) / T,    l_t = exp(x_t / s^2 - 1 / (2 s^2)).

Without the member the l_t are i.i.d. lognormal; with it one of them has x_t ~ N(1, s^2). So

    delta_remove = E_with (1 - e^epsilon / f)_+,    delta_add = E_without (1 - e^epsilon f)_+

are expectations over a sum of independent numbers, computed here by convolution on a grid, without
Monte Carlo (as in arXiv 2602.17284 and 2601.21636). The first grows with every l_t and the second
falls, so l_t is rounded up for the first and down for the second, and what leaves the grid counts
in full: both results are upper bounds, up to the rounding of the FFT, for which ``_FFT`` is added.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from accounting.guarantee import Guarantee, mu_upper
from accounting.report import Assumption

Array = NDArray[np.float64]

_FFT = 1e-13
_LEAST_DELTA = 1e-11
"""Deltas below this are lost in the rounding of the FFT."""
_POINTS = 2**19
"""Points of the grid of the sum."""
_FAR = 7.4
"""Standard deviations of x beyond which its mass, 7e-14, counts in full."""
_COARSEST = 0.02
"""Greatest step of the grid, against 1, the mean of each number: an error of a percent in f."""


@dataclass(frozen=True, slots=True)
class BallsInBins:
    """Each member is put into one bin, at random, once; round i takes the members of bin i mod T.

    Args:
        bins: number of bins T, 2 to 100,000.
        rounds: number of rounds, 1 to a million; the last pass may be cut off.
    """

    bins: int
    rounds: int

    def __post_init__(self) -> None:
        checks.count("bins", self.bins, minimum=2, maximum=100_000)
        checks.rounds(self.rounds)

    @property
    def passes(self) -> int:
        """Most rounds of one member."""
        return -(-self.rounds // self.bins)


@dataclass(frozen=True, slots=True)
class AllocatedGuarantee:
    """The guarantee of independent noise on bins, under add-or-remove adjacency.

    Args:
        noise_multiplier: noise standard deviation on the sum / clip norm, > 0.
        sampling: how members are put into bins.

    Raises:
        ConfigError: a value out of range, or so little noise that bins do not help here.

    >>> run = AllocatedGuarantee(4.0, BallsInBins(bins=8, rounds=32))
    >>> run.epsilon(1e-5) < Guarantee(0.5).epsilon(1e-5)
    True
    """

    noise_multiplier: float
    sampling: BallsInBins

    unit: ClassVar[str] = "the sampled member: a client, or an example"
    adjacency: ClassVar[str] = "add-or-remove"

    def __post_init__(self) -> None:
        checks.positive("noise_multiplier", self.noise_multiplier)
        if not isinstance(self.sampling, BallsInBins):
            raise ConfigError(f"sampling={self.sampling!r}: must be BallsInBins(...).")

    @property
    def mu(self) -> float:
        """Without the bins being hidden: sqrt(passes) / noise_multiplier, rounded up."""
        return mu_upper(float(self.sampling.passes), self.noise_multiplier)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The conditions of the amplification, besides clipping and secret noise."""
        lost = "no amplification: account for the unsampled mechanism instead"
        return (
            Assumption(
                "balls-in-bins",
                f"every member is put into one of {self.sampling.bins} bins on its own, uniformly, "
                "once for all passes",
                "asserted",
                lost,
            ),
            Assumption(
                "hidden-sample",
                "nobody who sees the release learns who is in which bin",
                "asserted",
                lost,
            ),
            Assumption(
                "public-constants",
                "the divisor is a public constant, not the realised batch",
                "asserted",
                "the size of the batch leaks, and one member weighs more than accounted",
            ),
        )

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at ``epsilon`` >= 0."""
        epsilon = checks.nonnegative("epsilon", epsilon)
        plain = Guarantee(self.mu).delta(epsilon)
        removed, added = _deltas(self.mu, self.sampling.bins, epsilon)
        return min(plain, max(removed, added) + _FFT)

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` in (0, 1), to 1e-6 above the bound's own.

        Raises:
            ConfigError: delta is below 1e-11.
        """
        delta = checks.probability("delta", delta)
        if delta < _LEAST_DELTA:
            raise ConfigError(f"delta={delta:g}: must be at least {_LEAST_DELTA:g} for bins.")
        high = Guarantee(self.mu).epsilon(delta)
        low = 0.0
        if self.delta(low) <= delta:
            return low
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            if self.delta(middle) <= delta:
                high = middle
            else:
                low = middle
        return high


def _deltas(mu: float, bins: int, epsilon: float) -> tuple[float, float]:
    """Return upper bounds on delta_remove and delta_add."""
    if epsilon > 700:
        return 1.0, 1.0  # e^epsilon is no float: the bound without bins is used
    up, beyond, step = _sum(mu, bins, with_member=True)
    ratio = np.arange(len(up)) * step / bins
    with np.errstate(divide="ignore"):
        gain = np.maximum(1 - math.exp(epsilon) / ratio, 0.0)
    removed = float(up @ gain) + beyond
    down, _, step = _sum(mu, bins, with_member=False)
    loss = np.maximum(1 - math.exp(epsilon) * (np.arange(len(down)) * step / bins), 0.0)
    return min(1.0, removed), min(1.0, float(down @ loss))


@lru_cache(maxsize=8)
def _sum(mu: float, bins: int, *, with_member: bool) -> tuple[Array, float, float]:
    """Return the masses of l_1 + ... + l_T on a grid, the mass beyond it, and the grid's step.

    Rounded up with the member, down without. A mass that leaves the grid upwards is beyond; where
    the sum is rounded down it stays at the end, since less is the safe side.
    """
    widest = math.exp(min(mu * _FAR + mu * mu / 2, 700.0))
    reach = 3.0 * bins + widest if with_member else 3.0 * bins
    if reach / _POINTS > _COARSEST:
        raise ConfigError(
            f"noise_multiplier: mu={mu:g} without sampling is too large for bins to help here; "
            "leave out the sampling, or use more noise."
        )
    step = reach / (_POINTS - 1)
    one = _lognormal(mu, step, with_member=with_member, shifted=False)
    total = _power(one, bins - 1 if with_member else bins, with_member=with_member)
    if with_member:
        total = _convolved(total, _lognormal(mu, step, with_member=True, shifted=True), keep=False)
    return total, max(0.0, 1.0 - float(total.sum())), step


def _lognormal(mu: float, step: float, *, with_member: bool, shifted: bool) -> Array:
    """Return the masses of exp(mu y - mu^2/2), y ~ N(0, 1), or N(mu, 1) if shifted, on the grid."""
    edges = np.arange(_POINTS) * step
    with np.errstate(divide="ignore"):
        y = np.log(edges) / mu + mu / 2 - (mu if shifted else 0.0)
    from scipy.special import ndtr

    below = ndtr(y)
    below[0] = 0.0
    if with_member:  # up: what lies in (a, b] goes to b
        return np.diff(below, prepend=0.0)
    masses = np.diff(below, append=1.0)  # down: what lies in [a, b) goes to a, the tail to the end
    return np.asarray(masses, dtype=np.float64)


def _power(one: Array, times: int, *, with_member: bool) -> Array:
    """Return the masses of a sum of ``times`` independent numbers, by repeated squaring."""
    total = np.zeros(_POINTS)
    total[0] = 1.0
    square = one
    while times:
        if times % 2:
            total = _convolved(total, square, keep=not with_member)
        times //= 2
        if times:
            square = _convolved(square, square, keep=not with_member)
    return total


def _convolved(left: Array, right: Array, *, keep: bool) -> Array:
    """Return the masses of a sum; what leaves the grid goes to its end, or is dropped."""
    size = 2 * _POINTS
    product = np.fft.irfft(np.fft.rfft(left, size) * np.fft.rfft(right, size), size)
    product = np.maximum(product, 0.0)
    inside = product[:_POINTS].copy()
    if keep:
        inside[-1] += product[_POINTS:].sum()
    return np.asarray(inside, dtype=np.float64)
