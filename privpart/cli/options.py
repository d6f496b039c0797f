"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from accounting import ConfigError
from accounting.guarantee import Method
from accounting.mechanisms.by_name import options_by_name
from privpart.cli.idle import beside

Format = Literal["table", "json", "csv"]
"""Forms of the result on standard output."""
Rounds = Annotated[
    int | None, typer.Option(help="Training rounds, each of which releases a model.")
]
DELTA = typer.Option(help="Delta of the guarantee, strictly between 0 and 1.")
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
    Method | None,
    typer.Option(
        help="'exact', the default, is tight; the others, by dp-accounting, reproduce papers and "
        "cross-check. Poisson sampling: 'pld' or 'rdp'."
    ),
]
FORM = typer.Option("--format", help="Form of the result.")
FormatOption = Annotated[Format, FORM]
TableOrJson = Annotated[Literal["table", "json"], FORM]
MaxEpsilon = Annotated[
    float | None, typer.Option(help="Exit with 3 if epsilon is above this; for CI.")
]
PolicyOption = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with what your organisation allows; exit with 3 if it is not met. Judged "
        "at the policy's delta and population."
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        help="Also write a page for people into this file: as PDF if its name ends in .pdf."
    ),
]
PublicKey = Annotated[
    str | None,
    typer.Option(
        help="Public key that you know the run by, in hex, or a file whose first line is that; not "
        "taken from the folder."
    ),
]

TYPED_MECHANISM = (
    "with options as in a plan's table: 'tree:restart_every=64', 'blt:buffers=2', "
    "'toeplitz:bands=8,fit', 'toeplitz:coefficients=1,0.5'; or 'file:PATH', which holds the JSON "
    "of --format json. Names and options: "
    + "; ".join(
        f"{name} ({', '.join(options)})" if options else name
        for name, options in options_by_name().items()
        if name != "file"
    )
    + "."
)
"""How a mechanism is typed, for help."""
_OF_SAMPLING = beside("sampling", "decides who takes part, and how often")

MechanismOption = Annotated[
    str | None,
    typer.Option(
        help=f"What correlates the noise over the rounds, by default a tree, {TYPED_MECHANISM}"
    ),
    beside("noise_schedule", "is of independent noise"),
]
NoiseScheduleOption = Annotated[
    Path | None,
    typer.Option(
        help="Independent noise that changes: a CSV file with the columns from_round and factor. "
        "From that round on, the first is 0, the noise is factor times --noise-multiplier."
    ),
]
SamplingOption = Annotated[
    str | None,
    typer.Option(
        help="Amplify by hiding who takes part, under add-or-remove adjacency. "
        "'poisson:expected_batch=20': each member of --population joins a round on its own. "
        "'scheduled-poisson:from_round=0,100,expected_batches=20,40': its rate changes by round. "
        "'poisson-examples:expected_batch=512,examples=60000,per_user=8': each example joins on "
        "its own, and a client, the unit, has up to 8; noise is / clip norm of an example. "
        "'truncated-poisson:expected_batch=20,most=32': of more than 32, a random 32 stay. "
        "'without-replacement:batch=20': a random 20 of --population in every round; "
        "'with-replacement:batch=20': each of 20 places on its own. "
        "'balls-in-bins:bins=8': each member is in one bin, and the rounds take the bins in turn; "
        "with 'chosen=3' each is in 3 of them, with 'redraw' every pass draws them anew. "
        "'b-min-sep:expected_batch=20,min_separation=4': each member joins on its own, but never "
        "within so many rounds of its last one; with 'most=32' a random 32 of more stay. "
        "'draws=1000000' estimates by Monte Carlo, which "
        "b-min-sep always does; the probability of error is part of delta. 'draw_seed=N' repeats a "
        "printed figure; the probability of error holds for a fresh seed, the default, alone."
    ),
]
MaxParticipations = Annotated[
    int | None,
    typer.Option(
        help="Most rounds in which one client takes part. Default 1, with a warning: this command "
        "cannot enforce the limit."
    ),
    _OF_SAMPLING,
]
MinSeparation = Annotated[
    int | None,
    typer.Option(
        help="Least distance |i - j| between two of a client's rounds; 1, the default, allows "
        "consecutive ones."
    ),
    _OF_SAMPLING,
]
FixedOrderOption = Annotated[
    bool,
    typer.Option(
        "--fixed-order",
        help="Every pass takes --min-separation rounds, in one public order: a client's rounds "
        "are multiples of that apart.",
    ),
    _OF_SAMPLING,
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
