"""Closed forms: inputs of a dense layer, computed from its gradient without optimisation."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from attacks.observation import Observation
from attacks.reconstruction.labels import label_candidates
from attacks.reconstruction.reconstruct import Reconstruction, matching_loss
from attacks.reconstruction.solvers import SOLVED, Objective
from attacks.rounding import HALF, less


def invert_dense(weight_grad: Tensor, bias_grad: Tensor | None = None) -> Tensor:
    """Return the input of a dense layer from its gradient for one example.

    The gradient of W is the outer product of the bias's gradient and the input, gw = gb x^T, so
    x = sum_o gb_o gw_o / sum_o gb_o^2 is the least-squares answer over all rows (Phong et al.
    2018; the mean of row ratios found elsewhere collapses under noise). For a batch it is a
    weighted mixture of the inputs, not one of them.

    Without the bias, x is known only up to sign and scale: the first right singular vector is
    returned, scaled so that its entry of greatest magnitude is +1. For an image that is right if
    its brightest pixel is 1.

    The gradients are (O, I) and (O,); None where the bias is not in view.

    Raises:
        ConfigError: shapes that do not fit, values that are not finite, or a gradient of zero.

    >>> gb, x = torch.tensor([0.5, -2.0]), torch.tensor([0.0, 0.25, 1.0])
    >>> invert_dense(torch.outer(gb, x), gb)
    tensor([0.0000, 0.2500, 1.0000], dtype=torch.float64)
    """
    gw = weight_grad.detach().double()
    if gw.ndim != 2 or not bool(gw.isfinite().all()):
        raise ConfigError(f"weight_grad: shape {tuple(gw.shape)}; must be (O, I) and finite.")
    if not bool(gw.any()):
        raise ConfigError("weight_grad: is zero and says nothing about the input.")
    if bias_grad is None:
        direction: Tensor = torch.linalg.svd(gw, full_matrices=False).Vh[0]
        return brightest_is_one(direction[None])[0]
    gb = bias_grad.detach().double()
    if gb.shape != gw.shape[:1] or not bool(gb.isfinite().all()):
        raise ConfigError(
            f"bias_grad: shape {tuple(gb.shape)}; must be ({gw.shape[0]},) and finite."
        )
    if not bool(gb.any()):
        raise ConfigError("bias_grad: is zero; pass None to use the weight alone.")
    return gb @ gw / gb.square().sum()


def brightest_is_one(rows: Tensor) -> Tensor:
    """Return each row, scaled so that its (first) entry of greatest magnitude is 1."""
    size = rows.abs()
    equal = size >= size.amax(1, keepdim=True) * (1 - HALF)
    return rows / rows.gather(1, equal.int().argmax(1, keepdim=True))


def invert_dense_rows(weight_grad: Tensor, bias_grad: Tensor, batch: int) -> Tensor:
    """Return the inputs of a dense layer before a ReLU that its gradient for a batch contains.

    A neuron that only one image activates has gw_o = gb_o x exactly, so gw_o / gb_o is that
    image (Boenisch et al. 2023; here with honest weights). A vector that two or more neurons give
    must be an input; these come first, the most frequent first. A vector that one neuron gives is
    returned only if it is nonnegative, as images and ReLU features are; it may be a mixture.

    The gradients are (O, I) and (O,), the inputs (n, I), n <= ``batch``; n may be 0.

    >>> x = torch.tensor([[0.0, 1.0], [0.5, 0.25]])
    >>> gb = torch.tensor([[1.0, 0.0, 2.0, 3.0], [0.0, -2.0, 1.0, 0.0]])  # image by neuron
    >>> invert_dense_rows(gb.T @ x, gb.sum(0), 2)
    tensor([[0.0000, 1.0000],
            [0.5000, 0.2500]], dtype=torch.float64)
    """
    batch = checks.count("batch", batch)
    invert_dense(weight_grad, bias_grad)  # checks both
    gw = weight_grad.detach().double()
    gb = bias_grad.detach().double()
    alive = gb.abs() > _SILENT * gb.abs().max()
    rows = gw[alive] / gb[alive, None]
    gaps = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    homes = (gaps <= _SAME * rows.norm(dim=1)[:, None]).int().argmax(1).tolist()
    groups = [[i for i, home in enumerate(homes) if home == first] for first in set(homes)]
    sure = [g for g in groups if len(g) > 1]
    maybe = [g for g in groups if len(g) == 1 and float(rows[g[0]].min()) >= -_SAME]
    best = sorted(sure, key=len, reverse=True)[:batch]
    chosen = best + sorted(maybe, key=lambda g: float(rows[g[0]].max()))[: batch - len(best)]
    return rows[[g[0] for g in chosen]]


_SILENT = 1e-9  # a bias gradient below this, relative to the largest, counts as zero
_PAIRED = 32  # images whose labels are put in order; a score does not depend on it
_SAME = 1e-6  # two inputs closer than this, relative to their norm, count as one


def invert_first_dense(model: nn.Module, observation: Observation) -> Reconstruction | None:
    """Invert each visible dense layer that is as wide as the image; return the best match.

    A layer that does not act on the pixels themselves gives a poor match, so the order of the
    layers need not be known. Return None where no layer is that wide, or where the bias needed
    for a batch is not in view. An image that the gradient of a batch does not give away is grey.
    """
    pixels, batch = math.prod(observation.shape[1:]), observation.shape[0]
    inputs = []
    for _, gw, gb in visible_dense(model, observation):
        if gw.shape[1] != pixels:
            continue
        if batch == 1:
            inputs.append(invert_dense(gw, gb)[None])
        elif gb is not None and len(rows := invert_dense_rows(gw, gb, batch)):
            inputs.append(rows)
    return best_inputs(model, observation, inputs)


def best_inputs(
    model: nn.Module, observation: Observation, inputs: Sequence[Tensor]
) -> Reconstruction | None:
    """Return the (n, I) ``inputs`` that match the update best, as images; None of none.

    An image that is missing is left grey; the others are paired with the labels.
    """
    if not inputs:
        return None
    tried: list[tuple[float, Tensor, Tensor]] = []
    for labels in label_candidates(model, observation):
        loss = matching_loss(model, observation, labels)
        for rows in inputs:
            images = torch.full(observation.shape, 0.5, dtype=torch.float64)
            images[: len(rows)] = rows.reshape(len(rows), *images.shape[1:]).clamp(0, 1)
            few = len(rows) <= _PAIRED
            image, match = (
                ordered(images, partial(_value, loss)) if few else (images, _value(loss, images))
            )
            tried.append((match, image, labels))
    match, image, labels = min(tried, key=lambda item: item[0])
    return Reconstruction(
        x=image,
        labels=labels,
        match=match,
        status="exact" if match <= SOLVED else "stalled",
        evaluations=len(tried),
        restarts=(match,),
    )


def _value(loss: Objective, x: Tensor) -> float:
    return float(loss(x).detach())


def ordered(values: Tensor, residual: Callable[[Tensor], float]) -> tuple[Tensor, float]:
    """Swap two of the values while that lowers the residual; return them, and the residual."""
    least = residual(values)
    better = True
    while better:
        better = False
        for i, j in itertools.combinations(range(len(values)), 2):
            swapped = values.clone()
            swapped[[i, j]] = values[[j, i]]
            if torch.equal(swapped, values):
                continue
            if less(value := residual(swapped), least):
                values, least, better = swapped, value, True
    return values, least


def visible_dense(
    model: nn.Module, observation: Observation
) -> list[tuple[str, Tensor, Tensor | None]]:
    """Return (name, weight gradient, bias gradient or None) of each dense layer that is in view."""
    update = observation.update
    uncalled = nn.modules.linear.NonDynamicallyQuantizableLinear  # of an attention
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, uncalled)
    ]
    pairs = [(name, update.get(f"{name}.weight"), update.get(f"{name}.bias")) for name in layers]
    return [(name, w, b) for name, w, b in pairs if w is not None and bool(w.any())]
