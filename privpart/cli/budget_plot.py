"""A picture of epsilon against noise, rounds or participations, with the planned run marked."""

from pathlib import Path

from matplotlib.figure import Figure

from accounting import ConfigError, Participation, PrivacyReport
from accounting import guarantee as guarantee_of
from privpart.cli.options import Against
from privpart.mechanism_choice import MechanismChoice, MechanismName

_POINTS = 25
_AXES = {
    Against.NOISE: "noise multiplier",
    Against.ROUNDS: "rounds",
    Against.PARTICIPATIONS: "participations of one client, at most",
}


def draw(choice: MechanismChoice, report: PrivacyReport, *, against: Against, path: Path) -> None:
    """Draw the curve through ``report`` into ``path``; the format follows its suffix."""
    points = _curve(choice, report, against)
    here = {
        Against.NOISE: report.noise_multiplier,
        Against.ROUNDS: report.rounds,
        Against.PARTICIPATIONS: report.max_participations,
    }[against]
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True), color="#1f6f8b", marker=".")
    axes.plot([here], [report.epsilon], "o", color="#b3552c")
    axes.annotate(
        f"ε = {report.epsilon:.4g}", (here, report.epsilon), (8, 8), textcoords="offset points"
    )
    if against is not Against.PARTICIPATIONS:
        axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(_AXES[against])
    axes.set_ylabel(f"ε at δ = {report.delta:g}")
    axes.set_title(
        f"{report.mechanism}: {report.rounds} rounds, a {report.unit} in at most "
        f"{report.max_participations}; {report.adjacency} adjacency",
        fontsize=9,
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot={path}: cannot be written: {error}") from None


def _curve(
    choice: MechanismChoice, report: PrivacyReport, against: Against
) -> list[tuple[float, float]]:
    n, k, b = report.rounds, report.max_participations, report.min_separation
    run = Participation(n, k, b)
    if against is Against.NOISE:
        mechanism = choice.build(run)
        noises = [report.noise_multiplier * 10 ** (i / 12 - 1) for i in range(_POINTS)]
        return [
            (
                z,
                guarantee_of(mechanism, run, noise_multiplier=z, method=report.method).epsilon(
                    report.delta
                ),
            )
            for z in noises
        ]
    if choice.name is MechanismName.BLT:
        raise ConfigError(
            f"plot_against={against}: a BLT is fitted anew to each participation, so the noise "
            "multiplier does not mean the same along the curve. Plot against noise."
        )
    runs = _runs(run, against)
    return [
        (
            float(r.rounds if against is Against.ROUNDS else r.max_participations),
            guarantee_of(
                choice.build(r), r, noise_multiplier=report.noise_multiplier, method=report.method
            ).epsilon(report.delta),
        )
        for r in runs
    ]


def _runs(run: Participation, against: Against) -> list[Participation]:
    """Participations along the curve, through the planned one."""
    n, k, b = run.rounds, run.max_participations, run.min_separation
    if against is Against.ROUNDS:
        lengths = sorted({max(1, round(n * 10 ** (i / 12 - 1))) for i in range(_POINTS)} | {n})
        return [Participation(m, min(k, -(-m // b)), b) for m in lengths]
    most = -(-n // b)
    counts = sorted({max(1, round(most * i / _POINTS)) for i in range(1, _POINTS + 1)} | {1, k})
    return [Participation(n, m, b) for m in counts]
