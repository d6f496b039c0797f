"""Cosine matching: Adam on the direction of the update, with a prior and vectorized restarts.

Geiping et al. 2020 (Inverting gradients). It uses first derivatives only, so it works where ReLU
leaves second-order solvers without curvature. It needs thousands of steps, and on deep networks
no budget that a processor can afford is enough; its status then says "budget".
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from accounting import checks
from accounting.checks import ConfigError
from attacks.observation import Observation, sender, visible_parts
from attacks.reconstruction.reconstruct import (
    Reconstruction,
    chosen_labels,
    matching_loss,
    prior_weights,
    starting_point,
    total_variation,
)
from attacks.reconstruction.solvers import SOLVED, Status
from attacks.update import ready

_SAME_DIRECTION = 0.04  # a distance of noise below which the whole direction tells too little
_TINY = 1e-30  # keeps 0 / 0 from becoming a direction
_LEARNING_RATE = 0.1
_DECAY_AT = (3 / 8, 5 / 8, 7 / 8)  # shares of the steps, as published
_DECAY = 0.1


def cosine_tv(
    model: nn.Module,
    observation: Observation,
    *,
    restarts: int = 8,
    steps: int = 2000,
    tv: float | Sequence[float] = (2.0, 0.02),
    signed: bool | Sequence[bool] = (False, True),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Reconstruction:
    """Reconstruct a batch by the direction of its update; for ReLU networks.

    Minimise 1 - cos(u(x), u) + tv d TV(x) by Adam, where d is the distance 1 - cos at the starting
    point, with all restarts vectorized, and return the last point of the restart whose relative
    residual is least. A fixed number of steps proves nothing: the status is "budget" unless the
    residual says otherwise.

    The distance at noise differs between networks by a factor of hundreds. What weight is right in
    units of d depends on the images, 1 to 3 on photographs and 0.03 on handwritten digits; steps by
    the sign of the gradient find what several steps of Adam sent. So restart i takes entry i of
    both settings, cyclically, and the residual chooses.

    Where noise is closer than 0.04 to the update, the update has nearly this direction whatever the
    images are: 1 - cos(u(x), u) is then the mean over the tensors of the update, each weighted by
    its length.

    Args:
        model: see ``dlg``.
        observation: see ``dlg``.
        seed: see ``dlg``.
        restarts: starting points, >= 1; one more costs little on a small network.
        steps: steps of Adam, >= 1.
        tv: weight of the total variation in units of the distance at the start, >= 0; of several,
            the restarts take each in turn.
        signed: step by the sign of the gradient, as published; of several, the restarts take each
            in turn.
        dtype: precision of the gradients; the residual is always float64.

    Raises:
        ConfigError: see ``dlg``.
    """
    restarts = checks.count("restarts", restarts)
    steps = checks.count("steps", steps)
    weights, signs = prior_weights(tv), _signs(signed)
    seed = checks.count("seed", seed, minimum=0)
    labels, wasted = chosen_labels(model, observation, steps, seed)
    match = matching_loss(model, observation, labels)
    update = batched_update(model, observation, labels, restarts, dtype)
    target = [part.to(dtype) for part in observation.update.values()]
    points = [starting_point(observation.shape, [seed, i]) for i in range(restarts)]
    x = torch.stack(points).to(dtype).requires_grad_(True)
    solver = torch.optim.Adam([x], lr=_LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(
        solver, [int(part * steps) for part in _DECAY_AT], gamma=_DECAY
    )
    pressure = torch.tensor([weights[i % len(weights)] for i in range(restarts)], dtype=dtype)
    by_sign = torch.tensor([signs[i % len(signs)] for i in range(restarts)])
    by_sign = by_sign.view(restarts, *[1] * len(observation.shape))
    compare = whole_distance
    for step in range(steps):
        parts = update(x)
        if step == 0:
            at_noise = whole_distance(parts, target).detach()
            if bool(at_noise.median() < _SAME_DIRECTION):
                compare = distance_by_tensor
                at_noise = compare(parts, target).detach()
            pressure *= at_noise
        loss = compare(parts, target).sum() + pressure @ total_variation(x).mean(-1)
        (slope,) = torch.autograd.grad(loss, x)
        slope.nan_to_num_(0.0)
        x.grad = torch.where(by_sign, slope.sign(), slope)
        solver.step()
        scheduler.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    ends = x.detach().double()
    residuals = [float(match(end).detach()) for end in ends]
    matches = [value if math.isfinite(value) else math.inf for value in residuals]
    best = min(range(restarts), key=lambda i: matches[i])
    status: Status = "matched" if matches[best] <= SOLVED else "budget"
    if matches[best] == math.inf:
        status = "diverged"
    return Reconstruction(
        x=ends[best],
        labels=labels,
        match=matches[best],
        status=status,
        evaluations=wasted + restarts * (steps + 1),
        restarts=tuple(matches),
    )


def batched_update(
    model: nn.Module, observation: Observation, labels: Tensor, restarts: int, dtype: torch.dtype
) -> Callable[[Tensor], list[Tensor]]:
    """Return x (R, B, C, H, W) -> each restart's update: a tensor (R, ...) per visible parameter.

    A single restart is differentiated by plain autograd, which is faster there; several use
    ``vmap``. Without a transform the update is not clipped: a cosine ignores scale.
    """
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in observation.state.items()}
    net = ready(model, observation.training)
    send = sender(observation, dtype, clipped=bool(observation.transform.steps))

    def single(x: Tensor, **how: bool) -> list[Tensor]:
        options: dict[str, Any] = {"state": state, **how}
        seen = visible_parts(net, observation, x, labels, send, **options)
        return list(seen.values())

    if restarts == 1:
        return lambda x: [part[None] for part in single(x[0], differentiable=True)]
    return torch.vmap(partial(single, functional=True))


def whole_distance(update: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    """Return 1 - cos(u, target) of each restart's update u, (R,), of tensors (R, ...) and (...)."""
    rows = torch.cat([part.flatten(1) for part in update], 1)
    return 1 - cosine_similarity(rows, torch.cat([t.flatten() for t in target])[None], eps=_TINY)


def distance_by_tensor(update: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    """Return the mean of the tensors' 1 - cos, (R,), each weighted by the length of its target."""
    lengths = torch.stack([torch.linalg.vector_norm(part) for part in target])
    weights = lengths / lengths.sum().clamp(min=_TINY)
    distances = [whole_distance([a], [b]) for a, b in zip(update, target, strict=True)]
    return weights @ torch.stack(distances)


def _signs(signed: bool | Sequence[bool]) -> list[bool]:
    choices = list(signed) if isinstance(signed, Sequence) else [signed]
    if not choices or not all(isinstance(choice, bool) for choice in choices):
        raise ConfigError(f"signed={signed!r}: must be True, False, or a sequence of them.")
    return choices
