"""``privpart mechanisms``: what memory buys, at the same guarantee.

Every mechanism is known by the state vectors that its noise keeps and by the error of its prefix
sums. The front is the mechanisms that no other beats with as little memory.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import (
    ConfigError,
    Grouped,
    Guarantee,
    Mechanism,
    Participation,
    PrunedTree,
    checks,
    footprint,
    optimize,
)
from accounting.calibrate import least_noise
from accounting.error import prefix_error
from accounting.fit_cache import kept_figures
from accounting.guarantee import mu_upper
from accounting.mechanisms.by_name import MechanismChoice, MechanismName
from accounting.mechanisms.tree import EstimatorName, ReleaseName
from accounting.report import shown_parameters, up
from privpart.cli import options
from privpart.cli.budget.options import Limits, accept_planned_delta, with_shared_options
from privpart.cli.budget.progress import shown_fits
from privpart.cli.idle import OF_A_PLAN, Idle, typed
from privpart.cli.options import Format
from privpart.cli.output import as_csv, print_table

if TYPE_CHECKING:
    from privpart.training.plan_file import PlanFile

_WITHOUT_OPTIMAL = Idle(
    "only",
    lambda values: values["only"] is not None and values["only"] not in "dense, optimal",
    "leaves out 'dense, optimal'",
)
_PREFIX_ROUNDS = 2048
"""The most rounds whose prefix release is accounted in about a second; the time is cubic."""
_BANDED_ROUNDS = 8192
"""The most rounds for which many-banded filters are fitted here; the time is quadratic."""
_BUFFERS = (1, 2, 3, 4, 5)
_DRAWS = (2, 4, 16)


@with_shared_options
def mechanisms(
    context: typer.Context,
    *,
    rounds: Annotated[options.RoundsUnlessPlanned, OF_A_PLAN] = None,
    delta: options.DeltaUnlessPlanned = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Plan file with rounds, delta and participation; if it has a [schedule] or shared "
            "keys, a stream per group is compared with one stream over all rounds."
        ),
    ] = None,
    population: options.Population = None,
    allow_large_delta: options.AllowLargeDelta = False,
    target_epsilon: Annotated[float, typer.Option(help="Epsilon of every row, above 0.")] = 1.0,
    choice: MechanismChoice,
    limits: Limits,
    only: Annotated[
        str | None,
        typer.Option(help="Only mechanisms whose name contains this, such as 'blt'."),
    ] = None,
    optimal: Annotated[
        bool,
        typer.Option(
            "--optimal",
            help="Add the numerically optimal matrix for the root mean squared error, one "
            "participation only (15 seconds at 1600 rounds).",
        ),
        _WITHOUT_OPTIMAL,
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw memory against error into this picture (.png, .svg, .pdf)."),
    ] = None,
    html: options.HtmlOption = None,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Show what memory buys: the error of all mechanisms at the same epsilon, by state vectors.

    Errors are per coordinate and in units of the clip norm; the prefix sum of the updates after
    each round is what a model is made of. A star marks the mechanisms that no other beats with as
    few state vectors. With --mechanism or --mechanism-file, that one has a row of its own. Fits are
    cached, so that the second call is quick.
    Example: privpart mechanisms --rounds 1600 --delta 1e-6 --max-participations 1
    """
    if plan is not None:
        planned = _read(plan)
        participation = planned.participation()
        population = accept_planned_delta(planned, delta, population, allow_large=allow_large_delta)
        delta = planned.privacy.delta if delta is None else delta
        own = None
    elif rounds is None or delta is None:
        raise ConfigError("--rounds and --delta are needed; or --plan FILE, which has them.")
    else:
        checks.accept_delta(delta, population, allow_large=allow_large_delta)
        planned = None
        participation = limits.of(rounds)
        own = _own(choice, typed(context))
    if optimal and participation.rounds > _BANDED_ROUNDS:
        raise ConfigError(
            f"optimal=True: is left out above {_BANDED_ROUNDS} rounds; leave out --optimal."
        )
    if optimal and participation.max_participations > 1:
        raise ConfigError(
            f"max_participations={participation.max_participations}: the optimal matrix is known "
            "for one only. Leave out --optimal."
        )
    offered = _rows_of(planned, participation, own, optimal=optimal)
    rows = _on_front(
        [
            _row(offer, mechanism, participation, target_epsilon, delta)
            for offer, mechanism in _built(offered, only)
        ]
    )
    title = _title(participation, target_epsilon, delta)
    warnings = _warnings(stated=plan is not None or limits.stated)
    if large := checks.delta_warning(delta, population):
        warnings.append(large)
    _draw(rows, title, warnings, plot, html)
    if form is Format.TABLE:
        _print_rows(rows, title)
    else:
        _print_data(form, rows, participation, delta, warnings)
    for warning in warnings:
        typer.echo(f"privpart: warning: {warning}", err=True)


