"""Cosine matching: Adam on the direction of the update, with a prior and vectorized restarts.

Geiping et al. 2020 (Inverting gradients). It uses first derivatives only, so it works where ReLU
leaves second-order solvers without curvature. It needs thousands of steps, and on deep networks
no budget that a processor can afford is enough; its status then says "budget".
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from attacks.observation import Observation
from attacks.reconstruction.labels import label_candidates
from attacks.reconstruction.reconstruct import (
    Reconstruction,
    differentiable_update,
    matching_loss,
    prior_weights,
    starting_point,
    total_variation,
)
from attacks.reconstruction.solvers import SOLVED, Status
from attacks.update import flat, ready, simulated_update

MOST_GUESSES = 8  # doubtful labels that are tried; all labels of a model would take too long
_SCOUTS = 10  # each of them first gets this fraction of the steps
_SAME_DIRECTION = 0.04  # a distance of noise below which the whole direction tells too little
_TINY = 1e-30  # keeps 0 / 0 from becoming a direction
_LEARNING_RATE = 0.1
_DECAY_AT = (3 / 8, 5 / 8, 7 / 8)  # shares of the steps, as published
_DECAY = 0.1

_Slope = Callable[[Sequence[Tensor], Sequence[Tensor], int], tuple[Tensor, list[Tensor]]]


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

    The distance at noise differs between networks by a factor of hundreds (0.3 on a ResNet-8,
    0.0006 on a ConvNet), so a weight that does not follow it is a guess: too large, and the image
    is flat. What is right in units of d depends on the images, 1 to 3 on photographs and 0.03 on
    handwritten digits; the residual tells, so the restarts take different weights. Steps along the
    gradient find more on ResNet-8; steps by its sign find what several steps of Adam sent, whose
    slopes are steep. So restart i takes entry i of both settings, cyclically: by default 2 with
    steps along the gradient, then 0.02 with steps by its sign.

    Where d is small, the update has nearly this direction whatever the images are: on a ConvNet the
    bias of the head is most of its length. Where noise is closer than 0.04 to the update,
    1 - cos(u(x), u) is therefore the mean over the tensors of the update, each weighted by its
    length.

    Args:
        model: the client's architecture; its weights are taken from ``observation``.
        observation: what the attacker has seen.
        restarts: starting points, >= 1; one more costs little on a small network.
        steps: steps of Adam, >= 1.
        tv: weight of the total variation in units of the distance at the start, >= 0; of several,
            the restarts take each in turn.
        signed: step by the sign of the gradient, as published; of several, the restarts take each
            in turn.
        seed: of the starting points.
        dtype: precision of the gradients; the residual is always float64.

    Raises:
        ConfigError: see ``dlg``; also hidden labels that would have to be guessed.
    """
    restarts = checks.count("restarts", restarts)
    steps = checks.count("steps", steps)
    weights, signs = prior_weights(tv), _signs(signed)
    seed = checks.count("seed", seed, minimum=0)
    start = time.perf_counter()
    candidates = label_candidates(model, observation)
    if len(candidates) > MOST_GUESSES:
        raise ConfigError(
            "labels=None: cosine_tv needs labels that are known or inferred; dlg guesses them."
        )
    labels = candidates[0]
    wasted = 0
    if len(candidates) > 1:
        scout = partial(
            cosine_tv,
            restarts=min(restarts, len(weights)),
            steps=max(steps // _SCOUTS, 1),
            tv=tv,
            signed=signed,
            seed=seed,
            dtype=dtype,
        )
        scouts = [scout(model, replace(observation, labels=guess)) for guess in candidates]
        labels = min(scouts, key=lambda scout: scout.match).labels
        wasted = sum(scout.evaluations for scout in scouts)
    match = matching_loss(model, observation, labels)
    update = batched_update(model, observation, labels, restarts, dtype)
    target = [part.to(dtype) for part in observation.update.values()]
    slope_of: _Slope = cosine_slope
    points = [starting_point(observation.shape, [seed, i]) for i in range(restarts)]
    x = torch.stack(points).to(dtype).requires_grad_(True)
    solver = torch.optim.Adam([x], lr=_LEARNING_RATE)
    pressure = torch.tensor([weights[i % len(weights)] for i in range(restarts)], dtype=dtype)
    by_sign = torch.tensor([signs[i % len(signs)] for i in range(restarts)])
    by_sign = by_sign.view(restarts, *[1] * len(observation.shape))
    unit = torch.ones((), dtype=dtype)
    milestones = {int(part * steps) for part in _DECAY_AT}
    for step in range(steps):
        parts = update(x)
        if step == 0:
            slope_of = _comparison(parts, target, restarts)
        distance, pulls = slope_of(parts, target, restarts)
        if step == 0:
            pressure *= distance
        prior = pressure @ total_variation(x).mean(-1)
        outputs = [*parts, prior]
        moved = [i for i, part in enumerate(outputs) if part.requires_grad]  # depends on the pixels
        (slope,) = torch.autograd.grad(
            [outputs[i] for i in moved], x, [[*pulls, unit][i] for i in moved]
        )
        slope.nan_to_num_(0.0)
        x.grad = torch.where(by_sign, slope.sign(), slope)
        if step in milestones:
            solver.param_groups[0]["lr"] *= _DECAY
        solver.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    ends = x.detach().double()
    residuals = [float(match(end).detach()) for end in ends]
    matches = [value if math.isfinite(value) else math.inf for value in residuals]
    best = min(range(restarts), key=lambda i: matches[i])
    return Reconstruction(
        x=ends[best],
        labels=labels,
        match=matches[best],
        status=_status(matches[best]),
        evaluations=wasted + restarts * (steps + 1),
        seconds=time.perf_counter() - start,
        restarts=tuple(matches),
    )


def batched_update(
    model: nn.Module, observation: Observation, labels: Tensor, restarts: int, dtype: torch.dtype
) -> Callable[[Tensor], list[Tensor]]:
    """Return x (R, B, C, H, W) -> each restart's update: a tensor (R, ...) per visible parameter.

    A single restart is differentiated by plain autograd, which is faster there, and its tensors
    lack the leading axis; several use ``vmap``. The update is not clipped: a cosine ignores scale.
    """
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in observation.state.items()}
    visible = tuple(observation.update)
    if restarts == 1:
        single = differentiable_update(model, observation, labels, state)
        return lambda x: _named(single(x[0]), visible)
    net = ready(model, observation.training)
    names = observation.sent or visible
    options = (labels, observation.loss, observation.local)
    many = torch.vmap(lambda x: simulated_update(net, state, names, x, *options, functional=True))
    return lambda x: _named(many(x), visible)


