"""Canaries of a run: the key of their coins, and what the released models say about them.

    canary-key       32 bytes, from which the auditor draws who takes part; secret until the end
    canary-releases  per released model, its products with all directions; the start comes first

The ledger keeps a hash of the key from before the first round, so the coins cannot be chosen after
the models are known. A row of products is on the disk before its round is committed: a crash
in between leaves a row too many, which the resumed run drops, and never one too few.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from accounting.checks import ConfigError, parsed_json
from privpart.run.store import (
    StorageError,
    append_durably,
    one_line,
    opened,
    read_small,
    write_durably,
)

FACT = "canaries"
_KEY = "canary-key"
_RELEASES = "canary-releases"
_KEY_BYTES = 32
_MOST = 1e45
"""Above the product of any model in float32 with a direction of length 1."""


def new_canary_key(seed: int | None) -> bytes:
    """Return 32 bytes from the operating system, or those of a simulation's seed."""
    if seed is None:
        return secrets.token_bytes(_KEY_BYTES)
    return hashlib.sha256(f"privpart canary coins of seed|{seed}".encode()).digest()


def canary_key_hash(key: bytes) -> str:
    """Return what the ledger keeps of a key: its SHA-256 under a name of its own, in hex."""
    return hashlib.sha256(b"privpart canary key|" + key).hexdigest()


def write_canary_key(folder: Path, key: bytes) -> None:
    """Keep the key in a run folder, readable by the owner only."""
    write_durably(folder / _KEY, key)


def read_canary_key(folder: Path, facts: Mapping[str, Any]) -> bytes:
    """Return the key of a run's canaries.

    Raises:
        ConfigError: the run has no canaries, or the key is missing or not the one of its ledger.
    """
    if FACT not in facts:
        raise ConfigError(
            f"{folder}: this run has no canaries. Give the plan a table [canaries] before a run "
            "begins, or audit a replica of it (--plan FILE --simulate)."
        )
    key = _read(folder / _KEY, _KEY_BYTES, "who of the canaries took part is lost")
    if canary_key_hash(key) != facts[FACT].get("key"):
        raise ConfigError(
            f"{folder / _KEY} is not the key of this run: it is damaged or of another run, so "
            "nothing can be said about its canaries. Restore it from the run's own folder."
        )
    return key


class ReleaseLog:
    """The products of each released model with ``width`` directions of canaries, a row each."""

    def __init__(self, folder: Path, width: int) -> None:
        self._path = folder / _RELEASES
        self._row = 8 * width
        self._count = 0

    def resume(self, rounds: int, current: Tensor) -> None:
        """Drop rows after so many committed rounds; begin a new run with ``current``, (width,).

        Raises:
            ConfigError: rows of committed rounds are missing.
        """
        size = 0
        try:
            with opened(self._path) as file:
                size = file.seek(0, os.SEEK_END)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be opened: {one_line(error)}.") from None
        # A crash between this file and the ledger leaves a row too many; the next one replaces it.
        self._count = min(rounds + 1, size // self._row)
        if self._count < rounds:
            raise ConfigError(
                f"{self._path} has {self._count} of {rounds} committed rounds: what the released "
                "models say about the canaries is lost, so this run cannot be audited. Restore the "
                "file."
            )
        if self._count == rounds:
            self.append(current)

    def append(self, products: Tensor) -> None:
        """Add the row of a model before it is committed; it is on the disk when this returns.

        Raises:
            StorageError: the disk refused.
        """
        try:
            row = products.numpy().astype("<f8").tobytes()
            append_durably(self._path, row, self._count * self._row)
        except OSError as error:
            raise StorageError(
                f"{self._path}: what a round says about the canaries could not be saved: {error}. "
                "Nothing of the round was released; free some space, and resume."
            ) from None
        self._count += 1


def read_releases(folder: Path, width: int, rounds: int) -> NDArray[np.float64]:
    """Return the products of the start and of every released model, shape (rounds + 1, width).

    Raises:
        ConfigError: the file is missing, or has another size.
    """
    size = 8 * width * (rounds + 1)
    lost = "what the released models say about the canaries is lost"
    data = _read(folder / _RELEASES, size, lost)
    if len(data) != size:
        raise ConfigError(
            f"{folder / _RELEASES} has another size; {rounds} rounds of {width} directions "
            f"need {size} bytes. It is damaged or of another run. Restore it."
        )
    # Little endian, whatever the machine is.
    rows = np.frombuffer(data, "<f8").reshape(rounds + 1, width).astype(np.float64)
    if not (np.abs(rows) < _MOST).all():
        raise ConfigError(f"{folder / _RELEASES} holds values that no model has. Restore it.")
    return rows


AUDIT = "audit"
"""Folder inside a run for what an audit found."""
AUDIT_REPORT = "report.json"
AUDIT_SCHEMA = "privpart/audit-epsilon/1"
_MEASURED = re.compile(
    r"epsilon at least [0-9.]{1,20} \([A-Za-z -]{1,40}, [0-9.]{1,20} %; assumes [A-Za-z, ]{1,60}\)"
    r"(; VIOLATION|; above the accountant's, as happens in at most [0-9.e-]{1,20} % of audits of a "
    r"correct server)?"
)
_LONGEST_REPORT = 2**22


def measured_from_below(folder: Path, run_id: str) -> str | None:
    """Return what the audit beside a run found, or None; it is a sentence of that file, unchecked.

    A damaged file, or one of another run, counts as none: it could only lower what is known.
    """
    try:
        values = parsed_json(read_small(folder / AUDIT / AUDIT_REPORT, _LONGEST_REPORT))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.get("schema") != AUDIT_SCHEMA:
        return None
    sentence = values.get("measured")
    if values.get("run_id") != run_id or not isinstance(sentence, str):
        return None
    return sentence if _MEASURED.fullmatch(sentence) else None


def _read(path: Path, size: int, lost: str) -> bytes:
    try:
        return read_small(path, size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}): {lost}.") from None
