"""``privpart epsilon``: what a planned run costs, or what a finished one did cost."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accounting import ConfigError, Mechanism, Participation, PrivacyReport, Realised, checks
from accounting.cohorts import sampled_passes
from accounting.mechanisms.by_name import MechanismChoice
from accounting.realised import read_log
from accounting.report import up
from privpart.cli import options
from privpart.cli.budget.options import Limits, accept_planned_delta, with_shared_options
from privpart.cli.budget.progress import shown_fits
from privpart.cli.budget.sampled import (
    OF_ONE_ACCOUNTANT,
    Bins,
    DrawCount,
    DrawSeed,
    ExpectedBatch,
    SamplerOptions,
    SamplingName,
    SamplingOption,
    print_sampled,
    typed_sampling,
)
from privpart.cli.idle import OF_A_PLAN, beside, typed
from privpart.cli.options import Format, MethodName
from privpart.cli.output import print_report

if TYPE_CHECKING:  # imported where used: it needs torch
    from privpart.plan import PrivacyPlan

_REPORTED = beside("sampling", "decides who takes part, and has a report of its own")
_PROSE = beside("statement", "prints prose")
_EXCEEDED = 3
_LEFT_ITS_PLAN = 6


@dataclass(frozen=True, slots=True)
class _Run:
    """Everything that the figures depend on.

    Attributes:
        sampled: the plan, if it samples who takes part; its accountant is then another.
    """

    choice: MechanismChoice
    participation: Participation
    mechanism: Mechanism
    noise_multiplier: float
    delta: float
    stated: bool
    population: int | None
    sampled: "PrivacyPlan | None" = None


@with_shared_options
def epsilon(
    context: typer.Context,
    *,
    rounds: Annotated[options.RoundsUnlessPlanned, OF_A_PLAN] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help="Noise standard deviation per coordinate / clip norm, on the scale of the sum."
        ),
        OF_A_PLAN,
    ] = None,
    delta: options.DeltaUnlessPlanned = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan file to read all of this from, as `privpart train` does."),
    ] = None,
    choice: MechanismChoice,
    limits: Limits,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Who took part when: a run folder, or a CSV file with the columns client and "
            "round. Its cost is shown beside what was promised; without a promise, alone."
        ),
        _REPORTED,
    ] = None,
    method: Annotated[options.MethodOption, OF_ONE_ACCOUNTANT] = MethodName.EXACT,
    population: options.Population = None,
    allow_large_delta: options.AllowLargeDelta = False,
    sampling: SamplingOption = None,
    expected_batch: ExpectedBatch = None,
    bins: Bins = None,
    draws: DrawCount = None,
    draw_seed: DrawSeed = None,
    cross_check: Annotated[
        bool,
        typer.Option("--cross-check", help="Cross-check by dp-accounting (a second more)."),
        _REPORTED,
    ] = False,
    max_epsilon: options.MaxEpsilon = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw epsilon into this picture (.png, .svg, .pdf)."),
        _REPORTED,
    ] = None,
    statement: Annotated[
        bool,
        typer.Option("--statement", help="Print the report in plain English instead."),
        _REPORTED,
    ] = False,
    html: Annotated[options.HtmlOption, _REPORTED] = None,
    form: Annotated[options.FormatOption, _PROSE] = Format.TABLE,
) -> None:
    """Report the (epsilon, delta) of a planned run.

    Example: privpart epsilon --rounds 1600 --noise-multiplier 1.13 --delta 1e-6
    --max-participations 1
    """
    limit = None if max_epsilon is None else checks.positive("max_epsilon", max_epsilon)
    if sampling is not None:
        given = SamplerOptions(
            expected_batch=expected_batch,
            population=population,
            bins=bins,
            min_separation=limits.min_separation,
            draws=draws,
            draw_seed=draw_seed,
            method=method if "method" in typed(context) else None,
        )
        figures = (rounds, noise_multiplier, delta)
        spent = _of_sampling(sampling, choice, figures, given, form, allow_large=allow_large_delta)
        _within(spent, limit)
        return
    histories = None if log is None else histories_of(log)
    population = _counted(population, histories)
    if plan is not None:
        run = _of_plan(plan, delta, population, allow_large=allow_large_delta)
    elif rounds is None or noise_multiplier is None or delta is None:
        raise ConfigError(
            "--rounds, --noise-multiplier and --delta are needed; or --plan FILE, which has them."
        )
    else:
        _refuse_silent_limits(limits, limit, histories)
        checks.accept_delta(delta, population, allow_large=allow_large_delta)
        run = _of_options(choice, limits, rounds, noise_multiplier, delta, histories, population)
    if run.sampled is not None:
        report = _sampled_report(context, run.sampled, run)
    else:
        report = _report(run, histories, method, cross_check=cross_check)
    _write_page(run, report, html, limit)
    _plot(run, report, plot, limit)
    if statement:
        typer.echo(report.statement())
    else:
        print_report(report, form, beside=_one_stream(run, form))
    _judge(report, limit)


def _of_sampling(
    sampling: SamplingName,
    choice: MechanismChoice,
    figures: tuple[int | None, float | None, float | None],
    given: SamplerOptions,
    form: Format,
    *,
    allow_large: bool,
) -> float:
    """Print the guarantee of a sampled run of these rounds, noise and delta; return its epsilon."""
    rounds, noise, delta = figures
    if rounds is None or noise is None or delta is None:
        raise ConfigError("--sampling needs --rounds, --noise-multiplier and --delta.")
    checks.accept_delta(delta, given.population, allow_large=allow_large)
    with shown_fits():
        mechanism = choice.build(sampled_passes(rounds, given.bins))
    run = typed_sampling(sampling, mechanism, given).guarantee(noise)
    return print_sampled(run, choice, noise, delta, form, given.population)


def _counted(population: int | None, histories: Mapping[str, list[int]] | None) -> int | None:
    """Return how many clients there are: at least those of a log."""
    if histories is None:
        return population
    if population is not None and population < len(histories):
        raise ConfigError(f"population={population}: the log has {len(histories)} clients.")
    return population or len(histories)


def _refuse_silent_limits(
    limits: Limits, limit: float | None, histories: Mapping[str, list[int]] | None
) -> None:
    """Refuse a gate on an assumption that nothing enforces."""
    if limit is not None and not limits.stated and histories is None:
        raise ConfigError(
            f"max_epsilon={limit:g}: a gate needs --max-participations, the most rounds of one "
            "client; 1 would be assumed, which nothing enforces."
        )


def _of_options(
    choice: MechanismChoice,
    limits: Limits,
    rounds: int,
    noise_multiplier: float,
    delta: float,
    histories: Mapping[str, list[int]] | None,
    population: int | None,
) -> _Run:
    participation = limits.of(rounds)
    if histories is not None and not limits.stated:  # no promise: the log alone
        if choice.fitted:
            raise ConfigError(
                f"mechanism={choice.name}: is fitted to a promise, and fitted to a log it is not "
                "the one that ran. Say what was promised (--max-participations, "
                "--min-separation), or pass the mechanism that ran (--mechanism-file)."
            )
        participation = Participation.from_log(rounds, histories)
    with shown_fits():
        mechanism = choice.build(participation)
    stated = limits.stated or histories is not None
    return _Run(choice, participation, mechanism, noise_multiplier, delta, stated, population)


def _of_plan(path: Path, delta: float | None, population: int | None, *, allow_large: bool) -> _Run:
    """Read a plan file. It takes a second, because plans contain optimisers, which need torch."""
    from privpart.training.plan_file import read

    plan = read(path)
    population = accept_planned_delta(plan, delta, population, allow_large=allow_large)
    with shown_fits():
        promised = plan.privacy_plan()
    return _Run(
        plan.privacy.mechanism,
        promised.participation,
        promised.mechanism,
        promised.noise_multiplier,
        plan.privacy.delta if delta is None else delta,
        stated=True,
        population=population,
        sampled=None if promised.sampling is None else promised,
    )


def _sampled_report(context: typer.Context, promised: "PrivacyPlan", run: _Run) -> PrivacyReport:
    """Return the report of a plan that samples.

    Raises:
        ConfigError: an option was typed that is of plans without sampling.
    """
    given = typed(context) & {"log", "method", "cross_check", "plot"}
    if given:
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        raise ConfigError(
            f"plan: samples who takes part, and its accountant is decided by that; leave out "
            f"{listed}."
        )
    return promised.report(run.delta, population=run.population)


def histories_of(log: Path) -> dict[str, list[int]]:
    """Return each client's rounds, from a run folder or a CSV file."""
    if not log.is_dir():
        return read_log(log)
    from privpart.run.ledger import Ledger

    ledger = Ledger(log)
    if ledger.facts["plan"].get("sampling") is not None:
        raise ConfigError(
            f"log={log}: who took part in a run that samples is secret, and its epsilon holds "
            "only while it is; see `privpart report`."
        )
    ledger.rows()  # checks the chain
    # JSON, because the number 1 and the string "1" are two clients
    found = {json.dumps(client): own for client, own in ledger.rounds_by_client().items()}
    if not found:
        raise ConfigError(f"log={log}: no client took part yet.")
    return found


