"""Recorded: a mechanism from a file, as a report writes it, or as a numpy array.

A file can be changed after a plan was written, so a plan also names the mechanism's fingerprint. On
the command line there is nothing to compare it with; the report shows it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from accounting.checks import ConfigError, parsed_json
from accounting.mechanisms.dense import Dense
from accounting.mechanisms.mechanism import SCHEMA, Mechanism

_MOST_BYTES = 256_000_000
_MOST_ENCODER_ROUNDS = 4096
"""Of an encoder in an array: its Gram matrix takes 128 MB."""
_REPORT_KEY = "mechanism_parameters"


def read_mechanism(path: Path, from_dict: Callable[[Mapping[str, Any]], Mechanism]) -> Mechanism:
    """Return the mechanism in a file.

    Args:
        path: a JSON file with what ``to_dict`` returns, or with a whole report that contains it; or
            a ``.npy`` file with a dense encoder C, shape (n, n).
        from_dict: ``mechanism_from_dict``.

    Raises:
        ConfigError: the file cannot be read, is too large, or holds something else.
    """
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ConfigError(
                f"mechanism file {path}: has {size:,} bytes; must have at most {_MOST_BYTES:,}."
            )
        if path.suffix == ".npy":
            return Dense(_read_array(path))
        return from_dict(_parameters(path, path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"mechanism file {path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"mechanism file {path}: is neither JSON nor a .npy array.") from None


def _parameters(path: Path, text: str) -> Mapping[str, Any]:
    try:
        held = parsed_json(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) or "nested too deeply"
        raise ConfigError(f"mechanism file {path}: is not JSON: {reason}.") from None
    if isinstance(held, dict) and held.get("schema") != SCHEMA and _REPORT_KEY in held:
        held = held[_REPORT_KEY]
        if held is None:
            raise ConfigError(
                f"mechanism file {path}: this report leaves out the mechanism's parameters, "
                "because there are too many."
            )
    if not isinstance(held, dict):
        raise ConfigError(f"mechanism file {path}: must hold a JSON object.")
    return held


def _read_array(path: Path) -> np.ndarray[Any, Any]:
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OverflowError, MemoryError, SyntaxError) as error:
        reason = str(error).partition(".")[0].partition("\n")[0]
        raise ConfigError(f"mechanism file {path}: is not a numpy array: {reason}.") from None
    if mapped.dtype.kind not in "iuf" or mapped.ndim != 2:
        raise ConfigError(
            f"mechanism file {path}: has shape {mapped.shape} of {mapped.dtype}; must be a square "
            "array of real numbers."
        )
    if max(mapped.shape) > _MOST_ENCODER_ROUNDS:
        raise ConfigError(
            f"mechanism file {path}: has shape {mapped.shape}; an encoder in an array has at most "
            f"{_MOST_ENCODER_ROUNDS} rounds."
        )
    return np.array(mapped, dtype=np.float64)
