"""``privpart budget``: what each population has spent on this machine, and its limit."""

import difflib
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import ConfigError, checks
from accounting.report import down, up
from privpart.cli import options
from privpart.cli.idle import beside, without
from privpart.cli.options import Format
from privpart.cli.output import as_csv, fill_lines, print_table

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from privpart.run.budget_book import Account, Entry

_SCHEMA = "privpart/budget/1"
_EXCEEDED = 3
_FAULT = 70
_NONE = "-"
_HIDDEN = (
    "runs on other machines, or about the same people under another name, are not in this book",
    "whoever is in two populations has spent both",
)
_OF_ONE = without("population", "a limit is of one population")
_NO_LIMIT = beside("remove_limit", "sets no limit")
_OF_A_LIMIT = (_OF_ONE, _NO_LIMIT)


def budget(
    population: Annotated[
        str | None,
        typer.Argument(
            help="Name of the people, as in a plan's [data] population; default: all.",
            show_default=False,
        ),
    ] = None,
    limit_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Set a limit, with --delta: `train` refuses to begin a run or fork that would "
            "pass it (exit code 3).",
            show_default=False,
        ),
        _OF_A_LIMIT,
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Delta of the limit, or of the epsilons shown; default: the limit's, or the least "
            "of the runs'.",
            show_default=False,
        ),
        _NO_LIMIT,
    ] = None,
    raise_limit: Annotated[
        bool,
        typer.Option(
            "--raise-limit", help="With --limit-epsilon: allow it to be above the present limit."
        ),
        (*_OF_A_LIMIT, without("limit_epsilon", "nothing is raised")),
    ] = False,
    remove_limit: Annotated[
        bool,
        typer.Option("--remove-limit", help="Remove the limit; the book keeps that it was."),
        _OF_ONE,
    ] = False,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Show what all runs about each population have spent together, by run, and what is left.

    A run is charged when it is created, for its whole plan; what it was forked from is a run of its
    own. Exit code 3 if a population is above its limit.

    Example: privpart budget keyboard-de --limit-epsilon 8 --delta 1e-6
    """
    from privpart.run.budget_book import accounts

    chosen = None if delta is None else checks.probability("delta", delta)
    try:
        # Changed before it is shown, so that the exit code is that of the new limit.
        if population is not None and (remove_limit or limit_epsilon is not None):
            _change_limit(population, limit_epsilon, chosen, looser=raise_limit)
        shown = accounts()
    except OSError as error:
        typer.echo(f"privpart: {error}.", err=True)
        raise typer.Exit(_FAULT) from None
    if population is not None:
        shown = [_named(population, shown)]
    _print(shown, chosen, form, runs=population is not None)
    if any(account.passed for account in shown):
        raise typer.Exit(_EXCEEDED)


def _change_limit(
    population: str, epsilon: float | None, delta: float | None, *, looser: bool
) -> None:
    """Set the limit of a population, or remove it if ``epsilon`` is None."""
    from privpart.run.budget_book import Limit, set_limit

    if epsilon is None:
        set_limit(population, None)
        return
    if delta is None:
        raise ConfigError("delta is missing: a limit is an epsilon with a delta. Pass --delta.")
    if not set_limit(population, Limit(epsilon, delta), looser=looser).entries:
        typer.echo(f"privpart: no run names the population {population!r} yet.", err=True)


def _named(population: str, book: "list[Account]") -> "Account":
    names = [account.population for account in book]
    if population in names:
        return book[names.index(population)]
    near = difflib.get_close_matches(population, names, n=1, cutoff=0.0)
    hint = f"The nearest is {near[0]!r}." if near else "The book is empty."
    raise ConfigError(
        f"population={population!r}: the budget book of this machine has none. {hint}"
    )


def _print(book: "list[Account]", delta: float | None, form: Format, *, runs: bool) -> None:
    if form is Format.JSON:
        shown = {"schema": _SCHEMA, "populations": [account.to_dict(delta) for account in book]}
        typer.echo(json.dumps(shown, indent=2, allow_nan=False))
    elif form is Format.CSV:
        _print_csv(book, delta, runs=runs)
    elif runs:
        _print_one(book[0], delta)
    else:
        _print_all(book, delta)


def _print_csv(book: "list[Account]", delta: float | None, *, runs: bool) -> None:
    rows: list[dict[str, Any]] = []
    for account in book:
        values = account.to_dict(delta)
        if runs:
            rows += [{"schema": _SCHEMA} | run for run in values["runs"]]
        else:
            plain = {k: v for k, v in values.items() if not isinstance(v, list | dict)}
            plain.pop("limit", None)
            limit = values["limit"] or {"epsilon": None, "delta": None}
            of_limit = {f"limit_{name}": limit[name] for name in ("epsilon", "delta")}
            rows.append({"schema": _SCHEMA, "runs": len(values["runs"])} | plain | of_limit)
    if rows:
        typer.echo(as_csv(rows), nl=False)


def _print_all(book: "list[Account]", delta: float | None) -> None:
    if not book:
        typer.echo("  No run on this machine has named a population yet.")
        return
    rows = []
    for account in book:
        values = account.to_dict(delta)
        limit, remaining = account.limit, account.left()
        rows.append(
            [
                account.population,
                str(len(account.entries)),
                _up(values["mu"]),
                _up(values["epsilon"]),
                _NONE if values["delta"] is None else f"{values['delta']:g}",
                _NONE if limit is None else f"{limit.epsilon:g} at {limit.delta:g}",
                _NONE if remaining is None else down(remaining, 4),
                account.status,
            ]
        )
    header = ["population", "runs", "mu", "epsilon", "delta", "limit", "mu left", "status"]
    print_table(
        "What all runs on this machine told about one member of each population",
        header,
        rows,
        spare=("mu", "mu left"),
    )
    typer.echo("\n".join(fill_lines(_HIDDEN)))


def _print_one(account: "Account", delta: float | None) -> None:
    values = account.to_dict(delta)
    if account.entries:
        header = ["run", "parent", "mu", "epsilon", "rounds", "status", "begun", "folder"]
        print_table(
            f"Runs about {account.population}, each charged alone and for its whole plan",
            header,
            [_cells(entry, values["delta"]) for entry in account.entries],
            spare=("begun", "folder", "parent"),
        )
    lines = [
        ("together", f"mu {_up(values['mu'])}, epsilon {_up(values['epsilon'])}{_at(values)}"),
        ("status", _status(account)),
        (
            "limit",
            _NONE if account.limit is None else _limit(account.limit.epsilon, account.limit.delta),
        ),
    ]
    if account.limit is not None:
        lines.append(("left", _left(account)))
    # the last entry is the present limit, which is listed above
    for since, old in account.history[:-1] if account.limit is not None else account.history:
        limit = "removed" if old is None else _limit(old.epsilon, old.delta)
        lines.append(("earlier limit", f"{limit}, since {since}"))
    text = [f"  {name:<14} {value}" for name, value in lines]
    typer.echo("\n".join([*text, "", *fill_lines(_HIDDEN)]))


def _cells(entry: "Entry", delta: float | None) -> list[str]:
    from accounting import Guarantee

    values = entry.to_dict()
    alone = None
    if entry.mu is not None and delta is not None:
        alone = Guarantee(entry.mu).epsilon(delta)
    done, planned = values["released"], entry.rounds
    return [
        entry.run[:12],
        _NONE if entry.parent is None else entry.parent[:12],
        entry.kind if entry.mu is None else _up(entry.mu),
        _up(alone),
        f"{'?' if done is None else done} of {'?' if planned is None else planned}",
        values["status"],
        entry.begun[:10],
        entry.folder or _NONE,
    ]


def _status(account: "Account") -> str:
    if account.status == "not-private":
        return (
            f"NOT PRIVATE: {len(account.unbounded)} runs with noise from a seed, or without noise, "
            "have no bound and are not added"
        )
    if account.unbounded:
        return (
            f"{account.status}; {len(account.unbounded)} simulations on public data are not added"
        )
    return account.status


def _left(account: "Account") -> str:
    from accounting import Guarantee

    remaining, limit = account.left(), account.limit
    if remaining is None or limit is None or not remaining > 0:
        return "nothing" + (": the limit is passed" if account.passed else "")
    alone = Guarantee(remaining).epsilon(limit.delta)
    return f"a run of mu {down(remaining, 4)}, that is epsilon {down(alone, 4)} alone"


def _limit(epsilon: float, delta: float) -> str:
    return f"epsilon {epsilon:g} with delta {delta:g}"


def _at(values: dict[str, Any]) -> str:
    return "" if values["delta"] is None else f" with delta {values['delta']:g}"


def _up(value: float | None) -> str:
    return _NONE if value is None else up(value, 4)
