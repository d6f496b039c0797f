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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from accounting import checks, typed
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
from accounting.truncated import (
    TruncatedGuarantee,
    TruncatedPoissonSampling,
    WithoutReplacementSampling,
)

Members = NDArray[np.int64]
Bounded = TruncatedPoissonSampling | WithoutReplacementSampling
Sampling = PoissonSampling | ScheduledPoissonSampling | Bounded | BallsInBins | BMinSep
Sampled = (
    SampledGuarantee
    | ScheduledGuarantee
    | TruncatedGuarantee
    | AllocatedGuarantee
    | EstimatedGuarantee
)

SamplerName = Literal[
    "poisson",
    "scheduled-poisson",
    "truncated-poisson",
    "without-replacement",
    "balls-in-bins",
    "b-min-sep",
]

KEY_BYTES = 32
SAMPLERS: Mapping[str, type[Sampling]] = {
    "poisson": PoissonSampling,
    "scheduled-poisson": ScheduledPoissonSampling,
    "truncated-poisson": TruncatedPoissonSampling,
    "without-replacement": WithoutReplacementSampling,
    "balls-in-bins": BallsInBins,
    "b-min-sep": BMinSep,
}
"""Samplers by the name that people type."""
NEEDED: Mapping[str, Literal["expected_batch", "expected_batches", "batch", "bins"]] = {
    "poisson": "expected_batch",
    "scheduled-poisson": "expected_batches",
    "truncated-poisson": "expected_batch",
    "without-replacement": "batch",
    "balls-in-bins": "bins",
    "b-min-sep": "expected_batch",
}
"""The option that a sampler cannot do without."""
_OPTIONS = {
    "poisson": {"expected_batch"},
    "scheduled-poisson": {"from_round", "expected_batches"},
    "truncated-poisson": {"expected_batch", "most"},
    "without-replacement": {"batch"},
    "balls-in-bins": {"bins", "chosen", "redraw", "draws"},
    "b-min-sep": {"expected_batch", "min_separation", "draws"},
}


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
            (before the cut).
        from_round: of scheduled-poisson: rounds from which on an expected batch holds.
        expected_batches: of scheduled-poisson: one per such round.
        most: of truncated-poisson: members of a round, at most.
        batch: of without-replacement: members of every round.
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
    most: int | None = None
    batch: int | None = None
    bins: int | None = None
    chosen: int | None = None
    redraw: bool | None = None
    min_separation: int | None = None
    population: int | None = None
    draws: int | None = None

    def __post_init__(self) -> None:
        beside = {"truncated-poisson": ("most",), "scheduled-poisson": ("from_round",)}
        for needed in (NEEDED[self.name], *beside.get(self.name, ())):
            if getattr(self, needed) is None:
                raise ConfigError(f"{needed}: is missing; {self.name} needs it.")
        for key in set.union(*_OPTIONS.values()):
            if getattr(self, key) is not None and key not in _OPTIONS[self.name]:
                raise ConfigError(f"{key}: is not of {self.name}; leave it out.")

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
        values = typed.typed_values(cls, name, options, _OPTIONS[name])
        return cls(name=name, **values), seed  # type: ignore[arg-type]

    def sampler(self, mechanism: Mechanism, population: int | None) -> Sampling:
        """Return the sampler of these members, for the rounds of the mechanism."""
        if self.bins is not None:
            chosen = 1 if self.chosen is None else self.chosen
            return BallsInBins(self.bins, mechanism.rounds, bool(self.redraw), chosen)
        if population is None:
            raise ConfigError(f"population is missing: {self.name} draws members from it.")
        if self.batch is not None:
            return WithoutReplacementSampling(self.batch, population)
        if self.expected_batches is not None:
            return ScheduledPoissonSampling(
                self.from_round or (), self.expected_batches, population
            )
        batch = self.expected_batch or 0.0
        if self.most is not None:
            return TruncatedPoissonSampling(batch, population, self.most)
        if self.name == "poisson":
            alone = mechanism.name in ("independent", "scheduled")
            groups = 1 if alone else bands_of(mechanism)
            return PoissonSampling(batch, population, groups)
        apart = self.min_separation
        return BMinSep(batch, population, bands_of(mechanism) if apart is None else apart)

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
        draws = {} if self.draws is None else {"draws": self.draws}
        return Estimate(**draws, **({} if seed is None else {"seed": seed}))


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
    if isinstance(sampling, PoissonSampling | ScheduledPoissonSampling):
        if estimate is not None:
            raise ConfigError("draws: Poisson sampling is accounted for in closed form; leave out.")
        return _of_poisson(mechanism, sampling, z, method)
    if isinstance(sampling, Bounded):
        if estimate is not None:
            raise ConfigError("draws: samples of bounded size have a closed form; leave out.")
        return _of_bounded_size(mechanism, sampling, z)
    if estimate is not None:
        return EstimatedGuarantee(z, sampling, mechanism, estimate.draws, estimate.seed)
    if isinstance(sampling, BMinSep):
        raise ConfigError("draws: b-min-sep has no closed form; it needs an estimate.")
    if not isinstance(sampling, BallsInBins):
        raise ConfigError(f"sampling={sampling!r}: must be a sampler of this package.")
    return _in_bins(mechanism, sampling, z)


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


