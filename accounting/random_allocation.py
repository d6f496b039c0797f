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

Correlated noise: with C the encoder, |C| its entries without their signs, and x_j the rounds of
bin j, the two are N(0, z^2 I) and the uniform mixture of N(|C| x_j, z^2 I), whatever the updates,
adaptive too (Choquette-Choo et al. 2024, arXiv 2410.06266, for C >= 0; ``docs/sampling.md`` has a
proof for any C). The exponents of the mixture are Gaussian with covariance
K_ij = <|C| x_i, |C| x_j> / z^2, and both deltas grow with every K_ij (Kahane 1986). So K may be
replaced by own + shared on the diagonal and shared elsewhere, its largest entries. Then f is a
product: a Gaussian release of mu^2 = shared, which the bins do not help, and a random allocation of
mu^2 = own. Or tell the adversary T' bins, T / T' apart around the circle and turned at random so
that the member's is among them: these share less, and nothing if C has at most T / T' bands. The
least bound counts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.guarantee import Guarantee, mu_upper
from accounting.mechanisms import Mechanism
from accounting.report import Assumption
from accounting.sensitivity import Array, rounded_up
from accounting.subsampled import magnitudes, sampling_assumptions

_FFT = 1e-13
_LEAST_DELTA = 1e-11
"""Deltas below this are lost in the rounding of the FFT."""
_POINTS = 2**19
"""Points of the grid of the sum."""
_FAR = 7.4
"""Standard deviations of x beyond which its mass, 7e-14, counts in full."""
_COARSEST = 0.02
"""Greatest step of the grid, against 1, the mean of each number: an error of a percent in f."""
_SHARED = np.linspace(-8.0, 8.0, 4001)
"""Edges that the shared release is rounded to."""
_SUMS = 2e-10
"""Relative error of a sum over the grid, with room."""


