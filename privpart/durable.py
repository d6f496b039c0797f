"""Durable files: written whole or not at all, and on the disk when the call returns."""

import os
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``, readable by its owner only.

    A crash at any instant leaves the old file or the new one. The bytes, and then the name, are
    flushed to the disk before the call returns.
    """
    scratch = path.with_name(path.name + ".part")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    scratch.replace(path)
    flush_directory(path.parent)


def remove_durably(path: Path) -> None:
    """Remove ``path`` if it is there, for good."""
    path.unlink(missing_ok=True)
    flush_directory(path.parent)


def flush_directory(directory: Path) -> None:
    """Flush the names in a directory: without it a rename may be lost with the power."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
