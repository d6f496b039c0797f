"""Batches: examples as nests of tensors, such as ``(x, y)`` or a dict of tensors by name.

Every tensor of a nest has one row per example. A nest is a tensor, or a tuple, list or dict of
nests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accounting.checks import ConfigError

Batch = Any
"""A nest of tensors whose first dimensions are equal."""

_HALVES_AND_DOUBLES = {torch.float16, torch.bfloat16, torch.float64}
_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32}
_IMAGE_DIMS = 3  # (n, height, width) and above


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return the nest with ``function`` applied to each tensor; refuse other leaves."""
    return map_leaves(lambda leaf, name: function(_tensor(leaf, name)), batch)


def tensors_of(batch: Batch, name: str = "examples") -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each leaf, such as ``("examples[0]", x)``."""
    for leaf_name, leaf in leaves_of(batch, name):
        yield leaf_name, _tensor(leaf, leaf_name)


def map_leaves(function: Callable[[Any, str], Any], nest: Any, name: str = "examples") -> Any:  # noqa: ANN401
    """Return the nest with ``function`` applied to each leaf and its name."""
    if isinstance(nest, Mapping):
        return {key: map_leaves(function, value, f"{name}[{key!r}]") for key, value in nest.items()}
    if isinstance(nest, tuple | list):
        return _like(nest, [map_leaves(function, v, f"{name}[{k}]") for k, v in enumerate(nest)])
    return function(nest, name)


def leaves_of(nest: Any, name: str = "examples") -> list[tuple[str, Any]]:  # noqa: ANN401
    """Return the name and the value of each leaf, whatever it is."""
    leaves: list[tuple[str, Any]] = []
    map_leaves(lambda leaf, leaf_name: leaves.append((leaf_name, leaf)), nest, name)
    return leaves


def count_rows(batch: Batch) -> int:
    """Return the number of examples; refuse tensors that differ in it."""
    leaves = list(tensors_of(batch))
    if not leaves:
        raise ConfigError("examples: hold no tensor.")
    if flat := [name for name, tensor in leaves if not tensor.dim()]:
        raise ConfigError(f"{flat[0]}: is a single number; must have one row per example.")
    first, tensor = leaves[0]
    for name, other in leaves[1:]:
        if len(other) != len(tensor):
            raise ConfigError(
                f"{name} has {len(other)} rows, {first} has {len(tensor)}: each must have one row "
                "per example."
            )
    return len(tensor)


def take(batch: Batch, rows: Tensor) -> Batch:
    """Return the examples in some rows."""
    return map_tensors(lambda tensor: tensor[rows], batch)


def as_tensors(batch: Any, name: str = "examples") -> Batch:  # noqa: ANN401  a nest of arrays
    """Return a nest of arrays and tensors as tensors of the types that networks take.

    float16, bfloat16 and float64 become float32, in which a value too large becomes infinity, to be
    refused by ``not_finite``; whole numbers become int64, and so does a column of truth values,
    shape (n,). Tensors that need no change share their memory with what was passed.

    Bytes of images are refused, since int64 would be the wrong type for them.
    """
    return map_leaves(as_tensor, batch, name)


def as_tensor(leaf: Any, name: str) -> Tensor:  # noqa: ANN401  whatever a nest holds
    """Return one leaf of a nest as ``as_tensors`` does."""
    if isinstance(leaf, Tensor):
        return _converted(leaf, name)
    if not isinstance(leaf, np.ndarray):
        raise _not_a_tensor(leaf, name)
    return _converted(torch.from_numpy(_numbers(leaf, name)), name)


def stack(items: Sequence[Any], name: str = "examples") -> Batch:
    """Return single examples, nests of one structure, as one nest with a row per example.

    A leaf may be a tensor, an array or a number; types become those of ``as_tensors``.
    """
    structures = {_structure(item) for item in items}
    if structures == {None}:
        arrays = [
            i if isinstance(i, Tensor) else torch.from_numpy(_numbers(i, name)) for i in items
        ]
        structures = {f"{array.dtype} {tuple(array.shape)}" for array in arrays}
        if len(structures) == 1:
            return _converted(torch.stack(arrays), name)
    if len(structures) > 1:
        raise ConfigError(
            f"{name}: examples of one client are {' and '.join(sorted(map(str, structures))[:2])}; "
            "all must have one structure, type and shape: crop, resize or pad them."
        )
    first = items[0]
    if isinstance(first, Mapping):
        return {key: stack([i[key] for i in items], f"{name}[{key!r}]") for key in first}
    columns = [[item[key] for item in items] for key in range(len(first))]
    return _like(first, [stack(col, f"{name}[{key}]") for key, col in enumerate(columns)])


def _structure(item: Any) -> str | None:  # noqa: ANN401
    if isinstance(item, Mapping):
        return f"dict of {', '.join(sorted(map(str, item)))}"
    return f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else None


def not_finite(tensor: Tensor) -> Tensor | None:
    """Return the rows that contain NaN or infinity; None if no row does."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.sum().isfinite():
        # a sum is finite only if all of its terms are
        return None
    rows = (~tensor.isfinite()).reshape(len(tensor), -1).any(dim=1).nonzero().flatten()
    return rows if len(rows) else None


