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
    BallsInBins,
    BMinSep,
    ConfigError,
    Estimate,
    EstimatedGuarantee,
    Guarantee,
    Mechanism,
    PoissonSampling,
    SampledGuarantee,
    checks,
    sampled_guarantee,
)
from accounting.calibrate import estimated_noise, least_sampled_noise
from accounting.cohorts import Sampled, Sampling, sampled_claim
from accounting.mechanisms.by_name import MechanismChoice
from accounting.monte_carlo import bands_of
from accounting.report import Assumption, SampledClaim, large_delta, up
from privpart.cli.options import Format, MethodName
from privpart.cli.output import as_csv, condition, fill_lines

if TYPE_CHECKING:
    from accounting.subsampled import SampledMethod

_SAMPLING = "Sampling, where the server can hide who takes part"


class SamplingName(StrEnum):
    """Ways to choose who takes part that are accounted for."""

    POISSON = "poisson"
    BALLS_IN_BINS = "balls-in-bins"
    B_MIN_SEP = "b-min-sep"


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

    def estimate(self) -> Estimate | None:
        """Return the draws that were asked for; their seed is fresh unless it was typed."""
        if self.draws is None and self.draw_seed is None:
            return None
        draws = _MILLION if self.draws is None else self.draws
        if self.draw_seed is None:
            return Estimate(draws)
        return Estimate(draws, checks.count("draw_seed", self.draw_seed, minimum=0))


@dataclass(frozen=True, slots=True)
class TypedSampling:
    """A sampler, what it needs besides, and the noise that it covers."""

    mechanism: Mechanism
    sampler: Sampling
    estimate: Estimate | None
    method: "SampledMethod"

    def guarantee(self, noise_multiplier: float) -> Sampled:
        """Return the guarantee with the one accountant that covers it."""
        return sampled_guarantee(
            self.mechanism,
            self.sampler,
            noise_multiplier=noise_multiplier,
            estimate=self.estimate,
            method=self.method,
        )

    def calibrated(self, target_epsilon: float, delta: float) -> tuple[float, Sampled]:
        """Return the least noise found that meets a target, and its guarantee."""
        if self.estimate is not None and not isinstance(self.sampler, PoissonSampling):
            found = estimated_noise(
                self.mechanism,
                self.sampler,
                target_epsilon=target_epsilon,
                delta=delta,
                draws=self.estimate.draws,
            )
            return found.noise_multiplier, found
        noise = least_sampled_noise(
            self.mechanism,
            self.sampler,
            target_epsilon=target_epsilon,
            delta=delta,
            method=self.method,
        )
        return noise, self.guarantee(noise)


def typed_sampling(
    sampling: SamplingName, mechanism: Mechanism, given: SamplerOptions
) -> TypedSampling:
    """Return the sampler that was typed.

    Raises:
        ConfigError: a missing option, or a mechanism that the sampler is not known to amplify.
    """
    method: SampledMethod = "rdp" if given.method is MethodName.RDP else "pld"
    if sampling is SamplingName.BALLS_IN_BINS:
        if given.bins is None:
            raise ConfigError("bins is missing: --sampling balls-in-bins needs --bins.")
        bins = BallsInBins(given.bins, mechanism.rounds)
        return TypedSampling(mechanism, bins, given.estimate(), method)
    if given.expected_batch is None or given.population is None:
        raise ConfigError(f"sampling={sampling}: needs --expected-batch and --population.")
    if sampling is SamplingName.B_MIN_SEP:
        apart = bands_of(mechanism) if given.min_separation is None else given.min_separation
        sampler = BMinSep(given.expected_batch, given.population, apart)
        return TypedSampling(mechanism, sampler, given.estimate() or Estimate(), method)
    return TypedSampling(mechanism, _poisson(mechanism, given), None, method)


def _poisson(mechanism: Mechanism, given: SamplerOptions) -> PoissonSampling:
    if given.method not in (None, MethodName.PLD, MethodName.RDP):
        raise ConfigError(f"method={given.method}: of a sampled run is 'pld' (default) or 'rdp'.")
    _refuse_other_noise(mechanism, ("independent", "toeplitz"), SamplingName.POISSON)
    alone = mechanism.name == "independent"
    # a Toeplitz mechanism has bands
    groups = 1 if alone else int(getattr(mechanism, "bands"))  # noqa: B009
    return PoissonSampling(given.expected_batch or 0.0, given.population or 0, groups)


def _refuse_other_noise(
    mechanism: Mechanism, covered: tuple[str, ...], sampling: SamplingName
) -> None:
    if mechanism.name not in covered:
        raise ConfigError(
            f"sampling={sampling}: is not known to amplify {mechanism.name} here; its proof covers "
            f"{' and '.join(covered)}."
        )


def print_sampled(
    run: Sampled,
    choice: MechanismChoice,
    noise_multiplier: float,
    delta: float,
    form: Format,
    population: int | None,
) -> float:
    """Print the guarantee of a sampled run; return its epsilon."""
    claim, warning = sampled_claim(run, delta), checks.delta_warning(delta, population)
    epsilon = claim.epsilon
    assumptions = (*run.assumptions, *large_delta(delta, population, "client"))
    values = {
        "schema": "privpart/sampled/1",
        "epsilon": epsilon,
        "delta": delta,
        "mechanism": str(choice.name),
        "noise_multiplier": noise_multiplier,
        "unit": run.unit,
        "adjacency": run.adjacency,
    } | _of_sampler(claim, run, delta)
    if form is Format.CSV:
        typer.echo(as_csv([values]), nl=False)
    elif form is Format.JSON:
        listed = [
            {"code": a.code, "text": a.text, "status": a.status, "consequence": a.consequence}
            for a in assumptions
        ]
        document = values | {"assumptions": listed, "warnings": [warning] if warning else []}
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        typer.echo(_as_text(run, values, assumptions))
    if warning:
        typer.echo(f"privpart: warning: {warning}", err=True)
    return epsilon


def _of_sampler(claim: SampledClaim, run: Sampled, delta: float) -> dict[str, object]:
    own = dict(claim.parameters)
    values: dict[str, object] = {}
    if not isinstance(run, SampledGuarantee):
        values["epsilon_unsampled"] = Guarantee(run.mu).epsilon(delta)
    values["sampling"] = own.pop("name")
    return values | own


def _as_text(run: Sampled, values: dict[str, object], assumptions: tuple[Assumption, ...]) -> str:
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
    said = list(map(condition, assumptions))
    said.append(
        "every update is clipped to clip_norm, and the noise is secret and fresh; else: no "
        "guarantee"
    )
    return "\n".join([*lines, "", "  It holds if", *fill_lines(said)])
