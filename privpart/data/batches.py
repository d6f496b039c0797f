"""Batches: examples as nests of tensors, such as ``(x, y)`` or a dict of tensors by name.

Every tensor of a nest has one row per example. A nest is a tensor, or a tuple, list or dict of
nests.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from accounting.checks import ConfigError

Batch = Any
"""A nest of tensors whose first dimensions are equal."""


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return the nest with ``function`` applied to each tensor.

    Raises:
        ConfigError: a leaf is not a tensor.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        mapped = [map_tensors(function, value) for value in batch]
        # a named tuple takes its fields one by one
        return type(batch)(*mapped) if hasattr(batch, "_fields") else type(batch)(mapped)
    raise ConfigError(
        f"examples: hold a {type(batch).__name__}; must be tensors, or tuples, lists or dicts of "
        "them."
    )


def tensors_of(batch: Batch, name: str = "examples") -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each leaf, such as ``("examples[0]", x)``.

    Raises:
        ConfigError: a leaf is not a tensor.
    """
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from tensors_of(value, f"{name}[{key!r}]")
    elif isinstance(batch, tuple | list):
        for key, value in enumerate(batch):
            yield from tensors_of(value, f"{name}[{key}]")
    else:
        raise ConfigError(
            f"{name}: is a {type(batch).__name__}; must be a tensor, or a tuple, list or dict of "
            "tensors."
        )


def count_rows(batch: Batch) -> int:
    """Return the number of examples.

    Raises:
        ConfigError: there is no tensor, or tensors differ in their number of rows.
    """
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
