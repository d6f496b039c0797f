"""Cohorts: who takes part in each round, drawn from a secret key as the accountant assumes.

The sampler that an amplified guarantee names is the object that draws: its probability, bins or
separation are read from it here and there. ``sampled_guarantee`` returns the one accountant that
covers a sampler and a mechanism. Words of 64 bits come from SHAKE-256 of key, purpose and
round, so the cohorts of a run can be drawn again from the key, in any process. Whoever has the key,
or sees who takes part, is not covered by the amplification.

A member joins if 53 bits are below its probability, rounded down for ``PoissonSampling``, where
less is safer, and exact for ``TruncatedPoissonSampling`` and ``BMinSep``, whose probabilities are
multiples of 2^-53; the start of ``BMinSep`` is exact to about 2^-52. Bins are exactly uniform.
"""

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accounting import checks, typed
from accounting.bounded import (
    ReplacedGuarantee,
    TruncatedGuarantee,
    TruncatedPoissonSampling,
    WithoutReplacementSampling,
    WithReplacementSampling,
)
from accounting.checks import ConfigError
from accounting.mechanisms import Mechanism
from accounting.monte_carlo import BMinSep, EstimatedGuarantee
from accounting.participation import Participation
from accounting.random_allocation import AllocatedGuarantee, BallsInBins, refuse_other_rounds
from accounting.report import SampledClaim
from accounting.scheduled_steps import (
    ScheduledGuarantee,
    ScheduledPoissonSampling,
    scheduled_guarantee,
)
from accounting.subsampled import (
    PoissonSampling,
    SampledGuarantee,
    SampledMethod,
    bands_of,
    poisson_guarantee,
)
from accounting.user_level import ExampleSampling, UserGuarantee

Members = NDArray[np.int64]
Bounded = TruncatedPoissonSampling | WithoutReplacementSampling | WithReplacementSampling
Sampling = (
    PoissonSampling | ScheduledPoissonSampling | ExampleSampling | Bounded | BallsInBins | BMinSep
)
Sampled = (
    SampledGuarantee
    | ScheduledGuarantee
    | UserGuarantee
    | TruncatedGuarantee
    | ReplacedGuarantee
    | AllocatedGuarantee
    | EstimatedGuarantee
)

SamplerName = Literal[
    "poisson",
    "scheduled-poisson",
    "poisson-examples",
    "truncated-poisson",
    "without-replacement",
    "with-replacement",
    "balls-in-bins",
    "b-min-sep",
]

KEY_BYTES = 32


class Kind(NamedTuple):
    """A sampler's class, the options that it cannot do without, and others that it takes."""

    sampler: type[Sampling]
    needs: tuple[str, ...]
    takes: tuple[str, ...] = ()


