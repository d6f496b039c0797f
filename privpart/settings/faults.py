"""Faults: what is wrong in a file that a person wrote, a sentence each.

pydantic finds them and names them in its own words; these are for whoever wrote the file.
"""

import difflib
from typing import Any, get_args

from pydantic import BaseModel


def field_of(fault: Any) -> str:  # noqa: ANN401  pydantic's ErrorDetails
    """Return the dotted name of a field; pydantic adds each type that a value could have."""
    return ".".join(str(part) for part in fault["loc"] if "[" not in str(part))


def sentence_of(fault: Any, file: type[BaseModel]) -> str:  # noqa: ANN401  pydantic's ErrorDetails
    """Return what is wrong in a file of this kind."""
    where = field_of(fault)
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        keys = _keys_at(file, fault["loc"][:-1])
        near = difflib.get_close_matches(str(fault["loc"][-1]), keys, n=1, cutoff=0.0)
        return f"{where}: no such key. The nearest is {near[0]}; all keys are {', '.join(keys)}."
    if fault["type"] in ("missing", "missing_argument"):
        return f"{where}: is missing."
    if fault["type"] == "value_error":
        # no key where tables contradict each other
        return f"{where}: {fault['ctx']['error']}".removeprefix(": ")
    return f"{where}: {fault['msg']}; this is {fault['input']!r}."


def _keys_at(file: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Return the keys of the table at ``location`` of a file."""
    table: Any = file
    for part in location:
        annotation = _fields(table).get(str(part), table)
        table = next((kind for kind in _inner(annotation) if _fields(kind)), annotation)
    return ["schema" if key.endswith("_schema") else key for key in _fields(table)]


def _inner(annotation: Any) -> list[Any]:  # noqa: ANN401  of a field
    """Return a type and all those that it is made of."""
    return [annotation, *(inner for part in get_args(annotation) for inner in _inner(part))]


def _fields(table: Any) -> dict[str, Any]:  # noqa: ANN401  a type
    """Return the types of a model's or a dataclass's fields; of another type there are none."""
    models = {name: field.annotation for name, field in getattr(table, "model_fields", {}).items()}
    fields = getattr(table, "__dataclass_fields__", {})
    return models or {name: field.type for name, field in fields.items()}
