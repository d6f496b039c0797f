"""``privpart report``: the guarantee of a run, derived again from its ledger."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from accounting import ConfigError, checks
from accounting.report import printable
from privpart.cli import gate, options
from privpart.cli.idle import without
from privpart.cli.options import Format
from privpart.cli.output import WIDTH, fill_lines, print_result, report_row, say

if TYPE_CHECKING:
    from privpart.run.evidence import Check
    from privpart.run.report import RunReport

_REGISTRY = "An entry of OpenDP's registry of deployments"


def report(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    delta: Annotated[float | None, typer.Option(help="Delta; default: the plan's.")] = None,
    allow_large_delta: Annotated[
        options.AllowLargeDelta, without("delta", "the run has its own delta")
    ] = False,
    vouch: Annotated[
        list[str] | None,
        typer.Option(
            help="Code of an assumption that you vouch for, such as 'choices'; may be repeated. "
            "The report says so, and when."
        ),
    ] = None,
    voucher: Annotated[
        str | None,
        typer.Option(help="Name of who vouches, for the report and for --policy."),
        without("vouch", "nothing is vouched for"),
    ] = None,
    public_key: options.PublicKey = None,
    max_epsilon: options.MaxEpsilon = None,
    policy: options.PolicyOption = None,
    html: options.HtmlOption = None,
    registry: Annotated[
        Path | None,
        typer.Option(
            help="Also write an entry of OpenDP's registry of deployments into this file.",
            rich_help_panel=_REGISTRY,
        ),
    ] = None,
    about: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with what only you know: who publishes what, why and for whom.",
            rich_help_panel=_REGISTRY,
        ),
        without("registry", "no entry is written"),
    ] = None,
    form: Annotated[
        Literal["table", "statement", "json", "csv"],
        typer.Option("--format", help="Form of the result; 'statement' is plain English."),
    ] = "table",
) -> None:
    """Report the guarantee of a run and whether it holds, from the run's ledger.

    Works while the run continues. Exit code 6 if the run left its plan, 5 if its guarantee does not
    hold for another reason, or a file of the run is not what its ledger names, 3 above
    --max-epsilon.
    """
    from privpart.run.report import vouched

    limit = None if max_epsilon is None else checks.positive("max_epsilon", max_epsilon)
    key = options.public_key_of_file(public_key)
    result = _derived(run, delta, key, html)
    if delta is not None:
        g = result.guarantee
        checks.accept_delta(delta, g.population, allow_large=allow_large_delta, unit=g.unit)
    for code in vouch or ():
        result = vouched(result, code, voucher)
    refusals = [] if policy is None else gate.judged_run(policy, run, key, result.vouchers)
    _write(result, html, registry, about)
    if form == "statement":
        typer.echo(printable(result.statement()))
    else:
        print_run(result, form, gate.as_field(policy, refusals))
    # The report is printed before any gate ends the command: it says why.
    if result.deviations:
        raise typer.Exit(gate.LEFT_ITS_PLAN)
    if result.guarantee.status == "does-not-hold" or result.wrong:
        raise typer.Exit(gate.UNSOUND)
    if limit is not None and result.guarantee.status == "not-private":
        say("the run is not private, so no limit on epsilon holds.")
        raise typer.Exit(gate.EXCEEDED)
    gate.leave_if_above(result.guarantee.epsilon, limit)
    gate.leave_if_refused(refusals)


def _derived(
    run: Path, delta: float | None, public_key: str | None, html: Path | None
) -> "RunReport":
    """Return the report of a run; of a ledger that cannot be relied on, write a page that says so.

    Raises:
        ConfigError: see ``run_report``.
    """
    from privpart.run.evidence import gather
    from privpart.run.folder import holds_a_run
    from privpart.run.report import report_of

    checked: tuple[Check, ...] = ()
    try:
        evidence = gather(run, public_key)
        checked = evidence.checks
        return report_of(evidence, run, delta=delta)
    except ConfigError as error:
        # An older page at that place would still claim what no longer holds.
        broken = any(check.status == "wrong" for check in checked)
        unread = not checked and holds_a_run(run)
        if html is not None and (broken or unread):
            from privpart.cli.pages.run import unreadable_page

            unreadable_page(str(error), checked, run).write(html)
        raise


def _write(
    result: "RunReport", html: Path | None, registry: Path | None, about: Path | None
) -> None:
    if html is not None:
        from privpart.cli.pages.run import run_page

        run_page(result).write(html)
    if registry is not None:
        from privpart.cli.registry import write_entry

        if about is None:
            raise ConfigError("registry: --about FILE is needed, with what only you know.")
        write_entry(result, registry, about)


def print_run(
    result: "RunReport", form: Format, more: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Print the report of a run, with more fields of JSON, and its warnings on standard error."""
    document = result.to_dict() | dict(more)
    flat = {k: v for k, v in document.items() if not isinstance(v, list | dict)}
    row = flat | report_row(result.guarantee) | {"schema": flat["schema"]}
    print_result(form, document, [row], lambda: typer.echo(printable(_as_text(result))))
    for warning in result.guarantee.warnings:
        say(f"warning: {warning}")


def _as_text(result: "RunReport") -> str:
    text = [f"  {name:<17} {value}" for name, value in result.summary()]
    if result.wrong:
        wrong = (f"{check.what}: {check.says}" for check in result.wrong)
        text += ["", "  Wrong", *fill_lines(wrong)]
    if result.select is not None:
        text += ["", *(fill(line, WIDTH, initial_indent="  ") for line in result.select)]
    for title, assumptions in result.guarantee.by_status():
        text += ["", f"  {title}"]
        for a in assumptions:
            basis = f" ({a.evidence})" if a.evidence else f". If not, {a.consequence}"
            text += fill_lines([f"{a.code}: {a.text}{basis}"])
    return "\n".join(text)
