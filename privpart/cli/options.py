"""Options that several commands share, and the mechanism that they describe."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from accounting import (
    BinaryTree,
    ConfigError,
    Independent,
    Mechanism,
    Participation,
    Toeplitz,
    optimize,
)


class MechanismName(StrEnum):
    """Mechanisms by the name that people type."""

    TREE = "tree"
    INDEPENDENT = "independent"
    TOEPLITZ = "toeplitz"
    BLT = "blt"


class EstimatorName(StrEnum):
    """How a tree's nodes make a prefix sum."""

    VANILLA = "vanilla"
    ONLINE = "online"


class ReleaseName(StrEnum):
    """What of a tree leaves the server."""

    NODES = "nodes"
    PREFIX = "prefix"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismChoice:
    """The mechanism options as typed; ``build`` makes the mechanism of a given participation."""

    name: MechanismName
    restart_every: int | None = None
    estimator: EstimatorName = EstimatorName.VANILLA
    completed: bool = False
    release: ReleaseName = ReleaseName.NODES
    bands: int | None = None
    buffers: int | None = None

    def build(self, participation: Participation) -> Mechanism:
        """Return the mechanism; fitting a BLT takes a few seconds at thousands of rounds."""
        self._refuse_what_does_not_apply()
        rounds = participation.rounds
        if self.name is MechanismName.TREE:
            return BinaryTree(
                rounds,
                restart_every=self.restart_every,
                estimator=self.estimator.value,
                completed=self.completed,
                release=self.release.value,
            )
        if self.name is MechanismName.TOEPLITZ:
            return Toeplitz.square_root(rounds, bands=self.bands)
        if self.name is MechanismName.BLT:
            return optimize("blt", participation, buffers=self.buffers)
        return Independent(rounds)

    def _refuse_what_does_not_apply(self) -> None:
        default = MechanismChoice(name=self.name)
        owners = {
            MechanismName.TREE: ("restart_every", "estimator", "completed", "release"),
            MechanismName.TOEPLITZ: ("bands",),
            MechanismName.BLT: ("buffers",),
        }
        for owner, names in owners.items():
            for name in names:
                value = getattr(self, name)
                if owner is not self.name and value != getattr(default, name):
                    raise ConfigError(
                        f"{name}={value}: only for --mechanism {owner}; "
                        f"leave it out with {self.name}."
                    )
