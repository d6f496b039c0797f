"""Paired replay: a run repeated with the same noise, with and without one client.

An operator who still has the updates (or simulates them) and the noise key runs the server twice.
The releases then differ by what that client adds, exactly: no statistics, and every fault of clip,
weight, divisor or schedule shows. What is left of a release when the known sum is subtracted is the
noise, T d draws of it, which bound its standard deviation to a fraction of a percent.

Both are whitened by the noise that the mechanism should have: with K = L L^T the covariance of the
rounds' noise at unit draws (``attacks.lower_bounds.canaries.round_covariance``),

    signal = |L^-1 difference|,        sigma <= sqrt(sum (L^-1 residual)^2 / chi2_quantile(alpha)),

and mu >= signal / that, if the noise is Gaussian with the mechanism's correlations. Not that it is
Gaussian, but these are tested: a lag of whitened noise that is correlated, a tensor or a round with
less or more noise than the rest, and a parameter without any. The deviation of all the noise is
compared with the plan's: 5 % less are found among 12,000 draws. Sound noise fails any of these
tests with probability 1e-6 at most.

A tensor of n parameters in one round is n draws. Their share of the sum of squares of all draws has
a Beta distribution, whatever the deviation; docs/how-to/audit-epsilon.md says what it finds.

Releases are rounded to float32, differently in the two runs, which adds to the norm of a difference
of many parameters. So the signal is the part along the client's own direction, to which rounding
adds next to nothing, or the whole norm less what rounding may add.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.linalg import cholesky, solve_triangular
from scipy.special import betainc, betaincc
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from attacks.lower_bounds.bounds import Bound, error_of, from_mu

Array = NDArray[np.float64]
METHOD = "paired replay"
ASSUMPTION = "Gaussian noise; tested: the mechanism's correlations"
_PART = 1 << 22  # values that are whitened at a time
FALSE_ALARM = 1e-6  # probability, at most, that sound noise fails one of the tests
_STEP = 2.0**-20  # the server counts in steps of at most this share of the noise's deviation


@dataclass(frozen=True, slots=True)
class Replay:
    """What a paired replay measured; norms and deviations are in units of the clip norm.

    Attributes:
        faults: how the noise differs from the mechanism's, whatever its deviation; a sentence each.
        off_plan: how its deviation differs from the plan's, a sentence; empty if it does not. A
            bound holds nevertheless: it is of the measured deviation.
    """

    signal: float  # mu times sigma of this client; rounding does not add to it
    sigma: float  # root mean square of the whitened noise
    planned: float  # the plan's noise multiplier
    draws: int  # number of whitened noise values, rounds times parameters
    faults: tuple[str, ...]
    off_plan: str

    def bound(self, delta: float, confidence: float = 0.95) -> Bound:
        """Return the bound on mu and epsilon; it assumes the mechanism's correlations."""
        quantile = float(stats.chi2.ppf(error_of(confidence), self.draws))
        # The noise is at most this, so the signal shows at least so much.
        high = self.sigma * math.sqrt(self.draws / quantile) * (1 + 1e-9)
        mu = self.signal / high
        return from_mu(METHOD, ASSUMPTION, mu, delta=delta, confidence=confidence)

    def least_seen(self, false_alarm: float) -> float:
        """Return the factor of less noise that is found in 99 of 100 cases, below 1."""
        limit = stats.chi2.ppf(false_alarm / 4, self.draws)
        return math.sqrt(float(limit / stats.chi2.ppf(0.99, self.draws)))


def joined(replays: Sequence[Replay]) -> Replay:
    """Return the replay of a client that spans groups of parameters, from those of the groups.

    One Gaussian release has all of them, so that squares of their signals add; the deviation is of
    all draws together, of which the groups' own tests ask whether it is one.
    """
    draws = sum(replay.draws for replay in replays)
    squares = sum(replay.draws * replay.sigma**2 for replay in replays)
    return Replay(
        signal=math.hypot(*(replay.signal for replay in replays)),
        sigma=math.sqrt(squares / draws),
        planned=replays[0].planned,
        draws=draws,
        faults=tuple(dict.fromkeys(fault for replay in replays for fault in replay.faults)),
        off_plan=next((replay.off_plan for replay in replays if replay.off_plan), ""),
    )