def _report(
    run: _Run,
    histories: Mapping[str, list[int]] | None,
    method: MethodName,
    *,
    cross_check: bool,
) -> PrivacyReport:
    realised = None
    if histories is not None:
        realised = Realised.of(
            run.mechanism,
            histories,
            run.participation,
            noise_multiplier=run.noise_multiplier,
            delta=run.delta,
            method=method.value,
        )
    return PrivacyReport.of(
        run.mechanism,
        run.participation,
        noise_multiplier=run.noise_multiplier,
        delta=run.delta,
        method=method.value,
        population=run.population,
        cross_check="dp-accounting" if cross_check else "quadrature",
        participation_stated=run.stated,
        realised=realised,
    )


def _write_page(run: _Run, report: PrivacyReport, html: Path | None, limit: float | None) -> None:
    """Write the page of a budget, with a picture where one mechanism of one group is varied."""
    if html is None:
        return
    from privpart.cli.pages.budget import budget_page
    from privpart.cli.pages.plots import budget_figure

    figure = None
    if run.mechanism.groups is None and report.sampling is None:
        figure = budget_figure(run.choice, run.participation, report, target=limit)
    budget_page(report, figure, limit).write(html)


def _plot(run: _Run, report: PrivacyReport, path: Path | None, target: float | None) -> None:
    if path is None:
        return
    if run.mechanism.groups is not None:
        raise ConfigError(
            "plot: varies a mechanism of one group; leave it out with a [schedule] or shared keys."
        )
    from privpart.cli.pages import drawing, plots

    figure = plots.budget_figure(run.choice, run.participation, report, target=target)
    drawing.save(figure, path)


def _one_stream(run: _Run, form: Format) -> list[tuple[str, str]]:
    """Return the sensitivity of the same mechanism without groups, for comparison."""
    if run.mechanism.groups is None or run.sampled is not None or form is not Format.TABLE:
        return []
    found = run.choice.build(run.participation).sensitivity(run.participation)
    known = "" if found.exact else " at most"
    name = run.choice.name
    return [("one stream", f"{up(found.squared, 5)}{known}, if all groups shared one {name}")]


def _judge(report: PrivacyReport, limit: float | None) -> None:
    """Exit with 6 if the log breaks the promise, or with 3 if epsilon is above the limit."""
    if report.realised is not None and report.realised.deviations:
        raise typer.Exit(_LEFT_ITS_PLAN)
    _within(report.epsilon, limit)


def _within(epsilon: float, limit: float | None) -> None:
    """Exit with 3 if epsilon is above the limit."""
    if limit is not None and epsilon > limit:
        typer.echo(f"privpart: epsilon {up(epsilon)} exceeds {limit:g}.", err=True)
        raise typer.Exit(_EXCEEDED)
