r"""Random allocation: every member is in one bin of T, drawn once; bin t is round t of each pass.

This is balls-in-bins sampling (Chua et al. 2024, arXiv 2412.16802). With independent noise, on
whatever the rounds depend, it is dominated by one release in T coordinates: N(0, s^2 I) without the
member, and with it the uniform mixture of N(e_t, s^2 I). E passes with the same bins add up to
s = noise_multiplier / sqrt(E). Let f be the likelihood ratio of the two,

    f = (l_1 + ... + l_T) / T,    l_t = exp(x_t / s^2 - 1 / (2 s^2)).

Without the member the l_t are i.i.d. lognormal of mean 1, and both deltas are expectations of
convex functions of their sum alone:

    delta_remove = E_without (f - e^epsilon)_+,    delta_add = E_without (1 - e^epsilon f)_+.

A number that is moved to the two points of a grid beside it, so that its mean stays, is greater in
the convex order, and so is a sum of such numbers. So both results are upper bounds, their excess is
of second order in the step, and sums are convolutions on the grid, without Monte Carlo (rounding up
and down, as in arXiv 2601.21636 and 2602.17284, costs the first order). Outside of the grid

    (f - e^epsilon)_+ <= (f' - e^epsilon)_+ + sum (l_t - c)_+ / T,
    (1 - e^epsilon f)_+ <= (1 - e^epsilon f')_+ + e^epsilon sum (a - l_t)_+ / T

where f' has every l_t cut to [a, c]; the expectations of what is added are prices of options. The
first is weighted by one l_t, so that what is summed are probabilities with the member. What the
sum does not reach counts in full, and ``_FFT`` is added to every delta for the rounding of the
transforms.

Correlated noise: with C the encoder, |C| its entries without their signs, and x_j the rounds of bin
j, the two are N(0, z^2 I) and the uniform mixture of N(|C| x_j, z^2 I), whatever the updates,
adaptive too (Choquette-Choo et al. 2024, arXiv 2410.06266, for C >= 0; a proof for any C is in
``docs/concepts/sampling.md``). The exponents of the mixture are Gaussian with covariance K_ij =
<|C| x_i, |C| x_j> / z^2, which may be replaced by its largest entries: own + shared on the diagonal
and shared elsewhere. Then f is a product: a Gaussian release of mu^2 = shared, which the bins do
not help, and a random allocation of mu^2 = own. Or the adversary is told T' bins, T / T' apart
around the circle, which share less, and nothing if C has at most T / T' bands. The least bound
counts.

K of T bins each are at most K independent allocations in blocks of T / K bins, rounded down and up
so that they add up to T (Feldman and Shenfeld 2025, arXiv 2502.08202;
``docs/concepts/sampling.md``). Bins that every pass draws anew are as many allocations of
their own, whatever the passes before them released.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

from accounting import accountants, checks
from accounting.checks import ConfigError
from accounting.composed import Amplified, ComposedGuarantee, Part
from accounting.guarantee import Guarantee, mu_upper
from accounting.hull import lowest
from accounting.mechanisms import Mechanism
from accounting.report import Assumption
from accounting.sensitivity import Array, rounded_up
from accounting.subsampled import magnitudes, sampling_assumptions

_FFT = 1e-12
_LEAST_DELTA = 1e-11  # deltas below this are lost in the rounding of the FFT
_MOST_POINTS, _LEAST_POINTS = 2**21, 2**17
"""Of a grid of the sum."""
_FINE = 40  # steps of the grid in a standard deviation of l_t, where the points suffice
_FAR = (4.5, 5.5, 6.5, 7.5)
"""Standard deviations of x, with the member, where l_t is cut; what is beyond counts in full."""
_NEAR = 9.0  # the same downwards
_TYPICAL = 1e-6  # delta at which bounds are compared that hold at every delta
_MOST_MU = 12.0  # above it no sum is tried, and floats would overflow; hidden bins save nothing
_LEVELS = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)
"""Epsilons from which on a finer grid is taken for delta_add, which is about f <= e^-epsilon."""
_SHARED = np.linspace(-8.0, 8.0, 4001)  # edges that the shared release is rounded to
_SUMS = 1e-9  # relative error of a sum over the grid, with room


@dataclass(frozen=True, slots=True)
class BallsInBins:
    """Each member is put into bins, at random; round i takes the members of bin i mod T.

    Args:
        bins: number of bins T, 2 to 100,000.
        rounds: number of rounds, 1 to a million; the last pass may be cut off.
        redraw: whether every pass puts the members into bins anew; else once for all passes.
        chosen: number of different bins of each member, 1 to ``bins``.
    """

    bins: int
    rounds: int
    redraw: bool = False
    chosen: int = 1

    def __post_init__(self) -> None:
        checks.count("bins", self.bins, minimum=2, maximum=100_000)
        checks.rounds(self.rounds)
        checks.count("chosen", self.chosen, maximum=self.bins)

    @property
    def how(self) -> str:
        """What the sampler must do, as a condition."""
        often = "anew for each pass" if self.redraw else "once for all passes"
        count = "one" if self.chosen == 1 else f"{self.chosen} different ones"
        bins = f"{count} of {self.bins} bins"
        return f"every member is put into {bins} on its own, uniformly, {often}"

    @property
    def passes(self) -> int:
        """Number of passes over the bins, of which the last may be cut off."""
        return -(-self.rounds // self.bins)

    @property
    def participations(self) -> int:
        """Most rounds of one member."""
        whole, rest = divmod(self.rounds, self.bins)
        return whole * self.chosen + min(rest, self.chosen)


@dataclass(frozen=True, slots=True)
class Shares:
    """A random allocation in bins, and a Gaussian beside it: one release that dominates a run.

    Args:
        bins: number of bins, >= 2; those that remain, where the adversary was told of some.
        own: mu of what is each bin's own, in (0, 12].
        shared: mu of what all bins share, >= 0.
        draws: how often all of this is released, each time with bins that are drawn anew.
        chosen: number of different bins of the member, 1 to ``bins``.
    """

    bins: int
    own: float
    shared: float = 0.0
    draws: int = 1
    chosen: int = 1

    def __post_init__(self) -> None:
        checks.count("bins", self.bins, minimum=2, maximum=100_000)
        if checks.positive("own", self.own) > _MOST_MU:
            raise ConfigError(f"own={self.own:g}: must be at most {_MOST_MU:g}.")
        checks.nonnegative("shared", self.shared)
        checks.count("draws", self.draws, maximum=checks.MOST_ROUNDS)
        checks.count("chosen", self.chosen, maximum=self.bins)

    @property
    def mu(self) -> float:
        """If every member's bins are known, rounded up."""
        squared = self.draws * (self.chosen * self.own**2 + self.shared**2)
        return rounded_up(math.sqrt(squared), 8)

    def parts(self) -> Mapping[Part, int]:
        """Return allocations of one bin each, and as one Gaussian what no bin hides."""
        size, larger = divmod(self.bins, self.chosen)
        blocks = {size: self.chosen - larger, size + 1: larger}
        parts: dict[Part, int] = {
            Allocation(self.own, bins): self.draws * count
            for bins, count in blocks.items()
            if count and bins > 1
        }
        # a block of one bin hides nothing
        squared = self.shared**2 + blocks.get(1, 0) * self.own**2
        if squared:
            parts[Guarantee(rounded_up(math.sqrt(self.draws * squared), 8))] = 1
        return parts