def _of_bounded_size(mechanism: Mechanism, sampling: Bounded, z: float) -> TruncatedGuarantee:
    if mechanism.name == "scheduled":
        raise ConfigError("scheduled: samples of bounded size have one noise; or use 'poisson'.")
    if mechanism.name != "independent":
        raise ConfigError(
            f"{mechanism.name}: no proof covers correlated noise with samples of bounded size; use "
            "independent noise, or 'poisson'."
        )
    probability, most = 1.0, 0
    if isinstance(sampling, TruncatedPoissonSampling):
        probability, most = sampling.probability, sampling.most
    else:
        most = sampling.batch
    return TruncatedGuarantee(z, probability, sampling.population, most, mechanism.rounds)


def _in_bins(mechanism: Mechanism, sampling: BallsInBins, z: float) -> AllocatedGuarantee:
    refuse_other_rounds(sampling, mechanism)
    return AllocatedGuarantee(z, sampling, None if mechanism.name == "independent" else mechanism)


def sampled_claim(run: Sampled, delta: float) -> SampledClaim:
    """Return what a report says of a sampled run at ``delta``; an estimate takes seconds."""
    values: dict[str, Any]
    if isinstance(run, SampledGuarantee):
        values = {"name": "poisson", "probability": run.probability, "groups": run.groups}
        values |= {"steps": run.steps, "method": run.method}
        return SampledClaim(run.epsilon(delta), values, run.assumptions)
    if isinstance(run, ScheduledGuarantee):
        kinds = [(s.noise_multiplier, s.probability, s.steps) for s in run.steps]
        values = {"name": "poisson", "probability": max(q for _, q, _ in kinds)}
        values |= {"steps": sum(n for *_, n in kinds), "kinds": kinds, "method": "pld"}
        return SampledClaim(run.epsilon(delta), values, run.assumptions)
    if isinstance(run, TruncatedGuarantee):
        values = {"name": "without-replacement", "batch": run.most}
        if run.probability < 1:
            values = {"name": "truncated-poisson", "probability": run.probability, "most": run.most}
        values |= {"steps": run.steps, "method": "profile"}
        return SampledClaim(run.epsilon(delta), values, run.assumptions)
    if isinstance(run.sampling, BallsInBins):
        values = {"name": "balls-in-bins", "bins": run.sampling.bins}
        values |= {"passes": run.sampling.passes, "method": "convolution"}
        values |= {"redraw": True} if run.sampling.redraw else {}
        values |= {"chosen": run.sampling.chosen} if run.sampling.chosen > 1 else {}
    else:
        values = {"name": "b-min-sep", "probability": run.sampling.probability}
        values["min_separation"] = run.sampling.min_separation
    if isinstance(run, EstimatedGuarantee):
        values |= {"method": "monte-carlo", "draws": run.samples, "draw_seed": run.seed}
        values["failure_probability"] = run.failure(delta)
    return SampledClaim(run.epsilon(delta), values, run.assumptions)


def participation_of(sampling: Sampling, rounds: int) -> Participation:
    """Return the limits that every draw of a sampler keeps to, whoever takes part.

    >>> participation_of(BallsInBins(8, 20), 20)
    Participation(rounds=20, max_participations=3, min_separation=8)
    """
    if isinstance(sampling, PoissonSampling):
        turn = apart = sampling.groups
    elif isinstance(sampling, Bounded | ScheduledPoissonSampling):
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
    name = next(name for name, kind in SAMPLERS.items() if kind is type(sampling))
    values = asdict(sampling)
    unusual = {"redraw": False, "chosen": 1}  # no plan of an older version had them
    return {"name": name, **{k: v for k, v in values.items() if (k, v) not in unusual.items()}}