def _draw(
    rows: Sequence[dict[str, Any]],
    title: str,
    warnings: Sequence[str],
    plot: Path | None,
    html: Path | None,
) -> None:
    """Write the picture and the page that were asked for."""
    if plot is None and html is None:
        return
    from privpart.cli.pages import drawing
    from privpart.cli.pages.plots import front_figure

    figure = front_figure(rows, title=title)
    if plot is not None:
        drawing.save(figure, plot)
    if html is not None:
        from privpart.cli.pages.budget import front_page

        front_page(rows, title, figure, warnings).write(html)


@dataclass(frozen=True, slots=True)
class Offer:
    """A row before it is computed.

    Attributes:
        label: name of the row.
        build: makes its mechanism, which may take a fit.
        options: what makes the same mechanism on the command line; "" if nothing does.
    """

    label: str
    build: Callable[[], Mechanism]
    options: str = ""


def _built(offered: Iterator[Offer], only: str | None) -> list[tuple[Offer, Mechanism]]:
    """Make all mechanisms first: what is refused must not come after a minute of calibration."""
    with shown_fits():
        rows = [(offer, offer.build()) for offer in offered if (only or "") in offer.label]
    if not rows:
        raise ConfigError(f"only={only}: no mechanism has a name that contains this.")
    first = {mechanism: offer for offer, mechanism in reversed(rows)}  # fits drop useless buffers
    return [(offer, mechanism) for offer, mechanism in rows if first[mechanism] is offer]


_LISTED = "mechanism_parameters"


def _warnings(*, stated: bool) -> list[str]:
    if stated:
        return []
    return [
        "max_participations was not given, so this is for a client that takes part in one round, "
        "which nothing here enforces. More participations change the table."
    ]


def _read(path: Path) -> "PlanFile":
    from privpart.training.plan_file import read

    plan = read(path)
    if plan.privacy.sampling is not None:
        raise ConfigError(
            f"plan={path}: samples who takes part; the rows here are compared at a participation "
            "that nothing hides. See `privpart calibrate --sampling` for one mechanism."
        )
    plan.privacy_plan()  # refuses what `privpart train` would refuse
    return plan


def _own(choice: MechanismChoice, given: frozenset[str]) -> MechanismChoice | None:
    """Return the mechanism that was typed, if any was."""
    named = {field.name for field in fields(MechanismChoice)} | {"mechanism", "mechanism_file"}
    return choice if given & named else None


def _rows_of(
    plan: "PlanFile | None",
    participation: Participation,
    own: MechanismChoice | None,
    *,
    optimal: bool,
) -> Iterator[Offer]:
    shared = plan is not None and plan.select is not None and plan.select.takes_turns
    if plan is None or (plan.schedule is None and not shared):
        if own is not None:
            yield Offer(f"{own.name}, as given", partial(own.build, participation), as_typed(own))
        if plan is not None:
            planned = plan.privacy.mechanism
            build = partial(planned.build, participation)
            yield Offer(f"{planned.name}, as given", build, as_typed(planned))
        yield from _candidates(participation, optimal=optimal)
        return
    if optimal:
        raise ConfigError("optimal=True: not known for groups; leave it out.")
    yield from _group_by_group(plan, participation)


