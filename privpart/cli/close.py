"""``privpart close``: end a run before its last planned round, for good."""

import sys
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from accounting import ConfigError

if TYPE_CHECKING:
    from privpart.run.folder import RunFolder

_WIDTH = 96


def close(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; needed in scripts.")] = False,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="End a copy of which this machine did not see every round. You vouch that no "
            "other copy will ever be continued.",
        ),
    ] = False,
) -> None:
    """End a run early: erase its keys and its noise, and keep the model of the last round.

    As long as a run can be resumed, its folder holds the noise key, with which the noise can be
    removed from every released model. A complete run has erased it; this command does it for a run
    that will not be completed. It cannot be undone.

    Example: privpart close run
    """
    from privpart.run.folder import RunFolder

    with RunFolder.open(run, adopt=adopt) as opened:
        # A complete run has erased its keys already, so there is nothing to ask.
        if opened.rounds < opened.plan.rounds and not yes:
            _ask(opened)
        opened.end_early()
    typer.echo("\n".join(fill(line, _WIDTH) for line in _done(opened)))


def _ask(run: "RunFolder") -> None:
    if not sys.stdin.isatty():
        raise ConfigError(f"{run.path}: not a terminal, cannot ask. Nothing changed; pass --yes.")
    typer.confirm(
        f"End {run.path} after {run.rounds} of {run.plan.rounds} rounds, for good?",
        abort=True,
        err=True,
    )


def _done(run: "RunFolder") -> list[str]:
    """Return what was done, and what the report then covers."""
    from privpart.run.lives import life

    path, rounds, planned = run.path, run.rounds, run.plan.rounds
    if rounds:
        covered = (
            f"The model after round {rounds} stays, and can be exported. `privpart report {path}` "
            f"covers the {rounds} released rounds by the guarantee of all {planned} planned "
            "rounds: ending early does not lower epsilon."
        )
    elif run.facts["seed"] is None and not life(run.facts["run_id"]).is_free:
        covered = (
            "This copy released no model. Whether others did is not known here, so the budget book "
            "charges the whole plan."
        )
    else:
        covered = "No model was released, so nobody has seen anything of this run."
    return [
        f"{path}: ended after {rounds} of {planned} rounds; it cannot be resumed.",
        "Its keys and its noise state are erased. The keys were overwritten first; a disk of flash "
        "memory, a file system that copies on write, a snapshot or a backup may keep them.",
        covered,
    ]
