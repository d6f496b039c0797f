"""Optimizer: steps of ``torch.optim`` on flat vectors, of the server's model and of a client's.

A client's steps call torch's own functions. torch's classes import torch's compiler when one is
made, which takes every process of a training two seconds.

The server's steps are in numpy: torch fuses a product and a sum where the processor can, so that
its last bits depend on the processor. A released model follows from sums and noise by operations
that IEEE 754 rounds one by one, so that anybody can compute it again (``verify --replay``).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from accounting.checks import ConfigError
from privpart.settings.client import LocalTraining
from privpart.settings.server import Kind, ServerOptimizer

_STATES: dict[Kind, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adam": ("step", "exp_avg", "exp_avg_sq"),
    "yogi": ("step", "exp_avg", "exp_avg_sq"),
    "adagrad": ("step", "sum"),
}
Vector = NDArray[np.float32]
_BETAS = 0.9, 0.999
_EPSILON = 1e-8
"""torch's default of what Adam adds to the root of the second moment."""


class FlatOptimizer:
    """A client's steps on flat vectors: the bits of ``torch.optim.SGD`` or ``Adam(fused=True)``.

    Weight decay comes first, and apart from the gradient, as in ``torch.optim.AdamW``.
    """

    def __init__(self, local: LocalTraining, parts: Sequence[Tensor]) -> None:
        self._local, self._parts = local, list(parts)
        # torch makes the buffers of SGD's momentum in the first step
        self._moving: list[Tensor | None] = [None] * len(parts)
        self._means: list[list[Tensor]] = []
        if local.optimizer == "adam":
            steps = [torch.zeros((), device=part.device) for part in parts]
            self._means = [[torch.zeros_like(p) for p in parts] for _ in range(2)] + [steps]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Move all parts."""
        rate, decay = self._local.learning_rate, self._local.weight_decay
        if decay:
            torch._foreach_mul_(self._parts, 1 - rate * decay)
        options: dict[str, Any] = {"lr": rate, "weight_decay": 0.0, "maximize": False}
        moved, slopes = self._parts, list(gradients)
        if not self._means:
            options |= {"momentum": self._local.momentum, "dampening": 0.0, "nesterov": False}
            sgd(moved, slopes, self._moving, **options)
            return
        first, second, steps = self._means
        options |= {"beta1": _BETAS[0], "beta2": _BETAS[1], "eps": _EPSILON, "amsgrad": False}
        adam(moved, slopes, first, second, [], steps, **options, fused=True)

    @property
    def state(self) -> list[Tensor]:
        """What is kept from step to step."""
        moving = [buffer for buffer in self._moving if buffer is not None]
        return sum(self._means, moving)


class ExactOptimizer:
    """The server's steps on flat float32 vectors on the CPU: the same bits on every machine.

    The formulas are torch's, rounded after each operation. A part without a gradient rests, and so
    does its momentum.
    """

    def __init__(self, settings: ServerOptimizer, parts: Sequence[Tensor]) -> None:
        self._settings, self._parts = settings, list(parts)
        self._states: list[dict[str, Tensor]] = [{} for _ in parts]
        self._rate = 0.0  # of the step that is under way

    def begin(self, numbers: Iterable[int], share: float = 1.0) -> None:
        """Begin a step of the parts that have a gradient, by number.

        ``share`` is the part of the learning rate that this step takes.
        """
        settings = self._settings
        self._rate = settings.learning_rate * share
        for number in numbers:
            part, state = self._parts[number], self._states[number]
            if not state and (settings.kind != "sgd" or settings.momentum):
                # -0.0 + x has the bits of x: momentum begins with the first gradient
                zero = -0.0 if settings.kind == "sgd" else 0.0
                for name in _STATES[settings.kind]:
                    state[name] = torch.full(() if name == "step" else part.shape, zero)
            if "step" in state:
                state["step"] += 1

    def move(self, number: int, here: slice, slope: Vector) -> None:
        """Move a piece of a part by its gradient, which is overwritten.

        Every operation works on each coordinate alone. So pieces that stay in the processor's cache
        give the same bits as the whole part, and no step makes a vector of the model's length.
        """
        settings, state = self._settings, self._states[number]
        values = self._parts[number].numpy()[here]
        pieces = {name: t.numpy()[here] for name, t in state.items() if t.ndim}
        if settings.weight_decay:
            values *= 1 - self._rate * settings.weight_decay
        if settings.kind == "sgd":
            self._descend(values, slope, pieces)
        else:
            self._adapt(values, slope, pieces, int(state["step"]))

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by "part.name"; a part has none before its first step."""
        return {
            f"{number}.{name}": value
            for number, state in enumerate(self._states)
            for name, value in state.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that ``tensors`` returned; refuse another optimiser's or model's."""
        kind, names = self._settings.kind, _STATES[self._settings.kind]
        # a part has all of its state or, before its first step, none
        parts = dict(enumerate(self._parts))
        started = [n for n in parts if any(f"{n}.{name}" in tensors for name in names)]
        shapes = {
            f"{number}.{name}": () if name == "step" else parts[number].shape
            for number in started
            for name in names
        }
        if shapes != {key: value.shape for key, value in tensors.items()}:
            raise ConfigError(
                f"the state of the server's optimiser is not that of {kind} on this model: it has "
                f"{', '.join(f'{key} {tuple(value.shape)}' for key, value in tensors.items())}."
            )
        self._states = [
            {name: tensors[f"{number}.{name}"] for name in names if number in started}
            for number in parts
        ]

    def _descend(self, values: Vector, slope: Vector, state: Mapping[str, Vector]) -> None:
        moving = state.get("momentum_buffer", slope)
        if moving is not slope:
            moving *= self._settings.momentum
            moving += slope
        values -= np.multiply(moving, self._rate, out=slope)

    def _adapt(self, values: Vector, slope: Vector, state: Mapping[str, Vector], step: int) -> None:
        settings, rate = self._settings, self._rate
        if settings.kind == "adagrad":
            squares = state["sum"]
            squares += slope * slope
            values -= rate * slope / (np.sqrt(squares) + settings.adaptivity)
            return
        mean, squares = state["exp_avg"], state["exp_avg_sq"]
        mean += (1 - _BETAS[0]) * (slope - mean)
        if settings.kind == "yogi":
            if step == 1:
                squares += settings.adaptivity**2
            square = slope * slope
            squares -= (1 - _BETAS[1]) * square * np.sign(squares - square)
            values -= rate * mean / (np.sqrt(squares) + settings.adaptivity)
            return
        squares *= _BETAS[1]
        squares += (1 - _BETAS[1]) * (slope * slope)
        ended, root = (1 - _power(beta, step) for beta in _BETAS)
        spread = np.sqrt(squares) / math.sqrt(root) + settings.adaptivity
        values -= rate / ended * (mean / spread)


def _power(base: float, exponent: int) -> float:
    """Return a power by squaring, whose bits do not depend on the maths library."""
    half = _power(base * base, exponent // 2) if exponent > 1 else 1.0
    return half * base if exponent & 1 else half
