"""``privpart calibrate``: the least noise within a budget."""

from typing import Annotated

import typer

import accounting
from accounting import Guarantee, checks, most_mu
from accounting.report import up
from privpart.cli import options
from privpart.cli.budget.best_of import BestOf, lines_of, repetitions_of, selected
from privpart.cli.budget.options import (
    FixedOrderOption,
    MaxParticipations,
    MechanismOption,
    MinSeparation,
    SamplingOption,
    typed_choice,
    typed_participation,
)
from privpart.cli.budget.promise import Promise, SampledRun, built
from privpart.cli.idle import beside
from privpart.cli.options import Format, method_of
from privpart.cli.output import print_report

_CLOSE = 1e-4
"""Relative distance from the target that calibration promises for method "exact"."""


def calibrate(
    *,
    target_epsilon: Annotated[float, typer.Option(help="The budget, above 0.")],
    rounds: options.Rounds,
    delta: options.Delta,
    mechanism: MechanismOption = None,
    max_participations: MaxParticipations = None,
    min_separation: MinSeparation = None,
    fixed_order: FixedOrderOption = False,
    population: options.Population = None,
    allow_large_delta: options.AllowLargeDelta = False,
    sampling: SamplingOption = None,
    method: options.MethodOption = None,
    best_of: Annotated[
        BestOf,
        beside("sampling", "noise under sampling is found for one run"),
        beside("method", "a selection is accounted for by the exact trade-off"),
    ] = None,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Find the least noise whose epsilon does not exceed a target.

    With --best-of the target is for the selection; each of its runs gets this noise.

    With --sampling it finds the noise of a run that hides who takes part. By Monte Carlo, the noise
    is chosen by earlier draws, and one estimate is then made and printed.

    Example: privpart calibrate --target-epsilon 2 --rounds 1000 --delta 1e-6 --max-participations 1
    """
    checks.accept_delta(delta, population, allow_large=allow_large_delta)
    choice = typed_choice(mechanism, rounds)
    if best_of is not None:
        mu = most_mu(repetitions_of(best_of), target_epsilon=target_epsilon, delta=delta)
        target_epsilon = Guarantee(mu).epsilon(delta)
    if sampling is not None:
        run = SampledRun.typed(sampling, choice, rounds, population, method)
        promise = run.calibrated(target_epsilon, delta)
    else:
        participation = typed_participation(
            rounds, max_participations, min_separation, fixed_order=fixed_order
        )
        encoder = built(choice, participation)
        z = accounting.calibrate(
            encoder,
            participation,
            target_epsilon=target_epsilon,
            delta=delta,
            method=method_of(method),
        )
        stated = max_participations is not None
        promise = Promise(choice, encoder, participation, z, delta, stated, population)
    report = promise.report(method)
    selection = None if best_of is None else selected(promise.guarantee(), best_of, delta)
    lines = lines_of(selection) if selection else []
    print_report(report, form, beside=lines, more={"selection": selection} if selection else {})
    # Far below the target looks like a fault of this command, so the reader is told why.
    if promise.sampled is None and report.epsilon < target_epsilon * (1 - _CLOSE):
        typer.echo(
            f"privpart: warning: --method {method} jumps here: epsilon is {up(report.epsilon)} "
            f"with this noise and above {target_epsilon:g} with any less.",
            err=True,
        )
