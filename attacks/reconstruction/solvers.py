"""Solvers: L-BFGS-B and Gauss-Newton on pixels in [0, 1]; each keeps its best point.

Gradient matching works because of float64, a loss divided by ||g||^2 and no tolerances. The usual
choice (torch's LBFGS on the raw loss, with its absolute tolerances) stops at 4 to 6 dB on gradients
that are recovered to 100 dB here, which looks like privacy and is not. L-BFGS-B is cheap; where it
stalls on an ill-conditioned view (trained weights, one dense layer), Gauss-Newton often does not.
"""

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from torch import Tensor

Status = Literal["exact", "matched", "stalled", "budget", "diverged", "not run"]
Objective = Callable[[Tensor], Tensor]

SOLVED = 1e-16  # relative matching loss at which a search stops: the resolution of float64
_MEMORY = 20  # pairs of steps and gradients that L-BFGS-B keeps
_DAMPING = 1e-2
_LEAST_DAMPING = 1e-18
_VECTORIZED = 98  # columns of a Jacobian at a time
_ATTEMPTS = 8  # dampings to try before a Gauss-Newton search gives up


@dataclass
class Search:
    """The best point of one search so far; the solver's last iterate may be worse."""

    x: Tensor
    value: float = float("inf")
    status: Status = "stalled"
    evaluations: int = 0


class _StopError(Exception):
    """Leaves a solver's loop: solved, out of budget, or no longer finite."""


def quasi_newton(objective: Objective, start: Tensor, budget: int) -> Search:
    """Minimise by scipy's L-BFGS-B (Zhu et al. 1997); every point lies in [0, 1]."""
    search = Search(start)
    options = {"maxcor": _MEMORY, "ftol": 0.0, "gtol": 0.0, "maxiter": budget, "maxfun": budget}

    def evaluate(values: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        x = torch.tensor(values).view_as(start).requires_grad_(True)
        value = objective(x)
        (slope,) = torch.autograd.grad(value, x)
        search.evaluations += 1
        _record(search, x.detach(), value.item(), bool(slope.isfinite().all()), budget)
        return value.item(), slope.numpy().ravel()

    with contextlib.suppress(_StopError):
        minimize(
            evaluate,
            start.numpy().ravel(),
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, 1.0)] * start.numel(),
            options=options,
        )
    return search


def gauss_newton(residual: Objective, start: Tensor, steps: int) -> Search:
    """Minimise ||residual(x)||^2 by Levenberg-Marquardt steps, kept in [0, 1].

    Each step computes the whole Jacobian, one evaluation per unknown, 98 of them vectorized;
    ``torch.func`` must be able to differentiate ``residual``, (...) -> (m,).
    """
    search = Search(start)
    x = start.flatten()
    damping = _DAMPING
    basis = torch.eye(len(x), dtype=x.dtype)

    def flat(point: Tensor) -> Tensor:
        return residual(point.view_as(start))

    def column(tangent: Tensor) -> Tensor:
        moved: Tensor = torch.func.jvp(flat, (x,), (tangent,))[1]
        return moved

    r = flat(x)
    with contextlib.suppress(_StopError):
        search.evaluations = 1
        _record(search, start, float(r @ r), True, len(x) * (steps + 1))
        for _ in range(steps):
            with warnings.catch_warnings():  # torch's rules for jvp call its deprecated jit.script
                warnings.simplefilter("ignore", DeprecationWarning)
                jacobian = torch.vmap(column, chunk_size=_VECTORIZED)(basis)
            search.evaluations += len(x)
            move = _damped_step(flat, x, r, jacobian, damping)
            if move is None:
                return search
            x, r, damping = move
            _record(search, x.view_as(start), float(r @ r), True, len(x) * (steps + 1))
        search.status = "budget"
    return search


def _damped_step(
    flat: Objective, x: Tensor, r: Tensor, jacobian: Tensor, damping: float
) -> tuple[Tensor, Tensor, float] | None:
    """Return the first step that descends, its residual and the next damping; None without one.

    Entries at a bound whose step would leave the box do not move.
    """
    slope, curvature = jacobian @ r, jacobian @ jacobian.T
    leaving = ((x <= 0) & (slope > 0)) | ((x >= 1) & (slope < 0))
    free = (~leaving).nonzero()[:, 0]
    block, scale = curvature[free][:, free], float(curvature.diagonal().mean())
    for _ in range(_ATTEMPTS):
        damped = block + damping * scale * torch.eye(len(free), dtype=x.dtype)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            step = torch.zeros_like(x)
            step[free] = torch.cholesky_solve(slope[free, None], factor)[:, 0]
            moved = (x - step).clamp(0, 1)
            residual = flat(moved)
            if float(residual @ residual) < float(r @ r):
                return moved, residual, max(damping / 6, _LEAST_DAMPING)
        damping *= 4
    return None


def _record(search: Search, x: Tensor, value: float, finite: bool, budget: int) -> None:
    if not (np.isfinite(value) and finite):
        search.status = "diverged"
        raise _StopError
    if value < search.value:
        search.x, search.value = x, value
    if search.value <= SOLVED:
        search.status = "matched"
        raise _StopError
    if search.evaluations >= budget:
        search.status = "budget"
        raise _StopError
