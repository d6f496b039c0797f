"""Durable files: written completely or not at all, and on the disk when the call returns.

A state file holds tensors and plain values in one safetensors file; nothing in it is ever executed.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accounting.checks import ConfigError

_DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.int64: "I64",
}


def write_durably(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` by ``data``, readable by the owner only.

    A crash at any instant leaves either the old file or the new one. The bytes, and then the name,
    are flushed to the disk before the call returns.

    Raises:
        OSError: the disk refused; the old file stays.
    """
    with _replaced(path) as file:
        file.write(data)


@contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    scratch = path.with_name(path.name + ".part")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    scratch.replace(path)
    flush_directory(path.parent)


def remove_durably(path: Path) -> None:
    """Remove ``path`` if it exists, and flush its directory."""
    path.unlink(missing_ok=True)
    flush_directory(path.parent)


def flush_directory(directory: Path) -> None:
    """Flush the names in a directory: otherwise a power failure may undo a rename."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def encode_state(tensors: dict[str, Tensor], values: dict[str, Any]) -> bytes:
    """Return the bytes of a state file with these tensors and JSON values."""
    return b"".join(_parts(tensors, values))


def write_state(path: Path, tensors: dict[str, Tensor], values: dict[str, Any]) -> str:
    """Write a state file as ``write_durably`` does; return its SHA-256, in hex.

    The tensors are hashed by a second thread while they are written, and never copied.

    Raises:
        OSError: the disk refused; the old file stays.
    """
    parts = list(_parts(tensors, values))
    with ThreadPoolExecutor(1) as other:
        digest = other.submit(_sha256, parts)
        with _replaced(path) as file:
            file.writelines(parts)
    return digest.result()


def _sha256(parts: list[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _parts(tensors: dict[str, Tensor], values: dict[str, Any]) -> Iterator[memoryview]:
    """Yield a safetensors file: the length of its header, the header, and the tensors' bytes.

    Written here because the library's own writer copies every tensor; the library reads it.
    """
    header: dict[str, Any] = {"__metadata__": {"values": json.dumps(values, allow_nan=False)}}
    end = 0
    # the library wants wide types first, so that every tensor is aligned
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        flat = tensors[name].detach().contiguous().view(-1)
        if flat.numel():
            yield memoryview(flat.view(torch.uint8).numpy().data)


def read_state(path: Path, expected: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and values of the state file whose SHA-256, in hex, is ``expected``.

    Raises:
        ConfigError: the file is missing or unreadable, or its hash differs.
    """
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    if found != expected:
        raise ConfigError(
            f"{path} is not the state that the ledger names: it was changed, truncated, or "
            "restored from an older copy. Restore the newest copy, or begin a fork."
        )
    return decode_state(path)


def decode_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and values of a state file; nothing in it is ever executed.

    Raises:
        ConfigError: the file is not a valid state file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            values = json.loads((file.metadata() or {})["values"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is not a valid state file: {error}.") from None
    return tensors, values
