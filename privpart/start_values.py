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

Pretrained weights do not follow from a seed: ``load_weights`` copies them from a file.
"""

import difflib
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from accounting import checks
from accounting.checks import ConfigError
from privpart.patterns import matching_parameters
from privpart.settings.ranges import seed_bytes


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
    """Values of variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010), uniform or Gaussian."""

    uniform: bool = False


Initializer = Normal | Uniform | Constant | He | Glorot


def at_shape(initializer: Initializer, shape: torch.Size) -> Normal | Uniform | Constant:
    """Return the initialiser with He and Glorot resolved for shape (outputs, inputs, *kernel).

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
    # torch's convention: weights are (outputs, inputs, *kernel)
    fan_out, fan_in = (size * math.prod(shape[2:]) for size in shape[:2])
    if isinstance(initializer, Glorot) and initializer.uniform:
        return Uniform(math.sqrt(6 / (fan_in + fan_out)))
    return Normal(math.sqrt(2 / (fan_in if isinstance(initializer, He) else fan_in + fan_out)))


def _within_float32(name: str, value: float) -> None:
    """Raise ConfigError if float32 would turn the value, or a small draw, into 0 or infinity."""
    if value and not 1e-30 <= abs(value) <= 1e30:
        raise ConfigError(
            f"{name}={value:g}: must be 0, or between 1e-30 and 1e30 in absolute value."
        )


_ZERO, _ONE = Constant(0.0), Constant(1.0)
# by kind of layer: of the weight, and of the bias
_BY_LAYER: dict[tuple[type[nn.Module], ...], tuple[Initializer, Initializer | None]] = {
    (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d): (He(), _ZERO),
    (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, _BatchNorm): (_ONE, _ZERO),
    (nn.Embedding, nn.EmbeddingBag): (Normal(1.0), None),
    (nn.PReLU,): (Constant(0.25), None),
}


def default_initializers(module: nn.Module) -> dict[str, Initializer]:
    """Return an initialiser for each parameter of the common layers, by parameter name.

    Dense and convolution layers: He for the weight, 0 for the bias. Normalisation layers: 1 for the
    weight, 0 for the bias. Embeddings: Gaussian of scale 1. Recurrent layers: uniform to
    1/sqrt(hidden size) for weights and biases. MultiheadAttention: uniform Glorot for the input
    projections, 0 for biases. PReLU: 0.25. The last four are torch's own conventions.

    LoRA adapters, by name: 0 for B, so that they leave a pretrained network as it is; A is as
    ``peft`` has it, uniform to 1/sqrt(fan_in), or Gaussian of scale 1 for embeddings.
    """
    return {
        name: start
        for prefix, layer in module.named_modules()
        for name, parameter in layer.named_parameters(prefix, recurse=False)
        if (start := _default(layer, name, parameter.shape)) is not None
    }


def _default(layer: nn.Module, name: str, shape: torch.Size) -> Initializer | None:
    kind = name.rpartition(".")[2]
    if "lora_B" in name or "lora_embedding_B" in name:
        return _ZERO
    if "lora_embedding_A" in name:
        return Normal(1.0)
    if "lora_A" in name and len(shape) > 1:
        return Uniform(1 / math.sqrt(max(1, math.prod(shape[1:]))))
    if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        return Uniform(1 / math.sqrt(layer.hidden_size))
    if isinstance(layer, nn.MultiheadAttention):
        return _ZERO if kind == "in_proj_bias" else Glorot(uniform=kind.endswith("weight"))
    weight, bias = next(
        (starts for kinds, starts in _BY_LAYER.items() if isinstance(layer, kinds)), (None, None)
    )
    return {"weight": weight, "bias": bias}.get(kind)


