"""Arrays: clients from tensors or NumPy arrays and a column that names each example's client."""

from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from accounting.checks import ConfigError
from privpart.data.batches import (
    Batch,
    as_tensor,
    as_tensors,
    leaves_of,
    map_leaves,
    take,
)
from privpart.data.clients import IndexedClients
from privpart.data.index import Index
from privpart.data.users import Users, refuse_not_finite

_OF_USERS = {torch.float32, torch.int64}
_ZIP = b"PK"


def from_tensors(examples: Batch, *, user: object) -> Users | IndexedClients:
    """Return the clients of tensors or arrays.

    float16 and float64 become float32, whole numbers int64. Arrays of ``np.memmap`` stay on disk,
    and their rows are converted and checked when a client takes part.

    Args:
        examples: a nest of tensors or arrays with a row per example, such as ``(x, y)``.
        user: the id of each example's client, n whole numbers or strings.

    Returns:
        ``Users`` for a pair (x, y) in memory that it accepts, which engines compute fastest;
        ``IndexedClients`` for other nests.

    Raises:
        ConfigError: another type, lengths that differ, values that are not finite, or a missing id.
    """
    return clients_of(examples, Index.of_owners(user))


def from_npz(
    path: str | Path, *, user: str = "user", x: str = "x", y: str = "y"
) -> Users | IndexedClients:
    """Return the clients of an npz file with the arrays x, y and user.

    Args:
        path: the file, as ``np.savez`` writes it; arrays of Python objects are refused, because to
            read them is to run code from the file.
        user: name of the array with the id of each example's client.
        x: name of the inputs, shape (n, ...).
        y: name of the labels.

    Raises:
        ConfigError: a file that is missing or damaged, an array that is not in it, or as for
            ``from_tensors``.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            # np.load would read an .npy file, too
            if raw.read(len(_ZIP)) != _ZIP:
                raise ConfigError(f"{path}: is not an npz file, which np.savez writes.")
            raw.seek(0)
            with np.load(raw, allow_pickle=False) as file:
                arrays = {name: _member(file, name, path) for name in (user, x, y)}
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file.") from None
    except ConfigError:
        raise
    except (Exception, MemoryError) as error:
        # the bytes are not trusted
        why = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{path}: cannot be read as an npz file ({type(error).__name__}: {why})."
        ) from None
    index = Index.of_owners(arrays[user], user)
    return clients_of((arrays[x], arrays[y]), index, names=(x, y))


def clients_of(
    examples: Batch, index: Index, names: tuple[str, str] = ("x", "y")
) -> Users | IndexedClients:
    """Return the clients of tensors or arrays; ``names`` are those of a pair in messages."""
    pair = isinstance(examples, tuple | list) and len(examples) == 2
    parts = list(zip(names, examples, strict=True)) if pair else [("examples", examples)]
    for name, part in parts:
        _refuse_shapes(name, part, index)
    if any(isinstance(leaf, np.memmap) for _, leaf in leaves_of(examples)):
        stored = map_leaves(lambda leaf, _: _OnDisk.of(leaf), examples)
        return IndexedClients(index, partial(_rows_of, stored))
    tensors = [as_tensors(part, name) for name, part in parts]
    for (name, _), part in zip(parts, tensors, strict=True):
        refuse_not_finite(name, part, index)
    if not pair:
        return IndexedClients(index, partial(take, tensors[0]))
    x, y = tensors
    if isinstance(x, Tensor) and isinstance(y, Tensor) and {x.dtype, y.dtype} <= _OF_USERS:
        return Users(x, y, index)
    return IndexedClients(index, partial(take, (x, y)))


class _OnDisk:
    """An array in a file, of which a pickled copy opens the file again."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    @classmethod
    def of(cls, leaf: object) -> object:
        """Return a whole file's array wrapped, and all else (a slice, too) as it is."""
        if isinstance(leaf, np.memmap) and isinstance(getattr(leaf, "base", None), mmap):
            return cls(leaf)
        return leaf

    def __reduce__(self) -> tuple[Any, ...]:
        array = cast("np.memmap[Any, Any]", self.array)
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        return _opened, (array.filename, array.dtype, array.offset, array.shape, order)


def _opened(filename: Any, dtype: Any, offset: int, shape: Any, order: Any) -> _OnDisk:  # noqa: ANN401
    return _OnDisk(np.memmap(filename, dtype, "r", offset, shape, order))


def _rows_of(stored: Batch, rows: Tensor) -> Batch:
    """Return some rows of a nest of arrays, as tensors."""

    def own(leaf: Any, name: str) -> Tensor:  # noqa: ANN401
        leaf = leaf.array if isinstance(leaf, _OnDisk) else leaf
        part = leaf[rows] if isinstance(leaf, Tensor) else np.asarray(leaf[rows.numpy()])
        return as_tensor(part, name)

    return map_leaves(own, stored)


def _refuse_shapes(name: str, part: Batch, index: Index) -> None:
    for leaf_name, leaf in leaves_of(part, name):
        shape = getattr(leaf, "shape", None)
        if shape is None:
            # raises the error that it is not an array
            as_tensor(leaf, leaf_name)
        if not shape or shape[0] != index.rows:
            raise ConfigError(
                f"{leaf_name} has {f'{shape[0]} rows' if shape else 'no rows'}, and {index.rows} "
                "ids of clients were given: each row needs the id of its client."
            )
        if getattr(leaf, "dtype", None) == np.dtype(object):
            refuse_objects(leaf_name, leaf, index)


def refuse_objects(name: str, leaf: np.ndarray[Any, Any], index: Index) -> None:
    """Raise the error for an array of Python objects, by the first that is not a number."""
    bad = (row for row, v in enumerate(leaf) if not isinstance(v, int | float | np.number))
    row = next(bad, 0)
    advice = "An array of objects becomes one of numbers with .astype('float32')."
    if isinstance(leaf[row], str):
        advice = (
            "Number its values with .astype('category').cat.codes, or convert text by a tokenizer "
            "(examples= of a table)."
        )
    raise ConfigError(
        f"{name}, row {row} (client {index.owner(row)!r}): is {str(leaf[row])[:40]!r}, of type "
        f"{type(leaf[row]).__name__}; must be a number. {advice}"
    )


def _member(file: Any, name: str, path: Path) -> Any:  # noqa: ANN401  NumPy's
    if name not in file:
        raise ConfigError(f"{path}: has no array {name!r}; it has: {', '.join(file) or 'none'}.")
    try:
        return file[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise ConfigError(
            f"{path}: {name!r} holds Python objects, which are not read, because that would run "
            "code from the file: save it with .astype(str), or as numbers."
        ) from None
