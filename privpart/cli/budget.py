"""Budget commands: ``privpart epsilon``, ``calibrate`` and ``mechanisms``.

They report what a planned run costs, find the least noise or the most training that meets a
budget, and compare all mechanisms at the same guarantee. None of them imports torch, except to read
a plan file.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import accounting
from accounting import (
    BinaryTree,
    ConfigError,
    Grouped,
    Independent,
    Mechanism,
    Participation,
    PrivacyReport,
    PrunedTree,
    Toeplitz,
    checks,
    error,
    footprint,
    guarantee,
    least_separation,
    most_participations,
    most_rounds,
    optimize,
)
from accounting.guarantee import Method
from accounting.mechanisms.by_name import MechanismChoice, MechanismName
from accounting.report import up
from privpart.cli import options
from privpart.cli.options import Against, Format, MethodName
from privpart.cli.output import as_csv, print_report

if TYPE_CHECKING:
    from privpart.experiment.plan_file import PlanFile


_EXCEEDED = 3


@options.with_mechanism
def epsilon(
    *,
    rounds: options.RoundsUnlessPlanned = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help="Noise standard deviation per coordinate / clip norm, on the scale of the sum."
        ),
    ] = None,
    delta: options.DeltaUnlessPlanned = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan file to read all of this from, as `privpart train` does."),
    ] = None,
    choice: MechanismChoice,
    max_participations: options.MaxParticipations = 1,
    min_separation: options.MinSeparation = 1,
    method: options.MethodOption = MethodName.EXACT,
    population: Annotated[
        int | None, typer.Option(help="Clients in all, if public: warns of too large a delta.")
    ] = None,
    cross_check: Annotated[
        bool, typer.Option("--cross-check", help="Cross-check by dp-accounting (a second more).")
    ] = False,
    max_epsilon: options.MaxEpsilon = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw epsilon into this picture (.png, .svg, .pdf).")
    ] = None,
    plot_against: Annotated[
        Against | None, typer.Option(help="What the picture varies; by default the noise.")
    ] = None,
    statement: Annotated[
        bool, typer.Option("--statement", help="Print the report in plain English instead.")
    ] = False,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Report the (epsilon, delta) of a planned run.

    Example: privpart epsilon --mechanism tree --rounds 1600 --noise-multiplier 1.13 --delta 1e-6
    """
    _refuse_contradictions(statement, form, plot, plot_against)
    limit = None if max_epsilon is None else checks.positive("max_epsilon", max_epsilon)
    if plan is not None:
        said = (rounds, noise_multiplier, max_participations, min_separation, choice)
        if said != (None, None, 1, 1, options.DEFAULT_MECHANISM):
            raise ConfigError(
                f"plan={plan}: already contains these values; leave out the options for them."
            )
        choice, participation, built, noise_multiplier, delta = _planned(plan, delta)
    elif rounds is None or noise_multiplier is None or delta is None:
        raise ConfigError(
            "--rounds, --noise-multiplier and --delta are needed; or --plan FILE, which has them."
        )
    else:
        participation = Participation(rounds, max_participations, min_separation)
        built = choice.build(participation)
    report = PrivacyReport.of(
        built,
        participation,
        noise_multiplier=noise_multiplier,
        delta=delta,
        method=method.value,
        population=population,
        cross_check="dp-accounting" if cross_check else "quadrature",
    )
    if plot is not None and built.groups is not None:
        raise ConfigError(
            "plot: varies a mechanism of one group; leave it out with a [schedule] or shared keys."
        )
    if plot is not None:
        from privpart.cli.plots import draw_budget

        draw_budget(choice, report, against=plot_against or Against.NOISE, path=plot)
    if statement:
        typer.echo(report.statement())
    else:
        print_report(report, form, beside=_one_stream(built, choice, participation, form))
    if limit is not None and report.epsilon > limit:
        typer.echo(f"privpart: epsilon {up(report.epsilon)} exceeds {limit:g}.", err=True)
        raise typer.Exit(_EXCEEDED)


def _refuse_contradictions(
    statement: bool, form: Format, plot: Path | None, plot_against: Against | None
) -> None:
    if statement and form is not Format.TABLE:
        raise ConfigError(f"statement=True: is prose; leave out --format {form}.")
    if plot_against is not None and plot is None:
        raise ConfigError(f"plot_against={plot_against}: needs --plot FILE to draw into.")


def _one_stream(
    built: Mechanism, choice: MechanismChoice, participation: Participation, form: Format
) -> list[tuple[str, str]]:
    """Return the sensitivity of the same mechanism without groups, for comparison."""
    if built.groups is None or form is not Format.TABLE:
        return []
    found = choice.build(participation).sensitivity(participation)
    known = "" if found.exact else " at most"
    return [
        ("one stream", f"{up(found.squared, 5)}{known}, if all groups shared one {choice.name}")
    ]


def _planned(
    path: Path, delta: float | None
) -> tuple[MechanismChoice, Participation, Mechanism, float, float]:
    """Read a plan file. It takes a second, because plans contain optimisers, which need torch."""
    from privpart.experiment.plan_file import read

    plan = read(path)
    promised = plan.privacy_plan()
    return (
        plan.privacy.mechanism,
        promised.participation,
        promised.mechanism,
        promised.noise_multiplier,
        plan.privacy.delta if delta is None else delta,
    )


