"""Options that several commands share."""

import inspect
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any

import typer

from accounting.mechanisms.by_name import MechanismChoice, MechanismName
from accounting.mechanisms.tree import EstimatorName, ReleaseName


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


DEFAULT_MECHANISM = MechanismChoice(name=MechanismName("tree"))

_TREE = "Trees"
_FIT = "Toeplitz and BLT"

_ROUNDS = typer.Option(help="Training rounds, each of which releases a model.")
_DELTA = typer.Option(help="Delta of the guarantee, strictly between 0 and 1.")
Rounds = Annotated[int, _ROUNDS]
RoundsUnlessPlanned = Annotated[int | None, _ROUNDS]
Delta = Annotated[float, _DELTA]
DeltaUnlessPlanned = Annotated[float | None, _DELTA]
MaxParticipations = Annotated[int, typer.Option(help="Most rounds in which one client takes part.")]
MinSeparation = Annotated[
    int,
    typer.Option(
        help="Least distance |i - j| between two of a client's rounds; 1 allows consecutive ones."
    ),
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


def mechanism_choice(
    mechanism: Annotated[
        MechanismName,
        typer.Option(
            help="What correlates the noise over the rounds. 'toeplitz' is the square-root matrix; "
            "'blt' is fitted to the participation for the least root mean squared error.",
        ),
    ] = DEFAULT_MECHANISM.name,
    restart_every: Annotated[
        int | None,
        typer.Option(
            help="Rounds per tree; by default one tree spans all rounds.", rich_help_panel=_TREE
        ),
    ] = None,
    estimator: Annotated[
        EstimatorName,
        typer.Option(
            help="'online' (Honaker) has less noise at the same cost.", rich_help_panel=_TREE
        ),
    ] = EstimatorName.VANILLA,
    completed: Annotated[
        bool,
        typer.Option(
            "--completed", help="Complete each tree before a restart.", rich_help_panel=_TREE
        ),
    ] = False,
    release: Annotated[
        ReleaseName,
        typer.Option(
            help="'prefix' accounts for the models only: no node, virtual round or noise state may "
            "ever leave the server.",
            rich_help_panel=_TREE,
        ),
    ] = ReleaseName.NODES,
    bands: Annotated[
        int | None,
        typer.Option(help="Diagonals of 'toeplitz'; by default all.", rich_help_panel=_FIT),
    ] = None,
    buffers: Annotated[
        int | None,
        typer.Option(help="Buffers of 'blt', 1 to 5; by default 3.", rich_help_panel=_FIT),
    ] = None,
) -> MechanismChoice:
    """Return the mechanism that the options describe."""
    return MechanismChoice(
        name=mechanism,
        restart_every=restart_every,
        estimator=estimator,
        completed=completed,
        release=release,
        bands=bands,
        buffers=buffers,
    )


def with_mechanism(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of ``mechanism_choice`` in place of its parameter ``choice``."""
    own = inspect.signature(command)
    shared = inspect.signature(mechanism_choice).parameters
    options = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for declared in own.parameters.values()
        for option in (shared.values() if declared.name == "choice" else [declared])
    ]

    @wraps(command)
    def called(**values: Any) -> None:  # noqa: ANN401  whatever the options are
        choice = mechanism_choice(**{name: values.pop(name) for name in shared})
        command(choice=choice, **values)

    # typer reads a command's options from these two
    called.__signature__ = own.replace(parameters=options)  # type: ignore[attr-defined]
    called.__annotations__ = {option.name: option.annotation for option in options}
    return called
