"""``privpart calibrate``: the least noise, or the most training, within a budget."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

import accounting
from accounting import (
    ConfigError,
    Participation,
    PrivacyReport,
    checks,
    least_separation,
    most_participations,
    most_rounds,
)
from accounting.cohorts import sampled_passes
from accounting.guarantee import Method
from accounting.mechanisms.by_name import MechanismChoice
from accounting.report import up
from privpart.cli import options
from privpart.cli.budget.options import Limits, with_shared_options
from privpart.cli.budget.progress import shown_fits
from privpart.cli.budget.sampled import (
    Bins,
    DrawCount,
    ExpectedBatch,
    SamplerOptions,
    SamplingOption,
    print_sampled,
    typed_sampling,
)
from privpart.cli.idle import typed
from privpart.cli.options import Format, MethodName
from privpart.cli.output import print_report

_CLOSE = 1e-4
"""Relative distance from the target that calibration promises for method "exact"."""


class Unknown(StrEnum):
    """What to solve for."""

    NOISE_MULTIPLIER = "noise-multiplier"
    ROUNDS = "rounds"
    MAX_PARTICIPATIONS = "max-participations"
    MIN_SEPARATION = "min-separation"


@dataclass(frozen=True, slots=True)
class _Budget:
    noise_multiplier: float
    target_epsilon: float
    delta: float
    method: Method


@with_shared_options
def calibrate(
    context: typer.Context,
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
    limits: Limits,
    population: options.Population = None,
    allow_large_delta: options.AllowLargeDelta = False,
    sampling: SamplingOption = None,
    expected_batch: ExpectedBatch = None,
    bins: Bins = None,
    draws: DrawCount = None,
    method: options.MethodOption = MethodName.EXACT,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Find the least noise, or the most training, whose epsilon does not exceed a target.

    With --sampling it finds the noise of a run that hides who takes part. By Monte Carlo, the noise
    is chosen by earlier draws, and one estimate is then made and printed.

    Example: privpart calibrate --target-epsilon 2 --rounds 1000 --delta 1e-6 --max-participations 1
    """
    checks.accept_delta(delta, population, allow_large=allow_large_delta)
    if sampling is not None:
        given = SamplerOptions(
            expected_batch=expected_batch,
            population=population,
            bins=bins,
            min_separation=limits.min_separation,
            draws=draws,
            draw_seed=None,
            method=method if "method" in typed(context) else None,
        )
        with shown_fits():
            built = choice.build(sampled_passes(rounds, bins))
        noise, run = typed_sampling(sampling, built, given).calibrated(target_epsilon, delta)
        print_sampled(run, choice, noise, delta, form, population)
        return
    if solve is Unknown.NOISE_MULTIPLIER:
        participation = limits.of(rounds)
        with shown_fits():
            built = choice.build(participation)
        found = accounting.calibrate(
            built, participation, target_epsilon=target_epsilon, delta=delta, method=method.value
        )
    else:
        if noise_multiplier is None:
            raise ConfigError("noise_multiplier is missing: --solve needs to know the noise.")
        found = noise_multiplier
        budget = _Budget(found, target_epsilon, delta, method.value)
        participation = _solve(solve, choice, rounds, limits, budget)
        built = choice.build(participation)
    stated = limits.stated or solve is Unknown.MAX_PARTICIPATIONS
    report = PrivacyReport.of(
        built,
        participation,
        noise_multiplier=found,
        delta=delta,
        method=method.value,
        population=population,
        participation_stated=stated,
    )
    print_report(report, form)
    if solve is Unknown.NOISE_MULTIPLIER and report.epsilon < target_epsilon * (1 - _CLOSE):
        typer.echo(
            f"privpart: warning: --method {method} jumps here: epsilon is {up(report.epsilon)} "
            f"with this noise and above {target_epsilon:g} with any less.",
            err=True,
        )


def _solve(
    solve: Unknown, choice: MechanismChoice, rounds: int, limits: Limits, budget: _Budget
) -> Participation:
    """Return the participation that spends the budget, within the limits given."""
    if choice.fitted:
        raise ConfigError(
            f"solve={solve}: {choice.name} is fitted to its participation, which is unknown here. "
            "Solve for the noise multiplier, or use another mechanism."
        )
    if solve is Unknown.ROUNDS:
        return _rounds(choice, rounds, limits, budget)
    z, target = budget.noise_multiplier, budget.target_epsilon
    mechanism = choice.build(Participation(rounds))
    if solve is Unknown.MAX_PARTICIPATIONS:
        b = 1 if limits.min_separation is None else limits.min_separation
        most = most_participations(
            mechanism,
            noise_multiplier=z,
            target_epsilon=target,
            delta=budget.delta,
            min_separation=b,
            method=budget.method,
        )
        return Participation(rounds, most, b)
    k = limits.max_participations
    if k is None or k == 1:
        raise ConfigError(
            f"solve={solve}: is between two rounds of one client; say --max-participations of 2 "
            "or more."
        )
    least = least_separation(
        mechanism,
        max_participations=k,
        noise_multiplier=z,
        target_epsilon=target,
        delta=budget.delta,
        method=budget.method,
    )
    return Participation(rounds, k, least)


def _rounds(choice: MechanismChoice, rounds: int, limits: Limits, budget: _Budget) -> Participation:
    if choice.file is not None:
        raise ConfigError("solve=rounds: the mechanism in the file is for its own rounds.")
    at_most = limits.of(rounds)
    k, b = at_most.max_participations, at_most.min_separation
    n = most_rounds(
        lambda n: choice.build(Participation(n)),
        noise_multiplier=budget.noise_multiplier,
        target_epsilon=budget.target_epsilon,
        delta=budget.delta,
        max_participations=k,
        min_separation=b,
        at_most=rounds,
        method=budget.method,
    )
    return Participation(n, min(k, -(-n // b)), b)
