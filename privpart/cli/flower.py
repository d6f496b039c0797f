"""``privpart flower init``: a plan as a Flower app."""

from pathlib import Path
from typing import Annotated

import typer

from privpart.cli.idle import Command

app = typer.Typer(help="Train a plan over a network, with Flower.", no_args_is_help=True)


@app.callback()
def _family() -> None:
    """Keep ``init`` a command of its own while it is the only one."""


@app.command(cls=Command)
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the app; created if missing.")],
) -> None:
    """Write a Flower app that trains the folder's plan.toml; without one, the starter's.

    Example: privpart flower init mine && flwr run mine --stream
    """
    from privpart.experiment.starter import write_flower_app

    for path in write_flower_app(folder):
        typer.echo(path)
    typer.echo(
        f"privpart: simulate it on this machine with: flwr run {folder} --stream\n"
        f"privpart: run it over a network as {folder / 'README.md'} says",
        err=True,
    )
