"""Feature inversion: the input of a dense layer, and then the image that leads to it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from accounting import checks
from attacks.observation import Observation
from attacks.reconstruction.analytic import invert_dense, visible_dense
from attacks.reconstruction.labels import label_candidates
from attacks.reconstruction.reconstruct import (
    GOOD_ENOUGH,
    NEWTON_UNKNOWNS,
    Reconstruction,
    matching_loss,
    starting_point,
)
from attacks.reconstruction.solvers import SOLVED, Search, gauss_newton, quasi_newton
from attacks.rounding import RANK
from attacks.update import entering, ready


def dense_then_invert(
    model: nn.Module,
    observation: Observation,
    *,
    restarts: int = 2,
    max_evaluations: int = 1000,
    newton_steps: int = 20,
    seed: int = 0,
) -> Reconstruction | None:
    """Read a dense layer's input off its gradient exactly, then find the image that gives it.

    The layers before it are known: frozen ones come from a public seed, trained ones from the
    last release. So only a forward pass has to be inverted, which is far easier than matching
    gradients, works with ReLU, and needs no other layer. Where a layer acts on each token, or its
    bias is not in view, the space that its inputs span is what is inverted. Of several visible
    layers, the result of the one with the best match is returned.

    The budgets are those of ``dlg``, for each layer; Gauss-Newton continues a search that stopped
    short.

    Return None where no dense layer is in view or the batch has several images.
    """
    restarts = checks.count("restarts", restarts)
    budget = checks.count("max_evaluations", max_evaluations)
    newton_steps = checks.count("newton_steps", newton_steps, minimum=0)
    layers = visible_dense(model, observation)
    if not layers or observation.shape[0] != 1:
        return None
    labels = label_candidates(model, observation)[0]
    match = matching_loss(model, observation, labels)
    searches = []
    options = (restarts, budget, newton_steps, seed)
    for name, weight, bias in layers:
        reach = layer_input(model, observation, name)
        goal = _goal(weight, bias, reach(torch.full(observation.shape, 0.5).double()))
        if goal is not None:
            searches.append(_invert(reach, *goal, observation, options))
    if not searches:
        return None
    matches = [float(match(search.x).detach()) for search in searches]
    best = min(range(len(searches)), key=matches.__getitem__)
    return Reconstruction(
        x=searches[best].x,
        labels=labels,
        match=matches[best],
        status="matched" if matches[best] <= SOLVED else searches[best].status,
        evaluations=sum(search.evaluations for search in searches) + len(searches),
        restarts=tuple(search.value for search in searches),
    )


def layer_input(
    model: nn.Module, observation: Observation, layer: str
) -> Callable[[Tensor], Tensor]:
    """Return x (B, C, H, W) -> the rows (n, I) that enter ``layer``, at the observed weights.

    There is a row per image, or per token where the layer acts on each token; none where the
    model uses its weight without calling it.
    """
    reach = entering(ready(model, observation.training), layer, observation.state)

    def features(x: Tensor) -> Tensor:
        inputs = reach(x)
        return x.new_empty(0, 0) if inputs is None else inputs.flatten(0, -2)

    return features


def _goal(weight: Tensor, bias: Tensor | None, rows: Tensor) -> tuple[Tensor, bool] | None:
    """Return the input of a layer; or a basis of the space of its inputs, and False.

    The gradient of the weight spans the rows that enter the layer if its rank is their number. A
    space of as many dimensions as a row says nothing about them.
    """
    if len(rows) == 0:
        return None
    if len(rows) == 1 and bias is not None:
        return invert_dense(weight, bias)[None], True
    _, size, right = torch.linalg.svd(weight.double(), full_matrices=False)
    rank = int((size > RANK * size[0]).sum()) if len(rows) > 1 else 1
    if rank < len(rows) or rank == weight.shape[1]:
        return None
    return right[:rank], False


def _invert(
    features: Callable[[Tensor], Tensor],
    wanted: Tensor,
    sure: bool,
    observation: Observation,
    options: tuple[int, int, int, int],
) -> Search:
    """Find x with features(x) = wanted; unless ``sure``, with features in the space of wanted."""
    restarts, budget, newton_steps, seed = options
    size = float(wanted.norm())

    def residual(x: Tensor) -> Tensor:
        return (features(x) - wanted).flatten() / size

    def objective(x: Tensor) -> Tensor:
        if sure:
            return residual(x).square().sum()
        rows = features(x)
        inside = (rows @ wanted.T).square().sum()
        return 1 - inside / rows.square().sum().clamp(min=1e-30)

    tried = []
    for restart in range(restarts):
        x0 = starting_point(observation.shape, [seed, restart])
        tried.append(quasi_newton(objective, x0, budget))
        unsolved = sure and tried[-1].value > SOLVED
        if newton_steps and unsolved and x0.numel() <= NEWTON_UNKNOWNS:
            tried.append(gauss_newton(residual, tried[-1].x, newton_steps))
        if tried[-1].value < GOOD_ENOUGH:
            break
    best = min(tried, key=lambda search: search.value)
    evaluations = sum(search.evaluations for search in tried)
    return Search(best.x, best.value, best.status, evaluations)