def _group_by_group(plan: "PlanFile", participation: Participation) -> Iterator[Offer]:
    groups = plan.mechanism().groups
    if groups is None:
        raise TypeError("a plan whose groups take turns has a mechanism with groups")
    names = ("tree", "blt", "independent")
    kinds = {name: MechanismChoice(name=MechanismName(name)) for name in names}
    if (own := plan.privacy.mechanism) not in kinds.values():
        kinds = {f"{own.name}, as planned": own} | kinds
    for label, choice in kinds.items():
        build = partial(choice.build_grouped, groups.schedule, groups.sizes, participation)
        yield Offer(f"{label}, per group", build)
        yield Offer(f"{label}, one stream", partial(choice.build, participation))
    nodes = [PrunedTree(participation.rounds, tuple(own)) for own in groups.active_rounds()]
    pruned = partial(Grouped, tuple(groups.schedule), tuple(nodes), tuple(groups.sizes))
    yield Offer("tree, one, pruned", pruned)


def _candidates(participation: Participation, *, optimal: bool) -> Iterator[Offer]:
    n = participation.rounds
    small = n <= _BANDED_ROUNDS
    draws = [bands for bands in (_DRAWS if small else _DRAWS[:1]) if bands <= n]
    offered = {
        "independent": _choice("independent"),
        **{
            f"banded inverse, {bands}": _choice(
                "banded-inverse", bands=bands, fit=True, normalize_columns=True
            )
            for bands in draws
        },
        **{
            f"blt, {buffers} buffer{'s' if buffers > 1 else ''}": _choice("blt", buffers=buffers)
            for buffers in _BUFFERS
        },
        "tree": _choice("tree"),
        "tree, online": _choice("tree", estimator=EstimatorName.ONLINE),
    }
    if n <= _PREFIX_ROUNDS:
        offered["tree, online, prefix"] = _choice(
            "tree", estimator=EstimatorName.ONLINE, release=ReleaseName.PREFIX
        )
    if small:
        for bands in _widths(participation):
            offered[f"bandmf, {bands} bands"] = _choice("bandmf", bands=bands)
        offered["toeplitz, square root"] = _choice("toeplitz")
    else:
        typer.echo(
            f"privpart: left out above {_BANDED_ROUNDS} rounds: banded inverses of more than two "
            "bands, Toeplitz encoders, the prefix release of trees.",
            err=True,
        )
    for label, choice in offered.items():
        yield Offer(label, partial(choice.build, participation), as_typed(choice))
    if small and optimal:
        yield Offer("dense, optimal", partial(optimize, "dense", participation))


def _choice(name: str, **options: Any) -> MechanismChoice:  # noqa: ANN401  fields of a choice
    return MechanismChoice(name=MechanismName(name), **options)


def as_typed(choice: MechanismChoice) -> str:
    """Write a choice as the options that make it.

    >>> as_typed(_choice("blt", buffers=2))
    '--mechanism blt --buffers 2'
    """
    words = [f"--mechanism {choice.name}"] if choice.file is None else []
    for option in fields(choice):
        value = getattr(choice, option.name)
        if option.name in ("name", "fingerprint") or value == option.default:
            continue
        flag = "mechanism-file" if option.name == "file" else option.name.replace("_", "-")
        words.append(f"--{flag}")
        if isinstance(value, tuple):
            words.append(",".join(map(repr, value)))
        elif value is not True:
            words.append(str(value))
    return " ".join(words)


def _widths(participation: Participation) -> list[int]:
    """Return the bands of the BandMF rows, as many as fit into the separation."""
    n, b = participation.rounds, participation.min_separation
    widest = n if participation.max_participations == 1 else b
    widths = {min(2**power, widest) for power in range(3, widest.bit_length() + 1)}
    return sorted(width for width in widths if width > 1)


def _row(
    offer: Offer,
    mechanism: Mechanism,
    participation: Participation,
    target_epsilon: float,
    delta: float,
) -> dict[str, Any]:
    sensitivity = mechanism.sensitivity(participation)
    z = least_noise(sensitivity.squared, target_epsilon=target_epsilon, delta=delta)
    reached = Guarantee(mu_upper(sensitivity.squared, z))
    cost = _cost(mechanism)
    reach = math.sqrt(sensitivity.squared)
    rmse, worst = reach * cost["deviation"], reach * cost["largest_deviation"]
    return {
        "mechanism": offer.label,
        "options": offer.options,
        "sensitivity_squared": sensitivity.squared,
        "sensitivity_exact": sensitivity.exact,
        "rmse": rmse / reached.mu,
        "max_error": worst / reached.mu,
        "unit_rmse": rmse,
        "unit_max_error": worst,
        "state_vectors": int(cost["state_vectors"]),
        "draws_per_round": cost["draws_per_round"],
        "noise_multiplier": z,
        "epsilon": reached.epsilon(delta),
        _LISTED: shown_parameters(mechanism),
    }


