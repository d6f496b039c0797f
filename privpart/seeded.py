"""Seeded parameters: frozen weights as a function of a public seed, bit for bit.

FedPT (Sidahmed et al. 2022, section 3.1) sends a seed in place of the frozen parameters. That needs
the same bits on every machine, which ``torch.randn`` does not give: its bits differ between CPU
capabilities. Here only integers decide: SHAKE-128 words, keyed by seed, name and shape, index a
table of 65,536 normal quantiles that are multiples of 2^-20, exact in float32, followed by a single
IEEE multiplication. The table's hash is checked, so a deviating maths library is an error, not a
drift.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError

_GENERATOR = b"privpart-seeded-1"
_TABLE_SHA256 = "7030c40868edff0a36b70d4a06ceacbf25ac02eb87069f34786f8258a1e9a44d"


@dataclass(frozen=True, slots=True)
class Normal:
    """Gaussian start values of standard deviation ``scale``, none beyond 4.33 times that."""

    scale: float


@dataclass(frozen=True, slots=True)
class Uniform:
    """Start values between -``limit`` and ``limit``, 65,536 of them equally likely."""

    limit: float


@dataclass(frozen=True, slots=True)
class Constant:
    """Every start value is ``value``."""

    value: float


@dataclass(frozen=True, slots=True)
class He:
    """Gaussian of scale sqrt(2 / fan_in), for layers before a ReLU (He et al. 2015)."""


@dataclass(frozen=True, slots=True)
class Glorot:
    """Variance 2 / (fan_in + fan_out), Gaussian or uniform (Glorot and Bengio 2010)."""

    uniform: bool = False


Initializer = Normal | Uniform | Constant | He | Glorot


def seeded_tensor(seed: int, name: str, shape: torch.Size, initializer: Initializer) -> Tensor:
    """Return the start value of one parameter: float32, a function of the arguments alone.

    Args:
        seed: public, 0 <= seed < 2^128.
        name: the parameter's name; tensors of one model differ by it.
        shape: its shape.
        initializer: distribution and scale.
    """
    drawn = _resolved(initializer, name, shape)
    if isinstance(drawn, Constant):
        return torch.full(shape, drawn.value)
    numbers = math.prod(shape)
    label = b"|".join(
        [_GENERATOR, seed_bytes(seed), ",".join(map(str, shape)).encode(), name.encode()]
    )
    words = np.frombuffer(hashlib.shake_128(label).digest(2 * numbers), "<u2")
    if isinstance(drawn, Normal):
        values = _quantiles()[words] * np.float32(drawn.scale)
    else:
        values = (2.0 * words - 65535).astype(np.float32) * np.float32(drawn.limit / 65535)
    return torch.from_numpy(values).reshape(shape)


def seed_bytes(seed: int) -> bytes:
    """Return the seed as the 16 bytes that travel in a message."""
    value = checks.count("seed", seed, minimum=0)
    if value >= 1 << 128:
        raise ConfigError(f"seed={value}: must be below 2^128, it travels as 16 bytes.")
    return value.to_bytes(16, "big")


def default_initializers(module: nn.Module) -> dict[str, Initializer]:
    """Return an initialiser for every parameter of the common layers, by parameter name.

    Dense and convolution weights: Gaussian He, scale sqrt(2 / fan_in); their biases 0.
    Normalisation: weight 1, bias 0. Embedding: Gaussian of scale 1.
    """
    found: dict[str, Initializer] = {}
    for prefix, layer in module.named_modules():
        for name, _ in layer.named_parameters(prefix, recurse=False):
            initializer = _layer_initializer(layer, name.rpartition(".")[2])
            if initializer is not None:
                found[name] = initializer
    return found


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return 32 hex digits that change with any bit, name, shape or type of ``tensors``."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.numpy().astype(tensor.numpy().dtype.newbyteorder("<")).data)
    return digest.hexdigest()[:32]


def _resolved(
    initializer: Initializer, name: str, shape: torch.Size
) -> Normal | Uniform | Constant:
    """He and Glorot as the distribution that they are at this shape, (outputs, inputs, ...)."""
    if not isinstance(initializer, He | Glorot):
        return initializer
    if len(shape) < 2:
        raise ConfigError(
            f"{type(initializer).__name__}() for {name!r} of shape {tuple(shape)}: must have "
            "inputs and outputs, so at least two dimensions. Use Normal, Uniform or Constant."
        )
    fan_out, fan_in = (size * math.prod(shape[2:]) for size in shape[:2])
    if isinstance(initializer, He):
        return Normal(math.sqrt(2 / fan_in))
    if initializer.uniform:
        return Uniform(math.sqrt(6 / (fan_in + fan_out)))
    return Normal(math.sqrt(2 / (fan_in + fan_out)))


_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def _layer_initializer(layer: nn.Module, kind: str) -> Initializer | None:
    if isinstance(layer, _WEIGHTED) and kind == "weight":
        return He()
    if isinstance(layer, _NORMS) and kind == "weight":
        return Constant(1.0)
    if isinstance(layer, (*_WEIGHTED, *_NORMS)) and kind == "bias":
        return Constant(0.0)
    if isinstance(layer, nn.Embedding) and kind == "weight":
        return Normal(1.0)
    return None


@cache
def _quantiles() -> NDArray[np.float32]:
    """The middle quantiles of 65,536 equal slices of N(0, 1), in multiples of 2^-20."""
    normal = NormalDist()
    upper = [round(normal.inv_cdf(0.5 + (i + 0.5) / 65536) * 2**20) for i in range(32768)]
    half = np.array(upper, "<i4")
    table = np.concatenate([-half[::-1], half])
    if hashlib.sha256(table.tobytes()).hexdigest() != _TABLE_SHA256:
        raise RuntimeError(
            "this machine's maths library computes other normal quantiles than the committed ones: "
            "frozen parameters would differ from everyone else's. Please report it."
        )
    return (table * np.float64(2.0**-20)).astype(np.float32)