def _like(batch: tuple[Any, ...] | list[Any], values: list[Any]) -> Batch:
    # a named tuple takes its fields one by one
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _tensor(leaf: object, name: str) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise _not_a_tensor(leaf, name)
    return leaf


def _not_a_tensor(leaf: object, name: str) -> ConfigError:
    return ConfigError(
        f"{name}: is a {type(leaf).__name__}; must be a tensor, or a tuple, list or dict of "
        "tensors. torch.tensor converts lists, .to_numpy() tables, a tokenizer text."
    )


def _numbers(leaf: object, name: str) -> np.ndarray[Any, Any]:
    """Return an array or a number as a writable array in native byte order."""
    if not isinstance(leaf, np.ndarray | np.generic | float | int):
        raise _not_a_tensor(leaf, name)
    if isinstance(leaf, np.ma.MaskedArray):
        raise ConfigError(f"{name}: is masked; fill its gaps (.filled(...)) or drop their rows.")
    array = np.asarray(leaf)
    if array.dtype.kind not in "fiub":
        raise ConfigError(
            f"{name}: has type {array.dtype}; must be numbers, float32, or int64 for labels and "
            "token ids. Pad lists to one length; a tokenizer converts text."
        )
    if array.dtype.itemsize > np.dtype(np.float64).itemsize:
        array = array.astype(np.float64)  # long double
    # torch takes neither foreign byte order nor negative strides, and warns of read-only memory
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    writable = native if native.flags.writeable else native.copy()
    return writable if all(step >= 0 for step in writable.strides) else writable.copy()


def _converted(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype in _HALVES_AND_DOUBLES:
        return tensor.to(torch.float32)
    if tensor.dtype is torch.uint8 and tensor.dim() >= _IMAGE_DIMS:
        raise ConfigError(
            f"{name}: has type uint8 and shape {tuple(tensor.shape)}, as images in bytes have: "
            "convert images with x.astype('float32') / 255, and other whole numbers to int64."
        )
    if tensor.dtype is torch.uint64:
        if len(tensor) and int(tensor.cpu().numpy().max()) >= 2**63:
            raise ConfigError(f"{name}: has whole numbers of 2^63 or above, which int64 lacks.")
        return tensor.to(torch.int64)
    # a column of truth values holds labels; a mask of more dimensions stays one
    if tensor.dtype in _INTEGERS or (tensor.dtype is torch.bool and tensor.dim() == 1):
        return tensor.to(torch.int64)
    if tensor.dtype not in (torch.float32, torch.int64, torch.bool):
        raise ConfigError(f"{name}: has type {tensor.dtype}; must be real numbers.")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ConfigError(
            f"{name}: is sparse, or on the device meta; must hold all of its numbers."
        )
    return tensor
