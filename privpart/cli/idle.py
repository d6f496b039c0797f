"""Idle options: what was typed and can have no effect beside something else is refused.

A rule stands in the annotation of the option that it concerns, after ``typer.Option``. ``Command``
applies it before the command runs, also to a value that equals the default: whoever typed it meant
something. The options of mechanisms have one more rule, which plan files share
(``MechanismChoice.refuse_idle``): the chosen mechanism must take them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import typer
from typer.core import TyperCommand

from accounting import ConfigError

Values = Mapping[str, Any]
"""Every parameter of a command by name, typed or not."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A situation in which an option has no effect.

    The ``owner`` decides; a command without that option ignores the rule. The error says ``why``.
    """

    owner: str
    where: Callable[[Values], bool]
    why: str


def beside(owner: str, why: str) -> Idle:
    """Refuse the option beside a given ``owner``."""
    return Idle(owner, lambda values: bool(values[owner]), why)


def without(owner: str, why: str) -> Idle:
    """Refuse the option where ``owner`` is not given."""
    return Idle(owner, lambda values: not values[owner], why)


def where(owner: str, value: object, why: str) -> Idle:
    """Refuse the option where ``owner`` has this value."""
    return Idle(owner, lambda values: bool(values[owner] == value), why)


@dataclass(frozen=True, slots=True)
class Alone:
    """Beside the option that it stands behind, every other one but ``company`` has no effect."""

    why: str
    company: tuple[str, ...]


_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # typer exports no name for it
_MEANINGS = {
    "clients": "population",
    "cores": "workers jobs",
    "eps": "target-epsilon max-epsilon",
    "json": "format",
    "output": "out",
    "processes": "workers jobs",
    "sigma": "noise-multiplier",
    "std": "noise-multiplier",
    "steps": "rounds",
    "threads": "workers jobs",
    "users": "population",
}
"""Words of other tools -> options of ours."""
OF_A_PLAN = "already contains these values"
OF_FOLDER = Idle(
    "data", lambda values: values["data"] != "fashion-mnist", "is not read from a folder"
)
OF_IMAGES = (beside("plan", "audits text"), beside("tokens", "audits text"))
OF_SGD = Idle("optimizer", lambda values: values["optimizer"] != "sgd", "has a momentum of its own")


def typed(context: typer.Context) -> frozenset[str]:
    """Return the parameters that were given by whoever typed the command, whatever their values.

    An option that equals its default was still typed, and what was typed is never ignored.
    """
    return frozenset(
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") in ("COMMANDLINE", "ENVIRONMENT")
    )


class Command(TyperCommand):
    """A command that refuses idle options before it runs, and names what was meant otherwise."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  click's, vendored
        """Parse the command line; of an unknown option, name the nearest by meaning."""
        try:
            return super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            if unknown := getattr(error, "option_name", None):
                listed = [name for option in self.params for name in option.opts]
                error.possibilities = meant(unknown, listed) or error.possibilities
            elif faults := getattr(error.__cause__, "errors", None):
                # pydantic's, without the value, where typer 0.28 and older name it
                error.message = f"{faults()[0]['input']!r}: {error.message}"
            if re.match(r"'-?\d+,\d+'", error.message):
                error.message = f"{error.message.rstrip('.')}. A decimal number has a point"
            raise

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  click's, vendored
        """Run the command, unless ``refuse_idle`` raises."""
        refuse_idle(ctx)
        return super().invoke(ctx)


def meant(unknown: str, options: Iterable[str]) -> list[str]:
    """Return the options that an unknown one may stand for: by meaning, then by its words.

    >>> meant("--noise", ["--noise-multiplier", "--bins"]), meant("--eps", ["--max-epsilon"])
    (['--noise-multiplier'], ['--max-epsilon'])
    """
    typed_words = unknown.lstrip("-").split("-")
    targets = {f"--{name}" for word in typed_words for name in _MEANINGS.get(word, "").split()}
    listed = [option for option in options if option.startswith("--")]
    if same := [option for option in listed if option in targets]:
        return same
    return [option for option in listed if set(typed_words) <= set(option[2:].split("-"))]


def rules_of(command: Any) -> Iterator[tuple[str, Idle]]:  # noqa: ANN401  click's, vendored
    """Yield each rule of a command with the name of its option."""
    parameters = signature(command.callback).parameters
    rules: dict[str, list[object]] = {}
    for name in (option.name for option in command.params):
        behind = getattr(parameters[name].annotation, "__metadata__", ())
        rules[name] = [r for rule in behind for r in (rule if isinstance(rule, tuple) else (rule,))]
    owners = {name: rule for name in rules for rule in rules[name] if isinstance(rule, Alone)}
    for name, of_option in rules.items():
        for owner, alone in owners.items():
            if name not in (owner, *alone.company):
                yield name, beside(owner, alone.why)
        for rule in of_option:
            if isinstance(rule, Idle) and rule.owner in parameters:
                yield name, rule


def refuse_idle(context: Any) -> None:  # noqa: ANN401  click's, vendored
    """Raise ``ConfigError`` if an option was typed that has no effect beside another."""
    given = typed(context)
    idle: dict[tuple[str, str], list[str]] = {}
    for name, rule in rules_of(context.command):
        if name in given and rule.where(context.params):
            idle.setdefault((rule.owner, rule.why), []).append(name)
    for (owner, why), names in idle.items():
        written = {option.name: option.opts[-1] for option in context.command.params}
        flag, value = written[owner], context.params[owner]
        listed = ", ".join(written[name] for name in names)
        if value is None or value is False:
            raise ConfigError(f"without {flag}: {why}; add {flag}, or leave out {listed}.")
        raise ConfigError(f"{_shown(flag, value)}: {why}; leave out {listed}.")


def _shown(option: str, value: object) -> str:
    if value is True:
        return option
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join(f"{option} {own}" for own in values)
