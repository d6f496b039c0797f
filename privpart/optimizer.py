"""Optimizer: steps of ``torch.optim`` on flat vectors, of the server's model and of a client's.

A client's steps call torch's own functions. torch's classes import torch's compiler when one is
made, which takes every process of a training two seconds.

The server's steps are in numpy: torch fuses a product and a sum where the processor can, so that
its last bits depend on the processor. A released model follows from sums and noise by operations
that IEEE 754 rounds one by one, so that anybody can compute it again (``verify --replay``).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from accounting.checks import ConfigError
from privpart.settings.server import Kind, ServerOptimizer

_STATES: dict[Kind, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adam": ("step", "exp_avg", "exp_avg_sq"),
    "adagrad": ("step", "sum"),
}
_BETAS = 0.9, 0.999
_PLAIN: dict[str, Any] = {"weight_decay": 0.0, "maximize": False}


class FlatOptimizer:
    """The steps and the state of a ``torch.optim`` optimiser of flat vectors, with the same bits.

    Args:
        settings: of the steps.
        parts: the vectors; a part without a gradient rests, and so does its momentum.
        fused: whether "adam" takes its steps as ``Adam(fused=True)`` does.
    """

    def __init__(
        self, settings: ServerOptimizer, parts: Sequence[Tensor], *, fused: bool = False
    ) -> None:
        self._settings, self._parts, self._fused = settings, list(parts), fused
        self._states: list[dict[str, Tensor]] = [{} for _ in parts]

    @torch.no_grad()
    def step(self, gradients: Mapping[int, Tensor]) -> None:
        """Move the parts that have a gradient, by number."""
        for number, gradient in gradients.items():
            if self._settings.kind == "sgd":
                self._descend(self._parts[number], gradient, self._states[number])
            else:
                self._adapt(self._parts[number], gradient, self._states[number])

    def _descend(self, part: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        momentum = self._settings.momentum
        moving = [state.get("momentum_buffer") if momentum else None]
        plain: dict[str, Any] = {
            "lr": self._settings.learning_rate,
            "dampening": 0.0,
            "nesterov": False,
        }
        sgd([part], [gradient], moving, momentum=momentum, **plain, **_PLAIN)
        # torch makes the buffer in the first step
        if moving[0] is not None:
            state["momentum_buffer"] = moving[0]

    def _adapt(self, part: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        settings, names = self._settings, _STATES[self._settings.kind]
        if not state:
            state["step"] = torch.zeros((), device=part.device)
            state |= {name: torch.zeros_like(part) for name in names[1:]}
        step, first, *second = ([state[name]] for name in names)
        plain = _PLAIN | {"lr": settings.learning_rate, "eps": settings.adaptivity}
        if settings.kind == "adagrad":
            adagrad([part], [gradient], first, step, lr_decay=0.0, **plain)
        else:
            plain |= {
                "beta1": _BETAS[0],
                "beta2": _BETAS[1],
                "amsgrad": False,
                "fused": self._fused,
            }
            adam([part], [gradient], first, second[0], [], step, **plain)

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
        started = {
            number: part
            for number, part in enumerate(self._parts)
            if any(f"{number}.{name}" in tensors for name in names)
        }
        shapes = {
            f"{number}.{name}": () if name == "step" else part.shape
            for number, part in started.items()
            for name in names
        }
        if shapes != {key: value.shape for key, value in tensors.items()}:
            raise ConfigError(
                f"the state of the server's optimiser is not that of {kind} on this model: it has "
                f"{', '.join(f'{key} {tuple(value.shape)}' for key, value in tensors.items())}."
            )
        self._states = [
            {name: tensors[f"{number}.{name}"] for name in names if number in started}
            for number in range(len(self._parts))
        ]


class ExactOptimizer(FlatOptimizer):
    """The same steps for float32 on the CPU, rounded after each operation: the same bits anywhere.

    The formulas are torch's. The gradients that ``step`` is given are overwritten.
    """

    def _descend(self, part: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        momentum, slope = self._settings.momentum, gradient.numpy()
        if momentum and "momentum_buffer" in state:
            moving = state["momentum_buffer"].numpy()
            moving *= momentum
            moving += slope
            slope = moving
        elif momentum:
            state["momentum_buffer"] = gradient.clone()
        # Into the gradient: fresh memory would cost as much as the arithmetic.
        values, scaled = part.numpy(), gradient.numpy()
        values -= np.multiply(slope, self._settings.learning_rate, out=scaled)

    def _adapt(self, part: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        settings, slope, values = self._settings, gradient.numpy(), part.numpy()
        if not state:
            names = _STATES[settings.kind][1:]
            state |= {"step": torch.zeros(())} | {name: torch.zeros_like(part) for name in names}
        state["step"] += 1
        if settings.kind == "adagrad":
            squares = state["sum"].numpy()
            squares += slope * slope
            values -= settings.learning_rate * slope / (np.sqrt(squares) + settings.adaptivity)
            return
        mean, squares = state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()
        mean += (1 - _BETAS[0]) * (slope - mean)
        squares *= _BETAS[1]
        squares += (1 - _BETAS[1]) * (slope * slope)
        ended, root = (1 - _power(beta, int(state["step"])) for beta in _BETAS)
        spread = np.sqrt(squares) / math.sqrt(root) + settings.adaptivity
        values -= settings.learning_rate / ended * (mean / spread)


def _power(base: float, exponent: int) -> float:
    """Return a power by squaring, whose bits do not depend on the maths library."""
    half = _power(base * base, exponent // 2) if exponent > 1 else 1.0
    return half * base if exponent & 1 else half
