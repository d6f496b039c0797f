"""``privpart epsilon --events``: what releases cost that another tool describes."""

import json
from enum import StrEnum
from pathlib import Path

import typer

from accounting import ConfigError, checks
from accounting.events import read_events
from accounting.report import up
from privpart.cli.gate import leave_if_above


class EpsilonFormat(StrEnum):
    """Forms of what ``privpart epsilon`` prints."""

    TABLE = "table"
    STATEMENT = "statement"
    JSON = "json"
    CSV = "csv"
    EVENTS = "events"


def print_events(
    path: Path,
    delta: float | None,
    population: int | None,
    limit: float | None,
    form: EpsilonFormat,
    *,
    allow_large: bool,
) -> None:
    """Print the cost of the events in a file; exit with 3 if it is above the limit."""
    if delta is None:
        raise ConfigError("--events needs --delta.")
    if form not in (EpsilonFormat.TABLE, EpsilonFormat.JSON):
        raise ConfigError(f"format={form}: events have the forms table and json.")
    checks.accept_delta(delta, population, allow_large=allow_large)
    composed = read_events(path)
    epsilon = composed.epsilon(delta)
    if form is EpsilonFormat.JSON:
        values = {"epsilon": epsilon, "delta": delta, "mu": composed.mu}
        typer.echo(json.dumps({"schema": "privpart/events/1", **values}, indent=2))
    else:
        how = "every release is Gaussian: exact" if composed.mu else "their losses composed by PLD"
        lines = [("epsilon", f"{up(epsilon, 5)}   ({how})"), ("delta", up(delta, 6))]
        lines += [] if composed.mu is None else [("mu", up(composed.mu, 5))]
        adjacency = "the events' own: one person is there, or is not; divisors are public"
        typer.echo("\n".join(f"  {a:<17} {b}" for a, b in [*lines, ("adjacency", adjacency)]))
    leave_if_above(epsilon, limit)