class Unknown(StrEnum):
    """What to solve for."""

    NOISE_MULTIPLIER = "noise-multiplier"
    ROUNDS = "rounds"
    MAX_PARTICIPATIONS = "max-participations"
    MIN_SEPARATION = "min-separation"


@options.with_mechanism
def calibrate(
    *,
    target_epsilon: Annotated[float, typer.Option(help="The budget, above 0.")],
    rounds: options.Rounds,
    delta: options.Delta,
    solve: Annotated[
        Unknown,
        typer.Option(
            help="What to find: the least noise or separation, or the most rounds (up to --rounds) "
            "or participations. All but the first need --noise-multiplier."
        ),
    ] = Unknown.NOISE_MULTIPLIER,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="The noise, when solving for something else.")
    ] = None,
    choice: MechanismChoice,
    max_participations: options.MaxParticipations = 1,
    min_separation: options.MinSeparation = 1,
    method: options.MethodOption = MethodName.EXACT,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Find the least noise, or the most training, whose epsilon does not exceed a target.

    Example: privpart calibrate --target-epsilon 2 --rounds 1000 --delta 1e-6
    """
    if solve is Unknown.NOISE_MULTIPLIER:
        if noise_multiplier is not None:
            raise ConfigError(
                f"noise_multiplier={noise_multiplier}: that is what is solved for; leave it out, "
                "or say with --solve what to find instead."
            )
        participation = Participation(rounds, max_participations, min_separation)
        built = choice.build(participation)
        noise_multiplier = accounting.calibrate(
            built, participation, target_epsilon=target_epsilon, delta=delta, method=method.value
        )
    else:
        budget = _Budget(noise_multiplier, target_epsilon, delta, method.value)
        participation = _solve(solve, choice, (rounds, max_participations, min_separation), budget)
        built, noise_multiplier = choice.build(participation), budget.noise_multiplier
    report = PrivacyReport.of(
        built, participation, noise_multiplier=noise_multiplier, delta=delta, method=method.value
    )
    print_report(report, form)


@dataclass(frozen=True, slots=True)
class _Budget:
    given_noise: float | None
    target_epsilon: float
    delta: float
    method: Method

    @property
    def noise_multiplier(self) -> float:
        if self.given_noise is None:
            raise ConfigError("noise_multiplier is missing: --solve needs to know the noise.")
        return self.given_noise


def _solve(
    solve: Unknown, choice: MechanismChoice, limits: tuple[int, int, int], budget: _Budget
) -> Participation:
    """Return the participation that spends the budget, within the (rounds, k, b) given."""
    if choice.fitted:
        raise ConfigError(
            f"solve={solve}: {choice.name} is fitted to its participation, which is unknown here. "
            "Solve for the noise multiplier, or use another mechanism."
        )
    rounds, k, b = limits
    z, target = budget.noise_multiplier, budget.target_epsilon
    delta, method = budget.delta, budget.method
    if solve is Unknown.ROUNDS:
        n = most_rounds(
            lambda n: choice.build(Participation(n)),
            noise_multiplier=z,
            target_epsilon=target,
            delta=delta,
            max_participations=k,
            min_separation=b,
            at_most=rounds,
            method=method,
        )
        return Participation(n, min(k, -(-n // b)), b)
    mechanism = choice.build(Participation(rounds))
    if solve is Unknown.MAX_PARTICIPATIONS:
        if k != 1:
            raise ConfigError(f"max_participations={k}: that is what is solved for; leave it out.")
        k = most_participations(
            mechanism,
            noise_multiplier=z,
            target_epsilon=target,
            delta=delta,
            min_separation=b,
            method=method,
        )
    else:
        if b != 1:
            raise ConfigError(f"min_separation={b}: that is what is solved for; leave it out.")
        b = least_separation(
            mechanism,
            max_participations=k,
            noise_multiplier=z,
            target_epsilon=target,
            delta=delta,
            method=method,
        )
    return Participation(rounds, k, b)


_PREFIX_ROUNDS = 2048
"""The most rounds whose prefix release is accounted in about a second; the time is cubic."""


def mechanisms(
    rounds: options.RoundsUnlessPlanned = None,
    delta: options.DeltaUnlessPlanned = None,
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
            raise ConfigError(
                f"plan={plan}: already contains these values; leave out the options for them."
            )
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
    # all mechanisms first: what is refused must not come after a minute of calibration
    compared = list(_rows_of(planned, participation, optimal=optimal))
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
    plan.privacy_plan()  # refuses what `privpart train` would refuse
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
    groups = plan.mechanism().groups
    if groups is None:
        raise TypeError("a plan whose groups take turns has a mechanism with groups")
    names = ("tree", "blt", "independent")
    kinds = {name: MechanismChoice(name=MechanismName(name)) for name in names}
    if (own := plan.privacy.mechanism) not in kinds.values():
        kinds = {f"{own.name}, as planned": own} | kinds
    for label, choice in kinds.items():
        built = choice.build_grouped(groups.schedule, groups.sizes, participation)
        yield f"{label}, per group", built
        yield f"{label}, one stream", choice.build(participation)
    nodes = [PrunedTree(participation.rounds, tuple(own)) for own in groups.active_rounds()]
    yield "tree, one, pruned", Grouped(tuple(groups.schedule), tuple(nodes), tuple(groups.sizes))


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
    z = accounting.calibrate(mechanism, participation, target_epsilon=target_epsilon, delta=delta)
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
