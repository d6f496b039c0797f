"""``privpart calibrate``: the least noise, or the most training, that meets a budget."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

import accounting
from accounting import (
    ConfigError,
    Participation,
    PrivacyReport,
    least_separation,
    most_participations,
    most_rounds,
)
from accounting.guarantee import Method
from privpart.cli import options
from privpart.cli.options import Format, MethodName
from privpart.cli.output import print_report
from privpart.mechanism_choice import EstimatorName, MechanismChoice, MechanismName, ReleaseName


class Unknown(StrEnum):
    """What to solve for."""

    NOISE_MULTIPLIER = "noise-multiplier"
    ROUNDS = "rounds"
    MAX_PARTICIPATIONS = "max-participations"
    MIN_SEPARATION = "min-separation"


def calibrate(
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
    mechanism: options.MechanismOption = MechanismName.TREE,
    max_participations: options.MaxParticipations = 1,
    min_separation: options.MinSeparation = 1,
    restart_every: options.RestartEvery = None,
    estimator: options.Estimator = EstimatorName.VANILLA,
    completed: options.Completed = False,
    release: options.Release = ReleaseName.NODES,
    bands: options.Bands = None,
    buffers: options.Buffers = None,
    method: options.MethodOption = MethodName.EXACT,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Find the least noise, or the most training, whose epsilon does not exceed a target.

    Example: privpart calibrate --target-epsilon 2 --rounds 1000 --delta 1e-6
    """
    choice = MechanismChoice(
        name=mechanism,
        restart_every=restart_every,
        estimator=estimator,
        completed=completed,
        release=release,
        bands=bands,
        buffers=buffers,
    )
    if solve is Unknown.NOISE_MULTIPLIER:
        if noise_multiplier is not None:
            raise ConfigError(
                f"noise_multiplier={noise_multiplier}: that is what is solved for; leave it out, "
                "or say with --solve what to find instead."
            )
        participation = Participation(rounds, max_participations, min_separation)
        built = choice.build(participation)
        noise_multiplier = accounting.calibrate(
            built, participation, target_epsilon=target_epsilon, delta=delta, method=method.value
        )
    else:
        budget = _Budget(noise_multiplier, target_epsilon, delta, method.value)
        participation = _solve(solve, choice, (rounds, max_participations, min_separation), budget)
        built, noise_multiplier = choice.build(participation), budget.noise_multiplier
    report = PrivacyReport.of(
        built, participation, noise_multiplier=noise_multiplier, delta=delta, method=method.value
    )
    print_report(report, form)


@dataclass(frozen=True, slots=True)
class _Budget:
    given_noise: float | None
    target_epsilon: float
    delta: float
    method: Method

    @property
    def noise_multiplier(self) -> float:
        if self.given_noise is None:
            raise ConfigError("noise_multiplier is missing: --solve needs to know the noise.")
        return self.given_noise


def _solve(
    solve: Unknown, choice: MechanismChoice, limits: tuple[int, int, int], budget: _Budget
) -> Participation:
    """Return the participation that spends the budget, within (rounds, k, b) as typed."""
    if choice.name is MechanismName.BLT:
        raise ConfigError(
            f"solve={solve}: a BLT is fitted to its participation, which is unknown here. "
            "Solve for the noise multiplier, or use another mechanism."
        )
    rounds, k, b = limits
    z, target = budget.noise_multiplier, budget.target_epsilon
    delta, method = budget.delta, budget.method
    if solve is Unknown.ROUNDS:
        n = most_rounds(
            lambda n: choice.build(Participation(n)),
            noise_multiplier=z,
            target_epsilon=target,
            delta=delta,
            max_participations=k,
            min_separation=b,
            at_most=rounds,
            method=method,
        )
        return Participation(n, min(k, -(-n // b)), b)
    mechanism = choice.build(Participation(rounds))
    if solve is Unknown.MAX_PARTICIPATIONS:
        if k != 1:
            raise ConfigError(f"max_participations={k}: that is what is solved for; leave it out.")
        k = most_participations(
            mechanism,
            noise_multiplier=z,
            target_epsilon=target,
            delta=delta,
            min_separation=b,
            method=method,
        )
    else:
        if b != 1:
            raise ConfigError(f"min_separation={b}: that is what is solved for; leave it out.")
        b = least_separation(
            mechanism,
            max_participations=k,
            noise_multiplier=z,
            target_epsilon=target,
            delta=delta,
            method=method,
        )
    return Participation(rounds, k, b)
