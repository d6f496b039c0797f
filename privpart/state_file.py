"""State file: tensors and plain values in one safetensors file; nothing in it is ever executed."""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from accounting.checks import ConfigError


def encode(tensors: dict[str, Tensor], values: dict[str, Any]) -> bytes:
    """Return the bytes of a state file."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return save(contiguous, metadata={"values": json.dumps(values, allow_nan=False)})


def read(path: Path, expected: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what a file holds whose SHA-256, in hex, is ``expected``.

    Raises:
        ConfigError: it is missing, or another file.
    """
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    if found != expected:
        raise ConfigError(
            f"{path} is not the state that the ledger names: it was changed, cut short, or "
            "put back from an older copy. Put the newest copy back, or begin a fork."
        )
    return decode(path)


def decode(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and values of a state file.

    Raises:
        ConfigError: it is no such file. Nothing in it is ever executed.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            values = json.loads((file.metadata() or {})["values"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is no state of a run: {error}.") from None
    return tensors, values
