"""``privpart budget``: what each population has spent on this machine, and its limit."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accounting import ConfigError, Guarantee, StatedGuarantee, checks
from accounting.composed import Release
from accounting.events import read_events
from accounting.report import down, printable, up
from accounting.stated import read_profile, zcdp_profile
from accounting.typed import split_text
from privpart.cli import options
from privpart.cli.gate import EXCEEDED
from privpart.cli.idle import beside, without
from privpart.cli.output import Table, fill_lines, print_all, say

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from privpart.run.budget_book import Account

_SCHEMA = "privpart/budget/1"
_NONE = "-"
_UNSEEN = (
    "runs on other machines, or about the same people under another name, are not in this book",
    "whoever is in two populations has spent both",
)
_LOST = "an earlier log of runs is lost: more may have been spent than is listed"


def budget(
    population: Annotated[
        str | None,
        typer.Argument(help="Name of the people, as in a plan's [data] population; default: all."),
    ] = None,
    limit_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Set a limit, with --delta: `train` refuses to begin a run or fork that would "
            "pass it (exit code 3)."
        ),
        without("population", "a limit is of one population"),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Delta of the limit, or of the epsilons shown; default: the limit's, or the least "
            "of the runs'."
        ),
    ] = None,
    raise_limit: Annotated[
        bool,
        typer.Option(
            "--raise-limit", help="With --limit-epsilon: allow it to be above the present limit."
        ),
        without("limit_epsilon", "nothing is raised"),
    ] = False,
    add: Annotated[
        str | None,
        typer.Option(
            help="Charge what somebody else released about these people, with --by: "
            "'epsilon=1,delta=1e-6', 'mu=0.5', 'rho=0.1' (zCDP), 'profile=FILE' (CSV with the "
            "columns epsilon and delta, of any accountant), or 'events=FILE' (dp-accounting's, see "
            "epsilon --events). It stays in the book."
        ),
        without("population", "a release is about one population"),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(help="Who states the cost of --add."),
        without("add", "nothing is stated"),
    ] = None,
    write_witness: Annotated[
        Path | None,
        typer.Option(
            help="Write how far each run went on this machine into a file, by ids and hashes: "
            "`privpart verify --witness` compares it elsewhere."
        ),
        (
            beside("population", "is of all runs"),
            beside("delta", "shows no budget"),
            beside("html", "shows no budget"),
        ),
    ] = None,
    html: options.HtmlOption = None,
    form: options.TableOrJson = "table",
) -> None:
    """Show the privacy budget spent on, and left for, each population.

    A run is charged when it is created, for its whole plan; what it was forked from is a run of its
    own. Exit code 3 if a population is above its limit.

    Example: privpart budget keyboard-de --limit-epsilon 8 --delta 1e-6
    """
    from privpart.run.budget_book import accounts

    if write_witness is not None:
        _write_witness(write_witness, form)
        return
    chosen = None if delta is None else checks.probability("delta", delta)
    # Changed before it is shown, so that the exit code is that of the new limit.
    if population is not None and limit_epsilon is not None:
        _set_limit(population, limit_epsilon, chosen, looser=raise_limit)
    if population is not None and add is not None:
        _state(population, add, by)
    book = accounts()
    shown = [account for account in book if population in (None, account.population)]
    if population is not None and not shown:
        names = ", ".join(account.population for account in book) or "none"
        raise ConfigError(f"population={population!r}: must be one of this machine's: {names}.")
    if form == "json":
        values = {"schema": _SCHEMA, "populations": [account.to_dict(chosen) for account in shown]}
        typer.echo(json.dumps(values, indent=2, allow_nan=False))
    else:
        print_all(_tables(shown, chosen, runs=population is not None))
    if html is not None:
        _write_page(shown, chosen, html, whole=population is None)
    if any(account.passed for account in shown):
        raise typer.Exit(EXCEEDED)


def _write_page(shown: "list[Account]", delta: float | None, html: Path, *, whole: bool) -> None:
    """Write the page of one population, or the table of all."""
    from privpart.cli.pages.book import book_page
    from privpart.cli.pages.decision import tables_page
    from privpart.run.budget_book import counted

    if whole:
        passed = sum(account.passed for account in shown)
        answer = f"{counted(len(shown), 'population')} on this machine, {passed} above its limit"
        parts = _tables(shown, delta, runs=False)
        page = tables_page("Budget book", parts, answer=answer, tone="bad" if passed else "plain")
    else:
        page = book_page(shown[0], delta, (*_UNSEEN, _LOST) if shown[0].lost else _UNSEEN)
    page.write(html)


def _write_witness(path: Path, form: str) -> None:
    from privpart.run.budget_book import counted
    from privpart.run.witness import write_witness

    now = write_witness(path)
    runs, head = counted(len(now.runs), "run"), now.head[:12] or "without a line"
    text = f"  {path}: {runs}, log {head}, {now.at}."
    typer.echo(json.dumps(asdict(now), indent=2) if form == "json" else text)


def _set_limit(population: str, epsilon: float, delta: float | None, *, looser: bool) -> None:
    from privpart.run.budget_book import Limit, set_limit

    if delta is None:
        raise ConfigError("delta is missing: a limit is an epsilon with a delta. Pass --delta.")
    if not set_limit(population, Limit(epsilon, delta), looser=looser).charges:
        say(f"no run names the population {population!r} yet.")


def _state(population: str, text: str, by: str | None) -> None:
    from privpart.run.budget_book import state

    if by is None:
        raise ConfigError("by is missing: say who states what this release cost. Pass --by.")
    state(population, _stated(text), by)


def _stated(text: str) -> tuple[Release, ...]:
    """Return the releases that were typed."""
    _, options = split_text(f"cost:{text}")
    match options:
        case {"events": path} if len(options) == 1:
            return read_events(Path(path)).releases
        case {"profile": path} if len(options) == 1:
            return (read_profile(Path(path)),)
    try:
        values = {name: float(value) for name, value in options.items()}
    except ValueError:
        raise ConfigError(f"add={text}: must be numbers, such as epsilon=1,delta=1e-6.") from None
    try:
        match values:
            case {"mu": mu} if len(values) == 1:
                return (Guarantee(mu),)
            case {"rho": rho} if len(values) == 1:
                return (zcdp_profile(rho),)
            case {"epsilon": _} if not values.keys() - {"epsilon", "delta"}:
                return (StatedGuarantee(**values),)
    except ConfigError as error:  # not of --delta, which was not typed
        raise ConfigError(f"add={text}: {error}") from None
    raise ConfigError(
        f"add={text}: must be epsilon=... with or without delta=..., mu=..., rho=..., "
        "profile=FILE or events=FILE."
    )


def _tables(book: "list[Account]", delta: float | None, *, runs: bool) -> "list[Table | str]":
    if not book:
        return ["  No run on this machine has named a population yet."]
    rows = []
    for one in book:
        values = one.to_dict(delta)
        shown = _NONE if values["delta"] is None else f"{values['delta']:g}"
        limit = _NONE if one.limit is None else str(one.limit)
        left = _NONE if values["mu_left"] is None else down(values["mu_left"], 4)
        costs = _up(values["mu"]), _up(values["epsilon"]), shown, limit, left
        rows.append([one.population, str(len(one.charges)), *costs, one.status])
    header = ["population", "runs", "mu", "epsilon", "delta", "limit", "mu left", "status"]
    title = "What all runs on this machine told about one member of each population"
    tables: list[Table | str] = [Table(title, header, rows, spare=("mu", "mu left"))]
    if runs:
        tables.append(f"  {book[0].shown(delta or book[0].delta).says}\n")
        tables.append(_runs(book[0], delta))
    unseen = (*_UNSEEN, _LOST) if book[0].lost else _UNSEEN
    return [*tables, "\n".join(["", *fill_lines(unseen)])]


def _runs(account: "Account", delta: float | None) -> Table:
    from privpart.run.budget_book import composed, epsilon_of

    chosen = account.delta if delta is None else delta
    rows = []
    for charge in account.charges:
        entry, cost = charge.entry, composed([charge])
        parent = _NONE if entry.parent is None else entry.parent[:12]
        mu = "no bound" if cost is None else _up(cost.mu)
        epsilon = _up(None if cost is None or chosen is None else epsilon_of(cost, chosen))
        done, planned = ("?" if n is None else n for n in (charge.released, entry.planned))
        status = f"stated by {printable(entry.by)}" if entry.by else charge.status
        begun = entry.at[:10], entry.folder or _NONE
        rows.append([entry.run[:12], parent, mu, epsilon, f"{done} of {planned}", status, *begun])
    header = ["run", "parent", "mu", "epsilon", "rounds", "status", "begun", "folder"]
    title = "Each run is charged alone and for its whole plan"
    return Table(title, header, rows, spare=("begun", "folder", "parent"))


def _up(value: float | None) -> str:
    return _NONE if value is None else up(value, 4)
