"""``privpart calibrate``: the least noise within a budget, or what a budget allows with noise."""

from functools import partial
from typing import Annotated

import typer

from accounting import ConfigError, Guarantee, checks, most_mu
from accounting.report import up
from accounting.selection import repetitions_of
from privpart.cli import options
from privpart.cli.budget.best_of import BestOf, lines_of, selected
from privpart.cli.budget.promise import TypedRun
from privpart.cli.budget.solve import left_out, solve
from privpart.cli.idle import beside
from privpart.cli.output import print_report, say

_CLOSE = 1e-4
"""Relative distance from the target that calibration promises for method "exact"."""


def calibrate(
    *,
    target_epsilon: Annotated[float, typer.Option(help="The budget, above 0.")],
    delta: Annotated[float, options.DELTA],
    rounds: options.Rounds = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help="Noise of the sum / clip norm. What is left out is then found: the most rounds, "
            "or the greatest expected_batch, the fewest bins or most chosen of --sampling."
        ),
    ] = None,
    mechanism: options.MechanismOption = None,
    noise_schedule: options.NoiseScheduleOption = None,
    max_participations: options.MaxParticipations = None,
    min_separation: options.MinSeparation = None,
    fixed_order: options.FixedOrderOption = False,
    population: options.Population = None,
    allow_large_delta: options.AllowLargeDelta = False,
    sampling: options.SamplingOption = None,
    method: options.MethodOption = None,
    best_of: Annotated[
        BestOf,
        beside("sampling", "noise under sampling is found for one run"),
        beside("method", "a selection is accounted for by the exact trade-off"),
        beside("noise_multiplier", "with given noise, one run is accounted for"),
    ] = None,
    form: options.FormatOption = "table",
) -> None:
    """Find the least noise whose epsilon does not exceed a target.

    With --best-of the target is for the selection; each of its runs gets this noise.

    With --sampling it finds the noise of a run that hides who takes part. By Monte Carlo, the noise
    is chosen by earlier draws, and one estimate is then made and printed. With --noise-multiplier
    it finds what is left out: rounds, expected batch, bins, or chosen of given bins.

    Example: privpart calibrate --target-epsilon 2 --rounds 1000 --delta 1e-6 --max-participations 1
    """
    checks.accept_delta(delta, population, allow_large=allow_large_delta)
    limits = (max_participations, min_separation, fixed_order)
    run = TypedRun(mechanism, noise_schedule, limits, population, method, delta)
    if noise_multiplier is not None:
        promised = partial(run.promise, z=noise_multiplier)
        least = 1 + ((max_participations or 1) - 1) * (min_separation or 1)
        solution = solve(promised, target_epsilon, rounds, sampling, population, least)
        more = {"solution": solution.to_dict()}
        print_report(solution.promise.report(method), form, beside=[solution.line], more=more)
        return
    missing = left_out(rounds, sampling)
    if rounds is None or missing:
        raise ConfigError(f"{missing[0]} is missing: pass it, or --noise-multiplier to find it.")
    if best_of is not None:
        mu = most_mu(repetitions_of(best_of), target_epsilon=target_epsilon, delta=delta)
        target_epsilon = Guarantee(mu).epsilon(delta)
    promise = run.promise(rounds, sampling, target=target_epsilon)
    report = promise.report(method)
    selection = None if best_of is None else selected(promise.guarantee(), best_of, delta)
    lines = lines_of(selection) if selection else []
    print_report(report, form, beside=lines, more={"selection": selection} if selection else {})
    # Far below the target looks like a fault of this command, so the reader is told why.
    if promise.sampled is None and report.epsilon < target_epsilon * (1 - _CLOSE):
        say(
            f"warning: --method {method} jumps here: epsilon is {up(report.epsilon)} "
            f"with this noise and above {target_epsilon:g} with any less."
        )