@dataclass(frozen=True)
class AllocatedGuarantee(Amplified):
    """The guarantee of noise on bins, under add-or-remove (and so zero-out) adjacency.

    Args:
        noise_multiplier: noise standard deviation on the sum / clip norm, > 0.
        sampling: how members are put into bins.
        mechanism: what correlates the noise; None is independent noise, which alone is covered
            with several bins of each member, or bins that are drawn anew.

    >>> run = AllocatedGuarantee(4.0, BallsInBins(bins=8, rounds=32))
    >>> again = AllocatedGuarantee(4.0, BallsInBins(bins=8, rounds=32, redraw=True))
    >>> again.epsilon(1e-5) < run.epsilon(1e-5) < Guarantee(0.5).epsilon(1e-5)
    True
    """

    noise_multiplier: float
    sampling: BallsInBins
    mechanism: Mechanism | None = None
    _products: Array | None = field(init=False, repr=False, compare=False, default=None)

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
            return float(self.sampling.participations)
        return float(self._products.diagonal().max())

    @cached_property
    def _several(self) -> Shares | None:
        """All allocations that the run is composed of; None if it is one, or nothing is tried."""
        sampling = self.sampling
        draws = sampling.passes if sampling.redraw else 1
        own = mu_upper(sampling.passes / draws, self.noise_multiplier)
        if draws * sampling.chosen == 1 or own > _MOST_MU:
            return None
        return Shares(sampling.bins, own, draws=draws, chosen=sampling.chosen)

    def _bounds(self) -> list[Shares]:
        """Return what can be computed: all bins, and fewer that are further apart."""
        z, bins = self.noise_multiplier, self.sampling.bins
        if self._products is None:
            return [Shares(bins, self.mu)] if self.mu <= _MOST_MU else []
        squared = self._most()
        by_lag = [float(self._products.diagonal(lag).max()) for lag in range(bins)]
        bounds: list[Shares] = []
        smallest = math.inf
        for fewer in sorted({bins // apart for apart in range(1, bins // 2 + 1)}, reverse=True):
            apart = bins // fewer
            shared = max(by_lag[apart : bins - apart + 1])
            if shared < smallest * _WORTH and squared - shared > _WORTHLESS * squared:
                smallest = shared
                alone = squared - shared + squared * 1e-15  # the rounding of the difference
                own, mu_shared = mu_upper(alone, z), mu_upper(shared, z) if shared else 0.0
                bounds += [Shares(fewer, own, mu_shared)] if own <= _MOST_MU else []
        return bounds

    def _nearest(self, delta: float) -> tuple[float, "Shares | Guarantee"]:
        """Return the least epsilon of all bounds at ``delta``, and the release that has it."""
        plain = Guarantee(self.mu)
        nearest: Shares | Guarantee = plain
        lowest = plain.epsilon(delta)
        for shares in self._bounds():
            epsilon = _least_epsilon(shares, delta, lowest)
            if epsilon < lowest:
                lowest, nearest = epsilon, shares
        return lowest, nearest

    def dominating(self) -> "Shares | Guarantee":
        """Return one release that dominates the run, for composition with others.

        Of several, the one with the least epsilon at delta 1e-6; without amplification, if hidden
        bins save nothing.
        """
        if self._several is None:
            return self._nearest(_TYPICAL)[1]
        plain = Guarantee(self.mu)
        saves = self._composed.delta(plain.epsilon(_TYPICAL)) <= _TYPICAL
        return self._several if saves else plain

    def parts(self) -> Mapping[Part, int]:
        """Return allocations and Gaussians that dominate the run together."""
        release = self.dominating()
        return {release: 1} if isinstance(release, Guarantee) else release.parts()

    @cached_property
    def _composed(self) -> ComposedGuarantee:
        return ComposedGuarantee((self._several or self,))

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The conditions of the amplification, besides clipping and secret noise."""
        return sampling_assumptions("balls-in-bins", self.sampling.how, sees="who is in which bin")

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at ``epsilon`` >= 0."""
        epsilon = checks.nonnegative("epsilon", epsilon)
        if self._several is not None:
            return super().delta(epsilon)
        lowest = Guarantee(self.mu).delta(epsilon)
        for shares in self._bounds():
            for far in _FAR:
                lowest = min(lowest, _delta(shares, epsilon, far))
                if _beyond(far) <= lowest / 1e6:
                    break
        return lowest

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` in (0, 1), within 1e-6 of the least."""
        delta = checks.probability("delta", delta)
        if delta < _LEAST_DELTA:
            raise ConfigError(f"delta={delta:g}: must be at least {_LEAST_DELTA:g} for bins.")
        return self._nearest(delta)[0] if self._several is None else super().epsilon(delta)


def bin_modes(mechanism: Mechanism, sampling: BallsInBins) -> Array:
    """Return |C| x_j for every bin j, shape (released values, bins): means of the mixture."""
    for key in ("redraw",) * sampling.redraw + ("chosen",) * (sampling.chosen > 1):
        raise ConfigError(f"{key}: is accounted for in closed form, with independent noise only.")
    encoder = magnitudes(mechanism)
    refuse_other_rounds(sampling, mechanism)
    if sampling.bins > mechanism.rounds:
        raise ConfigError(
            f"bins={sampling.bins}: with correlated noise at most one per round, {sampling.rounds}."
        )
    bins = range(sampling.bins)
    return np.stack([encoder[:, j :: sampling.bins].sum(axis=1) for j in bins], axis=1)


def refuse_other_rounds(sampling: BallsInBins, mechanism: Mechanism) -> None:
    """Raise ``ConfigError`` if sampling and mechanism differ in their number of rounds."""
    if mechanism.rounds != sampling.rounds:
        raise ConfigError(
            f"rounds={sampling.rounds}: of the sampling; the mechanism has {mechanism.rounds}."
        )


_WORTH, _WORTHLESS = 0.75, 1e-3
"""Fewer bins are tried if they share a quarter less, and have something of their own."""
_ROUNDED = 1 + 1e-12  # room for the rounding of a sum over the edges


def _least_epsilon(shares: Shares, delta: float, high: float) -> float:
    def meets(epsilon: float) -> bool:
        return _delta(shares, epsilon, far) <= delta

    far = next((far for far in _FAR if _beyond(far) <= delta / 1000), _FAR[-1])
    if not meets(high):
        return high
    return 0.0 if meets(0.0) else lowest(meets, 0.0, high, close=1e-6)


def _delta(shares: Shares, epsilon: float, far: float) -> float:
    return min(1.0, max(_both(shares, epsilon, far)))


def _beyond(far: float) -> float:
    """Return at least the expectation of (l_t - c)_+ without the member."""
    from scipy.special import ndtr

    return float(ndtr(-far)) * (1 + _SUMS)


def _both(shares: Shares, epsilon: float, far: float) -> tuple[float, float]:
    """Return delta_remove and delta_add of a Gaussian release beside a random allocation.

    The loss of the Gaussian is rounded to the edges: up with the member, down without, and what
    lies beyond the last one counts in full. Given it, the allocation spends what is left.
    """
    allocation = Allocation(shares.own, shares.bins, far)
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


@dataclass(frozen=True, slots=True)
class Allocation:
    """Deltas of a random allocation with independent noise, at any epsilons, rounded up.

    Args:
        mu: of a member whose bin is known, in (0, 12].
        bins: number of bins T, >= 2.
        far: where l_t is cut, in standard deviations; Phi(-far) is added to delta_remove. None is
            the best of several at each epsilon.
    """

    mu: float
    bins: int
    far: float | None = None

    steps: ClassVar[int] = 1

    @property
    def spread(self) -> float:
        """About one standard deviation of the loss: as Poisson sampling in as many rounds."""
        return accountants.sampled_spread(1 / self.mu, 1 / self.bins, self.bins)

    @property
    def reach(self) -> float:
        """Loss beyond which no mass counts.

        Eight deviations of the member's number among T, or twelve of the sum of the others.
        """
        alone = self.mu * 8 + self.mu**2 / 2
        hit = alone if alone > 500 else math.log1p(math.expm1(alone) / self.bins)
        return min(alone, max(hit, 12 * self.spread))

    @property
    def _lost(self) -> float:
        return max(_FFT, accountants.transforms_lose(self.bins))

    def removed(self, epsilon: Array) -> Array:
        """Return upper bounds of E_with (1 - e^epsilon / f)_+ at epsilons of any sign."""
        scale = np.exp(np.minimum(epsilon, 700.0))  # at most what it is
        lowest = np.ones(len(scale))
        for far in _fine_enough(self.mu) if self.far is None else (self.far,):
            ratio, above, above_inverse = _sums_above(self.mu, self.bins, far)
            first = np.minimum(np.searchsorted(ratio, scale), len(ratio) - 1)
            deltas = above[first] * (1 + _SUMS) - scale * above_inverse[first] + _beyond(far)
            np.minimum(lowest, deltas, out=lowest)
        return np.clip(lowest + self._lost, 0.0, 1.0)

    def added(self, epsilon: Array) -> Array:
        """Return upper bounds of E_without (1 - e^epsilon f)_+ at epsilons of any sign."""
        from scipy.special import ndtr

        scale = np.exp(np.minimum(epsilon, 700.0))
        lowest_number = _cut_below(self.mu)
        deltas = scale * lowest_number * float(ndtr(-_NEAR))
        levels = np.searchsorted(_LEVELS, epsilon, side="right")
        for level in np.unique(levels):
            most = math.exp(-_LEVELS[level - 1]) if level else 3.0
            ratio, below, below_ratio = _sums_below(self.mu, self.bins, most)
            at = levels == level
            last = np.searchsorted(ratio, 1 / scale[at])
            deltas[at] += below[last] * (1 + _SUMS) - scale[at] * below_ratio[last]
        return np.clip(deltas + self._lost, 0.0, 1.0)


def _fine_enough(mu: float) -> list[float]:
    """Return where to cut l_t so that a step is at most its deviation, and the nearest."""
    most = _MOST_POINTS * _deviation(mu)
    return [_FAR[0], *(far for far in _FAR[1:] if math.exp(mu * far + mu * mu / 2) <= most)]


def _cut_below(mu: float) -> float:
    return math.exp(-mu * _NEAR - mu * mu / 2)


def _deviation(mu: float) -> float:
    """Return the standard deviation of l_t."""
    return math.sqrt(math.expm1(mu * mu))


def _reach(mu: float, bins: int) -> float:
    """Return how far above T a the sum of T numbers lies, unless some of them are very large."""
    return bins * (1 - _cut_below(mu)) + 12 * _deviation(mu) * math.sqrt(bins)


def _points(mu: float, reach: float) -> int:
    fine = min(reach * _FINE / _deviation(mu), float(_MOST_POINTS))
    return max(_LEAST_POINTS, int(fine))


@lru_cache(maxsize=4)
def _sums_above(mu: float, bins: int, far: float) -> tuple[Array, Array, Array]:
    """Return points of f, and with the member the masses from each on, and those divided by f.

    The last point stands for all that is beyond, and its mass counts in full.
    """
    low, high = _cut_below(mu), math.exp(mu * far + mu * mu / 2)
    reach = _reach(mu, bins) + high - low
    points = _points(mu, reach)
    step = reach / (points - 1)
    masses = np.zeros(points)
    cut = min(points, math.ceil((high - low) / step) + 1)
    masses[:cut] = _masses(mu, low, step, cut)
    weighted = masses * (low + step * np.arange(points))
    total = _convolved(_power(masses, bins - 1), weighted)
    ratio = low + step * np.arange(points) / bins
    inverse = 1 / ratio
    inverse[-1] = 0.0
    return ratio, _from_above(total), _from_above(total * inverse)


@lru_cache(maxsize=16)
def _sums_below(mu: float, bins: int, most: float) -> tuple[Array, Array, Array]:
    """Return points of f up to ``most``, and without the member the masses, and f, below each.

    The last point is the least of all that is beyond.
    """
    low = _cut_below(mu)
    reach = min(_reach(mu, bins), bins * (most - low))
    if reach <= 0:  # f' is nowhere as low as that
        return np.array([low]), np.zeros(2), np.zeros(2)
    points = _points(mu, reach)
    step = reach / (points - 1)
    total = _power(_masses(mu, low, step, points), bins)
    ratio = low + step * np.arange(points) / bins
    below = np.concatenate([[0.0], np.cumsum(total)])
    return ratio, below, np.concatenate([[0.0], np.cumsum(total * ratio)])


def _from_above(masses: Array) -> Array:
    return np.cumsum(masses[::-1])[::-1]


def _masses(mu: float, low: float, step: float, points: int) -> Array:
    """Return the masses of l_t, cut to the grid, moved to its points so that the mean stays.

    Of a cell's mass m0 with mean m1 / m0 the upper point gets (m1 - lower * m0) / step.
    """
    from scipy.special import ndtr

    grid = low + step * np.arange(points)
    y = np.log(grid) / mu + mu / 2
    mass, mean = _cells(y), _cells(y - mu)
    upper = np.clip((mean - grid[:-1] * mass) / step, 0.0, mass)
    masses = np.zeros(points)
    masses[:-1] += mass - upper
    masses[1:] += upper
    masses[0] += ndtr(y[0])
    masses[-1] += ndtr(-y[-1])
    return masses


def _cells(y: Array) -> Array:
    """Return the masses of N(0, 1) between neighbours, with all digits in both tails."""
    from scipy.special import ndtr

    return np.asarray(np.where(y[:-1] > 0, -np.diff(ndtr(-y)), np.diff(ndtr(y))))


def _power(masses: Array, times: int) -> Array:
    """Return the masses of a sum of ``times`` >= 1 independent numbers, by repeated squaring."""
    total, square = None, masses
    while True:
        if times % 2:
            total = square if total is None else _convolved(total, square)
        times //= 2
        if not times:
            return total if total is not None else square
        square = _convolved(square, square)


def _convolved(left: Array, right: Array) -> Array:
    """Return the masses of a sum; what leaves the grid goes to its last point."""
    from scipy import fft

    points = len(left)
    size = fft.next_fast_len(2 * points, real=True)
    spectrum = fft.rfft(left, size)
    other = spectrum if right is left else fft.rfft(right, size)
    product: Array = fft.irfft(spectrum * other, size)
    np.maximum(product, 0.0, out=product)
    product[points - 1] += product[points:].sum()
    return product[:points].copy()
