"""``privpart calibrate``: the least noise within a budget, or what a budget allows with noise."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import accounting
from accounting import ConfigError, Guarantee, Mechanism, Participation, checks, most_mu
from accounting.mechanisms import MechanismChoice
from accounting.report import up
from accounting.selection import repetitions_of
from privpart.cli import options
from privpart.cli.budget.best_of import BestOf, lines_of, selected
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
from privpart.cli.budget.promise import Promise, SampledRun, built
from privpart.cli.budget.solve import left_out, solve
from privpart.cli.idle import beside
from privpart.cli.options import Format, MethodName, method_of
from privpart.cli.output import print_report

_CLOSE = 1e-4
"""Relative distance from the target that calibration promises for method "exact"."""


def calibrate(
    *,
    target_epsilon: Annotated[float, typer.Option(help="The budget, above 0.")],
    delta: options.Delta,
    rounds: Annotated[int | None, options.ROUNDS] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help="Noise of the sum / clip norm. What is left out is then found: the most rounds, "
            "or the greatest expected_batch, the fewest bins or most chosen of --sampling."
        ),
    ] = None,
    mechanism: MechanismOption = None,
    noise_schedule: NoiseScheduleOption = None,
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
        beside("noise_multiplier", "with given noise, one run is accounted for"),
    ] = None,
    form: options.FormatOption = Format.TABLE,
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
    run = _Run(mechanism, noise_schedule, limits, population, method, delta)
    if noise_multiplier is not None:
        promised = partial(run.promise, z=noise_multiplier)
        least = 1 + ((max_participations or 1) - 1) * (min_separation or 1)
        solution = solve(promised, target_epsilon, rounds, sampling, population, least)
        more = {"solution": solution.to_dict()}
        print_report(solution.promise.report(method), form, beside=[solution.line], more=more)
        return
    missing = left_out(rounds, sampling)
    if rounds is None or missing:
        raise ConfigError(f"{missing[0]}: is missing; or give --noise-multiplier, and it is found.")
    if best_of is not None:
        mu = most_mu(repetitions_of(best_of), target_epsilon=target_epsilon, delta=delta)
        target_epsilon = Guarantee(mu).epsilon(delta)
    promise = run.calibrated(target_epsilon, rounds, sampling)
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


@dataclass(frozen=True, slots=True)
class _Run:
    """What was typed of a run whose noise, or whose length or sampler, is sought."""

    mechanism: str | None
    schedule: Path | None
    limits: tuple[int | None, int | None, bool]
    population: int | None
    method: MethodName | None
    delta: float

    def promise(self, rounds: int, sampling: str | None, *, z: float) -> Promise:
        """Return the promise with this noise."""
        if sampling is not None:
            return self._sampled(rounds, sampling).promise(z, self.delta)
        choice, participation = self._unsampled(rounds)
        return self._promise(choice, built(choice, participation), participation, z)

    def calibrated(self, target: float, rounds: int, sampling: str | None) -> Promise:
        """Return the promise with the least noise that meets a target."""
        if sampling is not None:
            return self._sampled(rounds, sampling).calibrated(target, self.delta)
        choice, participation = self._unsampled(rounds)
        encoder = built(choice, participation)
        by, delta = method_of(self.method), self.delta
        z = accounting.calibrate(
            encoder, participation, target_epsilon=target, delta=delta, method=by
        )
        return self._promise(choice, encoder, participation, z)

    def _sampled(self, rounds: int, sampling: str) -> SampledRun:
        choice = typed_choice(self.mechanism, rounds, self.schedule)
        return SampledRun.typed(sampling, choice, rounds, self.population, self.method)

    def _unsampled(self, rounds: int) -> tuple[MechanismChoice, Participation]:
        k, b, fixed_order = self.limits
        participation = typed_participation(rounds, k, b, fixed_order=fixed_order)
        return typed_choice(self.mechanism, rounds, self.schedule), participation

    def _promise(
        self, choice: MechanismChoice, encoder: Mechanism, limits: Participation, z: float
    ) -> Promise:
        stated = self.limits[0] is not None
        return Promise(choice, encoder, limits, z, self.delta, stated, self.population)
