"""Events of dp-accounting, read from JSON and written: what other tools say that they release.

dp-accounting has no file format of its own. The JSON here is that of ``DpEvent.to_named_tuple``,
with an object for each named tuple: ``class_name`` and the event's fields.
``docs/concepts/sampling.md`` has the lines that write it. No name in a file is imported.

An event is about one person, who is present or not; a composed guarantee is about a member whose
contributions are there or are zero. They agree where sums are divided by public constants.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from accounting import checks
from accounting.checks import ConfigError, parsed_json
from accounting.composed import ComposedGuarantee, Release, StatedGuarantee
from accounting.guarantee import Guarantee, mu_upper
from accounting.scheduled_steps import ScheduledGuarantee
from accounting.subsampled import SampledGuarantee

_DEEPEST = 50
_MOST_KINDS = 200
"""Different releases, each of which takes a transform; Gaussian ones are one together."""
_MOST_STATED = 10_000
_SUFFIX = "DpEvent"
_FIELDS: Mapping[str, set[str]] = {
    "NoOp": set(),
    "SelfComposed": {"event", "count"},
    "Composed": {"events"},
    "PoissonSampled": {"sampling_probability", "event"},
    "Gaussian": {"noise_multiplier"},
    "Laplace": {"noise_multiplier"},
}
"""What is read of each event. A field beside them would change what it means."""


@dataclass
class Tally:
    """Releases by kind, as many as there are of each.

    Attributes:
        gaussian: sum of mu^2 of all Gaussian releases, exactly.
        poisson: (noise multiplier, probability) -> steps.
        pure: epsilon -> how many.
    """

    gaussian: Fraction = Fraction(0)
    poisson: Counter[tuple[float, float]] = field(default_factory=Counter)
    pure: Counter[float] = field(default_factory=Counter)

    def guarantee(self) -> ComposedGuarantee:
        """Return what all of them cost together."""
        if len(self.poisson) + len(self.pure) > _MOST_KINDS or self.pure.total() > _MOST_STATED:
            raise ConfigError(
                f"events: at most {_MOST_KINDS} different releases that are not Gaussian, and "
                f"{_MOST_STATED:,} of pure epsilon, are composed."
            )
        releases: list[Release] = [Guarantee(_root(self.gaussian))] if self.gaussian else []
        releases += [SampledGuarantee(z, q, steps) for (z, q), steps in self.poisson.items()]
        releases += [StatedGuarantee(epsilon) for epsilon in self.pure.elements()]
        if not releases:
            raise ConfigError("events: none of them releases anything.")
        return ComposedGuarantee(tuple(releases))


def read_events(path: Path) -> ComposedGuarantee:
    """Return what the events in a file cost together.

    Raises:
        ConfigError: the file is not such JSON, or an event has no accountant here.
    """
    text = checks.text_of(path, f"events={path}")
    try:
        event = parsed_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"events={path}: is not JSON: {error or 'nested too deeply'}.") from None
    return composed_events(event)


def composed_events(event: object) -> ComposedGuarantee:
    """Return what an event costs, given as plain values.

    >>> step = {"class_name": "GaussianDpEvent", "noise_multiplier": 2.0}
    >>> run = {"class_name": "SelfComposedDpEvent", "event": step, "count": 4}
    >>> round(composed_events(run).mu, 6)
    1.0
    """
    tally = Tally()
    _count(event, 1, tally, 0)
    return tally.guarantee()


def _count(event: object, times: int, tally: Tally, depth: int) -> None:
    """Add ``times`` of an event to the tally."""
    kind, fields = _kind(event, depth)
    match kind:
        case "NoOp":
            pass
        case "SelfComposed":
            count = checks.count("count", _field(kind, fields, "count")) * times
            checks.count("count", count, maximum=checks.MOST_ROUNDS)
            _count(fields.get("event"), count, tally, depth + 1)
        case "Composed":
            for each in _listed(fields):
                _count(each, times, tally, depth + 1)
        case "PoissonSampled":
            _count_sampled(fields, times, tally, depth)
        case "Gaussian":
            tally.gaussian += times * Fraction(mu_upper(1.0, _noise(kind, fields))) ** 2
        case "Laplace":
            tally.pure[math.nextafter(1 / _noise(kind, fields), math.inf)] += times
        case _:
            raise ConfigError(
                f"{kind}{_SUFFIX}: has no accountant here. Those that have one are Gaussian, "
                "Laplace, Poisson-sampled Gaussian, composed and self-composed ones."
            )


def _count_sampled(fields: Mapping[str, Any], times: int, tally: Tally, depth: int) -> None:
    """Add steps on Poisson samples: several Gaussians on one sample are one, of a greater mu."""
    inner = Tally()
    _count(fields.get("event"), 1, inner, depth + 1)
    if inner.poisson or inner.pure:
        raise ConfigError("PoissonSampledDpEvent: only Gaussian events are accounted for in it.")
    given = _field("PoissonSampled", fields, "sampling_probability")
    q = checks.nonnegative("sampling_probability", given)
    if q:
        checks.rate("sampling_probability", q)
    if q == 1:
        tally.gaussian += times * inner.gaussian
    elif q and inner.gaussian:
        kind, event = _kind(fields["event"], depth)
        # Rounded down; one Gaussian keeps its own number, of which that would take the last bits.
        alone = kind == "Gaussian"
        z = _noise(kind, event) if alone else math.nextafter(1 / _root(inner.gaussian), 0.0)
        tally.poisson[z, q] += times


def _root(squares: Fraction) -> float:
    """Return the square root, rounded up."""
    try:
        return math.nextafter(math.sqrt(math.nextafter(float(squares), math.inf)), math.inf)
    except OverflowError:
        raise ConfigError("noise_multiplier: is too small to promise anything.") from None


def _kind(event: object, depth: int) -> tuple[str, Mapping[str, Any]]:
    if depth > _DEEPEST:
        raise ConfigError(f"events: nested deeper than {_DEEPEST}.")
    name = event.get("class_name") if isinstance(event, Mapping) else None
    if not isinstance(event, Mapping) or not isinstance(name, str) or not name.endswith(_SUFFIX):
        raise ConfigError(
            f"events: {str(event)[:60]!r} is not an event; it must be an object with a class_name "
            "such as GaussianDpEvent, and that event's fields."
        )
    kind = name.removesuffix(_SUFFIX)
    if unread := event.keys() - _FIELDS.get(kind, event.keys()) - {"class_name", "module_name"}:
        raise ConfigError(f"{name}: has no field {min(unread, key=str)!r}.")
    return kind, event


def _listed(fields: Mapping[str, Any]) -> list[Any]:
    if not isinstance(events := fields.get("events"), list):
        raise ConfigError("ComposedDpEvent: events must be a list.")
    return events


def _noise(kind: str, fields: Mapping[str, Any]) -> float:
    return checks.positive("noise_multiplier", _field(kind, fields, "noise_multiplier"))


def _field(kind: str, fields: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401  any JSON
    if name not in fields:
        raise ConfigError(f"{kind}{_SUFFIX}: {name} is missing.")
    return fields[name]


def event_of(guarantee: object) -> dict[str, Any]:
    """Return the event of a run, as plain values that dp-accounting's classes take.

    Raises:
        ConfigError: dp-accounting has no event that costs what the run costs.
    """
    if isinstance(guarantee, Guarantee):
        return _event("Gaussian", noise_multiplier=math.nextafter(1 / guarantee.mu, 0.0))
    if isinstance(guarantee, ScheduledGuarantee):
        return _event("Composed", events=list(map(event_of, guarantee.steps)))
    if isinstance(guarantee, SampledGuarantee):
        step = _event("Gaussian", noise_multiplier=guarantee.noise_multiplier)
        step = _event("PoissonSampled", sampling_probability=guarantee.probability, event=step)
        return _event("SelfComposed", event=step, count=guarantee.steps)
    raise ConfigError(
        "format=events: dp-accounting has no event for this sampler; it has them for Poisson "
        "sampling, and for runs that do not sample."
    )


def _event(kind: str, **values: object) -> dict[str, Any]:
    return {"class_name": f"{kind}{_SUFFIX}", **values}
