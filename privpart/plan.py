"""Privacy plan: everything that the guarantee of a run depends on, fixed before it starts.

``PrivacyPlan`` is the promise. Two of its parts are public rules of their own:

Schedule: which groups of parameters train in which round (FedPart, Wang et al. 2024, whose Tables 1
to 3 have warm_up = between = 5 and 2 rounds per group, and Tables 5 to 7 between = 0). It is a
function of public numbers alone, so it costs no privacy; ``accounting.Grouped`` is built from it.

Adaptive clipping: a clip norm that follows a quantile of the update norms, privately (Andrew et al.
2021, "Differentially Private Learning with Adaptive Clipping"). Every client adds a bit that says
whether its update was no longer than the clip norm; the noised share of such bits moves the clip
norm by a factor. Replacing a client's update by zeros changes its bit from "longer" to "no longer",
so it moves the sum of bits by up to 1 under our adjacency. (Andrew et al. centre the bits and
charge 1/2, for clients that are absent altogether.) The clip norm changes only where a tree
restarts: inside a tree it would change the sensitivity of sums that were already noised.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Context, Decimal
from typing import Any, Literal, get_args

from accounting import (
    ComposedGuarantee,
    Estimate,
    ExampleSampling,
    Guarantee,
    Mechanism,
    Participation,
    PrivacyReport,
    WithReplacementSampling,
    checks,
    guarantee,
    mechanism_from_dict,
    participation_of,
    piecewise,
    sampled_guarantee,
)
from accounting.checks import ConfigError
from accounting.claims import claim_of, known
from accounting.cohorts import (
    Sampled,
    Sampling,
    sampling_from_dict,
    sampling_to_dict,
)
from accounting.metrics import Metrics
from accounting.report import NoiseOrigin, Unit
from privpart.secure.rules import SecureSums
from privpart.settings.ranges import at_least_tiny

Order = Literal["sequential", "reverse", "random"]
Rounds = tuple[tuple[int, ...], ...]
"""The groups that train in each round, ascending."""

_MOST_CLIENTS = 2**53
"""Largest whole number up to which every one is exactly a float64."""
_CLIP_NORM_RANGE = 1e4
"""An adaptive clip norm stays within this factor of the first one."""


@dataclass(frozen=True, slots=True)
class ByRound:
    """A public number that changes at rounds fixed beforehand.

    Args:
        from_round: rounds from which on a value holds, ascending; the first is 0.
        value: per such round, > 0.

    >>> ByRound((0, 10), (1.0, 0.5)).at(10)
    0.5
    """

    from_round: tuple[int, ...]
    value: tuple[float, ...]

    def __post_init__(self) -> None:
        starts, values = piecewise.checked("value", self.from_round, self.value)
        object.__setattr__(self, "from_round", starts)
        object.__setattr__(self, "value", values)

    def at(self, round_: int) -> float:
        """Return the value of a round, >= 0."""
        return piecewise.at(self.from_round, self.value, round_)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlan:
    """The promise to one client, independent of who trains and on what data.

    Args:
        mechanism: its encoder sets the cost, its decoder the noise.
        participation: how often one client may take part; the server enforces it.
        clip_norm: bound on the joint L2 norm of one client's update in one round, > 0; the first
            such bound if there is ``adaptive_clipping``.
        noise_multiplier: standard deviation of one i.i.d. coordinate that enters the mechanism /
            clip_norm, on the scale of the sum, >= 0; 0 trains without noise and without guarantee.
        report_goal: public constant that the noised sum is divided by, 1 to 2^53.
        clip_norms: clip norm by round, the first of them ``clip_norm``; None keeps that. The noise
            of a round is in proportion to its clip norm, so that the cost does not depend on it.
        report_goals: public divisor by round, whole numbers, the first of them ``report_goal``.
        minimum_cohort: a round with fewer well-formed updates releases nothing, >= 1; 0 where
            members are sampled, since whether a round is released would tell how many came.
        adaptive_clipping: lets the clip norm follow the clients' updates at no additional cost.
        sampling: how each round's members are drawn, in secret; None leaves the cohorts to whoever
            trains. ``participation`` is then ``participation_of(sampling, rounds)``.
        estimate: draws of the Monte Carlo estimate of a sampled plan, where it needs one.
        metrics: noised metrics that are released beside the models.
        secure: promises that the server sees sums of so many parties only, by secure aggregation;
            None lets it see every update.
        context: hash of everything else that was fixed beforehand (model, data, optimisers, seeds).

    Raises:
        ConfigError: a value out of range, parts that describe different runs, or sampling or
            adaptive clipping beside what no proof covers.
    """

    mechanism: Mechanism
    participation: Participation
    clip_norm: float
    noise_multiplier: float
    report_goal: int
    minimum_cohort: int = 1
    adaptive_clipping: "AdaptiveClipping | None" = None
    sampling: Sampling | None = None
    estimate: Estimate | None = None
    metrics: Metrics | None = None
    clip_norms: ByRound | None = None
    report_goals: ByRound | None = None
    secure: SecureSums | None = None
    context: str = ""

    def __post_init__(self) -> None:
        at_least_tiny(checks.positive("clip_norm", self.clip_norm))
        checks.nonnegative("noise_multiplier", self.noise_multiplier)
        checks.count("report_goal", self.report_goal, maximum=_MOST_CLIENTS)
        minimum = 1 if self.sampling is None else 0
        checks.count("minimum_cohort", self.minimum_cohort, minimum=minimum)
        if self.participation.fixed_order:
            raise ConfigError(
                "participation: a FixedOrder is for budgets; a server enforces how often and how "
                "far apart a client takes part, not its place in an order. Use a Participation."
            )
        if self.mechanism.rounds != self.participation.rounds:
            raise ConfigError(
                f"the mechanism has rounds={self.mechanism.rounds}, the participation "
                f"rounds={self.participation.rounds}: both must describe the same run."
            )
        self._refuse_odd_schedules()
        if self.adaptive_clipping is not None:
            restarts(self.mechanism)
            self.adaptive_clipping.update_noise_multiplier(self.noise_multiplier)
        if self.sampling is not None:
            self._refuse_beside_sampling(self.sampling)
        elif self.estimate is not None:
            raise ConfigError("estimate: only valid with sampling; this plan has none.")
        needs_each = self.sampling, self.adaptive_clipping, self.metrics
        seen = not self.noise_multiplier or needs_each != (None, None, None)
        if self.secure is not None and seen:
            raise ConfigError(
                "secure: needs noise, whose grid the parties round to; and neither sampling, "
                "adaptive_clipping nor metrics, for which the server must see each client's answer."
            )
        if self.metrics is not None:
            sampled = self.sampling is not None
            self.metrics.refuse_beside(self.rounds, self.noise_multiplier, sampled=sampled)

    def _refuse_odd_schedules(self) -> None:
        firsts = {"clip_norms": float(self.clip_norm), "report_goals": self.report_goal}
        for name, first in firsts.items():
            schedule: ByRound | None = getattr(self, name)
            if schedule is None:
                continue
            piecewise.refuse_beyond(schedule.from_round, self.rounds)
            if schedule.value[0] != first:
                raise ConfigError(
                    f"{name}: begins with {schedule.value[0]:g}; must begin with the plan's "
                    f"{name.removesuffix('s')}, {first:g}."
                )
        for clip_norm in self.clip_norms.value if self.clip_norms else ():
            at_least_tiny(clip_norm)
        for goal in self.report_goals.value if self.report_goals else ():
            if not goal.is_integer() or goal > _MOST_CLIENTS:
                raise ConfigError(f"report_goals={goal:g}: must be whole numbers up to 2^53.")
        if self.clip_norms is not None and self.adaptive_clipping is not None:
            raise ConfigError("clip_norms: adaptive_clipping decides the clip norm; leave one out.")

    def _refuse_beside_sampling(self, sampling: Sampling) -> None:
        """Refuse what no proof of amplification covers (docs/concepts/sampling.md)."""
        if isinstance(sampling, ExampleSampling):
            raise ConfigError(
                "sampling: poisson-examples samples examples, and what a plan adds up are updates "
                "of clients; draw examples in a loop of your own, with accounting.cohorts."
            )
        if isinstance(sampling, WithReplacementSampling):
            raise ConfigError(
                "sampling: with-replacement counts a member several times in a round, and a client "
                "sends one update; use without-replacement."
            )
        if self.minimum_cohort:
            raise ConfigError(
                f"minimum_cohort={self.minimum_cohort}: must be 0 with sampling. A round is "
                "released whoever came; otherwise its absence would tell how many were sampled."
            )
        if self.adaptive_clipping is not None:
            raise ConfigError(
                "adaptive_clipping: cannot be combined with sampling; the amplification is proved "
                "for one clip norm."
            )
        # Computed only to be refused in time: a mechanism that the sampler's proof does not cover.
        self._sampled(sampling, self.noise_multiplier or 1.0)
        # what the server enforces and what the proof assumes must be one thing
        if self.participation != (drawn := participation_of(sampling, self.rounds)):
            raise ConfigError(
                f"participation: must be what the sampler keeps to, {drawn}; see participation_of."
            )

    def _sampled(self, sampling: Sampling, noise_multiplier: float) -> Sampled:
        return sampled_guarantee(
            self.mechanism, sampling, noise_multiplier=noise_multiplier, estimate=self.estimate
        )

    @property
    def rounds(self) -> int:
        """Number of rounds that the guarantee covers."""
        return self.mechanism.rounds

    def active(self, round_: int) -> tuple[int, ...] | None:
        """Return the groups of parameters that train in a round, or None if there are no groups.

        No group trains after the last round.
        """
        groups = self.mechanism.groups
        if groups is None:
            return None
        return groups.schedule[round_] if round_ < self.rounds else ()

    def may_clip_to(self, clip_norm: float, round_: int) -> bool:
        """Whether clients may be told this clip norm in a round."""
        first, adaptive = float(self.clip_norm), self.adaptive_clipping
        if adaptive is None:
            return clip_norm == self.clip_norm_at(round_)
        steps = sum(restart <= round_ for restart in restarts(self.mechanism))
        return adaptive.reaches(clip_norm, steps, first=first)

    def clip_norm_at(self, round_: int) -> float:
        """Return the planned clip norm of a round, >= 0, without adaptive clipping."""
        return float(self.clip_norm) if self.clip_norms is None else self.clip_norms.at(round_)

    def report_goal_at(self, round_: int) -> int:
        """Return the divisor of a round, >= 0."""
        return self.report_goal if self.report_goals is None else int(self.report_goals.at(round_))

    @property
    def update_noise_multiplier(self) -> float:
        """Noise multiplier of the updates: larger if noised bits are released with them."""
        if self.adaptive_clipping is None:
            return self.noise_multiplier
        return self.adaptive_clipping.update_noise_multiplier(self.noise_multiplier)

    @property
    def hash(self) -> str:
        """SHA-256, in hex, of everything in the plan; every message names it."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for JSON."""
        adaptive = self.adaptive_clipping
        return {
            "mechanism": self.mechanism.to_dict(),
            "participation": asdict(self.participation),
            "clip_norm": float(self.clip_norm),
            "noise_multiplier": float(self.noise_multiplier),
            "report_goal": self.report_goal,
            "minimum_cohort": self.minimum_cohort,
            "adaptive_clipping": None if adaptive is None else asdict(adaptive),
            "sampling": None if self.sampling is None else sampling_to_dict(self.sampling),
            "estimate": None if self.estimate is None else asdict(self.estimate),
            # left out by plans without metrics, whose hashes are those of versions without them
            **({} if self.metrics is None else {"metrics": asdict(self.metrics)}),
            **({} if self.clip_norms is None else {"clip_norms": asdict(self.clip_norms)}),
            **({} if self.report_goals is None else {"report_goals": asdict(self.report_goals)}),
            **({} if self.secure is None else {"secure": asdict(self.secure)}),
            "context": self.context,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PrivacyPlan":
        """Return the plan that ``to_dict`` wrote."""
        try:
            fields = dict(values)
            fields["mechanism"] = mechanism_from_dict(fields["mechanism"])
            fields["participation"] = Participation(**fields["participation"])
            for name, read in _READERS.items():
                if (part := fields.get(name)) is not None:
                    fields[name] = read(part)
            return cls(**fields)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ConfigError(f"not a valid privacy plan: {error}.") from None

    def guarantee(self) -> Guarantee | Sampled:
        """Return the guarantee: exact, or amplified by the plan's sampling."""
        if self.sampling is not None:
            return self._sampled(self.sampling, self.noise_multiplier)
        return self.unsampled_guarantee()

    def unsampled_guarantee(self) -> Guarantee:
        """Return what holds whoever learns who took part: for one user, metrics included."""
        training = guarantee(
            self.mechanism, self.participation, noise_multiplier=self.noise_multiplier
        )
        return training if self.metrics is None else self.metrics.claim().beside(training)

    def report(
        self,
        delta: float,
        *,
        noise_source: NoiseOrigin = "unstated",
        earlier: ComposedGuarantee | None = None,
        unit: Unit = "client",
        population: int | None = None,
    ) -> PrivacyReport:
        """Return the guarantee at ``delta`` in (0, 1) and the assumptions that it rests on.

        Args:
            delta: in (0, 1).
            noise_source: "seeded" if the noise came from a ``SeededSource``, which is not private.
            earlier: what earlier runs on the same clients cost, to be added.
            unit: what takes part, "client" or "example".
            population: how many there are, which delta is judged against; None if not known.
        """
        alone = self.sampling is None and earlier is None
        return PrivacyReport.of(
            self.mechanism,
            self.participation,
            noise_multiplier=self.noise_multiplier,
            delta=delta,
            noise_source=noise_source,
            earlier=None if earlier is None else known(earlier.releases),
            sampled=None if alone else claim_of(self.guarantee(), delta, earlier),
            metrics=None if self.metrics is None else self.metrics.claim(),
            unit=unit,
            population=population,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Full rounds, in which everything trains, and cycles of partial rounds.

    Args:
        cycles: passes over all groups, >= 1.
        rounds_per_group: consecutive rounds of each group in a cycle, >= 1 (the paper's R/L).
        warm_up: full rounds before the first cycle, >= 0.
        between: full rounds before each later cycle, >= 0.
        order: order of the groups in a cycle: "sequential" (from the input to the output),
            "reverse", or "random" (shuffled in each cycle by public coins).
        seed: public seed of the coins of "random", >= 0.

    >>> Schedule(cycles=2, rounds_per_group=1, warm_up=1, between=1).rounds(2)
    ((0, 1), (0,), (1,), (0, 1), (0,), (1,))
    """

    cycles: int
    rounds_per_group: int = 2
    warm_up: int = 5
    between: int = 5
    order: Order = "sequential"
    seed: int = 0

    def __post_init__(self) -> None:
        checks.count("cycles", self.cycles)
        checks.count("rounds_per_group", self.rounds_per_group)
        checks.count("warm_up", self.warm_up, minimum=0)
        checks.count("between", self.between, minimum=0)
        checks.choice("order", self.order, get_args(Order))
        if checks.count("seed", self.seed, minimum=0) and self.order != "random":
            raise ConfigError(f"seed={self.seed}: only for order='random'. Leave it out.")

    def length(self, groups: int) -> int:
        """Return the number of rounds for a model of this many groups, >= 1."""
        partial = self.cycles * self.rounds_per_group * checks.count("groups", groups)
        return self.warm_up + (self.cycles - 1) * self.between + partial

    def rounds(self, groups: int) -> Rounds:
        """Return the groups that train in each round, out of 0 to ``groups`` - 1."""
        everything = tuple(range(checks.count("groups", groups)))
        rounds: list[tuple[int, ...]] = []
        for cycle in range(self.cycles):
            rounds += [everything] * (self.between if cycle else self.warm_up)
            for group in self._cycle(cycle, groups):
                rounds += [(group,)] * self.rounds_per_group
        return tuple(rounds)

    def _cycle(self, cycle: int, groups: int) -> Sequence[int]:
        if self.order == "sequential":
            return range(groups)
        if self.order == "reverse":
            return range(groups)[::-1]

        def coin(group: int) -> bytes:  # the same on every machine and in every version
            return hashlib.sha256(f"privpart order|{self.seed}|{cycle}|{group}".encode()).digest()

        return sorted(range(groups), key=coin)


def active_rounds(rounds: Rounds) -> list[list[int]]:
    """Return the rounds in which each group trains."""
    groups = 1 + max(group for active in rounds for group in active)
    return [[t for t, active in enumerate(rounds) if group in active] for group in range(groups)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveClipping:
    """The rule by which the clip norm follows the clients' updates.

    Args:
        quantile: share of updates that should stay unclipped, in (0, 1).
        rate: rate of the geometric step, in (0, 10]; Andrew et al. use 0.2.
        bit_noise_multiplier: standard deviation of the i.i.d. noise on the sum of bits, > 0;
            a twentieth of the cohort is customary.
    """

    quantile: float = 0.5
    rate: float = 0.2
    bit_noise_multiplier: float

    def __post_init__(self) -> None:
        checks.probability("quantile", self.quantile)
        if checks.positive("rate", self.rate) > 10:
            raise ConfigError(f"rate={self.rate:g}: must be at most 10.")
        checks.positive("bit_noise_multiplier", self.bit_noise_multiplier)

    def update_noise_multiplier(self, noise_multiplier: float) -> float:
        """Return the noise multiplier that the updates need beside the noised bits, rounded up.

        Sum and bits go through the same mechanism and are released together, so with noise
        multipliers z_u and z_b their mu is at most sens * sqrt(1/z_u^2 + 1/z_b^2): that of the
        plan's ``noise_multiplier`` z if 1/z_u^2 = 1/z^2 - 1/z_b^2 (as Andrew et al. 2021, Thm 1).

        Raises:
            ConfigError: the bits alone would cost more than the plan allows.
        """
        z, bits = noise_multiplier, self.bit_noise_multiplier
        if not bits > z * (1 + 1e-9):
            raise ConfigError(
                f"bit_noise_multiplier={bits:g}: must be above the noise multiplier {z:g}, or the "
                "bits alone cost more than the plan allows. A twentieth of the cohort is customary."
            )
        return z / math.sqrt((1 - z / bits) * (1 + z / bits)) * (1 + 1e-14)

    def next_clip_norm(self, clip_norm: float, unclipped: float, *, first: float) -> float:
        """Return the clip norm that follows a tree in which this noised share stayed unclipped.

        The result stays within a factor of 10,000 of ``first``, so that neither clients that send
        zeros nor a hostile majority can drive it out of the range of floats.
        """
        # noise may leave the share outside of what a share can be
        share = min(1.0, max(0.0, unclipped))
        exponent = Decimal(-self.rate * (share - self.quantile))
        # The last bit of math.exp depends on the processor, and whoever replays a run has another.
        wanted = clip_norm * float(Context(prec=40).exp(exponent))
        return min(first * _CLIP_NORM_RANGE, max(first / _CLIP_NORM_RANGE, wanted))

    def reaches(self, clip_norm: float, steps: int, *, first: float) -> bool:
        """Whether so many steps from ``first`` may come to a clip norm."""
        if steps == 0 or not 0 < clip_norm < math.inf:
            return clip_norm == first
        limit = math.log(_CLIP_NORM_RANGE)
        down = min(limit, steps * self.rate * (1 - self.quantile))
        up = min(limit, steps * self.rate * self.quantile)
        return -down - 1e-9 <= math.log(clip_norm / first) <= up + 1e-9


def restarts(mechanism: Mechanism) -> frozenset[int]:
    """Return the rounds at which the clip norm may change: later noise is independent of earlier.

    Raises:
        ConfigError: the mechanism correlates its noise over all rounds.
    """
    period = mechanism.restart_every
    if period is None:
        raise ConfigError(
            f"adaptive clipping with {mechanism.name}: the clip norm may change only where the "
            "noise restarts. Use a BinaryTree with restart_every, or Independent."
        )
    return frozenset(range(period, mechanism.rounds, period))


_READERS: Mapping[str, Callable[[Any], object]] = {
    "adaptive_clipping": lambda fields: AdaptiveClipping(**fields),
    "sampling": sampling_from_dict,
    "estimate": lambda fields: Estimate(**fields),
    "clip_norms": lambda fields: ByRound(**fields),
    "report_goals": lambda fields: ByRound(**fields),
    "secure": lambda fields: SecureSums(**fields),
    "metrics": Metrics.from_dict,
}
"""What reads a part of a plan that may be missing."""
