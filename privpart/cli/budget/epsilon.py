"""``privpart epsilon``: what a planned run costs, or what a finished one did cost."""

from pathlib import Path
from typing import Annotated

import typer

from accounting import ConfigError, PrivacyReport, checks
from accounting.report import up
from privpart.cli import options
from privpart.cli.budget.options import (
    FixedOrderOption,
    Limits,
    MaxParticipations,
    MechanismOption,
    MinSeparation,
    SamplingOption,
    refuse_beside,
)
from privpart.cli.budget.promise import Histories, Promise, Typed, histories_of
from privpart.cli.options import Format, ReportFormat
from privpart.cli.output import print_report

_EXCEEDED = 3
_LEFT_ITS_PLAN = 6


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
    mechanism: MechanismOption = None,
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
    ] = None,
    method: options.MethodOption = None,
    population: options.Population = None,
    allow_large_delta: options.AllowLargeDelta = False,
    max_epsilon: options.MaxEpsilon = None,
    html: options.HtmlOption = None,
    form: options.ReportFormatOption = ReportFormat.TABLE,
) -> None:
    """Report the (epsilon, delta) of a planned run.

    Example: privpart epsilon --rounds 1600 --noise-multiplier 1.13 --delta 1e-6
    --max-participations 1
    """
    limit = None if max_epsilon is None else checks.positive("max_epsilon", max_epsilon)
    histories = None if log is None else histories_of(log)
    population = _counted(population, histories)
    typed = Typed(
        rounds=rounds,
        noise_multiplier=noise_multiplier,
        delta=delta,
        mechanism=mechanism,
        limits=Limits(max_participations, min_separation, fixed_order),
        sampling=sampling,
        population=population,
        method=method,
    )
    if plan is not None:
        typed.refuse_beside_plan()
        promise = Promise.planned(plan, delta, population, allow_large=allow_large_delta)
    else:
        if limit is not None and not (typed.limits.stated or sampling or histories):
            raise ConfigError(
                f"max_epsilon={limit:g}: a gate needs --max-participations, the most rounds of one "
                "client; 1 would be assumed, which nothing enforces."
            )
        promise = typed.promise(histories, allow_large=allow_large_delta)
    if promise.sampled is not None:
        refuse_beside("sampling: who takes part is secret, and decided by it", log=log)
        if plan is not None:
            refuse_beside("--plan: its sampling has an accountant of its own", method=method)
    # The page comes first: a gate must not leave them unwritten.
    report = promise.report(method, histories=histories)
    _write_page(promise, report, html, limit)
    if form is ReportFormat.STATEMENT:
        typer.echo(report.statement())
    else:
        print_report(report, Format(form), beside=_one_stream(promise))
    _judge(report, limit)


def _counted(population: int | None, histories: Histories | None) -> int | None:
    """Return how many clients there are: at least those of a log."""
    if histories is None:
        return population
    if population is not None and population < len(histories):
        raise ConfigError(f"population={population}: the log has {len(histories)} clients.")
    return population or len(histories)


def _write_page(
    promise: Promise, report: PrivacyReport, html: Path | None, limit: float | None
) -> None:
    """Write the page of a budget, with a picture where one mechanism of one group is varied."""
    if html is None:
        return
    from privpart.cli.pages.budget import budget_page
    from privpart.cli.pages.plots import budget_figure

    figure = None
    if promise.mechanism.groups is None and report.sampling is None:
        figure = budget_figure(promise.mechanism, promise.participation, report, target=limit)
    budget_page(report, figure, limit).write(html)


def _one_stream(promise: Promise) -> list[tuple[str, str]]:
    """Return the sensitivity of the same mechanism without groups, for comparison."""
    if promise.mechanism.groups is None:
        return []
    alone = promise.choice.build(promise.participation).sensitivity(promise.participation)
    bound = "" if alone.exact else " at most"
    kind = promise.choice.name
    return [("one stream", f"{up(alone.squared, 5)}{bound}, if all groups shared one {kind}")]


def _judge(report: PrivacyReport, limit: float | None) -> None:
    """Exit with 6 if the log breaks the promise, or with 3 if epsilon is above the limit."""
    if report.realised is not None and report.realised.deviations:
        raise typer.Exit(_LEFT_ITS_PLAN)
    if limit is not None and report.epsilon > limit:
        typer.echo(f"privpart: epsilon {up(report.epsilon)} exceeds {limit:g}.", err=True)
        raise typer.Exit(_EXCEEDED)
