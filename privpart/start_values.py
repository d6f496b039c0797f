"""Start values: initialisers, and parameters drawn from a public seed, the same bits everywhere.

FedPT (Sidahmed et al. 2022, section 3.1) sends a seed in place of the frozen parameters. That needs
the same bits on every machine, which ``torch.randn`` does not give: its bits differ between CPU
capabilities. Here only integers decide: the 16-bit words of AES-256 in counter mode, keyed by seed,
name and shape, index a table of 65,536 float32 numbers. The table holds normal quantiles in
multiples of 2^-20, exact in float32, each multiplied once by the scale, which IEEE 754 defines
exactly. The table's hash is checked, so a maths library that deviates is an error rather than a
silent drift. An initialiser says which distribution to use; each is Gaussian, uniform or constant
once the shape is known.

Nothing here is secret: the seed is public, and so is every bit that follows from it.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError


@dataclass(frozen=True, slots=True)
class Normal:
    """Gaussian start values of standard deviation ``scale`` >= 0, cut off at 4.33 ``scale``."""

    scale: float

    def __post_init__(self) -> None:
        _within_float32("scale", checks.nonnegative("scale", self.scale))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform start values on 65,536 points from -``limit`` to ``limit`` >= 0."""

    limit: float

    def __post_init__(self) -> None:
        _within_float32("limit", checks.nonnegative("limit", self.limit))


@dataclass(frozen=True, slots=True)
class Constant:
    """Start values that all equal ``value``."""

    value: float

    def __post_init__(self) -> None:
        checks.reals("value", [self.value])
        _within_float32("value", self.value)


@dataclass(frozen=True, slots=True)
class He:
    """Gaussian values of scale sqrt(2 / fan_in), for layers before a ReLU (He et al. 2015)."""


@dataclass(frozen=True, slots=True)
class Glorot:
    """Start values of variance 2 / (fan_in + fan_out), by Glorot and Bengio (2010).

    They are uniform if ``uniform``, else Gaussian.
    """

    uniform: bool = False


Initializer = Normal | Uniform | Constant | He | Glorot


def at_shape(initializer: Initializer, shape: torch.Size) -> Normal | Uniform | Constant:
    """Return the initialiser with He and Glorot resolved for shape (outputs, inputs, *kernel).

    Raises:
        ConfigError: the shape has no inputs and outputs, which He and Glorot need.

    >>> at_shape(He(), torch.Size([4, 2, 3, 3]))
    Normal(scale=0.3333333333333333)
    >>> at_shape(Glorot(uniform=True), torch.Size([3, 3]))
    Uniform(limit=1.0)
    """
    if not isinstance(initializer, He | Glorot):
        return initializer
    if len(shape) < 2 or not math.prod(shape):
        raise ConfigError(
            f"{type(initializer).__name__}() on shape {tuple(shape)}: the weight must have inputs "
            "and outputs. Use Normal, Uniform or Constant."
        )
    fan_out, fan_in = (size * math.prod(shape[2:]) for size in shape[:2])
    if isinstance(initializer, He):
        return Normal(math.sqrt(2 / fan_in))
    if initializer.uniform:
        return Uniform(math.sqrt(6 / (fan_in + fan_out)))
    return Normal(math.sqrt(2 / (fan_in + fan_out)))


def _within_float32(name: str, value: float) -> None:
    """Raise ConfigError if float32 would turn the value, or a small draw, into 0 or infinity."""
    if value and not 1e-30 <= abs(value) <= 1e30:
        raise ConfigError(
            f"{name}={value:g}: must be 0, or between 1e-30 and 1e30 in absolute value."
        )


def default_initializers(module: nn.Module) -> dict[str, Initializer]:
    """Return an initialiser for each parameter of the common layers, by parameter name.

    Dense and convolution layers: He for the weight, 0 for the bias. Normalisation layers: 1 for the
    weight, 0 for the bias. Embeddings: Gaussian of scale 1.
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


GENERATOR = 2
"""Version of the generated bits, sent in every message. Version 1 drew words from SHAKE-128."""

_CHUNK = 1 << 16  # words per step, so that words, indices and table stay in the cache
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TABLE_SHA256 = "7030c40868edff0a36b70d4a06ceacbf25ac02eb87069f34786f8258a1e9a44d"


def seeded_tensor(seed: int, name: str, shape: torch.Size, initializer: Initializer) -> Tensor:
    """Return the start value of one parameter, float32, as a function of the arguments alone.

    Args:
        seed: public seed, 0 <= seed < 2^128.
        name: name of the parameter, so that tensors of one model differ.
        shape: shape of the parameter.
        initializer: distribution and scale.
    """
    drawn = at_shape(initializer, shape)
    if isinstance(drawn, Constant):
        return torch.full(shape, drawn.value, dtype=torch.float32)
    label = b"|".join(
        [
            b"privpart-seeded-%d" % GENERATOR,
            seed_bytes(seed),
            ",".join(map(str, shape)).encode(),
            name.encode(),
        ]
    )
    values = np.empty(math.prod(shape), np.float32)
    _gather(_table(drawn), hashlib.sha256(label).digest(), values)
    return torch.from_numpy(values).reshape(shape)


def seed_bytes(seed: int) -> bytes:
    """Return the seed as the 16 bytes that travel in a message."""
    value = checks.count("seed", seed, minimum=0)
    if value >= 1 << 128:
        raise ConfigError(f"seed={value}: must be below 2^128, since messages hold 16 bytes of it.")
    return value.to_bytes(16, "big")


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return 32 hex digits that change with any bit, name, shape or dtype of ``tensors``."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        bits = real.view(_INTEGERS[real.itemsize]).numpy()  # NumPy has no bfloat16
        digest.update(bits.astype(bits.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()[:32]


def _gather(table: NDArray[np.float32], key: bytes, out: NDArray[np.float32]) -> None:
    """Fill ``out``, shape (n,), with the table entries that the key's words index."""
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    zeros = bytes(2 * _CHUNK)
    words = np.empty(_CHUNK + 8, "<u2")  # update_into wants room for one more block of 8 words
    index = np.empty(_CHUNK, np.intp)
    for start in range(0, len(out), _CHUNK):
        part = out[start : start + _CHUNK]
        stream.update_into(zeros[: 2 * len(part)], words.data.cast("B"))
        index[: len(part)] = words[: len(part)]
        np.take(table, index[: len(part)], out=part, mode="clip")  # mode "clip" avoids a copy


def _table(drawn: Normal | Uniform) -> NDArray[np.float32]:
    """Return the value of each of the 65,536 words."""
    if isinstance(drawn, Normal):
        return _quantiles() * np.float32(drawn.scale)
    return np.arange(-65535, 65536, 2, dtype=np.float32) * np.float32(drawn.limit / 65535)


@cache
def _quantiles() -> NDArray[np.float32]:
    """Return the medians of 65,536 equally likely slices of N(0, 1), in multiples of 2^-20."""
    normal = NormalDist()
    upper = [round(normal.inv_cdf(0.5 + (i + 0.5) / 65536) * 2**20) for i in range(32768)]
    half = np.array(upper, "<i4")
    table = np.concatenate([-half[::-1], half])
    if hashlib.sha256(table.tobytes()).hexdigest() != _TABLE_SHA256:
        raise RuntimeError(
            "this machine's maths library computes normal quantiles that differ from the committed "
            "ones, so frozen parameters would differ from everyone else's. Please report it."
        )
    return (table * np.float64(2.0**-20)).astype(np.float32)