def whitened(noise: Array, covariance: Array) -> Array:
    """Return L^-1 times the noise (T, d) of T rounds whose covariance is L L^T."""
    root = np.asarray(cholesky(covariance, lower=True))
    return np.asarray(solve_triangular(root, noise, lower=True, check_finite=False))


def paired(
    difference: Tensor | Array,
    residual: Tensor | Array,
    covariance: Array,
    *,
    noise_multiplier: float,
    along: Array | None = None,
    rounding: float | Array = 0.0,
    tensors: Mapping[str, int] | None = None,
    rounds: Sequence[int] | None = None,
    false_alarm: float = FALSE_ALARM,
) -> Replay:
    """Return what two runs of one server with the same noise show.

    Args:
        difference: (T, d), rounds' noised sums with the client minus those without it, in units of
            the clip norm.
        residual: (T, d), a run's noised sums minus the sums of its updates, in the same units.
        covariance: K (T, T), of the noise of the rounds' sums at unit draws.
        noise_multiplier: the plan's.
        along: (T,), products of the difference with the client's direction, of length 1; None if
            the difference is exact.
        rounding: norm, at most, of what rounding adds to a parameter's whitened differences, (d,)
            or one for all.
        tensors: sizes, by name, of the tensors that the d parameters belong to, in order.
        rounds: numbers of the T rounds in the run; None if these are all.
        false_alarm: probability, at most, that sound noise has a fault or is off the plan.
    """
    planned = checks.positive("noise_multiplier", noise_multiplier)
    try:
        root = np.asarray(cholesky(covariance, lower=True))
    except (ValueError, np.linalg.LinAlgError):  # also of another shape, or not finite
        raise ConfigError(
            f"covariance: shape {covariance.shape}; must be square, finite and positive definite."
        ) from None
    noise = _squares(root, residual, tensors)
    count, dim = residual.shape
    if tuple(difference.shape) != (count, dim):
        raise ConfigError(
            f"difference: shape {tuple(difference.shape)}; must be that of the residual, "
            f"{(count, dim)}."
        )
    error = np.broadcast_to(np.asarray(rounding, dtype=np.float64), (dim,))
    signal = _whitened_norm(root, difference, "difference")
    signal -= checks.nonnegative("rounding", float(np.linalg.norm(error)))
    if along is not None:
        products = np.asarray(along, dtype=np.float64)[:, None]
        signal = max(signal, _whitened_norm(root, products, "along"))
    draws = count * dim
    squares = float(np.trace(noise.gram))
    if not signal > 0:
        raise ConfigError("difference: is zero, so the two runs do not differ by a client.")
    if not squares > 0:
        raise ConfigError(
            "residual: is zero: the server added no noise, and there is no finite mu to bound."
        )
    error = error + planned * _STEP * math.sqrt(count / np.linalg.eigvalsh(covariance)[0])
    pairs = count * (count - 1) // 2
    # Half is for the plan's deviation; T - 1 lags and a parameter count like pairs.
    error_of_one = (
        checks.probability("false_alarm", false_alarm) / 2 / (pairs + count + 1 + noise.tests)
    )
    return Replay(
        signal=signal,
        sigma=math.sqrt(squares / draws),
        planned=planned,
        draws=draws,
        faults=(
            *_correlated(noise.gram, dim, error_of_one),
            *_uneven(noise, error, range(count) if rounds is None else rounds, error_of_one),
        ),
        off_plan=_off_plan(squares, draws, planned, float(np.linalg.norm(error)), false_alarm / 4),
    )


