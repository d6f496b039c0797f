"""Fit cache: fitted mechanisms on the disk, by what they were fitted to.

A fit takes seconds to minutes and depends on the participation and a few settings alone. The folder
is ``$PRIVPART_CACHE_DIR``, else ``~/.cache/privpart``; it may be deleted at any time. A file that is
damaged or of another fit is fitted again. No guarantee depends on the cache: sensitivity and noise
are computed from the parameters that a mechanism has, wherever they come from.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accounting.participation import Participation

if TYPE_CHECKING:
    from accounting.mechanisms.mechanism import Mechanism

    Fitted = TypeVar("Fitted", bound=Mechanism)
else:
    Fitted = TypeVar("Fitted")

_FITS = 1
"""Version of the fits: raise it when a fit finds something better."""
_MOST_BYTES = 64_000_000


def kept(
    kind: type[Fitted],
    participation: Participation,
    settings: Mapping[str, Any],
    fit: Callable[[], Fitted],
) -> Fitted:
    """Return the cached result of ``fit``, or call it and cache what it returns.

    Args:
        kind: class of the mechanism.
        participation: what it is fitted to.
        settings: everything else that the fit depends on, as JSON values.
        fit: makes the mechanism.
    """
    name = getattr(kind, "name")  # noqa: B009  a protocol's property, here of the class
    key = {
        "fits": _FITS,
        "mechanism": name,
        "rounds": participation.rounds,
        "max_participations": participation.max_participations,
        "min_separation": participation.min_separation,
        **settings,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = _folder() / f"{name}-{participation.rounds}-{digest[:24]}.json"
    found = _read(path, key, kind)
    if found is None:
        found = fit()
        _write(path, {"key": key, "parameters": found.to_dict()})
    return found


def _folder() -> Path:
    given = os.environ.get("PRIVPART_CACHE_DIR")
    base = Path(given) if given else Path("~/.cache/privpart").expanduser()
    return base / "fits"


def _read(path: Path, key: Mapping[str, Any], kind: type[Fitted]) -> Fitted | None:
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["key"] != key:
            return None
        values = {k: v for k, v in held["parameters"].items() if k not in ("schema", "name")}
        found = kind(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found if found.rounds == key["rounds"] else None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError):  # a cache that cannot be written costs time and nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        part.replace(path)
