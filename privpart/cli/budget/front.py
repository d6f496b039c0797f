"""``privpart mechanisms``: what memory buys, at the same guarantee.

Every mechanism is known by the state vectors that its noise keeps and by the error of its prefix
sums. The front is the mechanisms that no other beats with as little memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

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
from accounting.error import MOST_ROUNDS, prefix_error, round_noise
from accounting.guarantee import mu_upper
from accounting.mechanisms import MechanismChoice
from accounting.report import shown_parameters, up
from accounting.workload import PREFIX, Workload
from privpart.cli import options
from privpart.cli.budget.promise import shown_fits, typed_choice, typed_participation
from privpart.cli.idle import OF_A_PLAN, Alone
from privpart.cli.output import Table, print_all, print_result, say

if TYPE_CHECKING:
    from privpart.training.plan_file import PlanFile

_BANDED_ROUNDS = 8192
"""The most rounds for which many-banded filters are fitted here; the time is quadratic."""
_DENSE: Final = "dense"
_BUFFERS = (1, 2, 3, 4, 5)
_DRAWS = (2, 4, 16)


def mechanisms(
    *,
    rounds: options.Rounds = None,
    delta: Annotated[float | None, options.DELTA] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Plan file with rounds, delta and participation; if it has a schedule or shared "
            "keys, a stream per group is compared with one stream over all rounds."
        ),
        Alone(OF_A_PLAN, ("target_epsilon", "mechanism", "html", "form")),
    ] = None,
    target_epsilon: Annotated[float, typer.Option(help="Epsilon of every row, above 0.")] = 1.0,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this mechanism, and others that are named like it; "
            f"{options.TYPED_MECHANISM} Alone, 'dense' adds the numerically optimal matrix for the "
            "root mean squared error to the usual rows, for one participation only (15 seconds "
            "at 1600 rounds)."
        ),
    ] = None,
    max_participations: options.MaxParticipations = None,
    min_separation: options.MinSeparation = None,
    fixed_order: options.FixedOrderOption = False,
    workload: Annotated[
        str | None,
        typer.Option(
            help="Optimiser of the server, 'momentum=0.9': shows the error of its models, and of "
            "the noise in one round, and fits for the former. --plan has its own."
        ),
    ] = None,
    html: options.HtmlOption = None,
    form: options.FormatOption = "table",
) -> None:
    """Compare mechanisms at equal epsilon: error against server memory.

    Errors are per coordinate and in units of the clip norm; the prefix sum of the updates after
    each round is what plain SGD makes its model of, and other optimisers make more of recent rounds
    (model rmse). A star marks the mechanisms that no other beats with as
    few state vectors. The first column is what --mechanism of other commands takes. Fits are
    cached, so that the second call is quick.
    Example: privpart mechanisms --rounds 1600 --delta 1e-6 --max-participations 1
    """
    planned, population = None, None
    made = None if workload is None else Workload.parse(workload)
    if plan is not None:
        planned = _read(plan)
        made = _workload_of(planned)
        participation = planned.participation()
        planned.accept_delta()
        delta, population = planned.privacy.delta, planned.stated_population
    elif rounds is None or delta is None:
        raise ConfigError("--rounds and --delta are needed; or --plan FILE, which has them.")
    else:
        checks.accept_delta(delta)
        participation = typed_participation(rounds, max_participations, min_separation, fixed_order)
    names = [name for name in mechanism or () if name != _DENSE]
    chosen = [typed_choice(text, participation.rounds) for text in names]
    optimal = _DENSE in (mechanism or ())
    n, k = participation.rounds, participation.max_participations
    if optimal and (n > _BANDED_ROUNDS or k > 1):
        raise ConfigError(
            f"mechanism=dense: is found for up to {_BANDED_ROUNDS} rounds and one participation, "
            f"not for {n} and {k}; leave it out."
        )
    offered = list(_rows_of(planned, participation, chosen, made, optimal=optimal))
    # all of them first: a refusal must not come after a minute of calibration
    with shown_fits():
        fitted = [(build(), label) for label, build in offered]
    # fits drop useless buffers: of equal mechanisms the first row stays
    first = dict(reversed(fitted))
    rows = [
        _row(label, encoder, participation, target_epsilon, delta, made)
        for encoder, label in fitted
        if first[encoder] == label
    ]
    rows = _on_front(rows)
    warnings = [] if plan is not None or max_participations is not None else [_ASSUMED]
    if large := checks.delta_warning(delta, population):
        warnings.append(large)
    document = {
        "schema": "privpart/mechanisms/1",
        "rounds": participation.rounds,
        "max_participations": participation.max_participations,
        "min_separation": participation.min_separation,
        "fixed_order": participation.fixed_order,
        "delta": delta,
        "unit": "client",
        "adjacency": "zero-out",
        "workload": None if made is None else made.to_dict(),
        "warnings": warnings,
        "rows": rows,
    }
    tables = _tables(rows, _title(participation, target_epsilon, delta, made))
    flat = [{k: v for k, v in row.items() if k != _LISTED} for row in rows]
    print_result(form, document, flat, lambda: print_all(tables))
    if html is not None:
        from privpart.cli.pages.decision import tables_page

        answer = "A star marks what no other mechanism beats with as few state vectors"
        words = ("epsilon", "delta", "noise")
        tables_page("Mechanisms by memory", tables, answer=answer, words=words).write(html)
    for warning in warnings:
        say(f"warning: {warning}")


Offer = tuple[str, Callable[[], Mechanism]]
"""A row before it is computed: its label, and what makes its mechanism, which may take a fit."""
_LISTED = "mechanism_parameters"
_ASSUMED = (
    "max_participations was not given, so this is for a client that takes part in one round, "
    "which nothing here enforces. More participations change the table."
)


def _read(path: Path) -> "PlanFile":
    from privpart.training.plan_file import read

    plan = read(path)
    if plan.privacy.sampling is not None:
        raise ConfigError(
            f"plan={path}: samples who takes part; the rows here are compared at a participation "
            "that nothing hides. See `privpart calibrate --sampling` for one mechanism."
        )
    # refuses what `privpart train` would refuse
    plan.privacy_plan()
    return plan


def _workload_of(plan: "PlanFile") -> Workload | None:
    """Return what the plan's optimiser makes of the sums; None where that is not known here.

    Adam and its like are not linear, weight decay is not in a ``Workload``, and of groups that take
    turns the momentum rests too.
    """
    server, rounds = plan.server, plan.privacy.rounds
    share = plan.learning_rates.server_share(rounds)
    groups = plan.schedule is not None or plan.select is not None
    if server.kind != "sgd" or server.weight_decay or groups or not (server.momentum or share):
        return None
    if rounds > MOST_ROUNDS:
        say(f"left out above {MOST_ROUNDS} rounds: the error of models.")
        return None
    return Workload(server.momentum, () if share is None else tuple(map(share, range(rounds))))


def _rows_of(
    plan: "PlanFile | None",
    participation: Participation,
    chosen: Sequence[MechanismChoice],
    workload: Workload | None,
    *,
    optimal: bool,
) -> Iterator[Offer]:
    shared = plan is not None and plan.select is not None and plan.select.takes_turns
    if plan is not None and (plan.schedule is not None or shared):
        if optimal:
            raise ConfigError("mechanism=dense: not known for groups; leave it out.")
        yield from _group_by_group(plan, participation, chosen)
        return
    names = list(map(str, chosen))
    if not names:
        names = [] if plan is None else [str(plan.privacy.mechanism)]
        momentum = workload.momentum if workload is not None else 0.0
        names += _candidates(participation, f",momentum={momentum:g}" if momentum else "")
    for name in dict.fromkeys(names):
        yield name, partial(MechanismChoice.parse(name).build, participation)
    if optimal:
        target = PREFIX if workload is None else workload
        yield "dense, optimal", partial(optimize, _DENSE, participation, workload=target)


def _group_by_group(
    plan: "PlanFile", participation: Participation, chosen: Sequence[MechanismChoice]
) -> Iterator[Offer]:
    groups = plan.mechanism().groups
    if groups is None:
        raise TypeError("a plan whose groups take turns has a mechanism with groups")
    common = [MechanismChoice.parse(name) for name in ("tree", "blt", "independent")]
    for choice in chosen or dict.fromkeys([plan.privacy.mechanism, *common]):
        build = partial(choice.build_grouped, groups.schedule, groups.sizes, participation)
        yield f"{choice}, per group", build
        yield f"{choice}, one stream", partial(choice.build, participation)
    if not chosen:
        nodes = [PrunedTree(participation.rounds, tuple(t)) for t in groups.active_rounds()]
        pruned = partial(Grouped, tuple(groups.schedule), tuple(nodes), tuple(groups.sizes))
        yield "tree, one, pruned", pruned


def _candidates(participation: Participation, fit: str) -> Iterator[str]:
    """Yield the usual mechanisms, as people type them; ``fit`` is what their fits are for."""
    n = participation.rounds
    small = n <= _BANDED_ROUNDS
    yield "independent"
    for bands in _DRAWS if small else _DRAWS[:1]:
        if bands <= n:
            yield f"banded-inverse:bands={bands},normalize_columns,fit{fit}"
    for buffers in _BUFFERS:
        yield f"blt:buffers={buffers}{fit}"
    yield from ("tree", "tree:estimator=online")
    if small:
        for bands in _widths(participation):
            yield f"bandmf:bands={bands}{fit}"
        yield "toeplitz"
    else:
        say(
            f"left out above {_BANDED_ROUNDS} rounds: banded inverses of more than two "
            "bands, and Toeplitz encoders."
        )


def _widths(participation: Participation) -> list[int]:
    """Return the bands of the BandMF rows, as many as fit into the separation."""
    n, b = participation.rounds, participation.min_separation
    # with one participation no separation limits the bands
    widest = n if participation.max_participations == 1 else b
    widths = {min(2**power, widest) for power in range(3, widest.bit_length() + 1)}
    return sorted(width for width in widths if width > 1)


def _row(
    label: str,
    mechanism: Mechanism,
    participation: Participation,
    target_epsilon: float,
    delta: float,
    workload: Workload | None,
) -> dict[str, Any]:
    sensitivity = mechanism.sensitivity(participation)
    z = least_noise(sensitivity.squared, target_epsilon=target_epsilon, delta=delta)
    # z is rounded up, so the row's own mu, not the target's, scales its errors
    reached = Guarantee(mu_upper(sensitivity.squared, z))
    cost, unit = footprint(mechanism), prefix_error(1.0, mechanism.prefix_variance())
    reach = math.sqrt(sensitivity.squared)
    rmse, worst = reach * unit.rmse, reach * unit.max_error
    models = {}
    if workload is not None:
        noise, scale = round_noise(mechanism), reach / reached.mu
        errors = prefix_error(1.0, (workload.models(noise) ** 2).sum(axis=1))
        models = {
            "model_rmse": scale * errors.rmse,
            "model_max_error": scale * errors.max_error,
            "round_rmse": scale * prefix_error(1.0, (noise**2).sum(axis=1)).rmse,
        }
    return {
        "mechanism": label,
        "sensitivity_squared": sensitivity.squared,
        "sensitivity_exact": sensitivity.exact,
        "rmse": rmse / reached.mu,
        "max_error": worst / reached.mu,
        "unit_rmse": rmse,
        "unit_max_error": worst,
        **models,
        "state_vectors": cost.state_vectors,
        "draws_per_round": cost.draws_per_round,
        "noise_multiplier": z,
        "epsilon": reached.epsilon(delta),
        _LISTED: shown_parameters(mechanism),
    }


def _on_front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows by memory, with their ratio to the best and whether they are on the front."""
    error = "model_rmse" if "model_rmse" in rows[0] else "rmse"
    best = min(rows, key=lambda row: (row[error], row["state_vectors"]))
    marked, lowest = [], math.inf
    for row in sorted(rows, key=lambda row: (row["state_vectors"], row[error])):
        ratio = {f"{error}_ratio": row[error] / best[error], f"{error}_ratio_to": best["mechanism"]}
        marked.append(row | ratio | {"front": row[error] < lowest})
        lowest = min(lowest, row[error])
    return marked


