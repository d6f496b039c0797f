"""``privpart init``: a commented plan and a Python file, which train as they are."""

from pathlib import Path
from typing import Annotated

import typer


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write into; created if missing.")],
    flower: Annotated[
        bool,
        typer.Option(
            "--flower",
            help="Write a Flower app that trains the folder's plan.toml over a network; without "
            "one there, the starter's.",
        ),
    ] = False,
) -> None:
    """Write plan.toml and task.py, a small training to change into your own.

    Example: privpart init mine && privpart train --plan mine/plan.toml --out run

    Example: privpart init mine --flower && flwr run mine --stream
    """
    from privpart.training.starter import write_flower_app, write_starter

    for path in write_flower_app(folder) if flower else write_starter(folder):
        typer.echo(path)
    if flower:
        advice = (
            f"simulate it on this machine with: flwr run {folder} --stream",
            f"run it over a network as {folder / 'README.md'} says",
        )
    else:
        advice = (
            f"train it with: privpart train --plan {folder / 'plan.toml'} --out RUN",
            f"ask what it costs with: privpart epsilon --plan {folder / 'plan.toml'}",
        )
    typer.echo("\n".join(f"privpart: {line}" for line in advice), err=True)
