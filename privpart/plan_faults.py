"""Plan faults: what is wrong with a plan file, as sentences that name the key."""

import difflib
from dataclasses import is_dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def sentences(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return a sentence per fault.

    Args:
        error: of reading a file.
        root: what the file was to be, for the keys that there are.
    """
    return [_sentence(fault, root) for fault in error.errors()]


def _sentence(fault: Any, root: type[BaseModel]) -> str:  # noqa: ANN401  pydantic's ErrorDetails
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _keys_at(fault["loc"][:-1], root)
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.0)
        return f"{where}: no such key. The nearest is {near[0]}; all are {', '.join(known)}."
    if fault["type"] in ("missing", "missing_argument"):
        return f"{where}: is missing."
    if fault["type"] == "value_error":
        return f"{where}: {fault['ctx']['error']}".removeprefix(": ")  # of the file as a whole
    return f"{where}: {fault['msg']}; this is {fault['input']!r}."


def _keys_at(location: tuple[Any, ...], root: type[BaseModel]) -> list[str]:
    """The keys of the table at ``location``."""
    table: Any = root
    for part in location:
        annotation = _fields(table)[str(part)]
        options = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type)]
        table = next(a for a in options if is_dataclass(a) or issubclass(a, BaseModel))
    return ["schema" if key == "plan_schema" else key for key in _fields(table)]


def _fields(table: Any) -> dict[str, Any]:  # noqa: ANN401  a model or a dataclass
    if is_dataclass(table):
        return {name: field.type for name, field in table.__dataclass_fields__.items()}
    return {name: field.annotation for name, field in table.model_fields.items()}
