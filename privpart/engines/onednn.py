"""oneDNN: computes large dense layers in place of the BLAS that torch calls.

torch multiplies float32 matrices with MKL. oneDNN, which torch ships for its convolutions, took
about half as long on an AMD processor with AVX-512. On other processors it may take longer, so the
engine times both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_WORTH = 2**22
"""Examples times weights above which oneDNN gains more than a custom autograd function costs."""


@contextmanager
def by_onednn(module: nn.Module) -> Iterator[None]:
    """Within this context, compute a module's large ``nn.Linear`` layers with oneDNN.

    Results equal torch's own up to rounding.
    """
    layers = _layers(module)
    for layer in layers:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def worth_onednn(module: nn.Module, examples: int) -> bool:
    """Return whether torch has oneDNN and some layer is large enough for it.

    Args:
        module: the network.
        examples: rows of a batch.
    """
    most = max((layer.weight.numel() for layer in _layers(module)), default=0)
    return _available() and examples * most >= _WORTH


def _layers(module: nn.Module) -> list[nn.Linear]:
    # only layers with torch's own ``forward``: a subclass may compute anything
    return [
        layer
        for layer in module.modules()
        if type(layer) is nn.Linear and "forward" not in vars(layer)
    ]


def _available() -> bool:
    mkldnn: Any = torch.backends.mkldnn
    allowed = mkldnn.is_available() and mkldnn.enabled
    return bool(allowed) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    examples = x.numel() // max(1, layer.in_features)
    if examples * layer.weight.numel() < _WORTH or x.dtype is not torch.float32:
        return linear(x, layer.weight, layer.bias)
    out: Tensor = _Linear.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    """Maps x (..., in), weight (out, in) and bias (out,) or None to shape (..., out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        # oneDNN's product has no derivative, which a gradient of this gradient would need
        product = linear if torch.is_grad_enabled() else _product
        return (
            product(gradient, weight.t()) if for_x else None,
            product(rows.t(), x.reshape(-1, x.shape[-1]).t()) if for_weight else None,
            rows.sum(dim=0) if for_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, shape (..., out)."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
