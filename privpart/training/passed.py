"""Passed: what stands in a ledger for the Python objects that ``privpart.train`` was given.

A run is resumed with the objects that it was begun with. They are compared by the source of
functions and classes, by what functions close over, and by the values of attributes and arguments;
not by what they read from globals or files.
"""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import numpy as np
from torch import Tensor, nn

from privpart.run.store import tensor_hash

_DEEPEST = 6
_TORCH = ("torch.", "builtins")


def digest(value: object) -> str:
    """Return 20 hex digits that change with a function, an object, or the make-up of a network."""
    # Without weights, which the fingerprint of the frozen part and the ledger's hashes cover.
    text = _network(value) if isinstance(value, nn.Module) else _text(value, _DEEPEST)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _network(module: nn.Module) -> str:
    """Return a network's layers, as it prints itself, and the source of their classes."""
    kinds = {type(layer) for layer in module.modules()}
    sources = sorted(_source(kind) for kind in kinds if not kind.__module__.startswith(_TORCH))
    return "\n".join([repr(module), *sources])


def _text(value: Any, depth: int) -> str:  # noqa: ANN401  anything
    """Return a text of a value that is the same in every process."""
    kind = type(value).__name__
    # Objects may contain each other; beyond this depth only their type counts.
    if depth == 0 or value is None or isinstance(value, str | bytes | int | float):
        return repr(value) if depth else kind
    if isinstance(value, Tensor | np.ndarray):
        return f"{kind} {tensor_hash(value) if isinstance(value, Tensor) else _array(value)}"
    if isinstance(value, nn.Module):
        return f"{_network(value)} {_text(value.state_dict(), depth - 1)}"
    if isinstance(value, partial):
        return f"partial {_text([value.func, value.args, value.keywords], depth - 1)}"
    if isinstance(value, Mapping):
        return f"{kind} {[_text(item, depth - 1) for item in value.items()]}"
    if isinstance(value, Sequence | set | frozenset):
        items = [_text(item, depth - 1) for item in value]
        return f"{kind} {sorted(items) if isinstance(value, set | frozenset) else items}"
    if not inspect.isroutine(value) and not isinstance(value, type):
        return f"{_source(type(value))} {_text(getattr(value, '__dict__', {}), depth - 1)}"
    function = getattr(value, "__func__", value)
    closed = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    defaults = [getattr(function, name, None) for name in ("__defaults__", "__kwdefaults__")]
    owner = getattr(value, "__self__", None) if inspect.ismethod(value) else None
    return f"{_source(function)} {_text([closed, defaults, owner], depth - 1)}"


def _array(value: np.ndarray[Any, Any]) -> str:
    return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"


def _source(value: Any) -> str:  # noqa: ANN401  a function or class
    """Return the name and source; of a function also what it does, as two may share a line."""
    code = getattr(value, "__code__", None)
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    compiled = "" if code is None else _compiled(code)
    try:
        return f"{name} {compiled} {inspect.getsource(value)}"
    except (OSError, TypeError):
        return f"{name} {compiled}"


def _compiled(code: CodeType) -> str:
    """Return what a function without source does, without its place in a file."""
    inner = [_compiled(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {inner}"
