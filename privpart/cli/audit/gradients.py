"""``privpart audit gradients``: whether per-example gradients are those of each example alone."""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from accounting import ConfigError, checks
from privpart.cli import options
from privpart.cli.options import Format
from privpart.cli.output import as_csv

_WRONG = 5


def gradients(
    target: Annotated[
        str,
        typer.Argument(
            help="Function that returns module, loss and batch, as 'package.module:function' or "
            "'./file.py:function'; the code is imported. The loss is a function from module and "
            "batch to the mean over the batch's examples."
        ),
    ],
    tolerance: Annotated[
        float, typer.Option(help="Largest relative error that counts as equal.")
    ] = 1e-4,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Compare Opacus's per-example gradients with one backward pass per example, per parameter.

    Exit code 5 if an error exceeds the tolerance: the clip norm then bounds nothing.

    Example: privpart audit gradients ./task.py:gradients
    """
    limit = checks.positive("tolerance", tolerance)
    from privpart.example_level.gradient_check import verify_gradients
    from privpart.training import own_code

    own_code.refuse_malformed(target)
    typer.echo(f"privpart: imports {target}", err=True)
    with redirect_stdout(sys.stderr):  # what the code prints is no part of the result
        function = own_code.load(target, Path.cwd())
        made = own_code.call(function, target, "audit gradients")
        if not isinstance(made, tuple) or len(made) != 3:
            raise ConfigError(
                f"{target}: returned {own_code.described(made)}; must return three things: module, "
                "loss and batch."
            )
        module, loss, batch = made

        def mean_loss(*arguments: Any) -> Any:  # noqa: ANN401  of the user's function
            return own_code.call(loss, target, "loss", *arguments)

        found = verify_gradients(module, mean_loss, batch)
    rows = [asdict(one) | {"equal": one.error <= limit} for one in found]
    wrong = [one for one in found if not one.error <= limit]
    if form is Format.JSON:
        for row in rows:  # JSON knows no infinity
            row["error"] = row["error"] if row["error"] < float("inf") else None
        document = {"schema": "privpart/gradients/1", "tolerance": limit, "parameters": rows}
        typer.echo(json.dumps(document | {"equal": not wrong}, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(rows), nl=False)
    else:
        width = max(len(one.parameter) for one in found)
        for one in found:
            mark = "  " if one.error <= limit else "! "
            typer.echo(f"{mark}{one.parameter:<{width}}  {one.error:8.1e}  {list(one.shape)}")
        typer.echo(
            f"{len(found) - len(wrong)} of {len(found)} parameters have the gradients of each "
            f"example alone, to {limit:g} of the longest."
        )
    if wrong:
        raise typer.Exit(_WRONG)
