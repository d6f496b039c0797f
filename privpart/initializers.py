"""Initialisers: the distributions that start values are drawn from.

All are Gaussian, uniform or constant once the shape is known; ``privpart.seeded`` draws them.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from accounting import checks
from accounting.checks import ConfigError


@dataclass(frozen=True, slots=True)
class Normal:
    """Gaussian start values of standard deviation ``scale`` >= 0, none beyond 4.33 times that."""

    scale: float

    def __post_init__(self) -> None:
        _within_float32("scale", checks.nonnegative("scale", self.scale))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Start values from -``limit`` to ``limit`` >= 0, 65,536 of them equally likely."""

    limit: float

    def __post_init__(self) -> None:
        _within_float32("limit", checks.nonnegative("limit", self.limit))


@dataclass(frozen=True, slots=True)
class Constant:
    """Every start value is ``value``."""

    value: float

    def __post_init__(self) -> None:
        checks.reals("value", [self.value])
        _within_float32("value", self.value)


@dataclass(frozen=True, slots=True)
class He:
    """Gaussian of scale sqrt(2 / fan_in), for layers before a ReLU (He et al. 2015)."""


@dataclass(frozen=True, slots=True)
class Glorot:
    """Variance 2 / (fan_in + fan_out), Gaussian or uniform (Glorot and Bengio 2010)."""

    uniform: bool = False


Initializer = Normal | Uniform | Constant | He | Glorot


def at_shape(initializer: Initializer, shape: torch.Size) -> Normal | Uniform | Constant:
    """Return what He and Glorot are for a weight of shape (outputs, inputs, *kernel).

    Raises:
        ConfigError: a shape without inputs and outputs.

    >>> at_shape(He(), torch.Size([4, 2, 3, 3]))
    Normal(scale=0.3333333333333333)
    >>> at_shape(Glorot(uniform=True), torch.Size([3, 3]))
    Uniform(limit=1.0)
    """
    if not isinstance(initializer, He | Glorot):
        return initializer
    if len(shape) < 2 or not math.prod(shape):
        raise ConfigError(
            f"{type(initializer).__name__}() on shape {tuple(shape)}: needs a weight with inputs "
            "and outputs. Use Normal, Uniform or Constant."
        )
    fan_out, fan_in = (size * math.prod(shape[2:]) for size in shape[:2])
    if isinstance(initializer, He):
        return Normal(math.sqrt(2 / fan_in))
    if initializer.uniform:
        return Uniform(math.sqrt(6 / (fan_in + fan_out)))
    return Normal(math.sqrt(2 / (fan_in + fan_out)))


def _within_float32(name: str, value: float) -> None:
    """Refuse what float32 would turn into zeros or infinities, the smallest draws included."""
    if value and not 1e-30 <= abs(value) <= 1e30:
        raise ConfigError(f"{name}={value:g}: must be 0, or between 1e-30 and 1e30 in size.")


def default_initializers(module: nn.Module) -> dict[str, Initializer]:
    """Return an initialiser for every parameter of the common layers, by parameter name.

    Dense and convolution weights: He; their biases 0. Normalisation: weight 1, bias 0. Embedding:
    Gaussian of scale 1.
    """
    found: dict[str, Initializer] = {}
    for prefix, layer in module.named_modules():
        for name, _ in layer.named_parameters(prefix, recurse=False):
            initializer = _of_layer(layer, name.rpartition(".")[2])
            if initializer is not None:
                found[name] = initializer
    return found


_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def _of_layer(layer: nn.Module, kind: str) -> Initializer | None:
    if isinstance(layer, _WEIGHTED) and kind == "weight":
        return He()
    if isinstance(layer, _NORMS) and kind == "weight":
        return Constant(1.0)
    if isinstance(layer, (*_WEIGHTED, *_NORMS)) and kind == "bias":
        return Constant(0.0)
    if isinstance(layer, nn.Embedding) and kind == "weight":
        return Normal(1.0)
    return None
