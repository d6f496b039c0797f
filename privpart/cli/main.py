"""``privpart``: the commands, and what becomes of an error.

Exit codes: 0 ok, 2 bad input, 3 budget exceeded, 130 interrupted. Standard output carries the
result only; progress, warnings and errors go to standard error.
"""

import sys
from importlib.metadata import version
from inspect import signature
from typing import Annotated

import typer

from accounting import ConfigError
from privpart.cli.calibrate import calibrate
from privpart.cli.costs import costs
from privpart.cli.demo import demo
from privpart.cli.epsilon import epsilon
from privpart.cli.freeze_search import freeze_search
from privpart.cli.mechanisms import mechanisms

app = typer.Typer(
    help="Differential privacy for partially trained models in federated learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(epsilon)
app.command()(calibrate)
app.command()(mechanisms)
app.command()(costs)
app.command()(freeze_search)
app.command()(demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("privpart"))
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; turn an argument out of range into one sentence and exit code 2."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"privpart: {_as_option(str(error))}", err=True)
        sys.exit(2)
    except MemoryError:
        typer.echo(
            "privpart: not enough memory for that many rounds; a tree needs little.", err=True
        )
        sys.exit(2)


_OPTIONS = {
    name
    for command in (epsilon, calibrate, mechanisms, costs, freeze_search, demo)
    for name in signature(command).parameters
}


def _as_option(message: str) -> str:
    """Name the option as it was typed: ``max_epsilon=0: ...`` becomes ``--max-epsilon 0: ...``."""
    name, equals, rest = message.partition("=")
    if equals and name in _OPTIONS:
        return f"--{name.replace('_', '-')} {rest}"
    return message


if __name__ == "__main__":
    main()
