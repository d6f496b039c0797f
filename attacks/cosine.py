"""Cosine matching: Adam on the direction of the update, with a prior, many restarts at once.

Geiping et al. 2020 (Inverting gradients). First order only, so it works where ReLU leaves second
order solvers without curvature; it needs thousands of steps, and fails on deep networks within
any budget of a processor. Then it says so.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from attacks.labels import label_candidates
from attacks.observation import Observation
from attacks.reconstruct import (
    Reconstruction,
    check_bounds,
    differentiable_update,
    matching_loss,
    starting_point,
    total_variation,
)
from attacks.solvers import SOLVED, Bounds, Status
from attacks.update import client_update, ready

_TINY = 1e-30  # keeps 0 / 0 from becoming a direction
_DECAY_AT, _DECAY = (3 / 8, 5 / 8, 7 / 8), 0.1  # of the steps; as published


def cosine_tv(
    model: nn.Module,
    observation: Observation,
    *,
    restarts: int = 8,
    steps: int = 2000,
    learning_rate: float = 0.1,
    tv: float = 3e-3,
    signed: bool = True,
    bounds: Bounds = (0.0, 1.0),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Reconstruction:
    """Reconstruct a batch by the direction of its update; for ReLU networks.

    Minimises 1 - cos(u(x), u) + tv TV(x) by Adam, for all restarts in one batch. Each restart ends
    where it ends; the one with the least relative residual is returned. A fixed number of steps
    proves nothing: the status is "budget" unless the residual says otherwise.

    Args:
        model: the client's architecture; its weights are taken from ``observation``.
        observation: what the attacker has seen.
        restarts: starting points, >= 1; one more costs little on a small network.
        steps: of Adam, >= 1.
        learning_rate: > 0; falls to a tenth after 3/8, 5/8 and 7/8 of the steps.
        tv: weight of the total variation, >= 0.
        signed: step by the sign of the slope.
        bounds: least and greatest pixel value.
        seed: of the starting points.
        dtype: in which gradients are computed; the residual is always float64.

    Raises:
        ConfigError: as ``dlg``; labels that are hidden and must be guessed.
    """
    restarts, steps = checks.count("restarts", restarts), checks.count("steps", steps)
    rate, tv = checks.positive("learning_rate", learning_rate), checks.nonnegative("tv", tv)
    seed = checks.count("seed", seed, minimum=0)
    check_bounds(bounds)
    start = time.perf_counter()
    labels, *others = label_candidates(model, observation)
    if others:
        raise ConfigError("labels=None: cosine_tv needs them known or in view; dlg guesses them.")
    match = matching_loss(model, observation, labels)
    distance = cosine_distance(model, observation, labels, restarts, dtype)
    points = [starting_point(observation.shape, bounds, [seed, i]) for i in range(restarts)]
    x = torch.stack(points).to(dtype).requires_grad_(True)
    solver = torch.optim.Adam([x], lr=rate)
    milestones = {int(part * steps) for part in _DECAY_AT}
    for step in range(steps):
        loss = (distance(x) + tv * total_variation(x).mean(-1)).sum()
        (slope,) = torch.autograd.grad(loss, x)
        slope.nan_to_num_(0.0)
        x.grad = slope.sign_() if signed else slope
        if step in milestones:
            solver.param_groups[0]["lr"] *= _DECAY
        solver.step()
        with torch.no_grad():
            x.clamp_(*bounds)
    ends = x.detach().double()
    found = [float(match(end).detach()) for end in ends]
    matches = [value if math.isfinite(value) else math.inf for value in found]
    best = min(range(restarts), key=lambda i: matches[i])
    return Reconstruction(
        x=ends[best],
        labels=labels,
        match=matches[best],
        status=_status(matches[best]),
        evaluations=restarts * (steps + 1),
        seconds=time.perf_counter() - start,
        restarts=tuple(matches),
    )


def cosine_distance(
    model: nn.Module,
    observation: Observation,
    labels: Tensor,
    restarts: int,
    dtype: torch.dtype = torch.float32,
) -> Callable[[Tensor], Tensor]:
    """Return x (R, B, C, H, W) -> (R,), 1 - cosine of each restart's update and the seen one.

    One restart is differentiated by plain autograd, which is faster for one; several by ``vmap``.
    The cosine does not see the clip, which only scales.
    """
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in observation.state.items()}
    target = {name: value.to(dtype) for name, value in observation.update.items()}
    size = torch.stack([value.square().sum() for value in target.values()]).sum().sqrt()
    names = observation.sent or tuple(target)
    options = (labels, observation.loss, observation.local)

    def distance(mine: dict[str, Tensor]) -> Tensor:
        rows = {name: mine[name].reshape(restarts, -1) for name in target}
        dots = [rows[name] @ value.flatten() for name, value in target.items()]
        squares = [row.square().sum(1) for row in rows.values()]
        length = torch.stack(squares).sum(0).sqrt()
        return 1 - torch.stack(dots).sum(0) / (length * size).clamp(min=_TINY)

    if restarts == 1:
        single = differentiable_update(model, replace(observation, state=state), labels)
        return lambda x: distance(single(x[0]))
    net = ready(model, observation.training)

    def update(x: Tensor) -> dict[str, Tensor]:
        return client_update(net, state, names, x, *options, functional=True)

    def many(x: Tensor) -> Tensor:
        return distance(torch.vmap(update)(x))

    return many


def _status(match: float) -> Status:
    if match == math.inf:
        return "diverged"
    return "matched" if match <= SOLVED else "budget"
