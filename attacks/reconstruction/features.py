"""Feature inversion: the input of a dense layer, and then the image that leads to it."""

import time
from collections.abc import Callable

from torch import Tensor, nn
from torch.func import functional_call

from accounting import checks
from attacks.observation import Observation
from attacks.reconstruction.analytic import invert_dense, is_dense, visible_dense
from attacks.reconstruction.labels import label_candidates
from attacks.reconstruction.reconstruct import (
    GOOD_ENOUGH,
    Reconstruction,
    matching_loss,
    starting_point,
)
from attacks.reconstruction.solvers import SOLVED, Search, gauss_newton, quasi_newton
from attacks.update import ready

_NEWTON_UNKNOWNS = 1024  # the Jacobian of a step has this many columns
_NEWTON_STEPS = 20


def dense_then_invert(
    model: nn.Module,
    observation: Observation,
    *,
    restarts: int = 2,
    max_evaluations: int = 1000,
    seed: int = 0,
) -> Reconstruction | None:
    """Read a dense layer's input off its gradient exactly, then find the image that gives it.

    The layers before it are known: frozen ones come from a public seed, trained ones from the
    last release. So only a forward pass has to be inverted, which is far easier than matching
    gradients, works with ReLU, and needs no other layer. Of several visible layers, the result of
    the one with the best match is returned.

    Args:
        model: the client's architecture.
        observation: of a batch of one.
        restarts: starting points for each layer, >= 1.
        max_evaluations: budget of each search.
        seed: of the starting points.

    Returns:
        The reconstruction; None where no dense layer is in view or the batch has several images.
    """
    restarts = checks.count("restarts", restarts)
    budget = checks.count("max_evaluations", max_evaluations)
    layers = visible_dense(observation, [n for n, m in model.named_modules() if is_dense(m)])
    if not layers or observation.shape[0] != 1:
        return None
    start = time.perf_counter()
    labels = label_candidates(model, observation)[0]
    match = matching_loss(model, observation, labels)
    searches = [
        _invert(layer_input(model, observation, name), features, sure, observation, options)
        for name, features, sure in (
            (name, invert_dense(weight, bias), bias is not None) for name, weight, bias in layers
        )
        for options in [(restarts, budget, seed)]
    ]
    matches = [float(match(search.x).detach()) for search in searches]
    best = min(range(len(searches)), key=matches.__getitem__)
    return Reconstruction(
        x=searches[best].x,
        labels=labels,
        match=matches[best],
        status="matched" if matches[best] <= SOLVED else searches[best].status,
        evaluations=sum(search.evaluations for search in searches) + len(searches),
        seconds=time.perf_counter() - start,
        restarts=tuple(search.value for search in searches),
    )


def layer_input(
    model: nn.Module, observation: Observation, layer: str
) -> Callable[[Tensor], Tensor]:
    """Return x (B, C, H, W) -> the input of ``layer``, (B, I), at the observed weights."""
    twin = ready(model, observation.training)
    state = {k: v.double() if v.is_floating_point() else v for k, v in observation.state.items()}

    def stop(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _ReachedError(inputs[0])

    twin.get_submodule(layer).register_forward_pre_hook(stop)

    def features(x: Tensor) -> Tensor:
        try:
            functional_call(twin, state, (x,))
        except _ReachedError as reached:
            return reached.value.flatten(1)
        raise AssertionError(f"{layer}: is never reached")  # impossible: its gradient is not zero

    return features


class _ReachedError(Exception):
    """Leaves a forward pass at the layer of interest, with its input."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def _invert(
    features: Callable[[Tensor], Tensor],
    wanted: Tensor,
    sure: bool,
    observation: Observation,
    options: tuple[int, int, int],
) -> Search:
    """Find x with features(x) = wanted; unless ``sure``, only the direction of wanted is known."""
    restarts, budget, seed = options
    size = float(wanted.norm())

    def residual(x: Tensor) -> Tensor:
        return (features(x)[0] - wanted) / size

    def objective(x: Tensor) -> Tensor:
        if sure:
            return residual(x).square().sum()
        there = features(x)[0]
        return 1 - (there @ wanted).square() / (there.square().sum() * size**2).clamp(min=1e-30)

    tried = []
    for restart in range(restarts):
        x0 = starting_point(observation.shape, (0.0, 1.0), [seed, restart])
        tried.append(quasi_newton(objective, x0, (0.0, 1.0), budget))
        if sure and tried[-1].value > SOLVED and x0.numel() <= _NEWTON_UNKNOWNS:
            tried.append(gauss_newton(residual, tried[-1].x, (0.0, 1.0), _NEWTON_STEPS))
        if tried[-1].value < GOOD_ENOUGH:
            break
    best = min(tried, key=lambda search: search.value)
    evaluations = sum(search.evaluations for search in tried)
    return Search(best.x, best.value, best.status, evaluations)
