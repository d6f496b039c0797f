r"""Monte Carlo: epsilon of a sampler whose mixture has no closed form, and how likely it is wrong.

For a sampler that draws a member's rounds x on its own, and an encoder C, every run is dominated by
Q = N(0, z^2 I) without the member and P = E_x N(|C| x, z^2 I) with it (docs/concepts/sampling.md).
With s_x = log N(|C| x, z^2 I) / Q at a draw, and L = P / Q = E_x e^(s_x),

    delta_remove = E_P (1 - e^epsilon / L)_+,    delta_add = E_Q (1 - e^epsilon L)_+.

Both are estimated with draws from R = Q E_x e^(w s_x) / Z, Z = E_x exp((w^2 - w) k_x / 2) with
k_x = |C x|^2 / z^2: a mixture with the means w |C| x. w = a >= 1 for the first, 1 - a for the
second; a = 1 draws from P and Q themselves. By Jensen E_x e^(w s_x) >= L^w, so what is averaged,

    (1 - e^epsilon / L)_+ P / R    or    (1 - e^epsilon L)_+ Q / R,

lies between 0 and B = Z (a-1)^(a-1) / a^a e^(-(a-1) epsilon). (jax_privacy has Z for the largest
k_x; a mean is less.) So the Chernoff bound holds (Hoeffding 1963, Theorem 1): the mean m of N draws
of expectation d has kl(m / B, d / B) <= log(1 / f) / N, or m > d, except with probability f.

delta = the bound on d + f, with f a hundredth of delta. The bound falls as epsilon grows, so one f
pays for all epsilons: the answer is too low only if the bound fails at the true epsilon, in the
worse direction. The tilt a is chosen with earlier draws of another stream.

A greatest batch (``BMinSep(most=)``) drops a random rest of a round that more joined. Whether any
round is cut depends on the draws alone, which are the same with the member's updates and without;
let that have the probability t. As long as nobody is cut, all is as without a greatest batch. So of
every set of releases P' <= P + t and Q' >= Q - t, and

    delta' <= delta + (1 + e^epsilon) t.

Every round's number of members is Binomial(population, expected_batch / population), so t is at
most the sum of its tails. What is added is taken at an epsilon that earlier draws chose, below
which the answer is sought, so that it is a constant and the bound still falls as epsilon grows.

f is the probability of one answer, over a seed that was drawn at random once the setting had been
chosen. Whoever chooses a noise, an encoder or a seed by k estimates is wrong with up to k f.

At little noise likelihoods exceed every float, so all of this is in logarithms, and a draw that is
not a finite number raises: it must not count as 0.
"""

import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from accounting import checks
from accounting.bounded import above
from accounting.checks import ConfigError
from accounting.guarantee import Guarantee, mu_upper
from accounting.hull import lowest
from accounting.mechanisms import Mechanism
from accounting.random_allocation import AllocatedGuarantee, BallsInBins, bin_modes
from accounting.report import Assumption, up
from accounting.sensitivity import Array, rounded_up
from accounting.subsampled import bands_of, magnitudes, sampling_assumptions

_FAILURE = 0.01  # part of delta that is the probability of an epsilon that is too low
_CELLS = 2**21  # numbers per chunk of draws
_TILTS = 1 + np.concatenate([[0.0], np.geomspace(0.01, 60.0, 80)])
_PILOT = 16  # each of two pilots has this part of the draws
_SLACK = 1e-9  # room for the rounding of logarithms of likelihoods, and of their mean
_SEED_BITS = 53  # as many as every reader of JSON keeps


