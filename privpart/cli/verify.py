"""``privpart verify``: every claim of a run folder, checked again by anybody who has it."""

import json
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from accounting.report import printable
from privpart.cli import options
from privpart.cli.gate import LEFT_ITS_PLAN, UNSOUND, as_field, judged_run, leave_if_refused
from privpart.cli.idle import without
from privpart.cli.output import WIDTH

if TYPE_CHECKING:
    from privpart.run.evidence import Check

_SCHEMA = "privpart/verify/1"
_LEDGER = "ledger", "chain", "signature"
"""Lines without which nothing in a folder can be replayed."""


def verify(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    model: Annotated[
        Path | None,
        typer.Argument(
            help="File that 'privpart export' wrote, full or trained; compared with the newest "
            "round."
        ),
    ] = None,
    public_key: options.PublicKey = None,
    policy: options.PolicyOption = None,
    witness: Annotated[
        list[Path] | None,
        typer.Option(
            help="File that 'privpart budget --write-witness' wrote on another machine, or earlier "
            "on this one: whether another copy of the run was continued there. Repeatable."
        ),
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Also compute each released model again, from the recorded sums and the noise "
            "(of a run that was begun with --record-sums).",
        ),
    ] = False,
    noise_key: Annotated[
        Path | None,
        typer.Option(help="File with the run's noise key, if its operator disclosed it."),
        without("replay", "nothing is computed again"),
    ] = None,
    html: options.HtmlOption = None,
    form: options.TableOrJson = "table",
) -> None:
    """Verify a run's signature, ledger, files and guarantee.

    Imports none of the plan's code and writes nothing into the run. Exit code 5 if something is
    wrong, 6 if the run left its plan.

    Example: privpart verify run model.safetensors --public-key key.txt
    """
    from privpart.training.verify import check_run, left_its_plan

    key = options.public_key_of_file(public_key)
    checks = check_run(run, model=model, public_key=key, witnesses=witness or ())
    if replay:
        checks = (*checks, _replayed(run, noise_key, checks))
    wrong = any(check.status == "wrong" for check in checks)
    refusals = [] if wrong or policy is None else judged_run(policy, run, key)
    if html is not None:
        from privpart.cli.pages.run import checks_page

        checks_page(checks, run).write(html)
    if form == "json":
        report = {"schema": _SCHEMA, "wrong": wrong, "checks": [asdict(check) for check in checks]}
        report |= as_field(policy, refusals)
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo(printable("\n".join(map(_as_text, checks))))
    if wrong:
        raise typer.Exit(LEFT_ITS_PLAN if left_its_plan(checks) else UNSOUND)
    leave_if_refused(refusals)


def _replayed(run: Path, noise_key: Path | None, checks: "tuple[Check, ...]") -> "Check":
    from privpart.run.evidence import Check
    from privpart.training.replay import replay as run_again

    if any(check.status == "wrong" and check.what in _LEDGER for check in checks):
        return Check("replay", "asserted", "not replayed: first, the ledger is wrong")
    result = run_again(run, key=noise_key)
    return Check("replay", "verified" if result.differs is None else "wrong", result.says)


def _as_text(check: "Check") -> str:
    text = f"  {check.status:<9} {check.what}: {check.says}"
    return fill(text, WIDTH, subsequent_indent=" " * 12, break_long_words=False)
