"""Loss: squared error of the prefix sums at equal cost, and its gradient in the coefficients.

Sensitivity^2 x (mean or largest) variance of the prefix sums is the square of ``accounting.error``.
For a Toeplitz C with c_0 = 1 let r be the coefficients of 1/((1-x) c(x)). The t-th prefix sum has
variance sum_{j<=t} r_j^2, so both errors are sums w_j r_j^2: w_j = (n-j)/n for the mean, 1 for the
largest. With q = r / c, as power series, the gradient is

    d/dc_i sum_j w_j r_j^2 = -2 sum_{j>=i} w_j r_j q_{j-i}.

The sensitivity is that of the earliest pattern, exact for coefficients that are nonnegative and do
not rise (Kalinin and Lampert 2024, Theorem 2); the fits stay in that region by parametrisation.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from accounting.mechanisms.toeplitz import forward_substitution
from accounting.participation import Participation

Array = NDArray[np.float64]
Objective = Literal["rmse", "max"]
Loss = Callable[[Array], tuple[float, Array]]
"""Parameters -> log of the squared error, and its gradient."""


def coefficient_loss(participation: Participation, objective: Objective) -> Loss:
    """Log of sensitivity^2 x error^2 and its gradient, for non-increasing c with c_0 = 1."""
    n, b = participation.rounds, participation.min_separation
    weights = (n - np.arange(n)) / n if objective == "rmse" else np.ones(n)
    starts = range(0, participation.max_participations * b, b)

    def loss(column: Array) -> tuple[float, Array]:
        v = np.zeros(n)
        for start in starts:
            v[start:] += column[: n - start]
        squared, rise = float(v @ v), np.zeros(n)
        for start in starts:
            rise[: n - start] += 2 * v[start:]
        r = forward_substitution(column, np.ones(n))
        variance = float(weights @ r**2)
        q = _convolve(r, np.diff(r, prepend=0.0))
        fall = -2 * _convolve((weights * r)[::-1], q)[::-1]
        return float(np.log(squared * variance)), rise / squared + fall / variance

    return loss


def _convolve(left: Array, right: Array) -> Array:
    """The first n coefficients of the product of two power series of length n."""
    size = 2 * len(left)
    product = np.fft.irfft(np.fft.rfft(left, size) * np.fft.rfft(right, size), size)
    return np.asarray(product[: len(left)], dtype=np.float64)


def minimized(
    loss: Loss, start: Array, bounds: Sequence[tuple[float, float]]
) -> tuple[Array, float]:
    """L-BFGS-B from ``start``; an empty parameter is already optimal."""
    from scipy.optimize import minimize

    if not len(start):
        return start, loss(start)[0]
    options = {"maxiter": 1000, "maxfun": 2000, "ftol": 1e-9, "gtol": 1e-7, "maxcor": 20}
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return np.asarray(found.x, dtype=np.float64), float(found.fun)
