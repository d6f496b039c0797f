"""Typed text: a name with its options, as ``blt:buffers=2`` or ``toeplitz:fit,bands=8``.

What stands for a table of a plan file on a command line: the same keys, and values without quotes.
A list needs no brackets (``blt:decay=0.9,0.99,scale=0.2,0.1``), and a truth value no value.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from accounting import checks
from accounting.checks import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def split_text(text: str) -> tuple[str, dict[str, str]]:
    """Split a text into the name and its options; an option without a value has "".

    >>> split_text("blt:decay=0.9,0.99,scale=0.2,0.1")
    ('blt', {'decay': '0.9,0.99', 'scale': '0.2,0.1'})
    """
    name, _, listed = text.partition(":")
    options: dict[str, str] = {}
    last = ""
    for part in listed.split(",") if listed else ():
        option, equals, value = part.partition("=")
        if last and not equals and not part.isidentifier():  # another number of the last list
            options[last] += f",{part}"
            continue
        if not option.isidentifier() or option in options:
            fault = "is there twice" if option in options else "must be written as name=value"
            raise ConfigError(f"{text}: option {option!r} {fault}.")
        last, options[option] = option, value if equals else ""
    return name, options


def typed_values(
    table: "type[DataclassInstance]", name: str, options: Mapping[str, str], known: Collection[str]
) -> dict[str, Any]:
    """Return the values of options, as the fields of ``table`` are annotated."""
    if unknown := [option for option in options if option not in known]:
        takes = f"takes {', '.join(sorted(known))}" if known else "has no options"
        raise ConfigError(f"{name}: no option {unknown[0]!r}; {name} {takes}.")
    hints = get_type_hints(table)
    return {option: _value(option, hints[option], text) for option, text in options.items()}


def _value(option: str, hint: Any, text: str) -> Any:  # noqa: ANN401  any field
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    kind = kinds[0] if NoneType in get_args(hint) else hint
    if kind is bool:
        if text:
            raise ConfigError(f"{option}={text}: takes no value; write {option}, or leave it out.")
        return True
    if get_origin(kind) is Literal:
        return checks.choice(option, text, get_args(kind))
    number = get_args(kind)[0] if get_origin(kind) is tuple else kind
    try:
        if number is kind:
            return kind(text)
        return tuple(map(number, text.split(",")))
    except ValueError:
        wanted = "a whole number" if number is int else "a number"
        wanted = wanted if number is kind else "numbers with commas between them"
        raise ConfigError(f"{option}={text}: must be {wanted}.") from None


def as_text(table: "DataclassInstance") -> str:
    """Write a table as the text that ``split_text`` and ``typed_values`` read."""
    words = []
    for field in fields(table):
        value = getattr(table, field.name)
        if field.name == "name" or value == field.default:
            continue
        if value is True:
            words.append(field.name)
        else:
            listed = ",".join(map(repr, value)) if isinstance(value, tuple) else value
            words.append(f"{field.name}={listed}")
    name = str(getattr(table, "name"))  # noqa: B009  every such table has one
    return f"{name}:{','.join(words)}" if words else name
