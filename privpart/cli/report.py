"""``privpart report``: the guarantee of a run, derived again from its ledger."""

import json
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from accounting import ConfigError, PrivacyReport, checks
from accounting.checks import MissingExtraError
from accounting.report import printable, up
from privpart.cli import options
from privpart.cli.options import Format
from privpart.cli.output import as_csv, report_row

if TYPE_CHECKING:
    from privpart.run.evidence import Check
    from privpart.run.report import RunReport

_EXCEEDED = 3
_UNSOUND = 5
_LEFT_ITS_PLAN = 6
_WIDTH = 96
_REGISTRY = "An entry of OpenDP's registry of deployments"
_VERDICTS = {
    "holds": "HOLDS: every assumption was enforced, verified or vouched for",
    "conditional": "CONDITIONAL: it holds if the assumptions listed as not checked are true",
    "does-not-hold": "DOES NOT HOLD",
    "not-private": "NOT PRIVATE: the noise can be recomputed from a seed",
}


def report(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    delta: Annotated[
        float | None,
        typer.Option(help="Delta; default: the plan's.", show_default=False),
    ] = None,
    allow_large_delta: options.AllowLargeDelta = False,
    vouch: Annotated[
        list[str] | None,
        typer.Option(
            help="Code of an assumption that you vouch for, such as 'choices'; may be repeated. "
            "The report says so."
        ),
    ] = None,
    public_key: options.PublicKey = None,
    max_epsilon: options.MaxEpsilon = None,
    statement: Annotated[
        bool, typer.Option("--statement", help="Print the report as prose.")
    ] = False,
    html: options.HtmlOption = None,
    registry: Annotated[
        Path | None,
        typer.Option(
            help="Also write an entry of OpenDP's registry of deployments into this file (.yaml "
            "or .json).",
            rich_help_panel=_REGISTRY,
        ),
    ] = None,
    about: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with what only you know: who publishes what, why and for whom.",
            rich_help_panel=_REGISTRY,
        ),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            help="The registry's JSON schema (.yaml or .json), which the entry must satisfy.",
            rich_help_panel=_REGISTRY,
        ),
    ] = None,
    about_template: Annotated[
        bool,
        typer.Option(
            "--about-template",
            help="Print the file for --about, to be filled in, in place of the report.",
            rich_help_panel=_REGISTRY,
        ),
    ] = False,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Report the guarantee of a run and whether it holds, from the run's ledger.

    Works while the run continues. Exit code 6 if the run left its plan, 5 if its guarantee does not
    hold for another reason, or a file of the run is not what its ledger names, 3 above
    --max-epsilon.
    """
    from privpart.run.report import vouched

    if about_template:
        from privpart.cli.registry import template

        typer.echo(template())
        return
    limit = None if max_epsilon is None else checks.positive("max_epsilon", max_epsilon)
    found = _derived(run, delta, options.public_key_of_file(public_key), html)
    if delta is not None:
        g = found.guarantee
        checks.accept_delta(delta, g.population, allow_large=allow_large_delta, unit=g.unit)
    for code in vouch or ():
        found = vouched(found, code)
    _write_page(found, html)
    _register(found, registry, about, schema)
    if statement:
        typer.echo(printable("\n\n".join([found.guarantee.statement(), *_sentences(found)])))
    else:
        print_run(found, form)
    if found.deviations:
        raise typer.Exit(_LEFT_ITS_PLAN)
    if found.guarantee.status == "does-not-hold" or found.wrong:
        raise typer.Exit(_UNSOUND)
    if limit is not None:
        _within(found.guarantee, limit)


def _derived(
    run: Path, delta: float | None, public_key: str | None, html: Path | None
) -> "RunReport":
    """Return the report of a run; of a ledger that cannot be relied on, write a page that says so.

    Raises:
        ConfigError: see ``run_report``.
    """
    from privpart.run.evidence import gather
    from privpart.run.report import report_of

    checked: tuple[Check, ...] = ()
    try:
        evidence = gather(run, public_key)
        checked = evidence.checks
        return report_of(evidence, run, delta=delta)
    except ConfigError as error:
        broken = any(check.status == "wrong" for check in checked)
        unread = not checked and (run / "ledger.sqlite").is_file()
        if html is not None and (broken or unread):
            from privpart.cli.pages.run import unreadable_page

            unreadable_page(str(error), checked, run).write(html)
        raise


def _write_page(found: "RunReport", path: Path | None) -> None:
    if path is None:
        return
    from privpart.cli.pages.run import run_page

    run_page(found).write(path)


def _register(
    found: "RunReport", path: Path | None, about: Path | None, schema: Path | None
) -> None:
    if path is None:
        return
    if about is None:
        raise ConfigError(
            "registry: --about FILE is needed, with what only you know; --about-template prints "
            "such a file to be filled in."
        )
    try:
        from privpart.cli.registry import write_entry

        write_entry(found, path, about, schema)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"--registry needs {error.name}: pip install 'privpart[registry]'."
        ) from None
    if schema is None:
        typer.echo(
            "privpart: warning: the entry was not checked: pass the registry's JSON schema "
            "(--schema).",
            err=True,
        )


def _within(found: PrivacyReport, limit: float) -> None:
    """Exit with code 3 unless the guarantee is private and within ``limit``."""
    if found.status == "not-private":
        typer.echo("privpart: the run is not private, so no limit on epsilon holds.", err=True)
    elif found.epsilon > limit:
        typer.echo(f"privpart: epsilon {up(found.epsilon)} exceeds {limit:g}.", err=True)
    else:
        return
    raise typer.Exit(_EXCEEDED)


def print_run(found: "RunReport", form: Format) -> None:
    """Print the report of a run, and its warnings on standard error."""
    if form is Format.JSON:
        typer.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    elif form is Format.CSV:
        own = {k: v for k, v in found.to_dict().items() if not isinstance(v, list | dict)}
        typer.echo(
            as_csv([own | report_row(found.guarantee) | {"schema": own["schema"]}]), nl=False
        )
    else:
        typer.echo(printable(_as_text(found)))
    for warning in found.guarantee.warnings:
        typer.echo(printable(f"privpart: warning: {warning}"), err=True)


def _sentences(found: "RunReport") -> list[str]:
    lines = list(found.select or ())
    if found.all_runs is not None:
        lines.append(f"all that this machine released about these people: {found.all_runs.says}")
    if found.measured is not None:
        lines.append(f"measured: {found.measured}")
    return [f"{line[0].upper()}{line[1:]}." for line in lines]


def _realised(found: "RunReport") -> str:
    state = "complete" if found.complete else f"{found.planned_rounds - found.rounds} to go"
    if found.closed:
        state = f"closed after {found.rounds} of {found.planned_rounds} rounds"
    seen, real = f"no {found.guarantee.unit} took part yet", found.realised
    if found.guarantee.sampling is not None:
        seen = "who took part is secret"
    if real is not None:
        seen = f"{found.guarantee.a_unit} in at most {real.max_participations}"
        if real.max_participations > 1:
            seen += f", {real.min_separation} or more apart"
    return f"{found.rounds} rounds ({state}), {seen}"


def _as_text(found: "RunReport") -> str:
    g = found.guarantee
    large = "; delta is too large" if checks.is_large_delta(g.delta, g.population) else ""
    lines = [
        ("verdict", _VERDICTS[g.status] + large),
        ("epsilon", f"{up(g.epsilon, 5)}   (this run{f'; {g.formula}' if g.sampling else ''})"),
        ("delta", f"{g.delta:g}"),
        ("unit", f"{g.unit}, {g.adjacency} adjacency"),
        ("mechanism", f"{g.mechanism}, noise multiplier {up(g.noise_multiplier, 6)}"),
        ("planned", f"{found.planned_rounds} rounds, {g.a_unit} in at most {g.max_participations}"),
        ("ledger", _realised(found)),
        ("mu", f"{up(g.mu, 5)}" + (" (an earlier run included)" if g.earlier_mu else "")),
        *(() if found.all_runs is None else [("all runs", found.all_runs.says)]),
        ("cross-check", f"{g.cross_check.method} says {up(g.cross_check.epsilon, 5)}"),
        ("run, plan", f"{found.run_id}, {found.plan[:12]}"),
        ("signed by", found.public_key or "nobody: begun by an earlier version"),
        ("head", f"{found.head} after {found.rounds} rounds"),
        *([] if found.measured is None else [("measured", found.measured)]),
    ]
    text = [f"  {name:<12} {value}" for name, value in lines]
    if found.wrong:
        text += ["", "  Wrong"]
    for check in found.wrong:
        said = f"{check.what}: {check.says}"
        text.append(fill(said, _WIDTH, initial_indent="  - ", subsequent_indent="    "))
    if found.select is not None:
        text += ["", *(fill(line, _WIDTH, initial_indent="  ") for line in found.select)]
    for status, title in (
        ("violated", "Violated"),
        ("asserted", "Not checked"),
        ("enforced", "Enforced by the code that ran"),
        ("verified", "Verified in the ledger"),
        ("vouched", "Vouched for by the user of this report"),
    ):
        chosen = [a for a in g.assumptions if a.status == status]
        if chosen:
            text += ["", f"  {title}"]
        for a in chosen:
            said = f"{a.code}: {a.text}"
            said += f" ({a.evidence})" if a.evidence else f"; else: {a.consequence}"
            text.append(fill(said, _WIDTH, initial_indent="  - ", subsequent_indent="    "))
    return "\n".join(text)
