"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from accounting import ConfigError
from accounting.guarantee import Method

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
        "--method",
        help="'exact', the default, is tight; the others, by dp-accounting, reproduce papers and "
        "cross-check. Poisson sampling: 'pld' or 'rdp'.",
        show_default=False,
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
