"""Best non-increasing Toeplitz coefficients: log c_j = -(sum of exp(p_i) for i <= j)."""

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.fits.loss import Array, Objective, coefficient_loss, minimized
from accounting.mechanisms.toeplitz import Toeplitz
from accounting.participation import Participation

_MOST_ROUNDS = 32_768


def fit_toeplitz(participation: Participation, bands: int | None, objective: Objective) -> Toeplitz:
    """Return the best non-increasing Toeplitz encoder.

    Args:
        participation: rounds, and how often one client may take part.
        bands: number of coefficients, 1 .. rounds; None is all of them. The noise keeps
            ``bands`` - 1 past vectors.
        objective: "rmse", the root mean squared error over the prefix sums, or "max", the largest.

    Returns:
        A local optimum, found from the square-root filter; seconds for 2048 rounds.

    Raises:
        ConfigError: a value is out of range.
    """
    n = checks.count(
        "rounds",
        participation.rounds,
        maximum=_MOST_ROUNDS,
        hint="That is for fitting a Toeplitz encoder; its square root takes more.",
    )
    width = n if bands is None else checks.count("bands", bands)
    if width > n:
        raise ConfigError(f"bands={width}: must be at most rounds={n}.")
    loss = coefficient_loss(participation, objective)

    def from_logs(logs: Array) -> tuple[float, Array]:
        drops = np.exp(logs)
        column = np.zeros(n)
        column[:width] = np.exp(-np.concatenate([[0.0], np.cumsum(drops)]))
        value, gradient = loss(column)
        tails = np.cumsum((column * gradient)[:width][::-1])[::-1]
        return value, -drops * tails[1:]

    start = np.log(-np.log1p(-0.5 / np.arange(1, width)))
    logs, _ = minimized(from_logs, start, [(-25.0, 3.0)] * (width - 1))
    coefficients = np.exp(-np.concatenate([[0.0], np.cumsum(np.exp(logs))]))
    return Toeplitz(n, tuple(coefficients))
