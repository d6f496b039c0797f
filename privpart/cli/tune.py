"""``privpart tune``: the best of a secret number of trainings, within one epsilon."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accounting import ConfigError
from accounting.report import up
from privpart.cli import options
from privpart.cli.idle import beside, without
from privpart.cli.options import Format
from privpart.cli.output import say
from privpart.cli.trainings import INTERRUPTED, tell_of_code

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from privpart.study.tune import Bill


def tune(
    file: Annotated[
        Path | None,
        typer.Argument(help="TOML file with a plan, candidates, a target epsilon and a score."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the selection; without it, a few rounds are timed for the bill."
        ),
    ] = None,
    abandon: Annotated[
        bool,
        typer.Option(
            "--abandon",
            help="Give up the selection in --out, for good: all of its trainings are charged, as "
            "if they had been released, and erased.",
        ),
        (
            beside("file", "gives up what is in --out"),
            without("out", "nothing is named to give up"),
        ),
    ] = False,
    html: Annotated[
        options.HtmlOption,
        (without("out", "nothing is released"), beside("abandon", "releases nothing")),
    ] = None,
    form: options.TableOrJson = "table",
) -> None:
    """Train a secret number of candidates; release the best, within one epsilon for everything.

    The bill comes first: noise, trainings, hours, and what counting all trainings would cost. The
    same command again resumes after a crash; nothing is ever drawn again.

    Example: privpart tune examples/tune_digits.toml --out tuned --html tuned.html
    """
    if abandon and out is not None:
        _abandon(out, form)
        return
    if file is None:
        raise ConfigError("file: is missing. Pass a TUNE.toml, or --abandon with --out.")
    from privpart.study.tune import bill_lines, prepared, read_tune, select

    tuned = read_tune(file)
    tell_of_code(*(candidate.plan for candidate in tuned.candidates))
    setup, bill = prepared(tuned)
    if out is None:
        _show_bill(bill, form)
        return
    typer.echo("\n".join(bill_lines(bill)), err=True)
    with _shown(bill, out):
        winner = select(tuned, out, setup)
    _tell(winner, form, html)


def _show_bill(bill: "Bill", form: str) -> None:
    from privpart.study.tune import bill_lines

    document = {"schema": "privpart/tune-bill/1", **asdict(bill), "cheaper": bill.cheaper}
    lines = [f"  {line}" for line in bill_lines(bill)]
    typer.echo(json.dumps(document, indent=2) if form == "json" else "\n".join(lines))


@contextmanager
def _shown(bill: "Bill", out: Path) -> Iterator[None]:
    """Show that trainings go on, and for how long; a bar would tell how many there are."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("training; {task.description}"), TimeElapsedColumn()
    console = Console(stderr=True)
    # While a training runs, there is another standard error.
    console.file = sys.stderr
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            hours = up(bill.most * bill.seconds / 3600, 3)
            progress.add_task(f"95 % of all selections end within {hours} hours", total=None)
            yield
    except KeyboardInterrupt:
        say(f"interrupted; the same command resumes the selection in {out}.")
        raise typer.Exit(INTERRUPTED) from None


def _tell(winner: Path, form: Format, html: Path | None) -> None:
    from privpart.cli.report import print_run
    from privpart.run.report import run_report

    say(f"released {winner}")
    report = run_report(winner)
    if html is not None:
        from privpart.cli.pages.run import run_page

        run_page(report).write(html)
    print_run(report, form)


def _abandon(out: Path, form: str) -> None:
    from privpart.run.selection import abandon

    given_up = abandon(out)
    text = f"{out}: given up. No round of a training was committed, so nobody is charged."
    if given_up.runs:
        text = (
            f"{out}: given up. {given_up.runs} trainings are charged, as if all had been released: "
            f"mu {up(given_up.mu)}."
        )
    document = {"schema": "privpart/tune-abandoned/1", **asdict(given_up)}
    typer.echo(json.dumps(document, indent=2) if form == "json" else text)
