"""``privpart export``: the released model of a run, for plain PyTorch or peft."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Literal

import typer

from accounting.report import printable
from privpart.cli.idle import where
from privpart.cli.output import say


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[
        Path, typer.Option(help="File to write (.safetensors), or folder for a peft adapter.")
    ],
    part: Annotated[
        Literal["full", "trained", "peft"],
        typer.Option(
            help="'full': state dict of the whole network; 'trained': the trained parameters; "
            "'peft': the adapter of a peft model."
        ),
    ] = "full",
    plan: Annotated[
        Path | None,
        typer.Option(help="The run's plan file, if it and its code were moved."),
        where("part", "trained", "needs no plan"),
    ] = None,
) -> None:
    """Write the model of the last committed round, with the privacy statement in its metadata.

    Only released rounds can be exported. 'full' and 'peft' build the network, for which they import
    the code that the plan names.

    Example: privpart export run --out model.safetensors
    """
    from privpart.cli.trainings import tell_of_code
    from privpart.training import export as files
    from privpart.training.train import released_setup

    # before anything is imported
    files.released_parameters(run)
    # what the plan's code prints is no part of the result
    with redirect_stdout(sys.stderr):
        setup = None if part == "trained" else released_setup(run, plan=plan, tell=tell_of_code)
        written = files.export(run, out, part=part, setup=setup)
    typer.echo(printable(files.privacy_metadata(run, part)["privpart.statement"]))
    say(f"wrote {written}")