def sampling_from_dict(values: Mapping[str, Any]) -> Sampling:
    """Return the sampler that ``sampling_to_dict`` wrote."""
    options = dict(values)
    name = options.pop("name", None)
    if name not in SAMPLERS:
        raise ConfigError(f"sampling={name!r}: must be one of {', '.join(SAMPLERS)}.")
    try:
        return SAMPLERS[name](**options)
    except TypeError as error:
        raise ConfigError(f"sampling={name}: {error}.") from None


def cohorts(sampling: Sampling, *, members: int, rounds: int, key: bytes) -> Iterator[Members]:
    """Yield the members of each round, ascending, 0 to members - 1.

    Args:
        sampling: the sampler of the guarantee. In the groups of ``PoissonSampling`` member i joins
            only rounds that leave the remainder i mod groups.
        members: how many there are; the population, where the sampler names one.
        rounds: how many cohorts; for bins, their own number of rounds.
        key: 32 secret bytes from the operating system, for this run alone.

    >>> drawn = list(cohorts(BallsInBins(2, 4), members=5, rounds=4, key=bytes(32)))
    >>> sorted([*drawn[0].tolist(), *drawn[1].tolist()])
    [0, 1, 2, 3, 4]
    >>> bool((drawn[0] == drawn[2]).all())
    True
    """
    members, rounds = checks.count("members", members), checks.rounds(rounds)
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ConfigError(f"key: must be {KEY_BYTES} secret bytes.")
    if isinstance(sampling, BallsInBins):
        if rounds != sampling.rounds:
            raise ConfigError(f"rounds={rounds}: the bins are for {sampling.rounds} rounds.")
        return _bins(sampling, members, key)
    if not isinstance(sampling, PoissonSampling | ScheduledPoissonSampling | Bounded | BMinSep):
        raise ConfigError(f"sampling={sampling!r}: must be a sampler of this package.")
    if members != sampling.population:
        raise ConfigError(f"members={members}: the sampler has population={sampling.population}.")
    if isinstance(sampling, PoissonSampling | ScheduledPoissonSampling):
        return _poisson(sampling, members, rounds, key)
    if isinstance(sampling, Bounded):
        return _of_size(sampling, members, rounds, key)
    return _separated(sampling, members, rounds, key)


def _poisson(
    sampling: PoissonSampling | ScheduledPoissonSampling, members: int, rounds: int, key: bytes
) -> Iterator[Members]:
    if isinstance(sampling, PoissonSampling):
        rates, groups = np.full(rounds, sampling.probability), sampling.groups
    else:
        rates, groups = sampling.probabilities(rounds), 1
    group = np.arange(members) % groups
    for t, rate in enumerate(rates.tolist()):
        threshold = np.uint64(int(rate * 2.0**53))
        joins = (_words(key, "poisson", t, members) >> np.uint64(11)) < threshold
        yield np.flatnonzero(joins & (group == t % groups))


def _of_size(sampling: Bounded, members: int, rounds: int, key: bytes) -> Iterator[Members]:
    joined = np.arange(members)
    for t in range(rounds):
        if isinstance(sampling, TruncatedPoissonSampling):
            most, threshold = sampling.most, np.uint64(int(sampling.probability * 2.0**53))
            joins = (_words(key, "poisson", t, members) >> np.uint64(11)) < threshold
            joined = np.flatnonzero(joins)
        else:
            most = sampling.batch
        yield joined if len(joined) <= most else np.sort(joined[_order(key, t, joined)[:most]])


def _order(key: bytes, t: int, joined: Members) -> Members:
    """Return a uniformly random order of those who joined."""
    attempt, words = 0, np.zeros(2, np.uint64)
    while len(np.unique(words)) < len(words):  # equal words would favour the first
        words = _words(key, f"order {attempt}", t, len(joined))
        attempt += 1
    return np.argsort(words)


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
    threshold = np.uint64(int(p * 2.0**53))
    # stationary: free from round 0 with weight 1, from rounds 1 to b - 1 with weight p each
    start = _words(key, "start", 0, members) / 2.0**64 * (1 + (b - 1) * p)
    free = np.where(start < 1, 0, np.minimum(1 + np.floor((start - 1) / p), b - 1)).astype(np.int64)
    for t in range(rounds):
        joins = (_words(key, "b-min-sep", t, members) >> np.uint64(11)) < threshold
        now = np.flatnonzero(joins & (free <= t))
        free[now] = t + b
        yield now


def _words(key: bytes, purpose: str, index: int, count: int) -> NDArray[np.uint64]:
    named = b"privpart cohorts 1|" + purpose.encode() + b"|" + index.to_bytes(8, "little") + key
    return np.frombuffer(hashlib.shake_256(named).digest(8 * count), dtype="<u8").astype(np.uint64)