@dataclass(frozen=True, slots=True)
class BMinSep:
    """Each member joins a round with one probability, unless it joined one of the last b - 1.

    The b-min-sep sampling of Dong and Ganesh 2026 (arXiv 2602.09338), begun as if it had run
    before, so that every round has ``expected_batch`` members on average. b = 1 is Poisson
    sampling, and expected_batch = population / b is balls in b bins.

    Args:
        expected_batch: expected number of members per round, > 0; the public constant that sums
            are divided by.
        population: number of members, >= 1; public.
        min_separation: b >= 1; expected_batch times b is at most the population.
        most: of more members of a round than that, a uniformly random rest is dropped, and counts
            as if it had joined; None drops nobody.
    """

    expected_batch: float
    population: int
    min_separation: int
    most: int | None = None

    def __post_init__(self) -> None:
        checks.positive("expected_batch", self.expected_batch)
        checks.count("population", self.population)
        checks.count("min_separation", self.min_separation, maximum=checks.MOST_ROUNDS)
        if not self.expected_batch * self.min_separation <= self.population:
            raise ConfigError(
                f"expected_batch={self.expected_batch:g}: at most population / min_separation, "
                f"{self.population / self.min_separation:g}, can join a round."
            )
        if self.most is not None and checks.count("most", self.most) >= self.population:
            raise ConfigError(
                f"most={self.most}: cuts no round of a population of {self.population}; leave it "
                "out."
            )

    @property
    def how(self) -> str:
        """What the sampler must do, as a condition."""
        cut = f"; of more than {self.most} in a round, a uniformly random rest is dropped"
        return (
            f"every member joins a round on its own with probability {self.probability:g}, unless "
            f"it joined one of the {self.min_separation - 1} rounds before; the first rounds "
            f"continue a run that never was{cut if self.most else ''}"
        )

    def cut_probability(self, rounds: int) -> float:
        """Return at least the probability that any of so many rounds is cut.

        >>> 1e-9 < BMinSep(100, 10_000, 4, most=170).cut_probability(1000) < 1e-7
        True
        """
        rounds = checks.rounds(rounds)
        if self.most is None:
            return 0.0
        rate = self.probability / (1 + (self.min_separation - 1) * self.probability)
        one = above(self.most, self.population, min(1.0, rate * (1 + 1e-12)))
        return min(1.0, rounds * (one * (1 + 1e-6) + 1e-300))

    @property
    def probability(self) -> float:
        """Probability p that a member joins if it may, rounded up to a multiple of 2^-53."""
        rate = self.expected_batch / self.population
        exact = rate / (1 - (self.min_separation - 1) * rate)
        return min(1.0, math.ceil(exact * 2.0**53) / 2.0**53)


