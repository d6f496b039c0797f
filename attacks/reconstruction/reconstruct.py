"""Gradient matching: find the image whose update is the observed one (Zhu et al. 2019)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from attacks.observation import Observation, sender, visible_parts
from attacks.reconstruction.batch_statistics import statistics_gap
from attacks.reconstruction.labels import label_candidates
from attacks.reconstruction.solvers import Objective, Search, Status, gauss_newton, quasi_newton
from attacks.rounding import less
from attacks.update import flat, norm, ready

GOOD_ENOUGH = 1e-10  # relative matching loss below which no further start is tried
NEWTON_UNKNOWNS = 1024  # the Jacobian of a step has this many columns
FALLING = (0.1, 0.01, 0.001, 0.0)  # weights of a prior that fades out
_SCOUTS = 10  # each candidate label first gets this fraction of the budget
_SMOOTH = 1e-4  # of the total variation: far above rounding, far below a level of a byte


@dataclass(frozen=True, slots=True, eq=False)
class Reconstruction:
    """What an attack found, selected by its own loss and never by the truth.

    Args:
        match: relative residual ||u(x) - u||^2 / ||u||^2 over the visible values of the update.
        status: "exact" (in closed form), "matched" (residual <= 1e-16), "stalled" (the solver
            found no further descent), "budget" (stopped; more evaluations might improve it),
            "diverged" (the loss was not finite; the best point before that is returned), or
            "not run" (nothing was attacked; an audit puts a grey image there).
    """

    x: Tensor  # (B, C, H, W) float64, in [0, 1]
    labels: Tensor  # (B,) given or inferred
    match: float
    status: Status
    evaluations: int  # updates that the attack computed, over all restarts
    restarts: tuple[float, ...]  # the final loss of each search
    seconds: float = 0.0  # that it took, measured by the audit


def dlg(
    model: nn.Module,
    observation: Observation,
    *,
    restarts: int = 3,
    max_evaluations: int = 1000,
    newton_steps: int = 15,
    tv: float | Sequence[float] = 0.0,
    statistics: float = 0.0,
    seed: int = 0,
) -> Reconstruction:
    """Reconstruct a batch by matching gradients; needs a model with smooth activations.

    Run on the CPU in float64, from uniform noise: L-BFGS-B from each starting point, then
    Gauss-Newton from the same points. The search with the least loss is returned; after a match to
    1e-10 no further search is made. On ReLU networks the matching loss has no useful curvature:
    expect "stalled" and a high match, which says nothing about privacy.

    Args:
        model: the client's architecture; its weights are taken from ``observation``.
        observation: what the attacker has seen.
        restarts: starting points, >= 1.
        max_evaluations: budget of each L-BFGS-B search, in evaluations of the matching loss.
        newton_steps: budget of each Gauss-Newton search, >= 0. A step costs as many evaluations
            as there are unknowns; it is not used above 1024 unknowns, nor with a prior.
        tv: weight of the total variation in the loss, >= 0: a prior that helps where the update is
            noisy or does not determine the image. Of several, a search takes them in turn, each
            from where the last one ended, and shares its evaluations among them: ``FALLING`` leads
            through photographs, on which a search without a prior takes ten times longer.
        statistics: weight of the batch statistics in the loss, >= 0; needs buffers that the client
            sent after one step in training mode.
        seed: of the starting points.

    Raises:
        ConfigError: a value out of range, hidden labels that cannot be inferred, or a visible
            update that is zero.
    """
    restarts = checks.count("restarts", restarts)
    budget = checks.count("max_evaluations", max_evaluations)
    newton_steps = checks.count("newton_steps", newton_steps, minimum=0)
    weights = prior_weights(tv)
    gap = (
        statistics_gap(model, observation) if checks.nonnegative("statistics", statistics) else None
    )
    if statistics and gap is None:
        raise ConfigError(
            f"statistics={statistics:g}: needs buffers that the client sent after one step in "
            "training mode; leave it out."
        )
    seed = checks.count("seed", seed, minimum=0)
    labels, wasted = chosen_labels(model, observation, budget, seed)
    residual = matching_residual(model, observation, labels)
    match = matching_loss(model, observation, labels)
    plain = weights == [0.0] and gap is None
    losses = [_with_prior(match, weight, statistics, gap) for weight in weights]
    points = [starting_point(observation.shape, [seed, i]) for i in range(restarts)]
    searches = [partial(_in_turn, losses, x0, budget) for x0 in points]
    if newton_steps and plain and points[0].numel() <= NEWTON_UNKNOWNS:
        searches += [partial(gauss_newton, residual, x0, newton_steps) for x0 in points]
    tried: list[Search] = []
    for search in searches:
        tried.append(search())
        if tried[-1].value < GOOD_ENOUGH:
            break
    best = min(tried, key=lambda search: search.value)
    return Reconstruction(
        x=best.x.detach(),
        labels=labels,
        match=best.value if weights[-1] == 0 and gap is None else float(match(best.x).detach()),
        status=best.status,
        evaluations=wasted + sum(search.evaluations for search in tried),
        restarts=tuple(search.value for search in tried),
    )


def _in_turn(losses: Sequence[Objective], x0: Tensor, budget: int) -> Search:
    """Minimise one loss after the other, each from where the last one ended.

    The last loss decides what is found; a budget below the number of losses leaves out the first.
    """
    search, spent = Search(x0), 0
    losses = losses[-budget:]
    for number, loss in enumerate(losses):
        share = (budget - spent) // (len(losses) - number)
        search = quasi_newton(loss, search.x.detach(), share)
        spent += search.evaluations
        if search.status == "diverged":
            break
    search.evaluations = spent
    return search


def prior_weights(tv: float | Sequence[float]) -> list[float]:
    """Return the weights of the prior, at least one, all >= 0."""
    weights = [checks.nonnegative("tv", w) for w in ([tv] if isinstance(tv, float | int) else tv)]
    if not weights:
        raise ConfigError("tv=(): is empty; pass a weight, or 0 for no prior.")
    return weights


def chosen_labels(
    model: nn.Module, observation: Observation, budget: int, seed: int
) -> tuple[Tensor, int]:
    """Return the labels that short searches match best, and the evaluations spent on them."""
    candidates = label_candidates(model, observation)
    if len(candidates) == 1:
        return candidates[0], 0
    x0, share = starting_point(observation.shape, [seed]), max(budget // _SCOUTS, 1)
    losses = [matching_loss(model, observation, guess) for guess in candidates]
    scouts = [quasi_newton(loss, x0, share) for loss in losses]
    best = min(range(len(scouts)), key=lambda i: scouts[i].value)
    return candidates[best], sum(scout.evaluations for scout in scouts)


def reid_rank(
    model: nn.Module, observation: Observation, truth: Tensor, decoys: Tensor, labels: Tensor
) -> int:
    """Return the rank of the true image among decoys for an attacker who has them all; 1 is best.

    The attacker computes the update of each candidate and ranks them by how well it matches. No
    optimisation can fail here, so a view that resists reconstruction but yields rank 1 still
    reveals who was in the data. Ties count against the attacker. Where the observation reveals the
    label, every candidate is tried with it: otherwise the label alone would tell the truth from
    decoys of other classes, whatever the view says of the image.

    The observation is of a batch of one; ``labels`` (1 + N,) are those of the truth and of the
    decoys, used where the label is hidden.
    """
    if observation.shape[0] != 1 or len(labels) != 1 + len(decoys):
        raise ConfigError(
            "decoys: pass an observation of one image, and a label for every candidate."
        )
    candidates = torch.cat([truth.double(), decoys.double()])
    scores = []
    for image, given in zip(candidates, labels, strict=True):
        label = given[None] if observation.labels is None else observation.labels
        labelled = replace(observation, labels=label)
        scores.append(float(matching_loss(model, labelled, label)(image[None]).detach()))
    return sum(not less(scores[0], score) for score in scores)


def matching_loss(model: nn.Module, observation: Observation, labels: Tensor) -> Objective:
    """Return x -> ||u(x) - u||^2 / ||u||^2 over the visible tensors, paired by name."""
    residual = matching_residual(model, observation, labels, differentiable=True)
    return lambda x: residual(x).square().sum()


def matching_residual(
    model: nn.Module, observation: Observation, labels: Tensor, *, differentiable: bool = False
) -> Objective:
    """Return x -> (u(x) - u) / ||u|| as one vector.

    The attacker trains its own images as the client did: the same mode, local steps, transform and
    clip; where a transform loses values, it matches what is left of them.
    It can be differentiated by autograd, or else be transformed by ``torch.func``.
    """
    net = ready(model, observation.training)
    target, scale = flat(observation.update.values()), norm(observation.update)
    if not scale > 0:
        names = ", ".join(observation.update)
        raise ConfigError(f"update: {names} is zero, so there is nothing to match.")
    how: dict[str, Any] = {"differentiable": differentiable, "functional": not differentiable}
    send = sender(observation)

    def residual(x: Tensor) -> Tensor:
        seen = visible_parts(net, observation, x, labels, send, **how)
        return (flat(seen.values()) - target) / scale

    return residual


def starting_point(shape: tuple[int, ...], seed: Sequence[int]) -> Tensor:
    """Return uniform noise in [0, 1], float64."""
    rng = np.random.default_rng(list(seed))
    return torch.from_numpy(rng.uniform(0.0, 1.0, math.prod(shape)).reshape(shape))


def total_variation(x: Tensor, smooth: float = 0.0) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels of each image: (...).

    Differences below ``smooth`` count as their square does. Without it, where neighbours are equal
    the slope is the sign of a rounding, and a search ends elsewhere on another processor.

    >>> total_variation(torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]))
    tensor(0.5000)
    """
    rows, columns = x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1]
    sizes = [(d.square() + smooth**2).sqrt() if smooth else d.abs() for d in (rows, columns)]
    return (sizes[0].mean((-3, -2, -1)) + sizes[1].mean((-3, -2, -1))) / 2


def _with_prior(match: Objective, tv: float, statistics: float, gap: Objective | None) -> Objective:
    def loss(x: Tensor) -> Tensor:
        value = match(x)
        if tv:
            value = value + tv * total_variation(x, _SMOOTH).mean()
        return value if gap is None else value + statistics * gap(x)

    return loss