@torch.no_grad()
def cosine_slope(
    update: Sequence[Tensor], target: Sequence[Tensor], restarts: int
) -> tuple[Tensor, list[Tensor]]:
    """Return 1 - cos(u, target) of each restart's update u, and its gradient in each tensor of u.

    The gradient is cos u / ||u||^2 - target / (||u|| ||target||), written out because autograd
    would read all values of all restarts about eight times more, which costs a third of a step.

    Args:
        update: (R, ...) tensors, or (...) for one restart, P values per restart in total.
        target: tensors of P values in total, in the same order.
        restarts: R.

    Returns:
        (R,), and a tensor of the shape of each of ``update``.
    """
    parts = [part.reshape(restarts, -1) for part in update]
    rows, aim = torch.cat(parts, 1), flat(target)
    length = torch.linalg.vector_norm(rows, dim=1)
    inverse = 1 / (length * torch.linalg.vector_norm(aim)).clamp(min=_TINY)
    cosine = rows @ aim * inverse
    rows.mul_((cosine / length.square().clamp(min=_TINY))[:, None]).addr_(inverse, aim, alpha=-1)
    pieces = torch.split(rows, [part.shape[1] for part in parts], dim=1)
    return 1 - cosine, [a.view_as(b) for a, b in zip(pieces, update, strict=True)]


@torch.no_grad()
def tensor_slope(
    update: Sequence[Tensor], target: Sequence[Tensor], restarts: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the mean of the tensors' 1 - cos, and its gradient; else as ``cosine_slope``.

    A tensor counts by the length of its target.
    """
    lengths = torch.stack([torch.linalg.vector_norm(part) for part in target])
    weights = lengths / lengths.sum().clamp(min=_TINY)
    distance = torch.zeros(restarts, dtype=weights.dtype)
    pulls = []
    for weight, part, aim in zip(weights, update, target, strict=True):
        gap, (pull,) = cosine_slope([part], [aim], restarts)
        distance += weight * gap
        pulls.append(weight * pull)
    return distance, pulls


def _comparison(update: Sequence[Tensor], target: Sequence[Tensor], restarts: int) -> _Slope:
    """Return how directions are compared, by the distance at the starting points."""
    distance, _ = cosine_slope(update, target, restarts)
    return tensor_slope if bool(distance.median() < _SAME_DIRECTION) else cosine_slope


def _signs(signed: bool | Sequence[bool]) -> list[bool]:
    choices = list(signed) if isinstance(signed, Sequence) else [signed]
    if not choices or not all(isinstance(choice, bool) for choice in choices):
        raise ConfigError(f"signed={signed!r}: must be True, False, or a sequence of them.")
    return choices


def _named(update: dict[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    return [update[name] for name in names]


def _status(match: float) -> Status:
    if match == math.inf:
        return "diverged"
    return "matched" if match <= SOLVED else "budget"
