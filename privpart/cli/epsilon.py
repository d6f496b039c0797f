"""``privpart epsilon``: what a planned run costs."""

from pathlib import Path
from typing import Annotated

import typer

from accounting import ConfigError, Grouped, Mechanism, Participation, PrivacyReport, checks
from accounting.statement import up
from privpart.cli import options
from privpart.cli.options import Against, Format, MethodName
from privpart.cli.output import print_report
from privpart.mechanism_choice import EstimatorName, MechanismChoice, MechanismName, ReleaseName

_EXCEEDED = 3


def epsilon(
    rounds: Annotated[
        int | None, typer.Option(help="Training rounds, each of which releases a model.")
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help="Noise standard deviation per coordinate / clip norm, on the scale of the sum."
        ),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta of the guarantee, strictly between 0 and 1.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan file to read all of this from, as `privpart train` does."),
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
    population: Annotated[
        int | None, typer.Option(help="Clients in all, if public: warns of too large a delta.")
    ] = None,
    cross_check: Annotated[
        bool, typer.Option("--cross-check", help="Cross-check by dp-accounting (a second more).")
    ] = False,
    max_epsilon: options.MaxEpsilon = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw epsilon into this picture (.png, .svg, .pdf).")
    ] = None,
    plot_against: Annotated[
        Against | None, typer.Option(help="What the picture varies; by default the noise.")
    ] = None,
    statement: Annotated[
        bool, typer.Option("--statement", help="Print the report in plain English instead.")
    ] = False,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Report the (epsilon, delta) of a planned run.

    Example: privpart epsilon --mechanism tree --rounds 1600 --noise-multiplier 1.13 --delta 1e-6
    """
    _refuse_contradictions(statement, form, plot, plot_against)
    limit = None if max_epsilon is None else checks.positive("max_epsilon", max_epsilon)
    choice = MechanismChoice(
        name=mechanism,
        restart_every=restart_every,
        estimator=estimator,
        completed=completed,
        release=release,
        bands=bands,
        buffers=buffers,
    )
    if plan is not None:
        said = (rounds, noise_multiplier, max_participations, min_separation, choice)
        if said != (None, None, 1, 1, _DEFAULT):
            raise ConfigError(f"plan={plan}: says it all; leave out the options it contains.")
        choice, participation, built, noise_multiplier, delta = _planned(plan, delta)
    elif rounds is None or noise_multiplier is None or delta is None:
        raise ConfigError(
            "--rounds, --noise-multiplier and --delta are needed; or --plan FILE, which has them."
        )
    else:
        participation = Participation(rounds, max_participations, min_separation)
        built = choice.build(participation)
    report = PrivacyReport.of(
        built,
        participation,
        noise_multiplier=noise_multiplier,
        delta=delta,
        method=method.value,
        population=population,
        cross_check="dp-accounting" if cross_check else "quadrature",
    )
    if plot is not None and isinstance(built, Grouped):
        raise ConfigError(
            "plot: varies a mechanism of one group; leave it out with a [schedule] or shared keys."
        )
    if plot is not None:
        from privpart.cli.budget_plot import draw

        draw(choice, report, against=plot_against or Against.NOISE, path=plot)
    if statement:
        typer.echo(report.statement())
    else:
        print_report(report, form, beside=_one_stream(built, choice, participation, form))
    if limit is not None and report.epsilon > limit:
        typer.echo(f"privpart: epsilon {up(report.epsilon)} exceeds {limit:g}.", err=True)
        raise typer.Exit(_EXCEEDED)


def _refuse_contradictions(
    statement: bool, form: Format, plot: Path | None, plot_against: Against | None
) -> None:
    if statement and form is not Format.TABLE:
        raise ConfigError(f"statement=True: is prose; leave out --format {form}.")
    if plot_against is not None and plot is None:
        raise ConfigError(f"plot_against={plot_against}: needs --plot FILE to draw into.")


def _one_stream(
    built: Mechanism, choice: MechanismChoice, participation: Participation, form: Format
) -> list[tuple[str, str]]:
    """What groups that take turns save: the same mechanism, once over all rounds."""
    if not isinstance(built, Grouped) or form is not Format.TABLE:
        return []
    found = choice.build(participation).sensitivity(participation)
    known = "" if found.exact else " at most"
    return [
        ("one stream", f"{up(found.squared, 5)}{known}, if all groups shared one {choice.name}")
    ]


_DEFAULT = MechanismChoice(name=MechanismName.TREE)


def _planned(
    path: Path, delta: float | None
) -> tuple[MechanismChoice, Participation, Mechanism, float, float]:
    """Read a plan file; takes a second, because plans name optimisers, which need torch."""
    from privpart.experiment.plan_file import read

    plan = read(path)
    promised = plan.privacy_plan()
    return (
        plan.privacy.mechanism,
        promised.participation,
        promised.mechanism,
        promised.noise_multiplier,
        plan.privacy.delta if delta is None else delta,
    )
