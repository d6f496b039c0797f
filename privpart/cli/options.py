"""Options that several commands share."""

from enum import StrEnum
from typing import Annotated

import typer


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
