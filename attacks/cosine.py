"""Cosine matching: Adam on the direction of the update, with a prior, many restarts at once.

Geiping et al. 2020 (Inverting gradients). First order only, so it works where ReLU leaves second
order solvers without curvature; it needs thousands of steps, and fails on deep networks within
any budget of a processor. Then it says so.
"""

import math
import time
from collections.abc import Callable, Sequence
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
    flat,
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
    update = batched_update(model, observation, labels, restarts, dtype)
    target = flat(observation.update.values()).to(dtype)
    points = [starting_point(observation.shape, bounds, [seed, i]) for i in range(restarts)]
    x = torch.stack(points).to(dtype).requires_grad_(True)
    solver = torch.optim.Adam([x], lr=rate)
    one = torch.ones((), dtype=dtype)
    milestones = {int(part * steps) for part in _DECAY_AT}
    for step in range(steps):
        mine, prior = update(x), tv * total_variation(x).mean(-1).sum()
        pulls = cosine_slope(mine, target, restarts)[1]
        outputs = [*mine, prior]
        moved = [i for i, part in enumerate(outputs) if part.requires_grad]  # by the pixels
        (slope,) = torch.autograd.grad(
            [outputs[i] for i in moved], x, [[*pulls, one][i] for i in moved]
        )
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


def batched_update(
    model: nn.Module, observation: Observation, labels: Tensor, restarts: int, dtype: torch.dtype
) -> Callable[[Tensor], list[Tensor]]:
    """Return x (R, B, C, H, W) -> each restart's update: a tensor (R, ...) per visible parameter.

    One restart is differentiated by plain autograd, which is faster for one, and its tensors lack
    the leading axis; several by ``vmap``. Before the clip: a cosine does not see what only scales.
    """
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in observation.state.items()}
    visible = tuple(observation.update)
    if restarts == 1:
        single = differentiable_update(model, replace(observation, state=state), labels)
        return lambda x: _named(single(x[0]), visible)
    net, names = ready(model, observation.training), observation.sent or visible
    options = (labels, observation.loss, observation.local)
    many = torch.vmap(lambda x: client_update(net, state, names, x, *options, functional=True))
    return lambda x: _named(many(x), visible)


@torch.no_grad()
def cosine_slope(
    mine: Sequence[Tensor], target: Tensor, restarts: int
) -> tuple[Tensor, list[Tensor]]:
    """Return 1 - cos(u, target) of each restart's update u, and its slope in each tensor of u.

    The slope is cos u / ||u||^2 - target / (||u|| ||target||). Written out, because autograd would
    pass over all numbers of all restarts some eight times more, which costs a third of a step.

    Args:
        mine: (R, ...) tensors, or (...) for one restart, P numbers per restart together.
        target: (P,).
        restarts: R.

    Returns:
        (R,), and a tensor in the shape of each of ``mine``.
    """
    parts = [part.reshape(restarts, -1) for part in mine]
    rows = torch.cat(parts, 1)
    length = torch.linalg.vector_norm(rows, dim=1)
    inverse = 1 / (length * torch.linalg.vector_norm(target)).clamp(min=_TINY)
    cosine = rows @ target * inverse
    rows.mul_((cosine / length.square().clamp(min=_TINY))[:, None]).addr_(inverse, target, alpha=-1)
    pieces = torch.split(rows, [part.shape[1] for part in parts], dim=1)
    return 1 - cosine, [a.view_as(b) for a, b in zip(pieces, mine, strict=True)]


def _named(update: dict[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    return [update[name] for name in names]


def _status(match: float) -> Status:
    if match == math.inf:
        return "diverged"
    return "matched" if match <= SOLVED else "budget"
