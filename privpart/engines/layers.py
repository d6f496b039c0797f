"""Layers: faster ways to compute single layers while one client trains after another.

The results equal torch's own up to rounding. Which of them is faster depends on the processor, so
the engine times them.

channels last  Convolutions and pools take images whose channels are adjacent in memory. torch's
               norm of few channels per group is slow there: it gets a contiguous copy.
oneDNN         Large dense layers are multiplied by oneDNN, which torch ships for its convolutions,
               in place of the BLAS that torch calls. It took half of MKL's time on an AMD processor
               with AVX-512, and longer than MKL on an Intel one.
in place       A step of plain SGD adds the product that is a dense layer's gradient to the weight
               at once. For a few examples, writing the gradient out and adding it takes twice as
               long as the product itself.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from privpart.client import loss_gradients

_WORTH_ONEDNN = 2**22
"""Examples times weights above which oneDNN gains more than a custom autograd function costs."""
_WORTH_IN_PLACE = 2**16
"""Weights of a layer above which a step in place gains more than it costs."""
_MOST_ROWS_IN_PLACE = 64
"""Rows of a batch above which the product takes so long that the gradient's memory does not matter.
"""
_FEW_CHANNELS = 16
"""Channels per group below which torch's channels-last norm is slower than two copies."""


class StepsInPlace:
    """Takes steps of plain SGD that write no gradient of large dense weights."""

    def __init__(self) -> None:
        self._trained: set[int] | None = None  # outside of a step, gradients are torch's
        self._products: list[tuple[Tensor, Tensor, Tensor]] = []

    def step(self, total: Tensor, trained: Sequence[Tensor], learning_rate: float) -> None:
        """Subtract the gradient of ``total``, times the learning rate, from what trains."""
        self._trained = {id(p) for p in trained if not p._backward_hooks}
        try:
            gradients = loss_gradients(total, trained)
            with torch.no_grad():
                for parameter, gradient in zip(trained, gradients, strict=True):
                    if gradient is not None:
                        parameter.add_(gradient, alpha=-learning_rate)
                # after the whole backward pass, which reads the weights as they were
                for weight, left, right in self._products:
                    weight.addmm_(left.t(), right, alpha=-learning_rate)
        finally:
            self._trained = None
            self._products.clear()

    def take(self, weight: Tensor, left: Tensor, right: Tensor) -> bool:
        """Keep the factors of a weight's gradient, ``left.T @ right``, until the step.

        Args:
            weight: shape (out, in).
            left: gradients of the layer's outputs, shape (n, out).
            right: the layer's inputs, shape (n, in).

        Returns:
            Whether the step adds them; otherwise the gradient has to be computed.
        """
        if self._trained is None or torch.is_grad_enabled() or id(weight) not in self._trained:
            return False
        if len(left) > _MOST_ROWS_IN_PLACE or weight.numel() < _WORTH_IN_PLACE:
            return False
        self._products.append((weight, left, right))
        return True


@contextmanager
def replaced_dense(
    module: nn.Module, *, onednn: bool = False, steps: StepsInPlace | None = None
) -> Iterator[None]:
    """Within this context, compute a module's large ``nn.Linear`` layers in another way.

    Args:
        module: the network.
        onednn: multiply by oneDNN where a layer is large enough for it.
        steps: takes the steps; None leaves the gradients as they are.
    """
    layers = _dense_layers(module)
    for layer in layers:
        layer.forward = partial(_forward, layer, onednn, steps)  # type: ignore[method-assign]
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
    most = max((layer.weight.numel() for layer in _dense_layers(module)), default=0)
    return _available() and examples * most >= _WORTH_ONEDNN


def worth_in_place(module: nn.Module, examples: int) -> bool:
    """Return whether some dense layer that trains is large enough for steps in place.

    Args:
        module: the network.
        examples: rows of a batch.
    """
    trained = (layer.weight for layer in _dense_layers(module) if layer.weight.requires_grad)
    most = max((weight.numel() for weight in trained), default=0)
    return examples <= _MOST_ROWS_IN_PLACE and most >= _WORTH_IN_PLACE


def _dense_layers(module: nn.Module) -> list[nn.Linear]:
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


def _forward(layer: nn.Linear, onednn: bool, steps: StepsInPlace | None, x: Tensor) -> Tensor:
    examples = x.numel() // max(1, layer.in_features)
    onednn = onednn and examples * layer.weight.numel() >= _WORTH_ONEDNN
    small = steps is None or layer.weight.numel() < _WORTH_IN_PLACE
    if (small and not onednn) or x.dtype is not torch.float32:
        return linear(x, layer.weight, layer.bias)
    product = _by_onednn if onednn else linear
    out: Tensor = _Linear.apply(x, layer.weight, layer.bias, product, steps)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    """Maps x (..., in), weight (out, in) and bias (out,) or None to shape (..., out)."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Callable[..., Tensor],
        steps: StepsInPlace | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.steps = product, steps
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        # oneDNN's product has no derivative, which a gradient of this gradient would need
        product = linear if torch.is_grad_enabled() else ctx.product
        if for_weight and ctx.steps is not None and ctx.steps.take(weight, rows, inputs):
            for_weight = False
        return (
            product(gradient, weight.t()) if for_x else None,
            product(rows.t(), inputs.t()) if for_weight else None,
            rows.sum(dim=0) if for_bias else None,
            None,
            None,
        )


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, shape (..., out)."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


@contextmanager
def channels_last(module: nn.Module) -> Iterator[None]:
    """Within this context, give ``module`` its images in channels-last layout.

    Every convolution keeps the layout of its input.
    """
    hooks = [module.register_forward_pre_hook(_input_to_channels_last)]
    for norm in (layer for layer in module.modules() if isinstance(layer, nn.GroupNorm)):
        hooks.append(norm.register_forward_pre_hook(_contiguous_input))
        hooks.append(norm.register_forward_hook(_channels_last_output))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def to_channels_last(x: Tensor) -> Tensor:
    """Return images (n, channels, height, width) with an image's channels adjacent in memory."""
    # x.to(memory_format=...) treats the two layouts of a single channel as equal and keeps the
    # strides of the other one, which convolutions do not recognise as channels last.
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


def _input_to_channels_last(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (to_channels_last(inputs[0]), *inputs[1:])


def _contiguous_input(norm: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Undo the layout before a norm of few channels, and before one that trains lowest.

    torch 2.13 crashes the process in the backward pass of the latter.
    """
    x, *others = inputs
    lowest = not x.requires_grad and any(p.requires_grad for p in norm.parameters())
    if x.dim() != 4 or not (lowest or _few_channels(norm)):
        return inputs
    return (x.clone(memory_format=torch.contiguous_format), *others)


def _channels_last_output(norm: nn.Module, _inputs: tuple[Any, ...], out: Tensor) -> Tensor:
    """Return to the layout after a norm of few channels."""
    if out.dim() != 4 or not _few_channels(norm):
        return out
    return out.contiguous(memory_format=torch.channels_last)


def _few_channels(norm: nn.Module) -> bool:
    return isinstance(norm, nn.GroupNorm) and norm.num_channels < _FEW_CHANNELS * norm.num_groups
