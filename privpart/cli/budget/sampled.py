"""Sampled budgets: ``privpart epsilon --sampling``, amplified by hiding who takes part.

Sampler and accountant are one choice. Poisson sampling: independent noise is DP-SGD; a banded
Toeplitz mechanism needs the members in as many groups as it has bands, which take turns. Balls in
bins: independent noise only. Others are refused: no bound in closed form is known here, and
estimates by Monte Carlo, which hold with a probability only, are not offered.
"""

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from accounting import (
    AllocatedGuarantee,
    BallsInBins,
    ConfigError,
    Mechanism,
    PoissonSampling,
    SampledGuarantee,
    amplified,
    dp_sgd,
)
from accounting.mechanisms.by_name import MechanismChoice
from accounting.report import up
from privpart.cli.options import Format, MethodName
from privpart.cli.output import as_csv, fill_lines

if TYPE_CHECKING:
    from accounting.subsampled import SampledMethod

_SAMPLING = "Sampling, where the server can hide who takes part"


class SamplingName(StrEnum):
    """Ways to choose who takes part that are accounted for."""

    POISSON = "poisson"
    BALLS_IN_BINS = "balls-in-bins"


SamplingOption = Annotated[
    SamplingName | None,
    typer.Option(
        help="Amplify by sampling, under add-or-remove adjacency. 'poisson': each member joins a "
        "round on its own ('independent', 'toeplitz' with --bands). 'balls-in-bins': each member "
        "is in one bin of --bins, and the rounds take the bins in turn ('independent').",
        rich_help_panel=_SAMPLING,
    ),
]
ExpectedBatch = Annotated[
    float | None,
    typer.Option(
        help="Expected members per round, of --population; for 'poisson'.",
        rich_help_panel=_SAMPLING,
    ),
]
Bins = Annotated[
    int | None,
    typer.Option(
        help="Bins, and rounds of a pass; for 'balls-in-bins'.", rich_help_panel=_SAMPLING
    ),
]


def sampled_guarantee(
    sampling: SamplingName,
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    expected_batch: float | None,
    population: int | None,
    bins: int | None,
    method: MethodName | None,
) -> SampledGuarantee | AllocatedGuarantee:
    """Return the guarantee of a sampler with the one accountant that covers it.

    Raises:
        ConfigError: a missing option, or a mechanism that the sampler is not known to amplify.
    """
    if sampling is SamplingName.POISSON:
        return _poisson(mechanism, noise_multiplier, expected_batch, population, method)
    if bins is None:
        raise ConfigError("bins is missing: --sampling balls-in-bins needs --bins.")
    _refuse_other_noise(mechanism, ("independent",), sampling)
    return AllocatedGuarantee(noise_multiplier, BallsInBins(bins, mechanism.rounds))


def _poisson(
    mechanism: Mechanism,
    noise_multiplier: float,
    expected_batch: float | None,
    population: int | None,
    method: MethodName | None,
) -> SampledGuarantee:
    if expected_batch is None or population is None:
        raise ConfigError("sampling=poisson: needs --expected-batch and --population.")
    if method not in (None, MethodName.PLD, MethodName.RDP):
        raise ConfigError(f"method={method}: of a sampled run is 'pld' (default) or 'rdp'.")
    how: SampledMethod = "rdp" if method is MethodName.RDP else "pld"
    sampler = PoissonSampling(expected_batch, population)
    _refuse_other_noise(mechanism, ("independent", "toeplitz"), SamplingName.POISSON)
    if mechanism.name == "independent":
        steps = mechanism.rounds
        return dp_sgd(noise_multiplier=noise_multiplier, sampling=sampler, steps=steps, method=how)
    bands = int(getattr(mechanism, "bands"))  # noqa: B009  a Toeplitz mechanism has them
    return amplified(
        mechanism, bands=bands, noise_multiplier=noise_multiplier, sampling=sampler, method=how
    )


def _refuse_other_noise(
    mechanism: Mechanism, covered: tuple[str, ...], sampling: SamplingName
) -> None:
    if mechanism.name not in covered:
        raise ConfigError(
            f"sampling={sampling}: is not known to amplify {mechanism.name} here; its proof covers "
            f"{' and '.join(covered)}."
        )


def print_sampled(
    run: SampledGuarantee | AllocatedGuarantee, choice: MechanismChoice, delta: float, form: Format
) -> float:
    """Print the guarantee of a sampled run; return its epsilon."""
    epsilon = run.epsilon(delta)
    sampler = "balls-in-bins" if isinstance(run, AllocatedGuarantee) else "poisson"
    values = {
        "schema": "privpart/sampled/1",
        "epsilon": epsilon,
        "delta": delta,
        "mechanism": str(choice.name),
        "sampling": sampler,
        "unit": run.unit,
        "adjacency": run.adjacency,
    }
    if isinstance(run, AllocatedGuarantee):
        values |= {
            "bins": run.sampling.bins,
            "passes": run.sampling.passes,
            "epsilon_unsampled": _unsampled(run, delta),
        }
    else:
        values |= {"probability": run.probability, "steps": run.steps, "method": run.method}
    if form is Format.CSV:
        typer.echo(as_csv([values]), nl=False)
    elif form is Format.JSON:
        listed = [
            {"code": a.code, "text": a.text, "status": a.status, "consequence": a.consequence}
            for a in run.assumptions
        ]
        typer.echo(json.dumps(values | {"assumptions": listed}, indent=2, allow_nan=False))
    else:
        typer.echo(_as_text(run, values))
    return epsilon


def _unsampled(run: AllocatedGuarantee, delta: float) -> float:
    from accounting import Guarantee

    return Guarantee(run.mu).epsilon(delta)


def _as_text(run: SampledGuarantee | AllocatedGuarantee, values: dict[str, object]) -> str:
    shown = {
        name.replace("_", " "): up(value, 5) if isinstance(value, float) else str(value)
        for name, value in values.items()
        if name != "schema"
    }
    lines = [f"  {name:<17} {value}" for name, value in shown.items()]
    said = [f"{a.text}; else: {a.consequence}" for a in run.assumptions]
    said.append(
        "every update is clipped to clip_norm, and the noise is secret and fresh; else: no "
        "guarantee"
    )
    return "\n".join([*lines, "", "  It holds if", *fill_lines(said)])