def built(
    module: nn.Module | Callable[[], nn.Module],
    seed: int | None,
    keep: Sequence[str],
    *,
    overwrite: bool,
) -> nn.Module:
    """Return a network, unless a seed would replace its weights without being told to."""
    holds_weights = isinstance(module, nn.Module)
    if keep and seed is None:
        raise ConfigError(
            f"keep={keep!r} with seed=None: no seed replaces any weight. Leave keep out."
        )
    if overwrite and (seed is None or keep or not holds_weights):
        raise ConfigError(
            "overwrite=True: nothing is overwritten; it is for a seed that replaces all weights of "
            "a module that is passed, without keep. Leave it out."
        )
    if holds_weights and seed is not None and not overwrite and not keep:
        raise ConfigError(
            f"seed={seed} would replace all weights of the module. Pass a function that builds "
            "the network, or overwrite=True; to keep the weights, pass seed=None, or name those "
            "that stay in keep=[...]."
        )
    network = module if isinstance(module, nn.Module) else module()
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"module: returned a {type(network).__name__}; must return a torch.nn.Module."
        )
    network = unwrapped(network)
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if is_lazy(tensor):
            raise ConfigError(
                f"{name!r} has no shape yet: its layer is lazy. Run the module once on a batch."
            )
    return network


def unwrapped(module: nn.Module) -> nn.Module:
    """Return a network without what ``torch.compile`` or data parallelism put around its layers.

    The names of its parameters are then its author's. Engines compile by themselves.

    Raises:
        ConfigError: it is TorchScript, or has packed weights, which nothing here can read.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            "module: is TorchScript, whose layers cannot be trained in part. Pass the nn.Module "
            "that it was made of; load_state_dict(scripted.state_dict()) gives that its weights."
        )
    # torch's class OptimizedModule would import the compiler
    wrapped = module._modules.get("_orig_mod")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        wrapped = module.module
    if wrapped is not None:
        return unwrapped(wrapped)
    for name, value in vars(module).items():
        if isinstance(value, torch.ScriptObject):
            raise ConfigError(
                f"module: {name} holds weights that are packed, such as quantised ones, where no "
                "fingerprint sees them. Pass the network before quantize_dynamic, or hold its "
                "integers in parameters or buffers."
            )
    module._compiled_call_impl = None
    for name, layer in module._modules.items():
        if layer is not None:
            module._modules[name] = unwrapped(layer)
    return module


def set_start_values(
    module: nn.Module,
    seed: int | None,
    keep: Sequence[str],
    chosen: Mapping[str, Initializer],
    moving: Collection[str],
) -> tuple[str, ...]:
    """Draw all parameters that are not kept from the seed, and return the names of the others.

    A seed of None keeps all. ``chosen`` are initialisers by pattern, besides the default ones. A
    draw takes the type of its parameter, which is float32 where it is one of ``moving``.
    """
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if fault := _type_fault(parameter, moves=name in moving):
            raise ConfigError(f"parameter {name!r} {fault}")
    kept = tuple(parameters)
    if seed is None and chosen:
        raise ConfigError(
            "initializers with seed=None: a pretrained model keeps its weights. Leave them out."
        )
    if seed is not None:
        kept = matching_parameters(module, keep, "keep") if isinstance(keep, str) or keep else ()
        drawn = {name: p for name, p in parameters.items() if name not in set(kept)}
        if not drawn:
            raise ConfigError(
                f"keep={list(keep)}: matches every parameter, so nothing follows from seed={seed}. "
                "Leave keep out and pass seed=None."
            )
        _initialize(module, drawn, seed, chosen)
    _refuse_non_finite(module)
    return kept


def _type_fault(parameter: nn.Parameter, *, moves: bool) -> str | None:
    """Return what is wrong with the type or the place of a parameter."""
    kind = parameter.dtype
    if parameter.device.type != "cpu":
        return f"is on {parameter.device}: must be on cpu, from where engines copy it. Use .cpu()."
    if kind.is_complex:
        return (
            f"is {kind}: must be real. Hold nn.Parameter(torch.view_as_real(w)), and call "
            "torch.view_as_complex in forward."
        )
    if moves and kind is not torch.float32:
        return (
            f"trains, and is {kind}: must be torch.float32, the type of updates and noise. Call "
            ".float() on its layer and on what that layer reads; the frozen part may stay as it is."
        )
    if type(parameter) is not nn.Parameter and not kind.is_floating_point:
        return (
            f"is a {type(parameter).__name__}, whose values depend on more than its own integers, "
            "which no fingerprint sees. Pass the network before it is quantised."
        )
    return None


def _refuse_non_finite(module: nn.Module) -> None:
    """Raise ConfigError for parameters and frozen statistics with NaN or infinity."""
    tensors = dict(module.named_parameters())
    for prefix, layer in module.named_modules():
        if has_statistics(layer):
            tensors |= dict(layer.named_buffers(prefix, recurse=False))
    for name, tensor in tensors.items():
        # torch cannot ask this of 8 bits
        if not (tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all():
            raise ConfigError(
                f"parameter or buffer {name!r} holds NaN or infinity: must be finite."
            )


def has_statistics(layer: nn.Module) -> bool:
    """Whether a layer keeps running statistics of what it saw."""
    return getattr(layer, "running_mean", None) is not None


def _initialize(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    seed: int,
    chosen: Mapping[str, Initializer],
) -> None:
    initializers = default_initializers(module)
    for pattern, initializer in chosen.items():
        names = matching_parameters(module, [pattern], "initializers")
        if not any(name in parameters for name in names):
            raise ConfigError(
                f"initializers: {pattern!r} matches only parameters that keep their weights. Leave "
                "it out, or take them out of keep."
            )
        initializers |= dict.fromkeys(names, initializer)
    if missing := [name for name in parameters if name not in initializers]:
        kinds = {type(module.get_submodule(name.rpartition(".")[0])).__name__ for name in missing}
        raise ConfigError(
            f"no initialiser for {', '.join(missing)} (layers of type {', '.join(sorted(kinds))}). "
            f"Pass initializers={{{missing[0]!r}: Normal(scale)}}, by name, pattern or type, such "
            f"as 'type:{min(kinds)}'; or name them in keep=[...] to keep the module's own weights."
        )
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}: a seed draws real numbers only. Name it "
                "in keep."
            )
        drawn = seeded_tensor(seed, name, parameter.shape, initializers[name])
        parameter.data = drawn.to(parameter.dtype)


GENERATOR = 2
"""Version of the generated bits, a part of every key; version 1 drew words from SHAKE-128."""

# words per step, so that words, indices and table stay in the cache
_CHUNK = 1 << 16
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TABLE_SHA256 = "7030c40868edff0a36b70d4a06ceacbf25ac02eb87069f34786f8258a1e9a44d"


def seeded_tensor(seed: int, name: str, shape: torch.Size, initializer: Initializer) -> Tensor:
    """Return the start value of one parameter, float32, as a function of the arguments alone."""
    drawn = at_shape(initializer, shape)
    if isinstance(drawn, Constant):
        return torch.full(shape, drawn.value, dtype=torch.float32)
    # name and shape are in the key, so that no two tensors of a model share a stream
    version, sizes = b"privpart-seeded-%d" % GENERATOR, ",".join(map(str, shape)).encode()
    label = b"|".join([version, seed_bytes(seed), sizes, name.encode()])
    values = np.empty(math.prod(shape), np.float32)
    _gather(_table(drawn), hashlib.sha256(label).digest(), values)
    return torch.from_numpy(values).reshape(shape)


def load_weights(module: nn.Module, path: str | Path, names: Iterable[str]) -> None:
    """Copy parameters from a safetensors file into a module, before it becomes a ``PartialModel``.

    The buffers of the same layers come with them, such as the running statistics of BatchNorm, and
    so do those of layers without parameters that the file has. Nothing is copied if any is wrong.

    Args:
        module: on the CPU.
        path: a safetensors file; floating point takes the type of the module's parameter.
        names: of the parameters, see ``privpart.patterns.matching_parameters``. A tied parameter
            may have any of its names in the file.
    """
    targets = _targets(module, tuple(names))
    try:
        stored = load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file.") from None
    except (OSError, SafetensorError) as error:
        reason = str(error).strip().rstrip(".")
        raise ConfigError(
            f"{path}: cannot be read as a safetensors file ({reason}). Pickled weights, such as "
            ".bin and .pt, are not opened: save them by safetensors.torch.save_file."
        ) from None
    values: list[tuple[Tensor, Tensor]] = []
    for target, aliases, needed in targets:
        if present := {name: stored[name] for name in aliases if name in stored}:
            values.append((target, _checked(path, present, target)))
        elif needed:
            near = difflib.get_close_matches(aliases[0], sorted(stored), n=1, cutoff=0.0)
            raise ConfigError(
                f"{path}: lacks {aliases[0]!r}. Near it: {', '.join(near) or 'nothing'}. Names "
                "must be those of the module, or keep fewer parameters."
            )
    with torch.no_grad():
        for target, value in values:
            target.copy_(value)


def _targets(module: nn.Module, names: Sequence[str]) -> list[tuple[Tensor, list[str], bool]]:
    """Return tensors to load, the names that each may have, and whether it must be in the file."""
    state = module.state_dict(keep_vars=True)
    if unknown := [name for name in names if not isinstance(state.get(name), nn.Parameter)]:
        raise ConfigError(f"names: {unknown[0]!r} is not a parameter of the module.")
    chosen = {id(state[name]) for name in names}
    aliases: dict[int, list[str]] = {}
    for name, tensor in state.items():
        aliases.setdefault(id(tensor), []).append(name)
    targets = [(state[own[0]], own, True) for key, own in aliases.items() if key in chosen]
    for name, tensor in state.items():
        layer, _, kind = name.rpartition(".")
        siblings = {id(p) for p in module.get_submodule(layer).parameters(recurse=False)}
        if not isinstance(tensor, nn.Parameter) and (chosen & siblings or not siblings):
            # files from before torch 0.4.1 do not have the number of batches
            targets.append((tensor, [name], bool(siblings) and kind != "num_batches_tracked"))
    return targets


def _checked(path: str | Path, stored: Mapping[str, Tensor], expected: Tensor) -> Tensor:
    """Return the value of one tensor, by whatever names the file has it."""
    floating = expected.is_floating_point()
    for name, value in stored.items():
        kinds = _FLOATS if floating else (expected.dtype,)
        if value.dtype not in kinds or value.shape != expected.shape:
            raise ConfigError(
                f"{path}: {name!r} is {value.dtype} of shape {tuple(value.shape)}; must be "
                f"{'floating point' if floating else expected.dtype} of shape "
                f"{tuple(expected.shape)}."
            )
        if not value.to(expected.dtype).isfinite().all():
            raise ConfigError(
                f"{path}: {name!r} holds NaN or infinity in {expected.dtype}: must be finite."
            )
    first, *duplicates = stored.values()
    if any(not torch.equal(first, other) for other in duplicates):
        names = " and ".join(map(repr, sorted(stored)))
        raise ConfigError(
            f"{path}: {names} are one parameter of the module and differ in the file. Remove one."
        )
    return first.to(expected.dtype)


def _gather(table: NDArray[np.float32], key: bytes, out: NDArray[np.float32]) -> None:
    """Fill ``out``, shape (n,), with the table entries that the key's words index."""
    # AES in counter mode: a stream that any machine computes alike
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    zeros = bytes(2 * _CHUNK)
    # update_into wants room for one more block of 8 words
    words = np.empty(_CHUNK + 8, "<u2")
    index = np.empty(_CHUNK, np.intp)
    for start in range(0, len(out), _CHUNK):
        part = out[start : start + _CHUNK]
        stream.update_into(zeros[: 2 * len(part)], words.data.cast("B"))
        index[: len(part)] = words[: len(part)]
        # mode "clip" avoids a copy
        np.take(table, index[: len(part)], out=part, mode="clip")


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
    # symmetric by construction, whatever the maths library rounds
    half = np.array(upper, "<i4")
    table = np.concatenate([-half[::-1], half])
    if hashlib.sha256(table.tobytes()).hexdigest() != _TABLE_SHA256:
        raise RuntimeError(
            "this machine's maths library computes normal quantiles that differ from the committed "
            "ones, so frozen parameters would differ from everyone else's. Please report it."
        )
    return (table * np.float64(2.0**-20)).astype(np.float32)