@dataclass(frozen=True, slots=True)
class EstimatedGuarantee:
    """The guarantee of correlated noise on sampled rounds, estimated by Monte Carlo.

    Adjacency is add-or-remove in the sense of zero-out: the member's place stays empty, and the
    population is a public constant.

    Args:
        noise_multiplier: noise standard deviation on the sum / clip norm, 1e-3 to 1e5.
        sampling: how a member's rounds are drawn. ``BMinSep`` needs an encoder with at most
            ``min_separation`` bands.
        mechanism: what correlates the noise.
        samples: draws in each direction, 10,000 to 10^9.
        seed: of the draws, zero or more; by default a fresh one from the operating system, for
            which alone ``failure`` holds. Give it to repeat a figure.
    """

    noise_multiplier: float
    sampling: BallsInBins | BMinSep
    mechanism: Mechanism
    samples: int = 1_000_000
    seed: int = field(default_factory=lambda: secrets.randbits(_SEED_BITS))
    _hypotheses: "_Hypotheses" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fault = "must lie between 1e-3 and 1e5"
        checks.between("noise_multiplier", self.noise_multiplier, 1e-3, 1e5, fault)
        checks.count("samples", self.samples, minimum=10_000, maximum=10**9)
        checks.count("seed", self.seed, minimum=0)
        object.__setattr__(self, "_hypotheses", self._possible())

    @property
    def mu(self) -> float:
        """Without the sample being hidden, rounded up."""
        terms = 2 * self.mechanism.rounds + 8
        return mu_upper(self._hypotheses.most() * rounded_up(1.0, terms), 1.0)

    def failure(self, delta: float) -> float:
        """Return the probability that ``epsilon(delta)`` is too low; it is part of delta.

        It is that of one answer, for a seed drawn after everything else was chosen.
        """
        return _FAILURE * checks.probability("delta", delta)

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` in (0, 1), except with ``failure(delta)``.

        It is never above the one without sampling, nor above that of bins in closed form. With
        few samples it is loose, not wrong.
        """
        failure = self.failure(delta)
        plain = Guarantee(self.mu).epsilon(delta)
        if isinstance(self.sampling, BallsInBins):
            closed = AllocatedGuarantee(self.noise_multiplier, self.sampling, self.mechanism)
            plain = min(plain, closed.epsilon(delta))
        guess, high = plain / 2, plain
        for pilot in (1, 2):
            draws = list(self._drawn(guess, self.samples // _PILOT, 0.0, pilot))
            guess = max(_least(sample, delta, plain, None) for sample in draws)
        spent = math.log(1 / failure) / self.samples
        if self._cut:
            near = max(_least(sample, delta - failure, plain, spent) for sample in draws)
            if near >= plain:
                return plain
            high = min(plain, 1.25 * near + 0.25)
        rest = delta - failure - self._lost(delta, high)
        both = self._drawn(guess, self.samples, guess / 2, 0)
        bound = max(_least(sample, rest, high, spent) for sample in both)
        return plain if bound >= high else min(plain, bound * (1 + _SLACK) + _SLACK)

    def _drawn(self, near: float, count: int, floor: float, stream: int) -> "Iterator[_Draws]":
        for direction in (0, 1):
            seed = [self.seed, stream, direction]
            yield _Draws.of(self._hypotheses, near, count, floor, seed, direction)

    @property
    def _cut(self) -> float:
        """Probability that a round is cut, rounded up."""
        if not isinstance(self.sampling, BMinSep):
            return 0.0
        return self.sampling.cut_probability(self.mechanism.rounds)

    def _lost(self, delta: float, epsilon: float) -> float:
        """Return what rounds that are cut add to a delta."""
        lost = self._cut * (1 + math.exp(min(epsilon, 700.0)))
        if lost > delta / 2:
            raise ConfigError(
                f"most: some round is cut with probability {self._cut:.2g}, which takes "
                f"{lost:.2g} of delta={delta:g} at epsilon {up(epsilon, 3)}; use a greater one."
            )
        return lost

    def _possible(self) -> "_Hypotheses":
        if isinstance(self.sampling, BallsInBins):
            return _Binned(bin_modes(self.mechanism, self.sampling) / self.noise_multiplier)
        if isinstance(self.sampling, BMinSep):
            b, p = self.sampling.min_separation, self.sampling.probability
            return _Separated(_bands(self.mechanism, b) / self.noise_multiplier, p, b)
        raise ConfigError(f"sampling={self.sampling!r}: must be BallsInBins(...) or BMinSep(...).")

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The conditions of the amplification, besides clipping and secret noise."""
        return (
            *sampling_assumptions("sampling", self.sampling.how, sees="who was sampled when"),
            Assumption(
                "draw-seed",
                f"{self.seed}, the seed of the draws, is random, and was drawn after noise, "
                "mechanism and sampling had been chosen",
                "asserted",
                "a seed that somebody chose is not a random one, and epsilon may be too low; "
                "choosing among k estimates makes one too low with up to k times the probability "
                "that is stated",
            ),
        )


class _Binned:
    """A member's possible rounds x, their probabilities, and the means |C| x / z: of bins.

    Uniform on the columns of a matrix of means; the terms are s_x of each.
    """

    def __init__(self, modes: Array) -> None:
        self._means = np.asarray(np.linalg.qr(modes)[1])  # a rotation changes no distance
        self._squares = (self._means**2).sum(axis=0)
        self.width = sum(modes.shape[1:]) + len(self._means)

    def most(self) -> float:
        """Return the largest k_x."""
        return float(self._squares.max())

    def log_weight(self, factor: Array) -> Array:
        """Return log E_x exp(factor k_x) for each factor."""
        return _log_mean(np.multiply.outer(self._squares, factor))

    def draw(self, rng: "np.random.Generator", count: int, power: float) -> Array:
        """Return terms of s_x at draws from R of w = power, shape (terms, count)."""
        weight = np.exp(_tilt(power) * (self._squares - self._squares.max()))
        bins = rng.choice(len(weight), size=count, p=weight / weight.sum())
        draws = rng.standard_normal((len(self._means), count))
        draws += power * self._means[:, bins]
        return np.asarray(self._means.T @ draws - self._squares[:, None] / 2)

    def log_mean(self, terms: Array, power: float) -> Array:
        """Return log E_x exp(power s_x) at each draw."""
        return _log_mean(power * terms)


class _Separated:
    """The Markov chain of b-min-sep; the terms are the parts of s_x of a round, if it is joined.

    Column t of |C| / z is ``bands[:, t]`` in rounds t, t + 1, ...; two rounds of one member share
    no row, so s_x and k_x are sums over its rounds.
    """

    def __init__(self, bands: Array, probability: float, separation: int) -> None:
        self._bands, self._p, self._b = bands, probability, separation
        self._squares = (bands**2).sum(axis=0)
        self.width = 4 * bands.shape[1] + 2 * separation

    def most(self) -> float:
        rounds, b = len(self._squares), self._b
        squared = np.zeros(rounds + b)
        for t in reversed(range(rounds)):
            squared[t] = max(squared[t + 1], self._squares[t] + squared[t + b])
        return float(squared[:b].max())

    def log_weight(self, factor: Array) -> Array:
        later = self._later(np.multiply.outer(self._squares, factor))
        return _log_mean(later[: self._b], self._start())

    def draw(self, rng: "np.random.Generator", count: int, power: float) -> Array:
        bands, (length, rounds) = self._bands, self._bands.shape
        draws = rng.standard_normal((rounds, count))
        for t, joins in enumerate(self._joins(rng, count, power)):
            for i in range(min(length, rounds - t)):
                draws[t + i] += power * bands[i, t] * joins
        terms = np.empty((rounds, count))
        for t in range(rounds):
            inside = min(length, rounds - t)
            terms[t] = bands[:inside, t] @ draws[t : t + inside]
        return np.asarray(terms - self._squares[:, None] / 2)

    def log_mean(self, terms: Array, power: float) -> Array:
        return _log_mean(self._later(power * terms)[: self._b], self._start())

    def _joins(self, rng: "np.random.Generator", count: int, power: float) -> Iterator[Array]:
        """Yield who joins each round, if x has the weight exp((w^2 - w) k_x / 2)."""
        reward = _tilt(power) * self._squares
        later = self._later(reward[:, None])[:, 0]
        start = self._start() * np.exp(later[: self._b] - later[: self._b].max())
        free = rng.choice(self._b, size=count, p=start / start.sum())
        for t, gain in enumerate(reward):
            joins = math.exp(math.log(self._p) + gain + later[t + self._b] - later[t])
            now = (free <= t) & (rng.random(count) < joins)
            free[now] = t + self._b
            yield now.astype(np.float64)

    def _later(self, rewards: Array) -> Array:
        """Return log E exp(sum of rewards of the rounds joined from t on), if free at t."""
        rounds, b = len(rewards), self._b
        later = np.zeros((rounds + b, *rewards.shape[1:]))
        stays = math.log1p(-self._p) if self._p < 1 else -math.inf
        joins = math.log(self._p)
        for t in reversed(range(rounds)):
            later[t] = np.logaddexp(stays + later[t + 1], joins + rewards[t] + later[t + b])
        return later

    def _start(self) -> Array:
        """Return the stationary probabilities of the round from which a member is free."""
        weights = np.full(self._b, self._p)
        weights[0] = 1.0
        return np.asarray(weights / weights.sum())


_Hypotheses = _Binned | _Separated


@dataclass(frozen=True, slots=True)
class _Draws:
    """What the mean needs of draws: losses above a floor, their weights, the count and the tilt."""

    losses: Array
    log_weights: Array
    count: int
    tilt: float
    log_normal: float
    floor: float

    @classmethod
    def of(
        cls,
        hypotheses: _Hypotheses,
        near: float,
        count: int,
        floor: float,
        seed: list[int],
        direction: int,
    ) -> "_Draws":
        """Draw with the tilt of the least B at an epsilon of ``near``; direction 0 is removing."""
        normal = hypotheses.log_weight((_TILTS**2 - _TILTS) / 2)
        best = int(np.argmin(_log_bound(_TILTS, normal, near)))
        tilt, log_normal = float(_TILTS[best]), float(normal[best])
        power = 1 - tilt if direction else tilt
        rng = np.random.default_rng(seed)
        parts: list[tuple[Array, Array]] = []
        remaining = count
        while remaining:
            size = min(remaining, max(256, _CELLS // hypotheses.width))
            remaining -= size
            terms = hypotheses.draw(rng, size, power)
            log_ratio = hypotheses.log_mean(terms, 1.0)
            drawn = 0.0 if tilt == 1 and direction else log_ratio
            if tilt > 1:
                drawn = hypotheses.log_mean(terms, power) - log_normal
            loss = -log_ratio if direction else log_ratio
            weight = (np.zeros(size) if direction else log_ratio) - drawn
            if not (np.isfinite(loss).all() and np.isfinite(weight).all()):
                raise ConfigError(
                    "noise_multiplier: with so little noise, or so large an encoder, the "
                    "likelihood of a draw is not a number; use the guarantee without sampling."
                )
            high = ~(loss <= floor)
            parts.append((loss[high], weight[high]))
        losses, weights = (np.concatenate(part) for part in zip(*parts, strict=True))
        return cls(losses, weights, count, tilt, log_normal, floor)

    def log_bound(self, epsilon: float) -> float:
        """Return log B, above the logarithm of everything that is averaged."""
        return float(_log_bound(np.array(self.tilt), self.log_normal, epsilon))

    def share(self, epsilon: float) -> float:
        """Return the estimate of delta / B at an epsilon above the floor, rounded up."""
        with np.errstate(divide="ignore"):  # a loss below epsilon gains exp(-inf)
            gains = np.log(-np.expm1(np.minimum(epsilon - self.losses, 0.0)))
        shares = np.exp(gains + self.log_weights - self.log_bound(epsilon))
        return min(1.0, float(shares.sum()) / self.count * (1 + _SLACK))


def _least(draws: _Draws, delta: float, high: float, spent: float | None) -> float:
    """Return the least epsilon with delta, or ``high``.

    ``spent`` is log(1 / f) / N; None is for the estimate without its error.
    """

    def enough(epsilon: float) -> bool:
        share = draws.share(epsilon)
        mean = share if spent is None else highest_mean(share, spent)
        return mean == 0 or draws.log_bound(epsilon) + math.log(mean) <= math.log(delta)

    return draws.floor if enough(draws.floor) else lowest(enough, draws.floor, high, close=1e-6)


def highest_mean(mean: float, spent: float) -> float:
    """Return the largest expectation u of numbers in [0, 1] with kl(mean, u) <= spent, rounded up.

    >>> round(highest_mean(0.0, 0.1), 6)  # 1 - exp(-0.1)
    0.095163
    """
    return lowest(lambda u: _kl(mean, u) > spent, mean, 1.0, close=1e-9)


def _kl(q: float, u: float) -> float:
    """Return the Kullback-Leibler divergence of coins, q <= u."""
    if u >= 1:
        return math.inf if q < 1 else 0.0
    first = q * math.log(q / u) if q else 0.0
    return first + (1 - q) * (math.log1p(-q) - math.log1p(-u)) if q < 1 else first


def _log_bound(tilt: Array, log_normal: Array | float, epsilon: float) -> Array:
    """Return log B; at tilt 1 it is 0."""
    past = tilt - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.where(past > 0, past * np.log(past), 0.0)
    return np.asarray(log_normal + power - tilt * np.log(tilt) - past * epsilon)


def _tilt(power: float) -> float:
    return (power * power - power) / 2


def _log_mean(logs: Array, weights: Array | None = None) -> Array:
    """Return the logarithm of the mean of exp(logs) over the first axis."""
    largest = logs.max(axis=0)
    scaled = np.exp(logs - largest)
    mean = scaled.mean(axis=0) if weights is None else np.tensordot(weights, scaled, axes=1)
    return np.asarray(largest + np.log(mean))


def _bands(mechanism: Mechanism, separation: int) -> Array:
    """Return the diagonals of |C|: row i has |C|_(t + i, t) for each round t."""
    reach, encoder, rounds = bands_of(mechanism), magnitudes(mechanism), mechanism.rounds
    if reach > separation:
        raise ConfigError(
            f"min_separation={separation}: the encoder of {mechanism.name} has {reach} bands. "
            "b-min-sep is covered only if two rounds of one member never share noise (Dong and "
            "Ganesh 2026)."
        )
    bands = np.zeros((reach, rounds))
    for lag in range(reach):
        bands[lag, : rounds - lag] = np.diagonal(encoder, -lag)
    return bands
