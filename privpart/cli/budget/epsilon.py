"""``privpart epsilon``: what a planned run costs, or what a finished one did cost."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from accounting import ConfigError, PrivacyReport, checks
from accounting.events import event_of, read_events
from accounting.report import up
from privpart.cli import options
from privpart.cli.budget.best_of import BestOf, lines_of, selected
from privpart.cli.budget.promise import Histories, Promise, TypedRun, histories_of
from privpart.cli.gate import LEFT_ITS_PLAN, judged_plan, leave_if_above, leave_if_refused
from privpart.cli.idle import OF_A_PLAN, Alone, beside
from privpart.cli.output import print_report

_Form = Literal["table", "statement", "json", "csv", "events"]
_OF_ANY = "population", "max_epsilon", "form"
"""Options that matter however a run is described."""


def epsilon(
    *,
    rounds: options.Rounds = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help="Noise standard deviation per coordinate / clip norm, on the scale of the sum."
        ),
    ] = None,
    delta: Annotated[float | None, options.DELTA] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan file to read all of this from, as `privpart train` does."),
        Alone(OF_A_PLAN, (*_OF_ANY, "log", "method", "policy", "best_of", "html")),
    ] = None,
    events: Annotated[
        Path | None,
        typer.Option(
            help="What was released, as events of dp-accounting in JSON; with --delta. "
            "--format events writes such a file."
        ),
        Alone("says what is released, and how", (*_OF_ANY, "plan", "delta", "allow_large_delta")),
    ] = None,
    mechanism: options.MechanismOption = None,
    noise_schedule: options.NoiseScheduleOption = None,
    max_participations: options.MaxParticipations = None,
    min_separation: options.MinSeparation = None,
    fixed_order: options.FixedOrderOption = False,
    sampling: options.SamplingOption = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Who took part when: a run folder, or a CSV file with the columns client and "
            "round. Its cost is shown beside what was promised; without a promise, alone."
        ),
        beside("sampling", "decides who takes part, which is secret"),
    ] = None,
    method: options.MethodOption = None,
    population: options.Population = None,
    allow_large_delta: options.AllowLargeDelta = False,
    max_epsilon: options.MaxEpsilon = None,
    policy: options.PolicyOption = None,
    best_of: BestOf = None,
    html: options.HtmlOption = None,
    form: Annotated[
        _Form,
        typer.Option(
            "--format",
            help="Form of the result; 'statement' is plain English, 'events' what dp-accounting "
            "reads.",
        ),
    ] = "table",
) -> None:
    """Report the (epsilon, delta) of a planned run.

    Example: privpart epsilon --rounds 1600 --noise-multiplier 1.13 --delta 1e-6
    --max-participations 1
    """
    limit = None if max_epsilon is None else checks.positive("max_epsilon", max_epsilon)
    if events is not None:
        _print_events(events, delta, population, limit, form, allow_large=allow_large_delta)
        return
    histories = None if log is None else histories_of(log)
    population = _counted(population, histories)
    if plan is not None:
        promise = Promise.planned(plan, population)
        if promise.sampled is not None and (log, method) != (None, None):
            raise ConfigError(
                f"plan={plan}: samples who takes part, which is secret and has an accountant of "
                "its own; leave out --method and --log."
            )
    elif rounds is None or noise_multiplier is None or delta is None:
        raise ConfigError(
            "--rounds, --noise-multiplier and --delta are needed; or --plan FILE, which has them."
        )
    else:
        checks.accept_delta(delta, population, allow_large=allow_large_delta)
        if limit is not None and not (max_participations is not None or sampling or histories):
            raise ConfigError(
                f"max_epsilon={limit:g}: a gate needs --max-participations, the most rounds of one "
                "client; 1 would be assumed, which nothing enforces."
            )
        limits = max_participations, min_separation, fixed_order
        run = TypedRun(mechanism, noise_schedule, limits, population, method, delta)
        promise = run.promise(rounds, sampling, z=noise_multiplier, histories=histories)
    refusals = [] if policy is None else judged_plan(policy, promise, best_of=best_of)
    # The page comes first: a gate must not leave them unwritten.
    report = promise.report(method, histories=histories)
    if html is not None:
        from privpart.cli.pages.budget import budget_page

        budget_page(report, limit, promise.about).write(html)
    selection = None if best_of is None else selected(promise.guarantee(), best_of, report.delta)
    _print(form, promise, report, selection)
    if report.realised is not None and report.realised.deviations:
        raise typer.Exit(LEFT_ITS_PLAN)
    leave_if_above(report.epsilon if selection is None else selection["epsilon"], limit)
    leave_if_refused(refusals)


def _print(
    form: _Form, promise: Promise, report: PrivacyReport, selection: dict[str, Any] | None
) -> None:
    if form == "events":
        typer.echo(json.dumps(event_of(promise.guarantee()), indent=2))
    elif form == "statement":
        typer.echo(report.statement())
    else:
        lines = [*_one_stream(promise), *(lines_of(selection) if selection else ())]
        more = {"selection": selection} if selection else {}
        print_report(report, form, beside=lines, more=more)


def _counted(population: int | None, histories: Histories | None) -> int | None:
    """Return how many clients there are: at least those of a log."""
    if histories is None:
        return population
    if population is not None and population < len(histories):
        raise ConfigError(f"population={population}: the log has {len(histories)} clients.")
    return population or len(histories)


def _one_stream(promise: Promise) -> list[tuple[str, str]]:
    """Return the sensitivity of the same mechanism without groups, for comparison."""
    if promise.mechanism.groups is None:
        return []
    alone = promise.choice.build(promise.participation).sensitivity(promise.participation)
    bound = "" if alone.exact else " at most"
    kind = promise.choice.name
    return [("one stream", f"{up(alone.squared, 5)}{bound}, if all groups shared one {kind}")]


def _print_events(
    path: Path,
    delta: float | None,
    population: int | None,
    limit: float | None,
    form: str,
    *,
    allow_large: bool,
) -> None:
    """Print the cost of the events in a file; exit with 3 if it is above the limit."""
    if delta is None:
        raise ConfigError("--events needs --delta.")
    if form not in ("table", "json"):
        raise ConfigError(f"format={form}: events have the forms table and json.")
    checks.accept_delta(delta, population, allow_large=allow_large)
    composed = read_events(path)
    epsilon = composed.epsilon(delta)
    if form == "json":
        values = {"epsilon": epsilon, "delta": delta, "mu": composed.mu}
        typer.echo(json.dumps({"schema": "privpart/events/1", **values}, indent=2))
    else:
        how = "every release is Gaussian: exact" if composed.mu else "their losses composed by PLD"
        lines = [("epsilon", f"{up(epsilon, 5)}   ({how})"), ("delta", up(delta, 6))]
        lines += [] if composed.mu is None else [("mu", up(composed.mu, 5))]
        adjacency = "the events' own: one person is there, or is not; divisors are public"
        typer.echo("\n".join(f"  {a:<17} {b}" for a, b in [*lines, ("adjacency", adjacency)]))
    leave_if_above(epsilon, limit)
