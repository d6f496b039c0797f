"""Options that several commands share, and the run that they describe."""

from enum import StrEnum
from typing import Annotated

import typer

from accounting import BinaryTree, Independent, Mechanism


class MechanismName(StrEnum):
    """Mechanisms by the name that people type."""

    TREE = "tree"
    INDEPENDENT = "independent"


class MethodName(StrEnum):
    """Ways to compute epsilon."""

    EXACT = "exact"
    RDP = "rdp"


class Format(StrEnum):
    """Forms of the result on standard output."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


Mechanism_ = Annotated[
    MechanismName, typer.Option("--mechanism", help="What correlates the noise over the rounds.")
]
Rounds = Annotated[int, typer.Option(help="Training rounds, each of which releases a model.")]
Delta = Annotated[float, typer.Option(help="Delta of the guarantee, strictly between 0 and 1.")]
MaxParticipations = Annotated[int, typer.Option(help="Most rounds in which one client takes part.")]
MinSeparation = Annotated[
    int,
    typer.Option(
        help="Least distance |i - j| between two of a client's rounds; 1 allows consecutive ones."
    ),
]
RestartEvery = Annotated[
    int | None, typer.Option(help="Rounds per tree; by default one tree spans all rounds.")
]
MethodOption = Annotated[
    MethodName,
    typer.Option(
        "--method", help="'exact' is tight; 'rdp' reproduces papers that used Renyi accounting."
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="Form of the result.")]


def build_mechanism(name: MechanismName, *, rounds: int, restart_every: int | None) -> Mechanism:
    """Return the mechanism that the options describe."""
    if name is MechanismName.TREE:
        return BinaryTree(rounds, restart_every=restart_every)
    if restart_every is not None:
        raise typer.BadParameter(
            "only a tree can restart: leave it out, or use --mechanism tree.",
            param_hint="--restart-every",
        )
    return Independent(rounds)
