"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from accounting import ConfigError
from accounting.guarantee import Method


class MethodName(StrEnum):
    """Ways to compute epsilon."""

    EXACT = "exact"
    PLD = "pld"
    RDP = "rdp"


def method_of(typed: MethodName | None) -> Method:
    """Return the method that was typed, or the default."""
    return "exact" if typed is None else typed.value


class Format(StrEnum):
    """Forms of the result on standard output."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class ReportFormat(StrEnum):
    """Forms of a report on standard output; a statement is prose."""

    TABLE = "table"
    STATEMENT = "statement"
    JSON = "json"
    CSV = "csv"


ROUNDS = typer.Option(help="Training rounds, each of which releases a model.")
_DELTA = typer.Option(help="Delta of the guarantee, strictly between 0 and 1.")
Rounds = Annotated[int, ROUNDS]
RoundsUnlessPlanned = Annotated[int | None, ROUNDS]
Delta = Annotated[float, _DELTA]
DeltaUnlessPlanned = Annotated[float | None, _DELTA]
Population = Annotated[
    int | None,
    typer.Option(
        help="Clients in all, if that is public. Delta is judged against it, and --sampling draws "
        "from it."
    ),
]
AllowLargeDelta = Annotated[
    bool,
    typer.Option(
        "--allow-large-delta",
        help="Accept a delta of 1 / population or more; the report repeats that it is too large.",
    ),
]
MethodOption = Annotated[
    MethodName | None,
    typer.Option(
        "--method",
        help="'exact', the default, is tight; the others, by dp-accounting, reproduce papers and "
        "cross-check. Poisson sampling: 'pld' or 'rdp'.",
        show_default=False,
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="Form of the result.")]
ReportFormatOption = Annotated[
    ReportFormat,
    typer.Option("--format", help="Form of the result; 'statement' is plain English."),
]
MaxEpsilon = Annotated[
    float | None, typer.Option(help="Exit with 3 if epsilon is above this; for CI.")
]
PolicyOption = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        help="TOML file with what your organisation allows; exit with 3 if it is not met. Judged "
        "at the policy's delta and population.",
        show_default=False,
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html",
        help="Also write the result as a page for people into this file.",
        show_default=False,
    ),
]
PublicKey = Annotated[
    str | None,
    typer.Option(
        help="Public key that you know the run by, in hex, or a file whose first line is that; not "
        "taken from the folder.",
        show_default=False,
    ),
]


def public_key_of_file(typed: str | None) -> str | None:
    """Return the key that was typed, or the first line of the file that was named."""
    try:
        if typed is None or not Path(typed).is_file():
            return typed
        with Path(typed).open("rb") as file:
            return file.read(2**16).decode().strip().partition("\n")[0]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"public_key={str(typed)[:80]}: cannot be read: {error}.") from None
