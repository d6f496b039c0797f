"""``privpart mechanisms``: every mechanism at the same guarantee, side by side."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import (
    BinaryTree,
    ConfigError,
    Grouped,
    Independent,
    Mechanism,
    Participation,
    PrunedTree,
    Toeplitz,
    calibrate,
    error,
    footprint,
    guarantee,
    optimize,
)
from accounting.statement import up
from privpart.cli import options
from privpart.cli.options import Format
from privpart.cli.output import as_csv
from privpart.mechanism_choice import MechanismChoice, MechanismName

if TYPE_CHECKING:  # imported where used: plans name optimisers, which need torch
    from privpart.experiment.plan_file import PlanFile

_PREFIX_ROUNDS = 2048
"""Up to here the online tree's prefix release is accounted in about a second; cubic beyond."""


def mechanisms(
    rounds: Annotated[
        int | None, typer.Option(help="Training rounds, each of which releases a model.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta of the guarantee, strictly between 0 and 1.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Plan file with rounds, delta and participation; if it has a [schedule] or shared "
            "keys, a stream per group is compared with one stream over all rounds."
        ),
    ] = None,
    target_epsilon: Annotated[float, typer.Option(help="Epsilon of every row, above 0.")] = 1.0,
    max_participations: options.MaxParticipations = 1,
    min_separation: options.MinSeparation = 1,
    optimal: Annotated[
        bool,
        typer.Option(
            "--optimal",
            help="Add the numerically optimal matrix for the root mean squared error, one "
            "participation only (15 seconds at 1600 rounds).",
        ),
    ] = False,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Compare all mechanisms at the same epsilon: noise of the prefix sums, memory, draws.

    Errors are per coordinate and in units of the clip norm; the prefix sum of the updates after
    each round is what a model is made of. Example: privpart mechanisms --rounds 1600 --delta 1e-6
    """
    planned = None
    if plan is not None:
        if (rounds, max_participations, min_separation) != (None, 1, 1):
            raise ConfigError(f"plan={plan}: says it all; leave out the options it contains.")
        planned = _read(plan)
        participation = planned.participation()
        max_participations = participation.max_participations
        delta = planned.privacy.delta if delta is None else delta
    elif rounds is None or delta is None:
        raise ConfigError("--rounds and --delta are needed; or --plan FILE, which has them.")
    else:
        participation = Participation(rounds, max_participations, min_separation)
    if optimal and max_participations > 1:
        raise ConfigError(
            f"max_participations={max_participations}: the optimal matrix is known for one only. "
            "Leave out --optimal."
        )
    compared = list(_rows_of(planned, participation, optimal=optimal))  # what is refused, at once
    rows = [
        _row(label, mechanism, participation, target_epsilon, delta)
        for label, mechanism in compared
    ]
    best = min(row["rmse"] for row in rows)
    rows = [row | {"rmse_ratio": row["rmse"] / best} for row in rows]
    if form is Format.JSON:
        document = {
            "schema": "privpart/mechanisms/1",
            "rounds": participation.rounds,
            "max_participations": participation.max_participations,
            "min_separation": participation.min_separation,
            "delta": delta,
            "unit": "client",
            "adjacency": "zero-out",
            "rows": rows,
        }
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(rows), nl=False)
    else:
        _print_table(rows, participation, target_epsilon, delta)


def _read(path: Path) -> "PlanFile":
    from privpart.experiment.plan_file import read

    plan = read(path)
    plan.privacy_plan()  # raises what `privpart train` would
    return plan


def _rows_of(
    plan: "PlanFile | None", participation: Participation, *, optimal: bool
) -> Iterator[tuple[str, Mechanism]]:
    shared = plan is not None and plan.select is not None and plan.select.takes_turns
    if plan is None or (plan.schedule is None and not shared):
        yield from _candidates(participation, optimal=optimal)
        return
    if optimal:
        raise ConfigError("optimal=True: not known for groups; leave it out.")
    planned = plan.mechanism()
    if not isinstance(planned, Grouped):
        raise TypeError("where groups take turns, the mechanism is grouped")
    kinds = {
        "tree": MechanismChoice(name=MechanismName.TREE),
        "blt": MechanismChoice(name=MechanismName.BLT),
        "independent": MechanismChoice(name=MechanismName.INDEPENDENT),
    }
    if (own := plan.privacy.mechanism) not in kinds.values():
        kinds = {f"{own.name}, as planned": own} | kinds
    for label, choice in kinds.items():
        built = choice.build_grouped(planned.schedule, planned.sizes, participation)
        yield f"{label}, per group", built
        yield f"{label}, one stream", choice.build(participation)
    nodes = [PrunedTree(planned.rounds, tuple(own)) for own in planned.active_rounds()]
    yield "tree, one, pruned", Grouped(planned.schedule, tuple(nodes), planned.sizes)


def _candidates(participation: Participation, *, optimal: bool) -> Iterator[tuple[str, Mechanism]]:
    n = participation.rounds
    yield "independent", Independent(n)
    yield "tree", BinaryTree(n)
    yield "tree, online", BinaryTree(n, estimator="online")
    if n <= _PREFIX_ROUNDS:
        yield "tree, online, prefix", BinaryTree(n, estimator="online", release="prefix")
    yield "toeplitz, square root", Toeplitz.square_root(n)
    for buffers in (2, 3):
        typer.echo(f"fitting a BLT with {buffers} buffers ...", err=True)
        blt = optimize("blt", participation, buffers=buffers)
        if blt.buffers == buffers:  # the fit drops buffers that gain nothing
            yield f"blt, {buffers} buffers", blt
    if optimal:
        typer.echo("fitting the optimal matrix ...", err=True)
        yield "dense, optimal", optimize("dense", participation)


def _row(
    label: str,
    mechanism: Mechanism,
    participation: Participation,
    target_epsilon: float,
    delta: float,
) -> dict[str, Any]:
    z = calibrate(mechanism, participation, target_epsilon=target_epsilon, delta=delta)
    reached = guarantee(mechanism, participation, noise_multiplier=z)
    sensitivity = mechanism.sensitivity(participation)
    unit_error, cost = error(mechanism, participation), footprint(mechanism)
    return {
        "mechanism": label,
        "sensitivity_squared": sensitivity.squared,
        "sensitivity_exact": sensitivity.exact,
        "rmse": unit_error.rmse / reached.mu,
        "max_error": unit_error.max_error / reached.mu,
        "state_vectors": cost.state_vectors,
        "draws_per_round": cost.draws_per_round,
        "noise_multiplier": z,
        "epsilon": reached.epsilon(delta),
    }


def _print_table(
    rows: Sequence[dict[str, Any]],
    participation: Participation,
    target_epsilon: float,
    delta: float,
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    k, b = participation.max_participations, participation.min_separation
    apart = f", {b} or more apart" if k > 1 else ""
    table = Table(
        title=f"{participation.rounds} rounds, a client in at most {k}{apart}; "
        f"epsilon {target_epsilon:g} at delta {delta:g}, zero-out adjacency",
        box=SIMPLE_HEAD,
        title_justify="left",
    )
    columns = ("sens^2", "rmse", "max error", "rmse ratio", "state", "draws", "noise mult.")
    table.add_column("mechanism", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        bound = "" if row["sensitivity_exact"] else "<= "
        table.add_row(
            row["mechanism"],
            bound + up(row["sensitivity_squared"], 5),
            up(row["rmse"], 4),
            up(row["max_error"], 4),
            f"{row['rmse_ratio']:.3f}",
            str(row["state_vectors"]),
            f"{row['draws_per_round']:.2f}",
            up(row["noise_multiplier"], 5),
        )
    Console(width=100, highlight=False).print(table)