def _cost(mechanism: Mechanism) -> Mapping[str, float]:
    """Return state, draws and the prefix sums' deviations at z = 1; cached if a run is long.

    None of them enters the guarantee: sensitivity and noise are computed on every call.
    """

    def figures() -> Mapping[str, float]:
        cost, unit = footprint(mechanism), prefix_error(1.0, mechanism.prefix_variance())
        return {
            "state_vectors": cost.state_vectors,
            "draws_per_round": cost.draws_per_round,
            "deviation": unit.rmse,
            "largest_deviation": unit.max_error,
        }

    if mechanism.rounds <= _BANDED_ROUNDS or mechanism.groups is not None:
        return figures()
    return kept_figures("cost", {"mechanism": mechanism.to_dict()}, figures)


def _on_front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows by memory, with their ratio to the best and whether they are on the front."""
    ordered = sorted(rows, key=lambda row: (row["state_vectors"], row["rmse"]))
    best = min(ordered, key=lambda row: row["rmse"])
    least = float("inf")
    marked = []
    for row in ordered:
        first = row["rmse"] < least
        least = min(least, row["rmse"])
        ratio = {"rmse_ratio": row["rmse"] / best["rmse"], "rmse_ratio_to": best["mechanism"]}
        marked.append(row | ratio | {"front": first})
    return marked


def _title(participation: Participation, target_epsilon: float, delta: float) -> str:
    k, b = participation.max_participations, participation.min_separation
    apart = f", {b} or more apart" if k > 1 else ""
    if participation.fixed_order:
        apart = f", passes of {b} rounds in one order"
    return (
        f"{participation.rounds} rounds, a client in at most {k}{apart}; epsilon "
        f"{target_epsilon:g} at delta {up(delta, 6)}, zero-out adjacency"
    )


def _print_data(
    form: Format,
    rows: Sequence[dict[str, Any]],
    participation: Participation,
    delta: float,
    warnings: list[str],
) -> None:
    if form is Format.CSV:
        listed = [{k: v for k, v in row.items() if k != _LISTED} for row in rows]
        typer.echo(as_csv(listed), nl=False)
        return
    document = {
        "schema": "privpart/mechanisms/1",
        "rounds": participation.rounds,
        "max_participations": participation.max_participations,
        "min_separation": participation.min_separation,
        "fixed_order": participation.fixed_order,
        "delta": delta,
        "unit": "client",
        "adjacency": "zero-out",
        "warnings": warnings,
        "rows": rows,
    }
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def _print_rows(rows: Sequence[dict[str, Any]], title: str) -> None:
    header = (
        "  mechanism", "state", "draws", "rmse", "rmse ratio", "max error", "sens^2",
        "noise mult.",
    )  # fmt: skip
    cells = [
        (
            ("* " if row["front"] else "  ") + row["mechanism"],
            str(row["state_vectors"]),
            f"{row['draws_per_round']:.2f}",
            up(row["rmse"], 4),
            f"{row['rmse_ratio']:.3f}",
            up(row["max_error"], 4),
            ("" if row["sensitivity_exact"] else "<= ") + up(row["sensitivity_squared"], 5),
            up(row["noise_multiplier"], 5),
        )
        for row in rows
    ]
    print_table(title, header, cells, spare=("noise mult.", "sens^2", "max error", "draws"))
    typer.echo(
        f"* least rmse with as few state vectors; rmse ratio: to {rows[0]['rmse_ratio_to']}, "
        "the least shown"
    )
    for row in rows:
        if row["front"] and row["options"]:
            typer.echo(f"{row['mechanism']}: {row['options']}")
