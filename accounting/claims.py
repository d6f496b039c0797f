"""Claims: what a report says of a run whose cost, or that of runs before it, is amplified.

A run alone is claimed by its own accountant; beside earlier runs all of them are one composition
(``accounting.composed``). The attacker's figures follow from the privacy profile of what is
claimed. Of an estimate by Monte Carlo only one pair (epsilon, delta) is known, and no composition.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, reduce
from itertools import chain
from typing import Any

import numpy as np

from accounting.bounded import ReplacedGuarantee, TruncatedGuarantee
from accounting.checks import ConfigError
from accounting.cohorts import Sampled, sampled_claim
from accounting.composed import ComposedGuarantee, Release, StatedGuarantee
from accounting.guarantee import Cost, Guarantee
from accounting.hull import most_detected
from accounting.monte_carlo import EstimatedGuarantee
from accounting.random_allocation import AllocatedGuarantee, Shares
from accounting.report import SampledClaim
from accounting.scheduled_steps import ScheduledGuarantee
from accounting.selection import SelectedGuarantee, fields_of, selected_of
from accounting.sensitivity import Array
from accounting.stated import StatedProfile
from accounting.subsampled import SampledGuarantee
from accounting.user_level import UserGuarantee

_MOST_RELEASES = 200  # of one run and those before it; each kind takes transforms


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
    if isinstance(cost, Alone):
        cost = cost.run
    if isinstance(cost, ScheduledGuarantee):
        return cost.steps
    return ComposedGuarantee((cost,)).releases  # type: ignore[arg-type]  # it refuses others


def together(releases: tuple[Release, ...]) -> ComposedGuarantee:
    """Return what releases cost, or what they cost whoever learns who was sampled, if less."""
    return ComposedGuarantee(releases, known(releases))


def known(releases: Iterable[Release]) -> Guarantee | None:
    """Return what releases cost whoever learns who was sampled; None if one is only stated."""
    gaussians = []
    for release in releases:
        if (mu := getattr(release, "mu", None)) is None:
            return None
        gaussians.append(release if isinstance(release, Guarantee) else Guarantee(mu))
    return reduce(Guarantee.compose, gaussians)


def plain(releases: Iterable[Release]) -> list[dict[str, Any]]:
    """Return releases as plain values, ready for JSON, with all that is Gaussian as one.

    >>> plain((Guarantee(3.0), StatedGuarantee(1.0), Guarantee(4.0)))
    [{'epsilon': 1.0, 'delta': 0.0}, {'mu': 5.000000000000001}]
    """
    values: list[dict[str, Any]] = []
    gaussians: list[Guarantee] = []
    for run in releases:
        release = run.dominating() if isinstance(run, AllocatedGuarantee) else run
        if isinstance(release, Guarantee):
            gaussians.append(release)
        elif isinstance(release, SelectedGuarantee):
            values.append(fields_of(release))
        else:
            fields = asdict(release)  # type: ignore[arg-type]  # all kinds are dataclasses
            fields.pop("method", None)
            values.append({k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()})
    both = [reduce(Guarantee.compose, gaussians)] if gaussians else []
    return values + [{"mu": gaussian.mu} for gaussian in both]


def read_releases(values: object) -> tuple[Release, ...]:
    """Return the releases that ``plain`` wrote, 1 to 200 of them.

    Raises:
        ConfigError: the values are not of such releases, or out of range.
    """
    if not isinstance(values, list) or not 0 < len(values) <= _MOST_RELEASES:
        raise ConfigError(f"releases: must be a list of 1 to {_MOST_RELEASES}.")
    return tuple(map(_read, values))


def _read(values: object) -> Release:
    fields = dict(values) if isinstance(values, Mapping) else {}
    lists = [value for value in fields.values() if isinstance(value, list)]
    numbers = [value for value in fields.values() if not isinstance(value, list)]
    if any(type(number) not in (int, float) for number in chain(numbers, *lists)):
        raise ConfigError(f"releases: {str(values)[:60]!r} is not a release's cost.")
    kind = next((kind for key, kind in _KINDS.items() if key in fields), Guarantee)
    try:
        return selected_of(fields) if "expected" in fields else kind(**fields)
    except (TypeError, KeyError, ValueError):
        raise ConfigError(f"releases: {str(values)[:60]!r} is not a release's cost.") from None


_KINDS: Mapping[str, Callable[..., Release]] = {
    "bins": Shares,
    "per_user": UserGuarantee,
    "batch": ReplacedGuarantee,
    "most": TruncatedGuarantee,
    "steps": SampledGuarantee,
    "epsilon": StatedGuarantee,
    "epsilons": StatedProfile,
}
"""Kind of a release by a field that no kind before it has."""


def samplers(releases: Iterable[Release]) -> tuple[str, ...]:
    """Return the names of the samplers that hide who took part in some of the releases."""
    names = set()
    for release in releases:
        if isinstance(release, TruncatedGuarantee):
            cut = release.probability < 1
            names.add("truncated-poisson" if cut else "without-replacement")
        elif isinstance(release, ReplacedGuarantee):
            names.add("with-replacement")
        elif isinstance(release, UserGuarantee):
            names.add("poisson-examples")
        elif isinstance(release, SampledGuarantee):
            names.add("poisson")
        elif isinstance(release, Shares | AllocatedGuarantee):
            names.add("balls-in-bins")
    return tuple(sorted(names))


def earlier_runs(values: object) -> ComposedGuarantee:
    """Return what the runs before a fork cost, as its ledger has it (``plain``).

    Raises:
        ConfigError: the values are not the costs of runs.
    """
    cost = together(read_releases(values))
    if cost.unhidden is None:
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
    claim = None if isinstance(run, Guarantee) else sampled_claim(run, delta)
    if earlier is None and claim is not None:
        return replace(claim, cost=_alone(run, claim.epsilon, delta))
    both, names = together(before), samplers(earlier.releases if earlier else ())
    return SampledClaim(
        epsilon=both.epsilon(delta),
        parameters=None if claim is None else claim.parameters,
        assumptions=() if claim is None else claim.assumptions,
        cost=both,
        earlier_sampling=names,
        earlier_epsilon=earlier.epsilon(delta) if earlier and names else None,
        composed=True,
    )


def _alone(run: Guarantee | Sampled, epsilon: float, delta: float) -> Cost:
    if isinstance(run, EstimatedGuarantee):
        return ComposedGuarantee((StatedGuarantee(epsilon, delta),), unhidden=Guarantee(run.mu))
    # With correlated noise each delta of bins is the least of many bounds, which takes longer.
    independent = isinstance(run, AllocatedGuarantee) and run.mechanism is None
    if independent or isinstance(run, SampledGuarantee):
        return Alone(run, epsilon)  # type: ignore[arg-type]
    return together(releases_of(run))


@dataclass(frozen=True)
class Alone(Cost):
    """A run beside no other: what an attacker gets, by its own accountant.

    Every (epsilon, delta) of the run bounds any test's rates, as in ``ComposedGuarantee``; some of
    them do, in a fifth of the time that a composition takes.

    Args:
        run: it has an accountant of its own.
        claimed: its epsilon, up to which and a little further deltas are computed.
    """

    run: SampledGuarantee | AllocatedGuarantee
    claimed: float

    def epsilon(self, delta: float) -> float:
        """Return an epsilon that holds with ``delta``."""
        return self._composed.epsilon(delta)

    def advantage(self) -> float:
        """Return an upper bound on any membership test's true minus false-positive rate."""
        return min(float(self._lines[1][0]), Guarantee(self.run.mu).advantage())

    def tpr_at_fpr(self, fpr: float) -> float:
        """Return an upper bound on the true-positive rate of any membership test."""
        return min(most_detected(*self._lines, fpr), Guarantee(self.run.mu).tpr_at_fpr(fpr))

    @cached_property
    def _lines(self) -> tuple[Array, Array]:
        epsilons = np.linspace(0.0, min(1.2 * self.claimed, 500.0), 64)
        return epsilons, np.array([self.run.delta(float(epsilon)) for epsilon in epsilons])

    @cached_property
    def _composed(self) -> ComposedGuarantee:
        return together(releases_of(self.run))
