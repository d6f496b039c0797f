"""Fit cache: figures that take seconds to minutes, on the disk, by all that they depend on.

The folder is ``$PRIVPART_CACHE_DIR``, else ``~/.cache/privpart``; it may be deleted at any time. A
file that is damaged or of other settings counts as none. No guarantee depends on the cache:
sensitivity and noise are computed from the parameters that a mechanism has, wherever they come
from.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accounting import checks

_FITS = 2  # version of the fits: raise it when a fit finds something better
_MOST_BYTES = 64_000_000


def read_cached(key: Mapping[str, Any]) -> Any:  # noqa: ANN401  any JSON
    """Return what ``write_cached`` stored under this key, or None; somebody may have changed it."""
    path, key = _path(key)
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:  # a pipe would never end
            return None
        content = checks.parsed_json(path.read_text(encoding="utf-8"))
        return content["value"] if content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_cached(key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
    """Store a JSON value under a key of JSON values; do nothing where that is not possible."""
    path, key = _path(key)
    part = path.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError):  # a cache that cannot be written costs time and nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"key": key, "value": value}, allow_nan=False), encoding="utf-8")
        part.replace(path)


def _path(key: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the file of a key, and the key with the version, as JSON has it."""
    text = json.dumps({"fits": _FITS, **key}, sort_keys=True)
    folder = Path(os.environ.get("PRIVPART_CACHE_DIR") or Path("~/.cache/privpart").expanduser())
    name = f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    return folder / "fits" / name, json.loads(text)