def _whitened(
    root: Array, vectors: Tensor | Array, name: str
) -> Iterator[tuple[slice, Array, Array]]:
    """Yield some columns, the vectors there, and L^-1 times them."""
    rounds = len(root)
    if vectors.ndim != 2 or vectors.shape[0] != rounds or not vectors.shape[1]:
        raise ConfigError(
            f"{name}: shape {tuple(vectors.shape)}; must be ({rounds}, parameters), a row for each "
            "round."
        )
    columns = max(1, _PART // rounds)
    for start in range(0, vectors.shape[1], columns):
        block = slice(start, start + columns)
        part = np.asarray(vectors[:, block], dtype=np.float64)
        if not np.isfinite(part).all():
            raise ConfigError(f"{name}: has values that are not finite.")
        yield block, part, solve_triangular(root, part, lower=True, check_finite=False)


def _whitened_norm(root: Array, vectors: Tensor | Array, name: str) -> float:
    parts = _whitened(root, vectors, name)
    return math.sqrt(sum(float(np.square(white).sum()) for _, _, white in parts))


@dataclass(frozen=True, slots=True)
class _Squares:
    """Sums of squares of a run's noise N, and of W = L^-1 N."""

    gram: Array  # W W^T
    cells: Array  # (2, T, K) by round and tensor: of N over its expectation at unit draws, and of W
    columns: Array  # (d,) of W by parameter
    tensors: Mapping[str, int]  # sizes by name, in order

    @property
    def tests(self) -> int:
        """Number of sums that ``_uneven`` tests."""
        return 2 * (len(self.gram) + 1) * (len(self.tensors) + 1)


def _squares(root: Array, residual: Tensor | Array, tensors: Mapping[str, int] | None) -> _Squares:
    dim = residual.shape[-1]
    sizes = {"all parameters": dim} if tensors is None else {k: n for k, n in tensors.items() if n}
    if sum(sizes.values()) != dim:
        raise ConfigError(f"tensors: have {sum(sizes.values())} parameters; must have {dim}.")
    tensor = np.repeat(np.arange(len(sizes)), list(sizes.values()))
    expected = np.square(root).sum(1, keepdims=True)
    gram = np.zeros((len(root), len(root)))
    cells = np.zeros((2, len(root), len(sizes)))
    columns = np.zeros(dim)
    for block, part, white in _whitened(root, residual, "residual"):
        gram += white @ white.T
        columns[block] = np.square(white).sum(0)
        starts = np.flatnonzero(np.diff(tensor[block], prepend=-1))
        for cell, squares in zip(
            cells, (np.square(part) / expected, np.square(white)), strict=True
        ):
            cell[:, tensor[block][starts]] += np.add.reduceat(squares, starts, axis=1)
    return _Squares(gram, cells, columns, sizes)


def _correlated(gram: Array, dim: int, alpha: float) -> list[str]:
    """Name two rounds, and a distance of rounds, whose noise is correlated after whitening."""
    rounds = len(gram)
    if dim < 2 or rounds < 2:
        return []
    faults = []
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    correlations = gram / np.outer(scale, scale)
    # The correlation r of two independent Gaussian vectors: r^2 is Beta(1/2, (d - 1)/2).
    limit = math.sqrt(float(stats.beta.isf(alpha, 0.5, (dim - 1) / 2)))
    below = np.tril(np.abs(correlations), -1)
    t, s = np.unravel_index(int(below.argmax()), below.shape)
    if below[t, s] > limit:
        faults.append(
            f"The noise of rounds {s} and {t} has a correlation of {correlations[t, s]:.3g} "
            f"after whitening; sound noise stays below {limit:.2g}."
        )
    lags = np.arange(1, rounds)
    means = np.array([np.diagonal(correlations, -lag).mean() for lag in lags])
    worst = int((np.abs(means) * np.sqrt(rounds - lags)).argmax())
    lag, mean = int(lags[worst]), float(means[worst])
    # The mean of k independent correlations, each of variance 1/d and bounded by 1.
    limit = float(stats.norm.isf(alpha / 2)) / math.sqrt((rounds - lag) * dim) * 1.1
    if dim >= 100 and abs(mean) > limit:
        faults.append(
            f"Noise {lag} rounds apart has a mean correlation of {mean:.3g} after whitening; "
            f"sound noise stays below {limit:.2g}."
        )
    return faults


def _uneven(noise: _Squares, error: Array, rounds: Sequence[int], alpha: float) -> list[str]:
    """Name the tensor and round, and the parameter, whose noise is least like that of the rest.

    Noise that is missing before whitening may have the right size after it, and the other way
    round; over all rounds only whitened noise is independent. ``error`` (d,) is the norm, at most,
    of what rounding adds to a parameter's noise, ``alpha`` the level of one test.
    """
    names = [*noise.tensors, "all parameters"]
    sizes = np.array([*noise.tensors.values(), len(error)])
    ends = np.cumsum(sizes[:-1])
    errors = np.sqrt(np.append(np.add.reduceat(error**2, ends - sizes[:-1]), np.sum(error**2)))
    by_round = np.concatenate([noise.cells, noise.cells.sum(2, keepdims=True)], axis=2)
    total = np.broadcast_to(by_round[1].sum(0), (2, 1, len(sizes)))
    cells = np.concatenate([by_round, total], axis=1)
    draws = np.outer([1] * len(rounds) + [len(rounds)], sizes)
    of_all = cells[0, -1, -1], errors[-1], draws[-1, -1]
    less, more = _tails(cells, errors, draws, of_all)
    faults = []
    worst = np.unravel_index(int(np.minimum(less, more).argmin()), cells.shape)
    kind, t, k = map(int, worst)
    if 2 * min(less[kind, t, k], more[kind, t, k]) < alpha:
        when = f"in round {rounds[t]}" if t < len(rounds) else "over all rounds"
        times = math.sqrt(cells[kind, t, k] / draws[t, k] / (cells[0, -1, -1] / draws[-1, -1]))
        faults.append(
            f"The noise of {names[k]} {when} has {times:.3g} times the standard deviation of all "
            f"noise{' after whitening' * kind}."
        )
    i = int((np.sqrt(noise.columns) + error).argmin())
    quietest = noise.columns[i], error[i], np.array(len(rounds))
    less, _ = _tails(*quietest, of_all)
    if less < alpha / len(error):
        times = math.sqrt(noise.columns[i] / len(rounds) / (cells[0, -1, -1] / draws[-1, -1]))
        faults.append(
            f"A parameter has {times:.3g} times the usual noise over all rounds: noise is missing "
            "somewhere."
        )
    return faults


def _tails(
    squares: Array, error: Array, draws: Array, of_all: tuple[float, float, int]
) -> tuple[Array, Array]:
    """Return the probabilities that sound noise has so little of all squares, and so much.

    The squares are of ``draws`` coordinates of the noise in an orthonormal basis, to which rounding
    adds a norm of at most ``error``; ``of_all`` are the same three of all coordinates.
    """
    total, total_error, count = of_all
    norm, other_norm = np.sqrt(squares), np.sqrt(np.maximum(total - squares, 0.0))
    smallest = (norm + error) ** 2, np.maximum(other_norm - total_error, 0.0) ** 2
    largest = np.maximum(norm - error, 0.0) ** 2, (other_norm + total_error) ** 2
    less, more = (part / (part + complement) for part, complement in (smallest, largest))
    a, b = draws / 2, np.maximum(count - draws, 1) / 2
    sure = draws >= count
    return np.where(sure, 1.0, betainc(a, b, less)), np.where(sure, 1.0, betaincc(a, b, more))


def _off_plan(squares: float, draws: int, planned: float, error: float, alpha: float) -> str:
    """Say that noise has another deviation than the plan's; sound noise does with 2 ``alpha``."""
    norm = math.sqrt(squares)
    less = float(stats.chi2.cdf(((norm + error) / planned) ** 2, draws))
    more = float(stats.chi2.sf((max(norm - error, 0.0) / planned) ** 2, draws))
    if min(less, more) >= alpha:
        return ""
    return (
        f"{draws:,} draws of noise have a standard deviation of {norm / math.sqrt(draws):.4g} clip "
        f"norms; the plan says {planned:.4g}."
    )
