"""Federated HDF5: local copies of TensorFlow Federated's data sets, one group per user.

For instance ``fed_emnist_train.h5`` (pixels, label) and ``shakespeare_train.h5`` (snippets).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from accounting.checks import ConfigError
from privpart.engines.local_work import Users


def federated_hdf5(path: Path, *, x: str = "pixels", y: str = "label") -> tuple[Users, list[str]]:
    """Read all users of a file of numbers.

    Args:
        path: an HDF5 file with a group ``examples/USER`` per user.
        x: data set of the inputs within a group, shape (n, ...); images without a channel get one.
        y: data set of the classes, shape (n,).

    Returns:
        The users, and their names in the same order.

    Raises:
        ConfigError: h5py is missing, or the file is, or it is of another form.
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
            names = sorted(groups)
            parts = [(_numbers(groups[n][x]), np.asarray(groups[n][y])) for n in names]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no federated HDF5 file of {x} and {y}: {error}.") from None
    lengths = [len(labels) for _, labels in parts]
    if not names or any(len(values) != n for (values, _), n in zip(parts, lengths, strict=True)):
        raise ConfigError(f"{path}: a user has unequally many {x} and {y}, or there is no user.")
    values = torch.from_numpy(np.concatenate([part for part, _ in parts]))
    if values.dim() == 3:
        values = values.unsqueeze(1)
    classes = torch.from_numpy(np.concatenate([labels for _, labels in parts]).astype(np.int64))
    return Users(values, classes, torch.split(torch.arange(len(classes)), lengths)), names


def _numbers(dataset: Any) -> "np.ndarray[Any, np.dtype[np.float32]]":  # noqa: ANN401  h5py's
    values = np.asarray(dataset)
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{values.dtype} are no numbers")
    return values.astype(np.float32)
