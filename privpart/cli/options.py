"""Options that several commands share."""

from enum import StrEnum
from typing import Annotated

import typer

from privpart.mechanism_choice import EstimatorName, MechanismName, ReleaseName


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


_TREE, _FIT = "Trees", "Toeplitz and BLT"

Rounds = Annotated[int, typer.Option(help="Training rounds, each of which releases a model.")]
Delta = Annotated[float, typer.Option(help="Delta of the guarantee, strictly between 0 and 1.")]
MaxParticipations = Annotated[int, typer.Option(help="Most rounds in which one client takes part.")]
MinSeparation = Annotated[
    int,
    typer.Option(
        help="Least distance |i - j| between two of a client's rounds; 1 allows consecutive ones."
    ),
]
MechanismOption = Annotated[
    MechanismName,
    typer.Option(
        "--mechanism",
        help="What correlates the noise over the rounds. 'toeplitz' is the square-root matrix; "
        "'blt' is fitted to the participation for the least root mean squared error.",
    ),
]
RestartEvery = Annotated[
    int | None,
    typer.Option(
        help="Rounds per tree; by default one tree spans all rounds.", rich_help_panel=_TREE
    ),
]
Estimator = Annotated[
    EstimatorName,
    typer.Option(help="'online' (Honaker) has less noise at the same cost.", rich_help_panel=_TREE),
]
Completed = Annotated[
    bool,
    typer.Option("--completed", help="Complete each tree before a restart.", rich_help_panel=_TREE),
]
Release = Annotated[
    ReleaseName,
    typer.Option(
        help="'prefix' accounts for the models only: no node, virtual round or noise state may "
        "ever leave the server.",
        rich_help_panel=_TREE,
    ),
]
Bands = Annotated[
    int | None,
    typer.Option(help="Diagonals of 'toeplitz'; by default all.", rich_help_panel=_FIT),
]
Buffers = Annotated[
    int | None, typer.Option(help="Buffers of 'blt', 1 to 5; by default 3.", rich_help_panel=_FIT)
]
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