class TooFineError(ConfigError):
    """There is so little noise that a grid of ``_POINTS`` is too coarse for it."""


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
    def how(self) -> str:
        """What the sampler must do, as a condition."""
        return (
            f"every member is put into one of {self.bins} bins on its own, uniformly, once for all "
            "passes"
        )

    @property
    def passes(self) -> int:
        """Most rounds of one member."""
        return -(-self.rounds // self.bins)


@dataclass(frozen=True, slots=True)
class _Shares:
    """One bound: bins that remain, mu of what is each bin's own, and mu of what all share."""

    bins: int
    own: float
    shared: float


@dataclass(frozen=True, slots=True)
class AllocatedGuarantee:
    """The guarantee of noise on bins, under add-or-remove (and so zero-out) adjacency.

    Args:
        noise_multiplier: noise standard deviation on the sum / clip norm, > 0.
        sampling: how members are put into bins.
        mechanism: what correlates the noise; None is independent noise.

    >>> run = AllocatedGuarantee(4.0, BallsInBins(bins=8, rounds=32))
    >>> run.epsilon(1e-5) < Guarantee(0.5).epsilon(1e-5)
    True
    """

    noise_multiplier: float
    sampling: BallsInBins
    mechanism: Mechanism | None = None
    _products: Array | None = field(init=False, repr=False, compare=False, default=None)

    adjacency: ClassVar[str] = "add-or-remove"

    def __post_init__(self) -> None:
        checks.positive("noise_multiplier", self.noise_multiplier)
        if not isinstance(self.sampling, BallsInBins):
            raise ConfigError(f"sampling={self.sampling!r}: must be BallsInBins(...).")
        if self.mechanism is not None:
            modes = bin_modes(self.mechanism, self.sampling)
            terms = len(modes) + 2 * self.sampling.passes
            object.__setattr__(self, "_products", modes.T @ modes * rounded_up(1.0, terms))

    @property
    def mu(self) -> float:
        """Without the bins being hidden, rounded up."""
        return mu_upper(self._most(), self.noise_multiplier)

    def _most(self) -> float:
        if self._products is None:
            return float(self.sampling.passes)
        return float(self._products.diagonal().max())

    def _bounds(self) -> list[_Shares]:
        """Return what can be computed: all bins, and fewer that are further apart."""
        z, bins = self.noise_multiplier, self.sampling.bins
        if self._products is None:
            return [_Shares(bins, self.mu, 0.0)]
        squared = self._most()
        by_lag = [float(self._products.diagonal(lag).max()) for lag in range(bins)]
        bounds: list[_Shares] = []
        smallest = math.inf
        for fewer in sorted({bins // apart for apart in range(1, bins // 2 + 1)}, reverse=True):
            apart = bins // fewer
            shared = max(by_lag[apart : bins - apart + 1])
            if shared < smallest * _WORTH and squared - shared > _WORTHLESS * squared:
                smallest = shared
                alone = squared - shared + squared * 1e-15  # the rounding of the difference
                mu_shared = mu_upper(shared, z) if shared else 0.0
                bounds.append(_Shares(fewer, mu_upper(alone, z), mu_shared))
        return [shares for shares in bounds if _fits(shares.own, shares.bins)]

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The conditions of the amplification, besides clipping and secret noise."""
        return sampling_assumptions("balls-in-bins", self.sampling.how, sees="who is in which bin")

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at ``epsilon`` >= 0."""
        epsilon = checks.nonnegative("epsilon", epsilon)
        plain = Guarantee(self.mu).delta(epsilon)
        return min([plain, *(_delta(shares, epsilon) for shares in self._usable())])

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` in (0, 1), within 1e-6 of the least."""
        delta = checks.probability("delta", delta)
        if delta < _LEAST_DELTA:
            raise ConfigError(f"delta={delta:g}: must be at least {_LEAST_DELTA:g} for bins.")
        least = Guarantee(self.mu).epsilon(delta)
        for shares in self._usable():
            if _delta(shares, least) <= delta:
                least = _least_epsilon(shares, delta, least)
        return least

    def _usable(self) -> list[_Shares]:
        bounds = self._bounds()
        if self.mechanism is None:
            _fits(self.mu, self.sampling.bins, refuse=True)
        return bounds


def bin_modes(mechanism: Mechanism, sampling: BallsInBins) -> Array:
    """Return |C| x_j for every bin j, shape (released values, bins): means of the mixture."""
    encoder = magnitudes(mechanism)
    refuse_other_rounds(sampling, mechanism)
    if sampling.bins > mechanism.rounds:
        raise ConfigError(
            f"bins={sampling.bins}: with correlated noise at most one per round, {sampling.rounds}."
        )
    modes = np.zeros((len(encoder), sampling.bins))
    for j in range(sampling.bins):
        modes[:, j] = encoder[:, j :: sampling.bins].sum(axis=1)
    return modes


def refuse_other_rounds(sampling: BallsInBins, mechanism: Mechanism) -> None:
    """Raise ``ConfigError`` if sampling and mechanism differ in their number of rounds."""
    if mechanism.rounds != sampling.rounds:
        raise ConfigError(
            f"rounds={sampling.rounds}: of the sampling; the mechanism has {mechanism.rounds}."
        )


_WORTH, _WORTHLESS = 0.75, 1e-3
"""Fewer bins are tried if they share a quarter less, and have something of their own."""
_ROUNDED = 1 + 1e-12
"""Room for the rounding of a sum over the edges."""


def lowest(meets: Callable[[float], bool], low: float, high: float, *, close: float) -> float:
    """Return where ``meets`` becomes true, rounded up to ``high`` or a number that was tried."""
    while high - low > close * high:
        middle = (low + high) / 2
        if meets(middle):
            high = middle
        else:
            low = middle
    return high


def _least_epsilon(shares: _Shares, delta: float, high: float) -> float:
    def meets(epsilon: float) -> bool:
        return _delta(shares, epsilon) <= delta

    return 0.0 if meets(0.0) else lowest(meets, 0.0, high, close=1e-6)


def _delta(shares: _Shares, epsilon: float) -> float:
    return min(1.0, max(_both(shares, epsilon)) + _FFT)


def _both(shares: _Shares, epsilon: float) -> tuple[float, float]:
    """Return delta_remove and delta_add of a Gaussian release beside a random allocation.

    The loss of the Gaussian is rounded to the edges: up with the member, down without, and what
    lies beyond the last one counts in full. Given it, the allocation spends what is left.
    """
    allocation = _allocation(shares.own, shares.bins)
    if not shares.shared:
        at = np.array([epsilon])
        return float(allocation.removed(at)[0]), float(allocation.added(at)[0])
    from scipy.special import ndtr

    mass = np.diff(ndtr(_SHARED))
    tail = 2 * float(ndtr(_SHARED[0]))
    mu = shares.shared
    with_member = allocation.removed(epsilon - mu * _SHARED[1:] - mu * mu / 2)
    without = allocation.added(epsilon + mu * _SHARED[:-1] - mu * mu / 2)
    removed = float(mass @ with_member) * _ROUNDED + tail
    return removed, float(mass @ without) * _ROUNDED + tail


@dataclass(frozen=True, slots=True, eq=False)
class _Allocation:
    """Sums over the grid of f, from which delta of a random allocation is read at any epsilon."""

    ratio_with: Array
    """Points of the grid, with the member; without, the grid is another one."""
    ratio_without: Array
    above: Array
    """Mass with the member at and above each point."""
    above_inverse: Array
    below: Array
    """Mass without the member below each point."""
    below_ratio: Array
    beyond: float

    def removed(self, epsilon: Array) -> Array:
        """Return E_with (1 - e^epsilon / f)_+ at any epsilon, negative ones too, rounded up."""
        scale = np.exp(np.minimum(epsilon, 700.0))  # at most what it is
        first = np.searchsorted(self.ratio_with, scale)
        deltas = self.above[first] * (1 + _SUMS) - scale * self.above_inverse[first]
        return np.clip(deltas + self.beyond, 0.0, 1.0)

    def added(self, epsilon: Array) -> Array:
        """Return E_without (1 - e^epsilon f)_+ at any epsilon, rounded up."""
        scale = np.exp(np.minimum(epsilon, 700.0))
        last = np.searchsorted(self.ratio_without, 1 / scale)
        deltas = self.below[last] * (1 + _SUMS) - scale * self.below_ratio[last]
        return np.clip(deltas, 0.0, 1.0)


@lru_cache(maxsize=4)
def _allocation(mu: float, bins: int) -> _Allocation:
    up, beyond, step = _sum(mu, bins, with_member=True)
    over = np.arange(len(up)) * step / bins
    with np.errstate(divide="ignore"):
        inverse = np.where(over > 0, 1 / over, 0.0)
    down, _, step = _sum(mu, bins, with_member=False)
    under = np.arange(len(down)) * step / bins
    return _Allocation(
        over,
        under,
        _from_above(up),
        _from_above(up * inverse),
        np.concatenate([[0.0], np.cumsum(down)]),
        np.concatenate([[0.0], np.cumsum(down * under)]),
        beyond,
    )


def _from_above(masses: Array) -> Array:
    return np.concatenate([np.cumsum(masses[::-1])[::-1], [0.0]])


def _fits(mu: float, bins: int, *, refuse: bool = False) -> bool:
    """Return whether the grid is fine enough; or refuse if it is not."""
    widest = math.exp(min(mu * _FAR + mu * mu / 2, 700.0))
    fine = (3.0 * bins + widest) / _POINTS <= _COARSEST
    if refuse and not fine:
        raise TooFineError(
            f"noise_multiplier: mu={mu:g} without sampling is too large for the grid of this "
            "accountant, whatever bins would save; leave out the sampling, or use more noise."
        )
    return fine


@lru_cache(maxsize=8)
def _sum(mu: float, bins: int, *, with_member: bool) -> tuple[Array, float, float]:
    """Return the masses of l_1 + ... + l_T on a grid, the mass beyond it, and the grid's step.

    Rounded up with the member, down without. A mass that leaves the grid upwards is beyond; where
    the sum is rounded down it stays at the end, since less is the safe side.
    """
    widest = math.exp(min(mu * _FAR + mu * mu / 2, 700.0))
    reach = 3.0 * bins + widest if with_member else 3.0 * bins
    _fits(mu, bins, refuse=True)
    step = reach / (_POINTS - 1)
    member = _lognormal(mu, step, with_member=with_member, shifted=False)
    total = _power(member, bins - 1 if with_member else bins, with_member=with_member)
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


def _power(masses: Array, times: int, *, with_member: bool) -> Array:
    """Return the masses of a sum of ``times`` independent numbers, by repeated squaring."""
    total = np.zeros(_POINTS)
    total[0] = 1.0
    square = masses
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
