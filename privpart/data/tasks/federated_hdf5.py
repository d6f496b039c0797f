"""Federated HDF5: local copies of TensorFlow Federated's data sets, one group per user.

For instance ``fed_emnist_train.h5`` (pixels, label). Text, as in ``shakespeare_train.h5``
(snippets), has no numbers yet and is refused.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accounting.checks import ConfigError
from privpart.data.users import Users

Array = np.ndarray[Any, Any]

_DENSEST = 1032
"""Bytes that one byte of deflate holds at most: a file that declares more would fill the memory."""


def federated_hdf5(path: Path, *, x: str = "pixels", y: str = "label") -> tuple[Users, list[str]]:
    """Read all users of a file of numbers.

    Args:
        path: an HDF5 file with a group ``examples/USER`` per user.
        x: data set of the inputs within a group, shape (n, ...); images without a channel get one.
        y: data set of the classes, shape (n,), whole numbers >= 0.

    Returns:
        The users, and their names in the same order.

    Raises:
        ConfigError: h5py is missing, or the file is, or it is damaged or of another form, points to
            other files, or has NaN or infinity for an input.
    """
    try:
        import h5py  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise ConfigError(
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
                raise ValueError("examples is no group")
            names = sorted(groups)
            sets = [(_of(groups, user, x, h5py), _of(groups, user, y, h5py)) for user in names]
            declared = sum(dataset.nbytes for pair in sets for dataset in pair)
            if declared > _DENSEST * path.stat().st_size:
                raise ValueError(f"it declares {declared} bytes, which cannot be in it")
            parts = [
                _part(user, np.asarray(inputs), np.asarray(classes))
                for user, (inputs, classes) in zip(names, sets, strict=True)
            ]
        return _users(parts), names
    except Exception as error:  # the bytes are not trusted, and HDF5 has errors of every kind
        why = " ".join(str(error).split())
        raise ConfigError(f"{path} is no federated HDF5 file of {x} and {y}: {why}.") from None


def _of(groups: Any, user: str, name: str, h5py: Any) -> Any:  # noqa: ANN401  h5py's
    """One data set of a user, not yet read; refused if its numbers are in another file."""
    group = groups[user]
    found = group.get(name) if isinstance(group, h5py.Group) else None
    if not isinstance(found, h5py.Dataset):
        raise ValueError(f"user {user} has no data set {name}")
    if found.file.filename != groups.file.filename or found.external or found.is_virtual:
        raise ValueError(f"{name} of user {user} points to another file")
    return found


def _part(user: str, inputs: Array, classes: Array) -> tuple[Array, Array]:
    """Inputs as float32 and classes as int64, of one user."""
    if inputs.dtype.kind not in "fiu" or classes.dtype.kind not in "iu":
        raise ValueError(
            f"user {user} has inputs of {inputs.dtype} and classes of {classes.dtype}; they must "
            "be numbers, and whole numbers"
        )
    if classes.ndim != 1 or inputs.shape[:1] != classes.shape:
        raise ValueError(
            f"user {user} has inputs of shape {inputs.shape} and classes of {classes.shape}; there "
            "must be a class for each input"
        )
    with np.errstate(over="ignore"):  # too large for float32 is infinity, and refused
        values = inputs.astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise ValueError(f"user {user} has NaN or infinity for an input")
    numbers = classes.astype(np.int64)
    if (numbers < 0).any():
        raise ValueError(f"user {user} has a class below 0, or above what 64 bits hold")
    return values, numbers


def _users(parts: Sequence[tuple[Array, Array]]) -> Users:
    lengths = [len(classes) for _, classes in parts]
    if not sum(lengths):
        raise ValueError("nobody has an example")
    shapes = sorted({values.shape[1:] for values, _ in parts})
    if len(shapes) > 1:
        raise ValueError(f"inputs have different shapes: {', '.join(map(str, shapes))}")
    values = torch.from_numpy(np.concatenate([values for values, _ in parts]))
    classes = torch.from_numpy(np.concatenate([classes for _, classes in parts]))
    if values.dim() == 3:
        values = values.unsqueeze(1)
    return Users(values, classes, torch.split(torch.arange(len(classes)), lengths))
