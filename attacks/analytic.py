"""Closed forms: what a dense layer's gradient gives away without any optimisation."""

import math
import time

import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from attacks.labels import known_labels
from attacks.observation import Observation
from attacks.reconstruct import SOLVED, Reconstruction, matching_loss


def invert_dense(weight_grad: Tensor, bias_grad: Tensor | None = None) -> Tensor:
    """Return the input of a dense layer from its gradient for one example.

    The gradient of W is the outer product of the bias's gradient and the input, gw = gb x^T, so
    x = sum_o gb_o gw_o / sum_o gb_o^2 is the least-squares answer over all rows (Phong et al.
    2018; the mean of row ratios found elsewhere collapses under noise). For a batch it is a
    weighted mixture of the inputs, not one of them.

    Without the bias, x is known only up to sign and scale: the first right singular vector is
    returned, scaled so that its entry of greatest magnitude is +1. For an image that is right if
    its brightest pixel is 1.

    Args:
        weight_grad: (O, I).
        bias_grad: (O,), or None where the bias is not in view.

    Returns:
        (I,) float64.

    Raises:
        ConfigError: shapes that do not fit, values that are not finite, a gradient of zero.

    >>> gb, x = torch.tensor([0.5, -2.0]), torch.tensor([0.0, 0.25, 1.0])
    >>> invert_dense(torch.outer(gb, x), gb)
    tensor([0.0000, 0.2500, 1.0000], dtype=torch.float64)
    """
    gw = weight_grad.detach().double()
    if gw.ndim != 2 or not bool(gw.isfinite().all()):
        raise ConfigError(f"weight_grad: shape {tuple(gw.shape)}; must be (O, I) and finite.")
    if not bool(gw.any()):
        raise ConfigError("weight_grad: is zero; it says nothing about the input.")
    if bias_grad is None:
        direction: Tensor = torch.linalg.svd(gw, full_matrices=False).Vh[0]
        return direction / direction[direction.abs().argmax()]
    gb = bias_grad.detach().double()
    if gb.shape != gw.shape[:1] or not bool(gb.isfinite().all()):
        raise ConfigError(
            f"bias_grad: shape {tuple(gb.shape)}; must be ({gw.shape[0]},) and finite."
        )
    if not bool(gb.any()):
        raise ConfigError("bias_grad: is zero; pass None to use the weight alone.")
    return gb @ gw / gb.square().sum()


def invert_first_dense(model: nn.Module, observation: Observation) -> Reconstruction | None:
    """Try ``invert_dense`` on each visible dense layer as wide as the image; the best by match.

    A layer that does not act on the pixels themselves gives a poor match, so nothing has to be
    known of the order of the layers. None where no layer is that wide. Pixels are in [0, 1].
    """
    start = time.perf_counter()
    pixels = math.prod(observation.shape)
    layers = [pair for pair in _visible_dense(model, observation) if pair[0].shape[1] == pixels]
    if not layers:
        return None
    labels = known_labels(model, observation)
    loss = matching_loss(model, observation, labels)
    inputs = [invert_dense(*pair).cpu() for pair in layers]
    images = [flat.reshape(observation.shape).clamp(0, 1) for flat in inputs]
    matches = [float(loss(image).detach()) for image in images]
    best = min(range(len(images)), key=matches.__getitem__)
    return Reconstruction(
        x=images[best],
        labels=labels,
        match=matches[best],
        status="exact" if matches[best] <= SOLVED else "stalled",
        evaluations=len(images),
        seconds=time.perf_counter() - start,
        restarts=(matches[best],),
    )


def _visible_dense(
    model: nn.Module, observation: Observation
) -> list[tuple[Tensor, Tensor | None]]:
    """(weight gradient, bias gradient or None) of each dense layer whose weight is in view."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    update = observation.update
    pairs = [(update.get(f"{name}.weight"), update.get(f"{name}.bias")) for name in layers]
    return [(weight, bias) for weight, bias in pairs if weight is not None and bool(weight.any())]
