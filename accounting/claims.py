"""Claims: what a report says of a run whose cost, or that of runs before it, is amplified.

A run alone is claimed by its own accountant; beside earlier runs all of them are one composition
(``accounting.composed``). The attacker's figures follow from the privacy profile of what is
claimed. Of an estimate by Monte Carlo only one pair (epsilon, delta) is known, and no composition.
"""

from dataclasses import replace

from accounting.checks import ConfigError
from accounting.cohorts import Sampled, sampled_claim
from accounting.composed import (
    ComposedGuarantee,
    Release,
    StatedGuarantee,
    read_releases,
    samplers,
)
from accounting.guarantee import Guarantee
from accounting.monte_carlo import EstimatedGuarantee
from accounting.report import SampledClaim


def releases_of(cost: object) -> tuple[Release, ...]:
    """Return the releases that a cost is composed of.

    Raises:
        ConfigError: no proof says that the cost composes with others.
    """
    if isinstance(cost, EstimatedGuarantee):
        raise ConfigError(
            "draws: an estimate by Monte Carlo is a bound at one delta, and no proof composes it "
            "with another run. Use bins without draws, Poisson sampling, or no sampling."
        )
    if isinstance(cost, ComposedGuarantee):
        return cost.releases
    return ComposedGuarantee((cost,)).releases  # type: ignore[arg-type]  # it refuses others


def earlier_runs(values: object) -> ComposedGuarantee:
    """Return what the runs before a fork cost, as its ledger has it (``composed.plain``).

    Raises:
        ConfigError: the values are not the costs of runs.
    """
    cost = ComposedGuarantee(read_releases(values))
    if cost.known is None:
        raise ConfigError("releases: one is stated by somebody; no run from here costs that.")
    return cost


def claim_of(
    run: Guarantee | Sampled, delta: float, earlier: ComposedGuarantee | None = None
) -> SampledClaim | None:
    """Return what a report says beyond mu; None if all is Gaussian, of which mu says everything.

    Args:
        run: what the run costs alone.
        delta: in (0, 1).
        earlier: what earlier runs cost about the same people.

    Raises:
        ConfigError: the run is an estimate by Monte Carlo, and there are earlier ones.
    """
    if isinstance(run, Guarantee) and (earlier is None or earlier.mu is not None):
        return None
    # An estimate takes seconds, so it is refused before it is made.
    before = () if earlier is None else (*earlier.releases, *releases_of(run))
    own = None if isinstance(run, Guarantee) else sampled_claim(run, delta)
    if earlier is None and own is not None:
        return replace(own, cost=_alone(run, own.epsilon, delta))
    both, names = ComposedGuarantee(before), samplers(before[:-1])
    return SampledClaim(
        epsilon=both.epsilon(delta),
        parameters=None if own is None else own.parameters,
        assumptions=() if own is None else own.assumptions,
        cost=both,
        earlier_sampling=names,
        earlier_epsilon=earlier.epsilon(delta) if earlier is not None and names else None,
        composed=True,
    )


def _alone(run: Guarantee | Sampled, epsilon: float, delta: float) -> ComposedGuarantee:
    if isinstance(run, EstimatedGuarantee):
        return ComposedGuarantee((StatedGuarantee(epsilon, delta),), unhidden=Guarantee(run.mu))
    return ComposedGuarantee((run,))
