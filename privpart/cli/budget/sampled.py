"""Sampled budgets: ``privpart epsilon --sampling``, amplified by hiding who takes part.

Sampler and accountant are one choice. Poisson sampling: independent noise is DP-SGD; a banded
Toeplitz mechanism needs the members in as many groups as it has bands, which take turns. Balls in
bins: any mechanism of one stream, by a bound in closed form, or nearer by Monte Carlo (--draws).
b-min-sep: encoders with no more bands than rounds between two of one member, by Monte Carlo only.
An estimate is printed with the probability that it is too low, which is part of delta.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from accounting import (
    AllocatedGuarantee,
    BallsInBins,
    BMinSep,
    ConfigError,
    EstimatedGuarantee,
    Guarantee,
    Mechanism,
    PoissonSampling,
    SampledGuarantee,
    amplified,
    dp_sgd,
)
from accounting.mechanisms.by_name import MechanismChoice
from accounting.monte_carlo import bands_of
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
    B_MIN_SEP = "b-min-sep"


Sampled = SampledGuarantee | AllocatedGuarantee | EstimatedGuarantee


SamplingOption = Annotated[
    SamplingName | None,
    typer.Option(
        help="Amplify by sampling, under add-or-remove adjacency. 'poisson': each member joins a "
        "round on its own ('independent', 'toeplitz' with --bands). 'balls-in-bins': each member "
        "is in one bin of --bins, and the rounds take the bins in turn (any mechanism). "
        "'b-min-sep': each member joins on its own, but never within --min-separation rounds of "
        "its last one (at most as many bands).",
        rich_help_panel=_SAMPLING,
    ),
]
ExpectedBatch = Annotated[
    float | None,
    typer.Option(
        help="Expected members per round, of --population; for 'poisson' and 'b-min-sep'.",
        rich_help_panel=_SAMPLING,
    ),
]
Bins = Annotated[
    int | None,
    typer.Option(
        help="Bins, and rounds of a pass; for 'balls-in-bins'.", rich_help_panel=_SAMPLING
    ),
]
DrawCount = Annotated[
    int | None,
    typer.Option(
        "--draws",
        help="Estimate by Monte Carlo with this many draws; 'b-min-sep' has no other way, and "
        "takes a million by default. The probability of error is part of delta.",
        rich_help_panel=_SAMPLING,
    ),
]
DrawSeed = Annotated[
    int | None,
    typer.Option(
        "--draw-seed",
        help="Seed of the draws, to repeat a printed figure; by default a fresh one, for which "
        "alone the probability of error holds.",
        rich_help_panel=_SAMPLING,
    ),
]

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """What was typed beside --sampling; None where nothing was. The idle ones were refused."""

    expected_batch: float | None
    population: int | None
    bins: int | None
    min_separation: int | None
    draws: int | None
    draw_seed: int | None
    method: MethodName | None


def sampled_guarantee(
    sampling: SamplingName, mechanism: Mechanism, *, noise_multiplier: float, given: SamplerOptions
) -> Sampled:
    """Return the guarantee of a sampler with the one accountant that covers it.

    Raises:
        ConfigError: a missing option, or a mechanism that the sampler is not known to amplify.
    """
    if sampling is SamplingName.POISSON:
        return _poisson(mechanism, noise_multiplier, given)
    if sampling is SamplingName.B_MIN_SEP:
        return _separated(mechanism, noise_multiplier, given)
    if given.bins is None:
        raise ConfigError("bins is missing: --sampling balls-in-bins needs --bins.")
    bins = BallsInBins(given.bins, mechanism.rounds)
    if given.draws is not None:
        return _estimated(mechanism, noise_multiplier, bins, given)
    alone = mechanism.name == "independent"
    return AllocatedGuarantee(noise_multiplier, bins, None if alone else mechanism)


def _separated(
    mechanism: Mechanism, noise_multiplier: float, given: SamplerOptions
) -> EstimatedGuarantee:
    if given.expected_batch is None or given.population is None:
        raise ConfigError("sampling=b-min-sep: needs --expected-batch and --population.")
    apart = bands_of(mechanism) if given.min_separation is None else given.min_separation
    sampler = BMinSep(given.expected_batch, given.population, apart)
    return _estimated(mechanism, noise_multiplier, sampler, given)


def _estimated(
    mechanism: Mechanism,
    noise_multiplier: float,
    sampler: BallsInBins | BMinSep,
    given: SamplerOptions,
) -> EstimatedGuarantee:
    draws = _MILLION if given.draws is None else given.draws
    if given.draw_seed is None:  # a fresh one
        return EstimatedGuarantee(noise_multiplier, sampler, mechanism, draws)
    return EstimatedGuarantee(noise_multiplier, sampler, mechanism, draws, given.draw_seed)


def _poisson(
    mechanism: Mechanism, noise_multiplier: float, given: SamplerOptions
) -> SampledGuarantee:
    if given.expected_batch is None or given.population is None:
        raise ConfigError("sampling=poisson: needs --expected-batch and --population.")
    if given.method not in (None, MethodName.PLD, MethodName.RDP):
        raise ConfigError(f"method={given.method}: of a sampled run is 'pld' (default) or 'rdp'.")
    how: SampledMethod = "rdp" if given.method is MethodName.RDP else "pld"
    _refuse_other_noise(mechanism, ("independent", "toeplitz"), SamplingName.POISSON)
    if mechanism.name == "independent":
        sampler, steps = PoissonSampling(given.expected_batch, given.population), mechanism.rounds
        return dp_sgd(noise_multiplier=noise_multiplier, sampling=sampler, steps=steps, method=how)
    bands = int(getattr(mechanism, "bands"))  # noqa: B009  a Toeplitz mechanism has them
    sampler = PoissonSampling(given.expected_batch, given.population, groups=bands)
    return amplified(mechanism, noise_multiplier=noise_multiplier, sampling=sampler, method=how)


def _refuse_other_noise(
    mechanism: Mechanism, covered: tuple[str, ...], sampling: SamplingName
) -> None:
    if mechanism.name not in covered:
        raise ConfigError(
            f"sampling={sampling}: is not known to amplify {mechanism.name} here; its proof covers "
            f"{' and '.join(covered)}."
        )


def print_sampled(run: Sampled, choice: MechanismChoice, delta: float, form: Format) -> float:
    """Print the guarantee of a sampled run; return its epsilon."""
    epsilon = run.epsilon(delta)
    values = {
        "schema": "privpart/sampled/1",
        "epsilon": epsilon,
        "delta": delta,
        "mechanism": str(choice.name),
        "unit": run.unit,
        "adjacency": run.adjacency,
    } | _of_sampler(run, delta)
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


def _of_sampler(run: Sampled, delta: float) -> dict[str, object]:
    if isinstance(run, SampledGuarantee):
        return {
            "sampling": "poisson",
            "probability": run.probability,
            "groups": run.groups,
            "steps": run.steps,
            "method": run.method,
        }
    values: dict[str, object] = {"epsilon_unsampled": Guarantee(run.mu).epsilon(delta)}
    if isinstance(run.sampling, BallsInBins):
        values |= {"sampling": "balls-in-bins", "bins": run.sampling.bins}
        values["passes"] = run.sampling.passes
    else:
        values |= {"sampling": "b-min-sep", "probability": run.sampling.probability}
        values["min_separation"] = run.sampling.min_separation
    if isinstance(run, EstimatedGuarantee):
        values |= {"method": "monte-carlo", "draws": run.samples, "draw_seed": run.seed}
        values["failure_probability"] = run.failure(delta)
    return values


def _as_text(run: Sampled, values: dict[str, object]) -> str:
    shown = {
        name.replace("_", " "): up(value, 5) if isinstance(value, float) else str(value)
        for name, value in values.items()
        if name != "schema"
    }
    if isinstance(run, EstimatedGuarantee):  # in one line with what it may be wrong by
        failure = shown.pop("failure probability")
        shown["epsilon"] += (
            f"  by Monte Carlo; too low for {failure} of all seeds at most, which is part of delta"
        )
    lines = [f"  {name:<17} {value}" for name, value in shown.items()]
    said = [f"{a.text}; else: {a.consequence}" for a in run.assumptions]
    said.append(
        "every update is clipped to clip_norm, and the noise is secret and fresh; else: no "
        "guarantee"
    )
    return "\n".join([*lines, "", "  It holds if", *fill_lines(said)])
