"""Paired replay: a run repeated with the same noise, with and without one client.

An operator who still has the updates (or simulates them) and the noise key runs the server twice.
The releases then differ by what that client adds, exactly: no statistics, and every fault of clip,
weight, divisor or schedule shows. What is left of a release when the known sum is subtracted is the
noise, T d draws of it, which bound its standard deviation to a fraction of a percent.

Both are whitened by the noise that the mechanism should have: with K = L L^T the covariance of the
rounds' noise at unit draws (``attacks.lower_bounds.canaries.round_covariance``),

    signal = |L^-1 difference|,        sigma <= sqrt(sum (L^-1 residual)^2 / chi2_quantile(alpha)),

and mu >= signal / that, if the noise is Gaussian with the mechanism's correlations. Not that it is
Gaussian, but these are tested: a lag of whitened noise that is correlated, a round with less noise
than the others, a parameter without any, and noise of some parameters that repeats that of others.

Releases are rounded to float32, differently in the two runs, which adds to the norm of a difference
of many parameters. So the signal is the part along the client's own direction, to which rounding
adds next to nothing, or the whole norm less what rounding may add.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.fft import irfft, next_fast_len, rfft
from scipy.linalg import cholesky, solve_triangular
from scipy.special import fdtr, fdtrc
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from attacks.lower_bounds.bounds import Bound, error_of, from_mu

Array = NDArray[np.float64]
ASSUMPTION = "Gaussian noise; tested: the mechanism's correlations"
_PART = 1 << 22
"""Values that are whitened at a time."""
_FALSE_ALARM = 1e-6
"""Probability that sound noise fails one of the tests."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a paired replay measured; norms and deviations are in units of the clip norm.

    Attributes:
        signal: mu times sigma of this client, exact but for rounding, which does not add to it.
        sigma: root mean square of the whitened noise: an estimate of the noise multiplier.
        sigma_high: the deviation is below this, with the bound's confidence.
        draws: number of whitened noise values, rounds times parameters.
        lag: distance in rounds at which whitened noise is most correlated; 0 with one round.
        correlation: the correlation at that distance.
        faults: what is wrong with the noise, a sentence each; sound noise has one with probability
            at most one in a million.
        bound: on mu and epsilon.
    """

    signal: float
    sigma: float
    sigma_high: float
    draws: int
    lag: int
    correlation: float
    faults: tuple[str, ...]
    bound: Bound


def paired(
    difference: Tensor | Array,
    residual: Tensor | Array,
    covariance: Array,
    *,
    delta: float,
    confidence: float = 0.95,
    along: Array | None = None,
    rounding: float = 0.0,
) -> Replay:
    """Return what two runs of one server with the same noise show.

    Args:
        difference: (T, d): rounds' noised sums with the client minus those without it, in units of
            the clip norm.
        residual: (T, d): a run's noised sums minus the sums of its updates, in the same units.
        covariance: K, shape (T, T): covariance of the noise of the rounds' sums at unit draws.
        delta: in (0, 1).
        confidence: in (0, 1).
        along: (T,): products of the difference with the client's direction, of length 1; None if
            the difference is exact.
        rounding: norm, at most, of what rounding adds to the whitened difference.

    Raises:
        ConfigError: shapes that do not fit, values that are not finite, a covariance that is not
            positive definite, or a client that changes nothing.
    """
    alpha = error_of(confidence)
    root = _root(covariance)
    signal = math.sqrt(float(np.trace(_whitened_gram(root, difference, "difference")[0])))
    signal -= checks.nonnegative("rounding", rounding)
    if along is not None:
        own = np.asarray(along, dtype=np.float64)[:, None]
        signal = max(signal, math.sqrt(float(np.trace(_whitened_gram(root, own, "along")[0]))))
    gram, quietest = _whitened_gram(root, residual, "residual")
    rounds, dim = residual.shape
    if tuple(difference.shape) != (rounds, dim):
        raise ConfigError(
            f"difference: shape {tuple(difference.shape)}; must be that of the residual, "
            f"{(rounds, dim)}."
        )
    draws = rounds * dim
    squares = float(np.trace(gram))
    if not signal > 0:
        raise ConfigError("difference: is zero, so the two runs do not differ by a client.")
    if not squares > 0:
        raise ConfigError(
            "residual: is zero: the server added no noise, and there is no finite mu to bound."
        )
    sigma_high = math.sqrt(squares / float(stats.chi2.ppf(alpha, draws))) * (1 + 1e-9)
    lag, correlation = _most_correlated(gram)
    bound = from_mu(
        "paired replay", ASSUMPTION, signal / sigma_high, delta=delta, confidence=confidence
    )
    return Replay(
        signal=signal,
        sigma=math.sqrt(squares / draws),
        sigma_high=sigma_high,
        draws=draws,
        lag=lag,
        correlation=correlation,
        faults=(*_faults(gram, quietest, dim), *_repeated(root, residual, squares)),
        bound=bound,
    )


def _root(covariance: Array) -> Array:
    matrix = np.asarray(covariance, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not np.isfinite(matrix).all():
        raise ConfigError(f"covariance: shape {matrix.shape}; must be square and finite.")
    try:
        return np.asarray(cholesky(matrix, lower=True))
    except np.linalg.LinAlgError:
        raise ConfigError("covariance: must be positive definite.") from None


def _whitened_gram(root: Array, vectors: Tensor | Array, name: str) -> tuple[Array, float]:
    """Return W W^T, with W = L^-1 vectors, and the least sum of squares of a column of W."""
    rounds = len(root)
    if vectors.ndim != 2 or vectors.shape[0] != rounds or not vectors.shape[1]:
        raise ConfigError(
            f"{name}: shape {tuple(vectors.shape)}; must be ({rounds}, parameters), a row for each "
            "round."
        )
    gram = np.zeros((rounds, rounds))
    quietest = math.inf
    columns = max(1, _PART // rounds)
    for start in range(0, vectors.shape[1], columns):
        part = np.asarray(vectors[:, start : start + columns], dtype=np.float64)
        if not np.isfinite(part).all():
            raise ConfigError(f"{name}: has values that are not finite.")
        white = solve_triangular(root, part, lower=True, check_finite=False)
        gram += white @ white.T
        quietest = min(quietest, float((white**2).sum(0).min()))
    return gram, quietest


def _most_correlated(gram: Array) -> tuple[int, float]:
    """Return the lag at which whitened noise is most correlated, for its size, and how much."""
    rounds = len(gram)
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    correlations = gram / np.outer(scale, scale)
    means = [float(np.diagonal(correlations, -lag).mean()) for lag in range(1, rounds)]
    if not means:
        return 0, 0.0
    deviations = np.abs(means) * np.sqrt(rounds - np.arange(1, rounds))
    worst = int(deviations.argmax())
    return worst + 1, means[worst]


def _faults(gram: Array, quietest: float, dim: int) -> list[str]:
    """Return what sound noise of any standard deviation would not do, tested at 1e-6 in all."""
    rounds = len(gram)
    found = []
    squares = np.diag(gram)
    pairs = rounds * (rounds - 1) // 2
    tests = max(1, pairs) + (rounds - 1) + rounds + 2
    alpha = _FALSE_ALARM / tests
    scale = np.sqrt(np.maximum(squares, 1e-300))
    correlations = gram / np.outer(scale, scale)
    # The correlation r of two independent Gaussian vectors: r^2 is Beta(1/2, (d - 1)/2).
    if dim > 1 and pairs:
        most = math.sqrt(float(stats.beta.isf(alpha, 0.5, (dim - 1) / 2)))
        below = np.tril(np.abs(correlations), -1)
        t, s = np.unravel_index(int(below.argmax()), below.shape)
        if below[t, s] > most:
            found.append(
                f"The noise of rounds {s} and {t} has a correlation of {correlations[t, s]:.3g} "
                f"after whitening; sound noise stays below {most:.2g}."
            )
    lag, mean = _most_correlated(gram)
    if lag and dim > 1:
        # The mean of k independent correlations, each of variance 1/d and bounded by 1.
        most = float(stats.norm.isf(alpha / 2)) / math.sqrt((rounds - lag) * dim) * 1.1
        if dim >= 100 and abs(mean) > most:
            found.append(
                f"Noise {lag} rounds apart has a mean correlation of {mean:.3g} after whitening; "
                f"sound noise stays below {most:.2g}."
            )
    if rounds > 1:
        found += _uneven(squares, dim, alpha)
    return found + _silent(float(squares.sum()), quietest, rounds, dim, alpha)


def _uneven(squares: Array, dim: int, alpha: float) -> list[str]:
    """Name the round whose noise differs most from that of the others, if it differs too much."""
    rounds = len(squares)
    others = (squares.sum() - squares) / ((rounds - 1) * dim)
    ratio = squares / dim / np.maximum(others, 1e-300)
    freedom = dim, (rounds - 1) * dim
    p = 2 * np.minimum(fdtr(*freedom, ratio), fdtrc(*freedom, ratio))
    t = int(p.argmin())
    if not p[t] < alpha:
        return []
    return [
        f"The noise of round {t} has {math.sqrt(ratio[t]):.3g} times the standard deviation of the "
        "others after whitening."
    ]


def _silent(squares: float, quietest: float, rounds: int, dim: int, alpha: float) -> list[str]:
    """Say that some parameter has too little noise in all rounds."""
    expected = squares / (rounds * dim)
    if rounds == 1:  # a draw on a grid is 0 now and then
        return []
    # Of d sums of squares over T rounds, the least; the estimate of sigma has an error far below.
    least = float(stats.chi2.ppf(alpha / dim, rounds)) * 0.5
    if dim < 2 or quietest / expected >= least:
        return []
    return [
        f"A parameter has {math.sqrt(quietest / rounds / expected):.3g} times the usual noise over "
        "all rounds: noise is missing somewhere."
    ]


def _repeated(root: Array, residual: Tensor | Array, squares: float) -> list[str]:
    """Say that some parameters have the noise of others, a constant distance apart.

    So it is if layers draw from one seed each. The autocorrelation c at distance k is a quadratic
    form of n = T (d - k) products with trace 0, squares of eigenvalues n / 2 in all and none above
    1, so |c| > sqrt(2 n u) + 2 u has probability at most 2 exp(-u) (Laurent and Massart 2000).
    """
    rounds, dim = residual.shape
    if dim < 2:
        return []
    spectrum = 0.0
    length = next_fast_len(2 * dim - 1, real=True)
    values = np.asarray(residual, dtype=np.float64)
    for weights in np.linalg.inv(root):
        spectrum = spectrum + np.abs(rfft(weights @ values, length)) ** 2
    found = irfft(spectrum, length)[1:dim]
    alpha = _FALSE_ALARM / (rounds * (rounds + 1) + 4)
    u = math.log(4 * (dim - 1) / alpha)
    products = rounds * (dim - np.arange(1.0, dim))
    variance = squares / float(stats.chi2.ppf(alpha / 2, rounds * dim))
    excess = np.abs(found) / variance - np.sqrt(2 * products * u) - 2 * u
    k = int(excess.argmax())
    if not excess[k] > 0:
        return []
    share = found[k] / squares
    return [
        f"Noise {k + 1} parameters apart has an autocorrelation of {share:.3g}: some parameters "
        "have the noise of others."
    ]