def _title(
    participation: Participation, target_epsilon: float, delta: float, workload: Workload | None
) -> str:
    k, b = participation.max_participations, participation.min_separation
    apart = f", {b} or more apart" if k > 1 else ""
    if participation.fixed_order:
        apart = f", passes of {b} rounds in one order"
    models = "" if workload is None else f"; {workload}"
    return (
        f"{participation.rounds} rounds, a client in at most {k}{apart}; epsilon "
        f"{target_epsilon:g} at delta {up(delta, 6)}, zero-out adjacency{models}"
    )


def _tables(rows: Sequence[dict[str, Any]], title: str) -> list[Table | str]:
    error = "model_rmse" if "model_rmse" in rows[0] else "rmse"
    label = error.replace("_", " ")
    models = [] if error == "rmse" else [("model rmse", "model_rmse"), ("per round", "round_rmse")]
    header = (
        "  mechanism", "state", "draws", "rmse", *(name for name, _ in models), f"{label} ratio",
        "max error", "sens^2", "noise mult.",
    )  # fmt: skip
    cells = [
        (
            ("* " if row["front"] else "  ") + row["mechanism"],
            str(row["state_vectors"]),
            f"{row['draws_per_round']:.2f}",
            up(row["rmse"], 4),
            *(up(row[key], 4) for _, key in models),
            f"{row[f'{error}_ratio']:.3f}",
            up(row["max_error"], 4),
            ("" if row["sensitivity_exact"] else "<= ") + up(row["sensitivity_squared"], 5),
            up(row["noise_multiplier"], 5),
        )
        for row in rows
    ]
    best = rows[0][f"{error}_ratio_to"]
    return [
        Table(title, header, cells, spare=("noise mult.", "sens^2", "max error", "draws")),
        f"* least {label} with as few state vectors; {label} ratio: to {best}, the least shown",
    ]
