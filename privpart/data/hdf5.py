"""HDF5: local copies of TensorFlow Federated's data sets, one group per user.

An example is ``fed_emnist_train.h5`` (pixels, label). Data sets of text, such as
``shakespeare_train.h5`` (snippets), are refused.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accounting.checks import ConfigError, MissingExtraError
from privpart.data.users import Users

_Array = np.ndarray[Any, Any]

# One byte of deflate expands to at most so many; a file that declares more would fill the memory.
_MAX_EXPANSION = 1032


def federated_hdf5(path: Path, *, x: str = "pixels", y: str = "label") -> tuple[Users, list[str]]:
    """Read the examples of all users from a federated HDF5 file.

    Args:
        path: HDF5 file with a group ``examples/USER`` per user.
        x: name of the inputs in a group, shape (n, ...); images without a channel axis get one.
        y: name of the labels in a group, shape (n,), whole numbers >= 0.

    Returns:
        The users, and their names in the same order.

    Raises:
        MissingExtraError: h5py is not installed.
        ConfigError: the file is missing or damaged, has another structure, refers to other files,
            or contains NaN or infinity among the inputs.
    """
    try:
        import h5py  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise MissingExtraError(
            "reading HDF5 needs h5py: pip install 'privpart[tff]', or pip install h5py."
        ) from None
    if not path.exists():
        raise ConfigError(
            f"no {path}: put the file there, as TensorFlow Federated's "
            "tff.simulation.datasets unpacks it into its cache folder."
        )
    try:
        with h5py.File(path, "r") as file:
            groups = file["examples"]
            if not isinstance(groups, h5py.Group):
                raise ValueError("examples is not a group")
            names = sorted(groups)
            sets = [
                (_dataset(groups, user, x, h5py), _dataset(groups, user, y, h5py)) for user in names
            ]
            declared = sum(dataset.nbytes for pair in sets for dataset in pair)
            if declared > _MAX_EXPANSION * path.stat().st_size:
                raise ValueError(f"it declares {declared} bytes, more than it can contain")
            parts = [
                _part(user, np.asarray(inputs), np.asarray(labels))
                for user, (inputs, labels) in zip(names, sets, strict=True)
            ]
        return _users(parts), names
    except Exception as error:  # the bytes are not trusted, and HDF5 has errors of every kind
        why = " ".join(str(error).split())
        raise ConfigError(f"{path} is not a federated HDF5 file with {x} and {y}: {why}.") from None


def _dataset(groups: Any, user: str, name: str, h5py: Any) -> Any:  # noqa: ANN401  h5py's
    """Return one data set of a user, not yet read; refuse data that another file holds."""
    group = groups[user]
    found = group.get(name) if isinstance(group, h5py.Group) else None
    if not isinstance(found, h5py.Dataset):
        raise ValueError(f"user {user} has no data set {name}")
    if found.file.filename != groups.file.filename or found.external or found.is_virtual:
        raise ValueError(f"{name} of user {user} points to another file")
    return found


def _part(user: str, inputs: _Array, labels: _Array) -> tuple[_Array, _Array]:
    """Return one user's inputs as float32 and labels as int64."""
    if inputs.dtype.kind not in "fiu" or labels.dtype.kind not in "iu":
        raise ValueError(
            f"user {user} has inputs of type {inputs.dtype} and labels of type {labels.dtype}; "
            "inputs must be numbers and labels whole numbers"
        )
    if labels.ndim != 1 or inputs.shape[:1] != labels.shape:
        raise ValueError(
            f"user {user} has inputs of shape {inputs.shape} and labels of shape {labels.shape}; "
            "every input needs one label"
        )
    with np.errstate(over="ignore"):  # too large for float32 becomes infinity, refused below
        values = inputs.astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ValueError(f"user {user} has NaN or infinity among the inputs")
    targets = labels.astype(np.int64)
    if (targets < 0).any():
        raise ValueError(f"user {user} has a label below 0 or above the range of 64 bits")
    return values, targets


def _users(parts: Sequence[tuple[_Array, _Array]]) -> Users:
    lengths = [len(labels) for _, labels in parts]
    if not sum(lengths):
        raise ValueError("no user has an example")
    shapes = sorted({values.shape[1:] for values, _ in parts})
    if len(shapes) > 1:
        raise ValueError(f"inputs have different shapes: {', '.join(map(str, shapes))}")
    values = torch.from_numpy(np.concatenate([values for values, _ in parts]))
    labels = torch.from_numpy(np.concatenate([labels for _, labels in parts]))
    if values.dim() == 3:
        values = values.unsqueeze(1)
    rows = torch.split(torch.arange(len(labels)), lengths)
    return Users(values, labels, rows, allow_empty=True)
