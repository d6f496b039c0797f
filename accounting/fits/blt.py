"""Best buffered Toeplitz coefficients: logarithms of rates and weights, several starts."""

import numpy as np

from accounting import checks
from accounting.fits.loss import Array, Loss, Objective, coefficient_loss, minimized
from accounting.mechanisms.buffered_toeplitz import BufferedToeplitz
from accounting.participation import Participation

_MOST_BUFFERS = 5
_MOST_ROUNDS = 32_768
"""Three minutes on one processor; each step of the fit takes O(rounds^2) time."""
_WORTH_A_BUFFER = 1e-5
"""Least relative decrease of the squared error for which another buffer is kept."""


def fit_blt(participation: Participation, buffers: int, objective: Objective) -> BufferedToeplitz:
    """Return the best buffered Toeplitz encoder found with at most ``buffers`` buffers.

    Args:
        participation: rounds, and how often one client may take part.
        buffers: 1 to 5; two or three come within a few percent of the best matrix.
        objective: as in ``fit_toeplitz``.

    Returns:
        The best local optimum of several starts, with as few buffers as do not increase its error:
        each number of buffers also starts from the best fit so far, and must improve on it.

    Raises:
        ConfigError: a value is out of range.
    """
    most = checks.count("buffers", buffers, maximum=_MOST_BUFFERS)
    n = checks.count(
        "rounds",
        participation.rounds,
        maximum=_MOST_ROUNDS,
        hint="That is for fitting a BLT; for more rounds give its decay and scale, or take a tree.",
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
    """The loss and its gradient in the logarithms of ``_blt_parameters``."""
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
    """Rates spread evenly in the logarithm, from about 1 down to 4/n or 1/n.

    1/sqrt(j) is the integral of e^(-s j) s^(-1/2) ds: scales go as the square root of the rate.
    """
    starts = []
    for slowest in (4 / rounds, 1 / rounds):
        rates = np.geomspace(0.5, min(0.4, slowest), 2 * count + 1)[1::2]
        starts.append(np.concatenate([np.log(rates), np.log(0.7 * np.sqrt(rates))]))
    return starts


def _one_more(fit: Array, count: int, rounds: int) -> list[Array]:
    """The best fit so far, if of one buffer less, with another: faster or slower than all."""
    if len(fit) != 2 * (count - 1) or not len(fit):
        return []
    rates, weights = np.split(fit, 2)
    return [
        np.concatenate([rates, [rate], weights, [-5.0]])
        for rate in (rates.max() + 1.0, max(rates.min() - 1.5, np.log(0.1 / rounds)))
    ]
