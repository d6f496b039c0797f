"""``privpart audit gradients``: whether per-example gradients are those of each example alone."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from accounting import ConfigError
from privpart.cli import options
from privpart.cli.options import Format
from privpart.cli.output import as_csv

_WRONG = 5
_TOLERANCE = 1e-4
"""Largest relative error that counts as equal: float32 leaves 1e-6."""


def gradients(
    target: Annotated[
        str,
        typer.Argument(
            help="Function that returns module, loss and batch, as 'package.module:function' or "
            "'./file.py:function'; the code is imported. The loss is a function from module and "
            "batch to the mean over the batch's examples."
        ),
    ],
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Compare Opacus's per-example gradients with one backward pass per example, per parameter.

    Exit code 5 if one differs by more than 1e-4 of the longest: the clip norm then bounds nothing.

    Example: privpart audit gradients ./task.py:gradients
    """
    from privpart.example_level.gradient_check import verify_gradients
    from privpart.training import own_code

    own_code.parsed(target)
    typer.echo(f"privpart: imports {target}", err=True)
    # What the code prints is no part of the result.
    with redirect_stdout(sys.stderr):
        task = own_code.call(own_code.load(target, Path.cwd()), target, "audit gradients")
        if not isinstance(task, tuple) or len(task) != 3:
            raise ConfigError(
                f"{target}: returned {own_code.described(task)}; must return three things: module, "
                "loss and batch."
            )
        module, loss, batch = task
        mean_loss = partial(own_code.call, loss, target, "loss")
        checked = verify_gradients(module, mean_loss, batch)
    rows = [asdict(check) | {"equal": check.error <= _TOLERANCE} for check in checked]
    equal = sum(row["equal"] for row in rows)
    if form is Format.JSON:
        # JSON has no infinity.
        finite = [row | {"error": row["error"] if isfinite(row["error"]) else None} for row in rows]
        document = {"schema": "privpart/gradients/1", "tolerance": _TOLERANCE, "parameters": finite}
        document["equal"] = equal == len(rows)
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(rows), nl=False)
    else:
        width = max(len(row["parameter"]) for row in rows)
        for row in rows:
            mark = "  " if row["equal"] else "! "
            typer.echo(f"{mark}{row['parameter']:<{width}}  {row['error']:8.1e}  {[*row['shape']]}")
        typer.echo(
            f"{equal} of {len(rows)} parameters have the gradients of each example alone, to "
            f"{_TOLERANCE:g} of the longest."
        )
    if equal < len(rows):
        raise typer.Exit(_WRONG)
