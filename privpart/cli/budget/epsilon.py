"""``privpart epsilon``: what a planned run costs, or what a finished one did cost."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from accounting import ConfigError, Participation, PrivacyReport, checks
from accounting.events import event_of
from accounting.mechanisms import MechanismChoice
from accounting.report import up
from privpart.cli import options
from privpart.cli.budget.best_of import BestOf, lines_of, selected
from privpart.cli.budget.events import EpsilonFormat, print_events
from privpart.cli.budget.options import (
    FixedOrderOption,
    MaxParticipations,
    MechanismOption,
    MinSeparation,
    NoiseScheduleOption,
    SamplingOption,
    typed_choice,
    typed_participation,
)
from privpart.cli.budget.promise import Histories, Promise, SampledRun, built, histories_of
from privpart.cli.gate import judged_plan, leave_if_above, leave_if_refused
from privpart.cli.idle import OF_A_PLAN, Alone, beside
from privpart.cli.options import Format
from privpart.cli.output import print_report

_LEFT_ITS_PLAN = 6
_OF_ANY = "population", "max_epsilon", "form"
"""Options that matter however a run is described."""


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
        Alone(OF_A_PLAN, (*_OF_ANY, "log", "method", "policy", "best_of", "html")),
    ] = None,
    events: Annotated[
        Path | None,
        typer.Option(
            "--events",
            help="What was released, as events of dp-accounting in JSON; with --delta. "
            "--format events writes such a file.",
            show_default=False,
        ),
        Alone("says what is released, and how", (*_OF_ANY, "plan", "delta", "allow_large_delta")),
    ] = None,
    mechanism: MechanismOption = None,
    noise_schedule: NoiseScheduleOption = None,
    max_participations: MaxParticipations = None,
    min_separation: MinSeparation = None,
    fixed_order: FixedOrderOption = False,
    sampling: SamplingOption = None,
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
        EpsilonFormat,
        typer.Option(
            "--format",
            help="Form of the result; 'statement' is plain English, 'events' what dp-accounting "
            "reads.",
        ),
    ] = EpsilonFormat.TABLE,
) -> None:
    """Report the (epsilon, delta) of a planned run.

    Example: privpart epsilon --rounds 1600 --noise-multiplier 1.13 --delta 1e-6
    --max-participations 1
    """
    limit = None if max_epsilon is None else checks.positive("max_epsilon", max_epsilon)
    if events is not None:
        print_events(events, delta, population, limit, form, allow_large=allow_large_delta)
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
        choice = typed_choice(mechanism, rounds, noise_schedule)
        stated = max_participations is not None
        if limit is not None and not (stated or sampling or histories):
            raise ConfigError(
                f"max_epsilon={limit:g}: a gate needs --max-participations, the most rounds of one "
                "client; 1 would be assumed, which nothing enforces."
            )
        if sampling is not None:
            run = SampledRun.typed(sampling, choice, rounds, population, method)
            promise = run.promise(noise_multiplier, delta)
        else:
            # no promise: the log alone
            if histories is not None and not stated:
                participation, stated = _logged(choice, rounds, histories), True
            else:
                participation = typed_participation(
                    rounds, max_participations, min_separation, fixed_order=fixed_order
                )
            encoder = built(choice, participation)
            promise = Promise(
                choice, encoder, participation, noise_multiplier, delta, stated, population
            )
    refusals = [] if policy is None else judged_plan(policy, promise, best_of=best_of)
    # The page comes first: a gate must not leave them unwritten.
    report = promise.report(method, histories=histories)
    _write_page(report, limit, html)
    selection = None if best_of is None else selected(promise.guarantee(), best_of, report.delta)
    _print(form, promise, report, selection)
    _judge(report, limit, selection)
    leave_if_refused(refusals)


def _print(
    form: EpsilonFormat, promise: Promise, report: PrivacyReport, selection: dict[str, Any] | None
) -> None:
    if form is EpsilonFormat.EVENTS:
        typer.echo(json.dumps(event_of(promise.guarantee()), indent=2))
    elif form is EpsilonFormat.STATEMENT:
        typer.echo(report.statement())
    else:
        lines = [*_one_stream(promise), *(lines_of(selection) if selection else ())]
        more = {"selection": selection} if selection else {}
        print_report(report, Format(form), beside=lines, more=more)


def _write_page(report: PrivacyReport, limit: float | None, html: Path | None) -> None:
    if html is not None:
        from privpart.cli.pages.budget import budget_page

        budget_page(report, limit).write(html)


def _counted(population: int | None, histories: Histories | None) -> int | None:
    """Return how many clients there are: at least those of a log."""
    if histories is None:
        return population
    if population is not None and population < len(histories):
        raise ConfigError(f"population={population}: the log has {len(histories)} clients.")
    return population or len(histories)


def _logged(choice: MechanismChoice, rounds: int, histories: Histories) -> Participation:
    # An encoder that is fitted to the log costs less than the one that ran.
    if choice.fitted:
        raise ConfigError(
            f"mechanism={choice}: is fitted to a promise, and fitted to a log it is not the one "
            "that ran. Say what was promised (--max-participations, --min-separation), or pass the "
            "mechanism that ran (file:PATH)."
        )
    return Participation.from_log(rounds, histories)


def _one_stream(promise: Promise) -> list[tuple[str, str]]:
    """Return the sensitivity of the same mechanism without groups, for comparison."""
    if promise.mechanism.groups is None:
        return []
    alone = promise.choice.build(promise.participation).sensitivity(promise.participation)
    bound = "" if alone.exact else " at most"
    kind = promise.choice.name
    return [("one stream", f"{up(alone.squared, 5)}{bound}, if all groups shared one {kind}")]


def _judge(report: PrivacyReport, limit: float | None, selection: dict[str, Any] | None) -> None:
    """Exit with 6 if the log breaks the promise, or with 3 if epsilon is above the limit."""
    if report.realised is not None and report.realised.deviations:
        raise typer.Exit(_LEFT_ITS_PLAN)
    leave_if_above(report.epsilon if selection is None else selection["epsilon"], limit)
