"""``privpart calibrate``: the least noise that meets a budget."""

from typing import Annotated

import typer

import accounting
from accounting import Participation, PrivacyReport
from privpart.cli import options
from privpart.cli.options import Format, MechanismName, MethodName, build_mechanism
from privpart.cli.output import print_report


def calibrate(
    target_epsilon: Annotated[float, typer.Option(help="The budget, above 0.")],
    rounds: options.Rounds,
    delta: options.Delta,
    mechanism: options.Mechanism_ = MechanismName.TREE,
    max_participations: options.MaxParticipations = 1,
    min_separation: options.MinSeparation = 1,
    restart_every: options.RestartEvery = None,
    method: options.MethodOption = MethodName.EXACT,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Find the least noise multiplier whose epsilon does not exceed a target.

    Example: privpart calibrate --target-epsilon 2 --rounds 1000 --delta 1e-6
    """
    built = build_mechanism(mechanism, rounds=rounds, restart_every=restart_every)
    participation = Participation(rounds, max_participations, min_separation)
    noise_multiplier = accounting.calibrate(
        built, participation, target_epsilon=target_epsilon, delta=delta, method=method.value
    )
    report = PrivacyReport.of(
        built, participation, noise_multiplier=noise_multiplier, delta=delta, method=method.value
    )
    print_report(report, form)
