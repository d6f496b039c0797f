"""``privpart epsilon``: what a planned run costs."""

from typing import Annotated

import typer

from accounting import Participation, PrivacyReport, checks
from privpart.cli import options
from privpart.cli.options import Format, MechanismName, MethodName, build_mechanism
from privpart.cli.output import print_report, up

_EXCEEDED = 3


def epsilon(
    rounds: options.Rounds,
    noise_multiplier: Annotated[
        float,
        typer.Option(
            help="Noise standard deviation per coordinate / clip norm, on the scale of the sum."
        ),
    ],
    delta: options.Delta,
    mechanism: options.Mechanism_ = MechanismName.TREE,
    max_participations: options.MaxParticipations = 1,
    min_separation: options.MinSeparation = 1,
    restart_every: options.RestartEvery = None,
    method: options.MethodOption = MethodName.EXACT,
    max_epsilon: Annotated[
        float | None, typer.Option(help="Exit with 3 if epsilon is above this; for CI.")
    ] = None,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Report the (epsilon, delta) of a planned run.

    Example: privpart epsilon --mechanism tree --rounds 1600 --noise-multiplier 1.13 --delta 1e-6
    """
    limit = None if max_epsilon is None else checks.positive("max_epsilon", max_epsilon)
    report = PrivacyReport.of(
        build_mechanism(mechanism, rounds=rounds, restart_every=restart_every),
        Participation(rounds, max_participations, min_separation),
        noise_multiplier=noise_multiplier,
        delta=delta,
        method=method.value,
    )
    print_report(report, form)
    if limit is not None and report.epsilon > limit:
        typer.echo(f"privpart: epsilon {up(report.epsilon)} exceeds {limit:g}.", err=True)
        raise typer.Exit(_EXCEEDED)
