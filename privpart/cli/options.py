"""Options that several commands share, and what was typed of them."""

from enum import StrEnum
from typing import Annotated

import typer

from accounting import ConfigError


class MethodName(StrEnum):
    """Ways to compute epsilon."""

    EXACT = "exact"
    PLD = "pld"
    RDP = "rdp"
    ZCDP = "zcdp"


class Format(StrEnum):
    """Forms of the result on standard output."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class Against(StrEnum):
    """What a picture of epsilon varies."""

    NOISE = "noise"
    ROUNDS = "rounds"
    PARTICIPATIONS = "participations"


_ROUNDS = typer.Option(help="Training rounds, each of which releases a model.")
_DELTA = typer.Option(help="Delta of the guarantee, strictly between 0 and 1.")
Rounds = Annotated[int, _ROUNDS]
RoundsUnlessPlanned = Annotated[int | None, _ROUNDS]
Delta = Annotated[float, _DELTA]
DeltaUnlessPlanned = Annotated[float | None, _DELTA]
MethodOption = Annotated[
    MethodName,
    typer.Option(
        "--method",
        help="'exact' is tight; the others, by dp-accounting, reproduce papers and cross-check.",
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="Form of the result.")]
MaxEpsilon = Annotated[
    float | None, typer.Option(help="Exit with 3 if epsilon is above this; for CI.")
]


def typed(context: typer.Context) -> frozenset[str]:
    """Return the parameters that were given by whoever typed the command, whatever their values.

    An option that equals its default was still typed, and what was typed is never ignored.
    """
    return frozenset(
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") in ("COMMANDLINE", "ENVIRONMENT")
    )


def refuse_beside(context: typer.Context, owner: str, allowed: frozenset[str], why: str) -> None:
    """Raise ``ConfigError`` if an option was typed that cannot apply beside option ``owner``.

    Args:
        context: of the command.
        owner: name of the parameter that decides, such as "plan".
        allowed: names of the parameters that still apply.
        why: end of the sentence, before the options to leave out.
    """
    idle = sorted(typed(context) - allowed - {owner})
    if idle:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise ConfigError(f"{owner}={context.params[owner]}: {why}: {options}.")
