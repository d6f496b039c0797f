"""``privpart calibrate``: the least noise, or the most training, within a budget."""

from enum import StrEnum
from typing import Annotated

import typer

import accounting
from accounting import (
    Budget,
    ConfigError,
    Participation,
    checks,
    least_separation,
    most_participations,
    most_rounds,
)
from accounting.mechanisms import MechanismChoice
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
    typed_choice,
)
from privpart.cli.budget.promise import Promise, Typed, built
from privpart.cli.options import Format, method_of
from privpart.cli.output import print_report

_CLOSE = 1e-4
"""Relative distance from the target that calibration promises for method "exact"."""


class Unknown(StrEnum):
    """What to solve for."""

    NOISE_MULTIPLIER = "noise-multiplier"
    ROUNDS = "rounds"
    MAX_PARTICIPATIONS = "max-participations"
    MIN_SEPARATION = "min-separation"


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
    mechanism: MechanismOption = None,
    max_participations: MaxParticipations = None,
    min_separation: MinSeparation = None,
    fixed_order: FixedOrderOption = False,
    population: options.Population = None,
    allow_large_delta: options.AllowLargeDelta = False,
    sampling: SamplingOption = None,
    method: options.MethodOption = None,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Find the least noise, or the most training, whose epsilon does not exceed a target.

    With --sampling it finds the noise of a run that hides who takes part. By Monte Carlo, the noise
    is chosen by earlier draws, and one estimate is then made and printed.

    Example: privpart calibrate --target-epsilon 2 --rounds 1000 --delta 1e-6 --max-participations 1
    """
    checks.accept_delta(delta, population, allow_large=allow_large_delta)
    choice = typed_choice(mechanism, rounds)
    limits = Limits(max_participations, min_separation, fixed_order)
    if solve is not Unknown.NOISE_MULTIPLIER:
        refuse_beside(f"--solve {solve}: is for a run that hides nobody", sampling=sampling)
        refuse_beside(f"--solve {solve}: is for clients in any order", fixed_order=fixed_order)
        if noise_multiplier is None:
            raise ConfigError("noise_multiplier is missing: --solve needs to know the noise.")
        budget = Budget(noise_multiplier, target_epsilon, delta, method_of(method))
        promise = _most_training(solve, choice, rounds, limits, budget, population)
    else:
        refuse_beside(f"--solve {solve}: finds this", noise_multiplier=noise_multiplier)
        target = {"target_epsilon": target_epsilon, "delta": delta}
        if sampling is not None:
            run = Typed(
                rounds=rounds,
                noise_multiplier=None,
                delta=delta,
                mechanism=mechanism,
                limits=limits,
                sampling=sampling,
                population=population,
                method=method,
            ).sampled(sampling, choice, rounds)
            z, sampled = run.calibrated(target_epsilon, delta)
            promise = run.promise(z, delta, sampled, population)
        else:
            run_of = limits.of(rounds)
            encoder = built(choice, run_of)
            z = accounting.calibrate(encoder, run_of, **target, method=method_of(method))
            promise = Promise(choice, encoder, run_of, z, delta, limits.stated, population)
    report = promise.report(method)
    print_report(report, form)
    # Far below the target looks like a fault of this command, so the reader is told why.
    exact = solve is Unknown.NOISE_MULTIPLIER and promise.sampled is None
    if exact and report.epsilon < target_epsilon * (1 - _CLOSE):
        typer.echo(
            f"privpart: warning: --method {method} jumps here: epsilon is {up(report.epsilon)} "
            f"with this noise and above {target_epsilon:g} with any less.",
            err=True,
        )


def _most_training(
    solve: Unknown,
    choice: MechanismChoice,
    rounds: int,
    limits: Limits,
    budget: Budget,
    population: int | None,
) -> Promise:
    """Return the promise that spends the budget, within the limits given."""
    # Each candidate would have an encoder of its own, and the cost would not be monotone.
    if choice.fitted:
        raise ConfigError(
            f"solve={solve}: {choice.name} is fitted to its participation, which is unknown here. "
            "Solve for the noise multiplier, or use another mechanism."
        )
    run = _RULES[solve](choice, rounds, limits, budget)
    stated = limits.stated or solve is Unknown.MAX_PARTICIPATIONS
    mechanism = choice.build(run)
    z, delta = budget.noise_multiplier, budget.delta
    return Promise(choice, mechanism, run, z, delta, stated, population)


def _rounds(choice: MechanismChoice, rounds: int, limits: Limits, budget: Budget) -> Participation:
    if choice.file is not None:
        raise ConfigError("solve=rounds: the mechanism in the file is for its own rounds.")
    most = limits.of(rounds)
    k, b = most.max_participations, most.min_separation
    n = most_rounds(
        lambda n: choice.build(Participation(n)),
        budget,
        max_participations=k,
        min_separation=b,
        at_most=rounds,
    )
    return Participation(n, min(k, -(-n // b)), b)


def _participations(
    choice: MechanismChoice, rounds: int, limits: Limits, budget: Budget
) -> Participation:
    refuse_beside(
        "--solve max-participations: finds this", max_participations=limits.max_participations
    )
    b = 1 if limits.min_separation is None else limits.min_separation
    mechanism = choice.build(Participation(rounds))
    return Participation(rounds, most_participations(mechanism, budget, min_separation=b), b)


def _separation(
    choice: MechanismChoice, rounds: int, limits: Limits, budget: Budget
) -> Participation:
    refuse_beside("--solve min-separation: finds this", min_separation=limits.min_separation)
    k = limits.max_participations or 1
    if k == 1:
        raise ConfigError(
            "--solve min-separation: is between two rounds of one client; say "
            "--max-participations of 2 or more."
        )
    mechanism = choice.build(Participation(rounds))
    return Participation(rounds, k, least_separation(mechanism, budget, max_participations=k))


_RULES = {
    Unknown.ROUNDS: _rounds,
    Unknown.MAX_PARTICIPATIONS: _participations,
    Unknown.MIN_SEPARATION: _separation,
}
