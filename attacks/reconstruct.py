"""Gradient matching: find the image whose gradient is the one that was seen.

Zhu, Liu and Han 2019 (DLG), with the solver that makes it work: scipy's L-BFGS-B in float64 on a
box, with the matching loss divided by ||g||^2 and no tolerances. The stock choice (torch's LBFGS
on the raw loss) stops at 4 to 6 dB on the same gradients, which looks like privacy and is not.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from attacks.labels import known_labels
from attacks.observation import Observation, as_double, clipped, gradient

Status = Literal["exact", "matched", "stalled", "budget"]
Array = npt.NDArray[np.float64]

SOLVED = 1e-16  # relative matching loss below which a search stops: float64 has nothing left to say
GOOD_ENOUGH = 1e-10  # ... and below which no further restart is tried


@dataclass(frozen=True, slots=True, eq=False)
class Reconstruction:
    """What an attack found; chosen by ``match`` alone, never by the truth.

    Args:
        x: (B, C, H, W) float64, inside the bounds.
        labels: (B,) given or inferred.
        match: relative residual ||g(x) - g||^2 / ||g||^2 over the visible numbers.
        status: "exact" (in closed form), "matched" (residual <= 1e-16), "stalled" (the solver
            found no way down), "budget" (cut off: more evaluations might go further).
        evaluations: gradients that the attack computed, over all restarts.
        seconds: wall clock.
        restarts: the match of each restart that was tried.
    """

    x: Tensor
    labels: Tensor
    match: float
    status: Status
    evaluations: int
    seconds: float
    restarts: tuple[float, ...]


def dlg(
    model: nn.Module,
    observation: Observation,
    *,
    restarts: int = 3,
    max_evaluations: int = 1000,
    bounds: tuple[float, float] = (0.0, 1.0),
    seed: int = 0,
) -> Reconstruction:
    """Reconstruct a batch by matching gradients; needs a model with smooth activations.

    Runs on the CPU in float64, from uniform noise. The restart with the least matching loss wins;
    none is tried after one has matched to 1e-10. On ReLU networks the matching loss has no useful
    curvature: expect "stalled" and a high match, which says nothing about privacy.

    Args:
        model: the client's architecture; its weights are taken from ``observation``.
        observation: what the attacker has seen.
        restarts: starting points, >= 1.
        max_evaluations: budget of each restart, in gradients of the matching loss.
        bounds: least and greatest pixel value.
        seed: of the starting points.

    Raises:
        ConfigError: a value out of range, labels that are hidden and cannot be inferred, a
            visible update that is zero.
    """
    restarts = checks.count("restarts", restarts)
    budget = checks.count("max_evaluations", max_evaluations)
    low, high = bounds
    if not -math.inf < low < high < math.inf:
        raise ConfigError(
            f"bounds=({low:g}, {high:g}): must be finite, the first below the second."
        )
    seed = checks.count("seed", seed, minimum=0)
    start = time.perf_counter()
    labels = known_labels(model, observation)
    loss = matching_loss(model, observation, labels)
    tried: list[_Search] = []
    for restart in range(restarts):
        x0 = np.random.default_rng([seed, restart]).uniform(low, high, math.prod(observation.shape))
        tried.append(_search(loss, x0, observation.shape, bounds, budget))
        if tried[-1].match < GOOD_ENOUGH:
            break
    best = min(tried, key=lambda search: search.match)
    return Reconstruction(
        x=torch.from_numpy(best.x.reshape(observation.shape)),
        labels=labels,
        match=best.match,
        status=best.status,
        evaluations=sum(search.evaluations for search in tried),
        seconds=time.perf_counter() - start,
        restarts=tuple(search.match for search in tried),
    )


def matching_loss(
    model: nn.Module, observation: Observation, labels: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return x -> ||g(x) - g||^2 / ||g||^2 over the visible tensors, paired by name.

    Where the update was clipped, the attacker clips its own gradient in the same way.
    """
    target = {name: as_double(value) for name, value in observation.update.items()}
    state = {name: as_double(value) for name, value in observation.state.items()}
    scale = sum(float(value.square().sum()) for value in target.values())
    if not scale > 0:
        raise ConfigError(f"update: {', '.join(target)} is zero; there is nothing to match.")

    def loss(x: Tensor) -> Tensor:
        seen = gradient(model, state, target, x, labels, observation.loss, differentiable=True)
        seen = clipped(seen, observation.clip)
        parts = [(seen[name] - value).square().sum() for name, value in target.items()]
        return torch.stack(parts).sum() / scale

    return loss


@dataclass
class _Search:
    """The best point of one restart so far; scipy's own last iterate may be a worse one."""

    x: Array
    match: float = float("inf")
    status: Status = "stalled"
    evaluations: int = 0


class _StopError(Exception):
    """Leaves scipy's loop: the search has reached its goal or its budget."""


def _search(
    loss: Callable[[Tensor], Tensor],
    x0: Array,
    shape: tuple[int, ...],
    bounds: tuple[float, float],
    budget: int,
) -> _Search:
    search = _Search(x0)

    def evaluate(flat: Array) -> tuple[float, Array]:
        x = torch.tensor(flat.reshape(shape), requires_grad=True)
        value = loss(x)
        (slope,) = torch.autograd.grad(value, x)
        search.evaluations += 1
        _record(search, flat, value.item(), budget)
        return value.item(), slope.numpy().ravel()

    options = {"maxcor": 20, "ftol": 0.0, "gtol": 0.0, "maxiter": budget, "maxfun": budget}
    with contextlib.suppress(_StopError):
        minimize(
            evaluate, x0, jac=True, method="L-BFGS-B", bounds=[bounds] * x0.size, options=options
        )
    return search


def _record(search: _Search, flat: Array, value: float, budget: int) -> None:
    if not np.isfinite(value):
        raise ConfigError(f"matching loss={value}: the model's gradient is not finite in the box.")
    if value < search.match:
        search.x, search.match = flat.copy(), value
    if search.match <= SOLVED:
        search.status = "matched"
        raise _StopError
    if search.evaluations >= budget:
        search.status = "budget"
        raise _StopError