SAMPLERS: Mapping[str, Kind] = {
    "poisson": Kind(PoissonSampling, ("expected_batch",)),
    "scheduled-poisson": Kind(ScheduledPoissonSampling, ("expected_batches", "from_round")),
    "poisson-examples": Kind(ExampleSampling, ("expected_batch", "examples", "per_user")),
    "truncated-poisson": Kind(TruncatedPoissonSampling, ("expected_batch", "most")),
    "without-replacement": Kind(WithoutReplacementSampling, ("batch",)),
    "with-replacement": Kind(WithReplacementSampling, ("batch",)),
    "balls-in-bins": Kind(BallsInBins, ("bins",), ("chosen", "redraw", "draws")),
    "b-min-sep": Kind(BMinSep, ("expected_batch",), ("min_separation", "most", "draws")),
}
"""Samplers by the name that people type."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The draws of a Monte Carlo estimate; a fresh seed is drawn when this object is made.

    Args:
        draws: how many, in each direction, 10,000 to 10^9.
        seed: of the draws, >= 0. Only for a fresh one the probability of error holds, so give it
            to repeat a figure, never to choose one.
    """

    draws: int = 1_000_000
    seed: int = field(default_factory=lambda: secrets.randbits(53))

    def __post_init__(self) -> None:
        checks.count("draws", self.draws, minimum=10_000, maximum=10**9)
        checks.count("seed", self.seed, minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChoice:
    """A sampler by its name and options; ``sampler`` makes it for a mechanism and a population.

    Args:
        name: of the sampler.
        expected_batch: of poisson, truncated-poisson and b-min-sep: members of a round, on average
            (before the cut); of poisson-examples: examples.
        from_round: of scheduled-poisson: rounds from which on an expected batch holds.
        expected_batches: of scheduled-poisson: one per such round.
        examples: of poisson-examples: how many there are, of all users.
        per_user: of poisson-examples: most examples of one user.
        most: of truncated-poisson and b-min-sep: members of a round, at most.
        batch: of without-replacement: members of every round; of with-replacement: its places.
        bins: of balls-in-bins: a member takes part in one round of so many.
        chosen: of balls-in-bins: a member is in so many different bins, by default 1.
        redraw: of balls-in-bins: whether every pass puts the members into bins anew.
        min_separation: of b-min-sep; None takes the number of bands.
        population: number of members, where nothing else says it.
        draws: of an estimate by Monte Carlo; b-min-sep has no other accountant.
    """

    name: SamplerName
    expected_batch: float | None = None
    from_round: tuple[int, ...] | None = None
    expected_batches: tuple[float, ...] | None = None
    examples: int | None = None
    per_user: int | None = None
    most: int | None = None
    batch: int | None = None
    bins: int | None = None
    chosen: int | None = None
    redraw: bool | None = None
    min_separation: int | None = None
    population: int | None = None
    draws: int | None = None

    def __post_init__(self) -> None:
        _, needs, takes = SAMPLERS[self.name]
        for option in needs:
            if getattr(self, option) is None:
                raise ConfigError(f"{option}: is missing; {self.name} needs it.")
        for option in [f.name for f in fields(self) if getattr(self, f.name) is not None]:
            if option not in ("name", "population", *needs, *takes):
                raise ConfigError(f"{option}: is not of {self.name}; leave it out.")

    @classmethod
    def parse(cls, text: str) -> "tuple[SamplingChoice, int | None]":
        """Read a choice as people type it, and the seed of its draws, None for a fresh one.

        A choice has no seed, because a plan must not fix one.

        >>> SamplingChoice.parse("balls-in-bins:bins=8,draws=10000,draw_seed=3")[1]
        3
        """
        name, options = named_options(text)
        text_of_seed = options.pop("draw_seed", None)
        try:
            seed = None if text_of_seed is None else int(text_of_seed)
        except ValueError:
            raise ConfigError(f"draw_seed={text_of_seed}: must be a whole number.") from None
        _, needs, takes = SAMPLERS[name]
        values = typed.typed_values(cls, name, options, (*needs, *takes))
        return cls(name=name, **values), seed  # type: ignore[arg-type]

    def sampler(self, mechanism: Mechanism, population: int | None) -> Sampling:
        """Return the sampler of these members, for the rounds of the mechanism."""
        kind, needs, takes = SAMPLERS[self.name]
        given = {option: getattr(self, option) for option in (*needs, *takes) if option != "draws"}
        given = {option: value for option, value in given.items() if value is not None}
        if kind is BallsInBins:
            given["rounds"] = mechanism.rounds
        elif kind is ExampleSampling:
            if population is not None and population * given["per_user"] < self.examples:
                raise ConfigError(
                    f"per_user={self.per_user}: a population of {population} with so few each has "
                    f"less than {self.examples} examples, so somebody has more."
                )
        elif population is None:
            raise ConfigError(f"population is missing: {self.name} draws members from it.")
        else:
            given["population"] = population
        if kind is PoissonSampling and mechanism.name not in ("independent", "scheduled"):
            given["groups"] = bands_of(mechanism)
        elif kind is BMinSep and self.min_separation is None:
            given["min_separation"] = bands_of(mechanism)
        return kind(**given)

    def expected(self, population: int) -> float:
        """Return the public expected number of members of a round, the first if it changes."""
        if self.bins:
            return population * (self.chosen or 1) / self.bins
        if self.expected_batches:
            return self.expected_batches[0]
        return self.batch or min(self.expected_batch or 0.0, self.most or math.inf)

    def estimate(self, seed: int | None = None) -> Estimate | None:
        """Return the draws of a new estimate; None if the sampler is accounted in closed form."""
        if self.draws is None and self.name != "b-min-sep":
            if seed is not None:
                raise ConfigError(
                    f"draw_seed={seed}: nothing is drawn; add draws, or leave it out."
                )
            return None
        given = {"draws": self.draws, "seed": seed}
        return Estimate(**{name: value for name, value in given.items() if value is not None})


def named_options(text: str) -> tuple[str, dict[str, str]]:
    """Return the name of a sampler that was typed, and its options as text."""
    name, options = typed.split_text(text)
    return checks.choice("sampling", name, list(SAMPLERS)), options


def sampled_guarantee(
    mechanism: Mechanism,
    sampling: Sampling,
    *,
    noise_multiplier: float,
    estimate: Estimate | None = None,
    method: SampledMethod = "pld",
) -> Sampled:
    """Return the guarantee of sampled rounds, by the one accountant that covers them."""
    z = noise_multiplier
    if estimate is not None:
        if isinstance(sampling, BallsInBins | BMinSep):
            return EstimatedGuarantee(z, sampling, mechanism, estimate.draws, estimate.seed)
        raise ConfigError("draws: this sampler is accounted for in closed form; leave them out.")
    if isinstance(sampling, PoissonSampling | ScheduledPoissonSampling):
        return _of_poisson(mechanism, sampling, z, method)
    if isinstance(sampling, ExampleSampling | Bounded):
        return _of_steps(mechanism, sampling, z)
    if isinstance(sampling, BallsInBins):
        refuse_other_rounds(sampling, mechanism)
        alone = mechanism.name == "independent"
        return AllocatedGuarantee(z, sampling, None if alone else mechanism)
    if isinstance(sampling, BMinSep):
        raise ConfigError("draws: b-min-sep has no closed form; it needs an estimate.")
    raise ConfigError(f"sampling={sampling!r}: must be a sampler of this package.")


def _of_poisson(
    mechanism: Mechanism,
    sampling: PoissonSampling | ScheduledPoissonSampling,
    z: float,
    method: SampledMethod,
) -> SampledGuarantee | ScheduledGuarantee:
    if isinstance(sampling, PoissonSampling) and mechanism.name != "scheduled":
        return poisson_guarantee(mechanism, sampling, noise_multiplier=z, method=method)
    if method != "pld":
        raise ConfigError(f"method={method}: steps that differ are composed by 'pld'.")
    return scheduled_guarantee(mechanism, sampling, noise_multiplier=z)


def _of_steps(
    mechanism: Mechanism, sampling: Bounded | ExampleSampling, z: float
) -> TruncatedGuarantee | ReplacedGuarantee | UserGuarantee:
    steps = mechanism.rounds
    if mechanism.name == "scheduled":
        raise ConfigError("scheduled: this sampler takes one noise multiplier; 'poisson' more.")
    if mechanism.name != "independent":
        several = isinstance(sampling, ExampleSampling)
        kind = "several examples of a user" if several else "samples of bounded size"
        raise ConfigError(
            f"{mechanism.name}: no proof covers correlated noise with {kind}; use independent "
            "noise, or 'poisson'."
        )
    if isinstance(sampling, ExampleSampling):
        return UserGuarantee(z, sampling.probability, sampling.per_user, steps)
    if isinstance(sampling, WithReplacementSampling):
        return ReplacedGuarantee(z, sampling.batch, sampling.population, steps)
    if isinstance(sampling, WithoutReplacementSampling):
        return TruncatedGuarantee(z, 1.0, sampling.population, sampling.batch, steps)
    return TruncatedGuarantee(z, sampling.probability, sampling.population, sampling.most, steps)


def sampled_claim(run: Sampled, delta: float) -> SampledClaim:
    """Return what a report says of a sampled run at ``delta``; an estimate takes seconds."""
    clips = 1
    if isinstance(run, SampledGuarantee):
        values = _named("poisson", run, "probability", "groups", "steps", "method")
    elif isinstance(run, ScheduledGuarantee):
        kinds = [(s.noise_multiplier, s.probability, s.steps) for s in run.steps]
        values = {"name": "poisson", "probability": max(q for _, q, _ in kinds)}
        values |= {"steps": sum(n for *_, n in kinds), "kinds": kinds, "method": "pld"}
    elif isinstance(run, UserGuarantee):
        clips, values = run.per_user, _named("poisson-examples", run, "probability", "per_user")
        values |= {"steps": run.steps, "method": "mixture"}
    elif isinstance(run, ReplacedGuarantee):
        clips, values = run.batch, _named("with-replacement", run, "batch", "steps")
        values["method"] = "profile"
    elif isinstance(run, TruncatedGuarantee):
        values = {"name": "without-replacement", "batch": run.most}
        if run.probability < 1:
            values = _named("truncated-poisson", run, "probability", "most")
        values |= {"steps": run.steps, "method": "profile"}
    else:
        values = _with_method(run, delta)
    return SampledClaim(run.epsilon(delta), values, run.assumptions, clips=clips)


def _with_method(run: AllocatedGuarantee | EstimatedGuarantee, delta: float) -> dict[str, Any]:
    if isinstance(sampling := run.sampling, BallsInBins):
        values = _named("balls-in-bins", sampling, "bins", "passes") | {"method": "convolution"}
        values |= {"redraw": True} if sampling.redraw else {}
        values |= {"chosen": sampling.chosen} if sampling.chosen > 1 else {}
    else:
        values = _named("b-min-sep", sampling, "probability", "min_separation")
        values |= {"most": sampling.most} if sampling.most else {}
    if isinstance(run, EstimatedGuarantee):
        values |= {"method": "monte-carlo", "draws": run.samples, "draw_seed": run.seed}
        values["failure_probability"] = run.failure(delta)
    return values


def _named(name: str, source: object, *attributes: str) -> dict[str, Any]:
    return {"name": name, **{key: getattr(source, key) for key in attributes}}


def participation_of(sampling: Sampling, rounds: int) -> Participation:
    """Return the limits that every draw of a sampler keeps to, whoever takes part.

    >>> participation_of(BallsInBins(8, 20), 20)
    Participation(rounds=20, max_participations=3, min_separation=8)
    """
    if isinstance(sampling, PoissonSampling):
        turn = apart = sampling.groups
    elif isinstance(sampling, Bounded | ScheduledPoissonSampling | ExampleSampling):
        turn = apart = 1
    elif isinstance(sampling, BallsInBins):
        # Drawn anew, a member may be in the last bin of a pass and in the first of the next.
        once = sampling.chosen == 1 and not sampling.redraw
        return Participation(rounds, sampling.participations, sampling.bins if once else 1)
    else:
        turn = apart = sampling.min_separation
    return Participation(rounds, -(-checks.rounds(rounds) // turn), apart)


def sampled_passes(rounds: int, bins: int | None) -> Participation:
    """Return what a mechanism is fitted to: every pass of a member in bins, else one round."""
    if bins is None or not 1 < bins <= rounds:
        return Participation(rounds)
    return participation_of(BallsInBins(bins, rounds), rounds)


def sampling_to_dict(sampling: Sampling) -> dict[str, Any]:
    """Return a sampler as plain values, ready for JSON."""
    name = next(name for name, kind in SAMPLERS.items() if kind.sampler is type(sampling))
    values = asdict(sampling)
    unusual = {"redraw": False, "chosen": 1, "most": None}  # no plan of an older version had them
    return {"name": name, **{k: v for k, v in values.items() if (k, v) not in unusual.items()}}


def sampling_from_dict(values: Mapping[str, Any]) -> Sampling:
    """Return the sampler that ``sampling_to_dict`` wrote."""
    options = dict(values)
    name = options.pop("name", None)
    if name not in SAMPLERS:
        raise ConfigError(f"sampling={name!r}: must be one of {', '.join(SAMPLERS)}.")
    try:
        return SAMPLERS[name].sampler(**options)
    except TypeError as error:
        raise ConfigError(f"sampling={name}: {error}.") from None


def cohorts(
    sampling: Sampling,
    *,
    members: int,
    rounds: int,
    key: bytes,
    owners: Sequence[Hashable] | None = None,
) -> Iterator[Members]:
    """Yield the members of each round, ascending, 0 to members - 1; with replacement, some twice.

    Args:
        sampling: the sampler of the guarantee. In the groups of ``PoissonSampling`` member i joins
            only rounds that leave the remainder i mod groups.
        members: how many there are; the population, where the sampler names one.
        rounds: how many cohorts; for bins, their own number of rounds.
        key: 32 secret bytes from the operating system, for this run alone.
        owners: of ``ExampleSampling``, whose members are examples: the user of each of them, of
            whom none may have more than ``per_user``.

    >>> drawn = list(cohorts(BallsInBins(2, 4), members=5, rounds=4, key=bytes(32)))
    >>> sorted([*drawn[0].tolist(), *drawn[1].tolist()])
    [0, 1, 2, 3, 4]
    >>> bool((drawn[0] == drawn[2]).all())
    True
    """
    members, rounds = checks.count("members", members), checks.rounds(rounds)
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ConfigError(f"key: must be {KEY_BYTES} secret bytes.")
    if not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling={sampling!r}: must be a sampler of this package.")
    if isinstance(sampling, ExampleSampling):
        _refuse_owners(sampling, members, owners)
        return _poisson(PoissonSampling(sampling.expected_batch, members), members, rounds, key)
    if owners is not None:
        raise ConfigError("owners: only examples have them; this sampler draws members.")
    if isinstance(sampling, BallsInBins):
        if rounds != sampling.rounds:
            raise ConfigError(f"rounds={rounds}: the bins are for {sampling.rounds} rounds.")
        return _bins(sampling, members, key)
    if members != sampling.population:
        raise ConfigError(f"members={members}: the sampler has population={sampling.population}.")
    return _of_population(sampling, rounds, key)


def _of_population(
    sampling: PoissonSampling | ScheduledPoissonSampling | Bounded | BMinSep,
    rounds: int,
    key: bytes,
) -> Iterator[Members]:
    if isinstance(sampling, PoissonSampling | ScheduledPoissonSampling):
        return _poisson(sampling, sampling.population, rounds, key)
    if isinstance(sampling, Bounded):
        return _of_size(sampling, sampling.population, rounds, key)
    return _separated(sampling, sampling.population, rounds, key)


def _refuse_owners(
    sampling: ExampleSampling, members: int, owners: Sequence[Hashable] | None
) -> None:
    if owners is None or not members == sampling.examples == len(owners):
        count = "none" if owners is None else len(owners)
        raise ConfigError(
            f"owners: {count} for {members} examples; the user of each of the {sampling.examples} "
            "examples of the sampler must be given."
        )
    ((user, most),) = Counter(owners).most_common(1)
    if most > sampling.per_user:
        raise ConfigError(
            f"owners: {user!r} has {most} examples, and per_user={sampling.per_user}; drop some by "
            "a rule that looks at no other user's."
        )


def _poisson(
    sampling: PoissonSampling | ScheduledPoissonSampling, members: int, rounds: int, key: bytes
) -> Iterator[Members]:
    if isinstance(sampling, PoissonSampling):
        rates, groups = np.full(rounds, sampling.probability), sampling.groups
    else:
        rates, groups = sampling.probabilities(rounds), 1
    group = np.arange(members) % groups
    for t, rate in enumerate(rates.tolist()):
        yield np.flatnonzero(_joins(key, "poisson", t, members, rate) & (group == t % groups))


def _of_size(sampling: Bounded, members: int, rounds: int, key: bytes) -> Iterator[Members]:
    most = sampling.most if isinstance(sampling, TruncatedPoissonSampling) else sampling.batch
    joined = np.arange(members)
    for t in range(rounds):
        if isinstance(sampling, TruncatedPoissonSampling):
            joined = np.flatnonzero(_joins(key, "poisson", t, members, sampling.probability))
        elif isinstance(sampling, WithReplacementSampling):
            joined = np.sort(_number_below(members, most, key, f"places {t}").astype(np.int64))
        yield _cut(joined, most, key, t)


def _cut(joined: Members, most: int, key: bytes, t: int) -> Members:
    """Return the first ``most`` of a uniformly random order, if more joined."""
    if len(joined) <= most:
        return joined
    attempt, words = 0, np.zeros(2, np.uint64)
    while len(np.unique(words)) < len(words):  # equal words would favour the first
        words = _words(key, f"order {attempt}", t, len(joined))
        attempt += 1
    return np.sort(joined[np.argsort(words)[:most]])


def _bins(sampling: BallsInBins, members: int, key: bytes) -> Iterator[Members]:
    for t in range(sampling.rounds):
        turn, place = divmod(t, sampling.bins)
        if place == 0:
            chosen = np.full(members, sampling.chosen, dtype=np.uint64)
        # A member whose last n bins are among the last m is in the next one with chance n / m.
        purpose = f"bins {turn * sampling.redraw} {place}"
        joins = _number_below(sampling.bins - place, members, key, purpose) < chosen
        chosen -= joins
        yield np.flatnonzero(joins)


def _number_below(count: int, members: int, key: bytes, purpose: str) -> NDArray[np.uint64]:
    words = _words(key, purpose, 0, members)
    limit = np.uint64(2**64 // count * count - 1)  # words above it would make some numbers likelier
    attempt = 1
    while (words > limit).any():
        words = np.where(words > limit, _words(key, purpose, attempt, members), words)
        attempt += 1
    return words % np.uint64(count)


def _separated(sampling: BMinSep, members: int, rounds: int, key: bytes) -> Iterator[Members]:
    b, p = sampling.min_separation, sampling.probability
    # stationary: free from round 0 with weight 1, from rounds 1 to b - 1 with weight p each
    start = _words(key, "start", 0, members) / 2.0**64 * (1 + (b - 1) * p)
    free = np.where(start < 1, 0, np.minimum(1 + np.floor((start - 1) / p), b - 1)).astype(np.int64)
    for t in range(rounds):
        now = np.flatnonzero(_joins(key, "b-min-sep", t, members, p) & (free <= t))
        free[now] = t + b  # also of who is dropped now
        yield _cut(now, sampling.most or members, key, t)


def _joins(key: bytes, purpose: str, t: int, members: int, rate: float) -> NDArray[np.bool_]:
    threshold = np.uint64(int(rate * 2.0**53))
    return np.asarray((_words(key, purpose, t, members) >> np.uint64(11)) < threshold)


def _words(key: bytes, purpose: str, index: int, count: int) -> NDArray[np.uint64]:
    named = b"privpart cohorts 1|" + purpose.encode() + b"|" + index.to_bytes(8, "little") + key
    return np.frombuffer(hashlib.shake_256(named).digest(8 * count), dtype="<u8").astype(np.uint64)
