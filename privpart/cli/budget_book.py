"""``privpart budget``: what each population has spent on this machine, and its limit."""

import difflib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import ConfigError, Guarantee, checks
from accounting.report import down, up
from privpart.cli import options
from privpart.cli.idle import beside, without
from privpart.cli.options import Format
from privpart.cli.output import fill_lines, print_result, print_table

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from privpart.run.budget_book import Account, Limit

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
    documents = [account.to_dict(delta) for account in book]
    if runs:
        rows = [{"schema": _SCHEMA} | run for document in documents for run in document["runs"]]
    else:
        rows = [_csv_row(document) for document in documents]
    print_result(
        form,
        {"schema": _SCHEMA, "populations": documents},
        rows,
        lambda: _print_one(book[0], documents[0]) if runs else _print_all(book, documents),
    )


def _csv_row(document: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in document.items() if not isinstance(v, list | dict)}
    plain.pop("limit", None)
    limit = document["limit"] or {}
    of_limit = {f"limit_{name}": limit.get(name) for name in ("epsilon", "delta")}
    return {"schema": _SCHEMA, "runs": len(document["runs"])} | plain | of_limit


def _print_all(book: "list[Account]", documents: list[dict[str, Any]]) -> None:
    if not book:
        typer.echo("  No run on this machine has named a population yet.")
        return
    rows = [
        [
            account.population,
            str(len(account.entries)),
            _up(values["mu"]),
            _up(values["epsilon"]),
            _NONE if values["delta"] is None else f"{values['delta']:g}",
            _limit(account.limit),
            _NONE if values["mu_left"] is None else down(values["mu_left"], 4),
            account.status,
        ]
        for account, values in zip(book, documents, strict=True)
    ]
    header = ["population", "runs", "mu", "epsilon", "delta", "limit", "mu left", "status"]
    print_table(
        "What all runs on this machine told about one member of each population",
        header,
        rows,
        spare=("mu", "mu left"),
    )
    typer.echo("\n".join(fill_lines(_HIDDEN)))


def _print_one(account: "Account", values: dict[str, Any]) -> None:
    if account.entries:
        header = ["run", "parent", "mu", "epsilon", "rounds", "status", "begun", "folder"]
        print_table(
            f"Runs about {account.population}, each charged alone and for its whole plan",
            header,
            [_cells(run, values["delta"]) for run in values["runs"]],
            spare=("begun", "folder", "parent"),
        )
    at = "" if values["delta"] is None else f" with delta {values['delta']:g}"
    status: str = account.status
    unbounded = len(account.unbounded)
    if status == "not-private":
        status = f"NOT PRIVATE: {unbounded} runs with noise from a seed, or none, are not added"
    elif unbounded:
        status += f"; {unbounded} simulations on public data are not added"
    lines = [
        ("together", f"mu {_up(values['mu'])}, epsilon {_up(values['epsilon'])}{at}"),
        ("status", status),
        ("limit", _limit(account.limit)),
    ]
    if account.limit is not None:
        passed = ": the limit is passed" * account.passed
        lines.append(("left", _left(account.left(), account.limit.delta) + passed))
    # the last entry is the present limit, which is listed above
    for since, old in account.history[:-1] if account.limit is not None else account.history:
        lines.append(("earlier limit", f"{_limit(old)}, since {since}"))
    text = [f"  {name:<14} {value}" for name, value in lines]
    typer.echo("\n".join([*text, "", *fill_lines(_HIDDEN)]))


def _cells(run: dict[str, Any], delta: float | None) -> list[str]:
    bounded = run["mu"] is not None
    done, planned = ("?" if run[name] is None else run[name] for name in ("released", "rounds"))
    return [
        run["run"][:12],
        _NONE if run["parent"] is None else run["parent"][:12],
        _up(run["mu"]) if bounded else run["kind"],
        _up(Guarantee(run["mu"]).epsilon(delta)) if bounded and delta is not None else _NONE,
        f"{done} of {planned}",
        run["status"],
        run["begun"][:10],
        run["folder"] or _NONE,
    ]


def _left(mu: float | None, delta: float) -> str:
    if mu is None or not mu > 0:
        return "nothing"
    alone = down(Guarantee(mu).epsilon(delta), 4)
    return f"a run of mu {down(mu, 4)}, that is epsilon {alone} alone"


def _limit(limit: "Limit | None") -> str:
    return _NONE if limit is None else f"epsilon {limit.epsilon:g} with delta {limit.delta:g}"


def _up(value: float | None) -> str:
    return _NONE if value is None else up(value, 4)
