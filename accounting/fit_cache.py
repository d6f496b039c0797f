"""Fit cache: fitted mechanisms on the disk, by what they were fitted to.

A fit takes seconds to minutes, and depends on the participation and a few settings alone. The
folder is ``$PRIVPART_CACHE_DIR``, else ``~/.cache/privpart``; it may be deleted at any time. A file
that is damaged or of another fit is made again. No guarantee depends on the cache: sensitivity and
noise are computed from the parameters that a mechanism has, wherever they come from.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accounting import checks
from accounting.participation import Participation

if TYPE_CHECKING:
    from accounting.mechanisms.mechanism import Mechanism

    Fitted = TypeVar("Fitted", bound=Mechanism)
else:
    Fitted = TypeVar("Fitted")

Made = TypeVar("Made")

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
        "mechanism": name,
        "rounds": participation.rounds,
        "max_participations": participation.max_participations,
        "min_separation": participation.min_separation,
        **settings,
    }

    def built(parameters: Mapping[str, Any]) -> Fitted:
        found = kind(**{k: v for k, v in parameters.items() if k not in ("schema", "name")})
        if found.rounds != participation.rounds:
            raise ValueError("another run")
        return found

    held = _read(_path(name, key), key, built)
    if held is None:
        held = fit()
        _write(_path(name, key), key, held.to_dict())
    return held


def kept_figures(
    name: str, settings: Mapping[str, Any], figures: Callable[[], Mapping[str, float]]
) -> Mapping[str, float]:
    """Return the cached result of ``figures``, or call it; for figures that only inform.

    Args:
        name: of the figures; part of the file's name.
        settings: everything that they depend on, as JSON values.
        figures: computes them.
    """
    found = read_figures(name, settings)
    if found is None:
        found = figures()
        write_figures(name, settings, found)
    return found


def read_figures(name: str, settings: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Return figures that ``write_figures`` cached; None without any, or if they are damaged."""

    def checked(held: Mapping[str, Any]) -> Mapping[str, float]:
        return {str(k): checks.nonnegative(str(k), v) for k, v in held.items()}

    return _read(_path(name, settings), settings, checked)


def write_figures(name: str, settings: Mapping[str, Any], figures: Mapping[str, float]) -> None:
    """Cache figures under their name and settings; do nothing where that is not possible."""
    _write(_path(name, settings), settings, figures)


def _path(name: str, key: Mapping[str, Any]) -> Path:
    given = os.environ.get("PRIVPART_CACHE_DIR")
    base = Path(given) if given else Path("~/.cache/privpart").expanduser()
    digest = hashlib.sha256(json.dumps(_versioned(key), sort_keys=True).encode()).hexdigest()
    return base / "fits" / f"{name}-{digest[:32]}.json"


def _versioned(key: Mapping[str, Any]) -> dict[str, Any]:
    return {"fits": _FITS, **key}


def _read(path: Path, key: Mapping[str, Any], built: Callable[[Any], Made]) -> Made | None:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:  # a pipe would never end
            return None
        held = checks.parsed_json(path.read_text(encoding="utf-8"))
        wanted = json.loads(json.dumps(_versioned(key)))  # in which a tuple is a list
        return built(held["value"]) if held["key"] == wanted else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _write(path: Path, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    content = json.dumps({"key": _versioned(key), "value": dict(value)}, allow_nan=False)
    with suppress(OSError):  # a cache that cannot be written costs time and nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(content, encoding="utf-8")
        part.replace(path)
