"""``privpart init``: a commented plan and a Python file, which train as they are."""

from pathlib import Path
from typing import Annotated

import typer


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write into; created if missing.")],
) -> None:
    """Write plan.toml and task.py, a small training to change into your own.

    Example: privpart init mine && privpart train --plan mine/plan.toml --out run
    """
    from privpart.experiment.starter import write_starter

    for path in write_starter(folder):
        typer.echo(path)
    typer.echo(
        f"privpart: train it with: privpart train --plan {folder / 'plan.toml'} --out RUN\n"
        f"privpart: ask what it costs with: privpart epsilon --plan {folder / 'plan.toml'}",
        err=True,
    )
