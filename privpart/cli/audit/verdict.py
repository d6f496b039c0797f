"""Verdict: what scores and replays prove about epsilon, beside what the accountant says.

Bounds are printed at the confidence that was asked for. A VIOLATION is held to a stricter one, with
all bounds together: a correct server would otherwise fail one audit in twenty, because the worst
client's epsilon is the accountant's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from scipy import stats

from accounting import Guarantee
from accounting.cohorts import Sampled
from accounting.report import down, up
from attacks.lower_bounds import bounds
from attacks.lower_bounds.bounds import Bound, percent
from attacks.lower_bounds.checks import Check
from attacks.lower_bounds.replay import FALSE_ALARM, METHOD, Replay
from privpart.cli.audit.replica import Scored
from privpart.run.canaries import AUDIT_SCHEMA

OfReplay = Callable[[Replay, float, float], Bound]
"""From a replay, delta and confidence to what it proves."""
SURE = 0.9999
"""Confidence of a VIOLATION."""
_HEADLINE = "guesses"
"""Method of the sentence in a run's report: fixed, since the best of several proves less.

Its error is exact, and it does not need the scores to be Gaussian, which a faulty server's may not
be."""

Verdict = Literal["consistent", "VIOLATION"]


@dataclass(frozen=True, slots=True)
class EpsilonAudit:
    """What an audit found; ``judged`` makes it.

    Attributes:
        about: what was audited, ready for JSON.
        claimed: the accountant's guarantee, without that of an earlier run.
        delta: at which every epsilon is stated.
        epsilon: the accountant's.
        scored: the canaries; None if only a replay was made.
        replays: of the whole path, at most one.
        bounds: each at the audit's confidence on its own. A replay whose noise fails a test has
            none: its bound would assume what is known to be wrong.
        reasons: what contradicts the accountant, the mechanism or the plan, a sentence each.
        checks: what a replay compared with the plan, a row each.
    """

    about: dict[str, Any]
    claimed: Guarantee | Sampled
    delta: float
    epsilon: float
    scored: Scored | None
    replays: tuple[Replay, ...]
    bounds: tuple[Bound, ...]
    reasons: tuple[str, ...]
    checks: tuple[Check, ...] = ()

    @property
    def mu(self) -> float | None:
        """The accountant's mu; None if the plan samples, which is not one Gaussian."""
        return self.claimed.mu if isinstance(self.claimed, Guarantee) else None

    @property
    def above(self) -> tuple[Bound, ...]:
        """The bounds that are above the accountant's epsilon at their own confidence."""
        return tuple(bound for bound in self.bounds if bound.epsilon > self.epsilon)

    def comparison(self) -> str:
        """Say which bounds are above the accountant's epsilon, and how often that is expected."""
        if not self.bounds:
            return "there is no bound: the noise is not the mechanism's"
        count, level = len(self.bounds), percent(self.bounds[0].confidence)
        if not self.above:
            return (
                f"none of {count} bounds at {level} is above the accountant's epsilon, which does "
                "not show that the run is private"
            )
        listed = ", ".join(f"{bound.method} {down(bound.epsilon, 5)}" for bound in self.above)
        return (
            f"at {level}, {len(self.above)} of {count} are above the accountant's "
            f"{up(self.epsilon, 5)}: {listed}. For each this happens {_chance(self.bounds[0])}; a "
            f"VIOLATION needs {percent(SURE)} over all bounds together"
        )

    @property
    def verdict(self) -> Verdict:
        """Whether a bound passes the accountant's epsilon, or the noise is not the mechanism's."""
        return "VIOLATION" if self.reasons else "consistent"

    @property
    def visible(self) -> float | None:
        """Share of the accountant's mu that the observer of the canaries can see at all."""
        return None if self.scored is None or self.mu is None else self.scored.mu / self.mu

    def measured(self) -> str:
        """Return the sentence for a run's report."""
        by_method = {bound.method: bound for bound in self.bounds}
        chosen = by_method.get(METHOD, by_method.get(_HEADLINE))
        note = "; VIOLATION" * bool(self.reasons)
        if chosen is None:
            return f"nothing: the noise is not the mechanism's{note}"
        if chosen in self.above and not self.reasons:
            note = f"; above the accountant's, as happens {_chance(chosen)}"
        return (
            f"epsilon at least {chosen.least} ({chosen.method}, {percent(chosen.confidence)}; "
            f"assumes {chosen.assumption}){note}"
        )

    def lines(self) -> list[tuple[str, str]]:
        """Return what a person reads of the audit, as pairs of a name and a text."""
        lines = [("verdict", self.verdict), *(("", reason) for reason in self.reasons)]
        guarantee = f"epsilon {up(self.epsilon, 5)}"
        guarantee += "" if self.mu is None else f", mu {up(self.mu, 5)}"
        lines += [("accountant", f"{guarantee} at delta {self.delta:g}")]
        lines += [(name.replace("_", " "), str(value)) for name, value in self.about.items()]
        if (scored := self.scored) is not None:
            visible = f"mu {up(scored.mu, 5)}, {self.visible:.0%} of the accountant's"
            counts = f"{len(scored.scores)}, {int(scored.present.sum())} took part"
            lines.append(("canaries", f"{counts}; they show {visible}"))
        for replay in self.replays:
            noise = f"noise {replay.sigma:.5f}, of the plan {replay.planned:g}"
            shown = f"signal {replay.signal:.5f} clip norms, {noise} ({replay.draws:,} draws)"
            lines.append(("replay", shown))
        for check in self.checks:
            level = f"level {check.level:.1g}" if check.level else "exact"
            found = f"{check.name}: {check.compared:,} compared, {level}; sees {check.sees}"
            lines.append((check.result, found))
        lines += [("bound", str(bound)) for bound in self.bounds]
        return [*lines, ("compared", self.comparison()), ("measured", self.measured())]

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain values under a schema name, ready for JSON."""
        values: dict[str, Any] = {
            "schema": AUDIT_SCHEMA,
            **self.about,
            "delta": self.delta,
            "accountant": {"epsilon": self.epsilon, "mu": self.mu},
            "verdict": self.verdict,
            "verdict_confidence": SURE,
            "reasons": list(self.reasons),
            "measured": self.measured(),
            "bounds": [asdict(bound) for bound in self.bounds],
            "bounds_above_accountant": [bound.method for bound in self.above],
            "replays": [asdict(replay) for replay in self.replays],
            "checks": [asdict(check) | {"result": check.result} for check in self.checks],
        }
        if (scored := self.scored) is not None:
            values["canaries"] = {
                "count": len(scored.scores),
                "present": int(scored.present.sum()),
                "visible_mu": scored.mu,
                "visible_share": self.visible,
            }
        return values


def judged(
    about: dict[str, Any],
    claimed: Guarantee | Sampled,
    *,
    delta: float,
    confidence: float,
    scored: Scored | None = None,
    replays: Sequence[Replay] = (),
    checks: Sequence[Check] = (),
    of_replay: OfReplay = Replay.bound,
) -> EpsilonAudit:
    """Return an audit with its bounds and verdict; the replays' errors are shared."""
    evidence = scored, replays, of_replay, delta
    proved = _bounds(*evidence, confidence)
    # Bonferroni: the error of a VIOLATION is shared by all bounds.
    sure = 1 - (1 - SURE) / max(1, len(proved))
    epsilon = claimed.epsilon(delta)
    above = [b for b in _bounds(*evidence, sure) if b.epsilon > epsilon]
    reasons = [f"{bound}; the accountant says {up(epsilon)}." for bound in above]
    for replay in replays:
        reasons += [*replay.faults, *([replay.off_plan] if replay.off_plan else [])]
    reasons += [fault for check in checks for fault in check.faults]
    # What other clients add widens the scores of a real run, and is no fault of the noise.
    if scored is not None and scored.others_known:
        reasons += _off_plan(scored)
    unique = tuple(dict.fromkeys(reasons))
    about_claim = about, claimed, delta, epsilon
    return EpsilonAudit(*about_claim, scored, tuple(replays), proved, unique, tuple(checks))


def _chance(bound: Bound) -> str:
    """Say how often a bound of a correct server is above the truth."""
    error = 100 * (1 - bound.confidence)
    return f"in at most {error:.3g} % of audits of a correct server"


def _off_plan(scored: Scored) -> list[str]:
    """Say that canaries which were absent show another noise than the plan's, as 1 in 10^6 may."""
    alone = scored.scores[~scored.present]
    squares = float((alone**2).sum())
    tails = stats.chi2.cdf(squares, len(alone)), stats.chi2.sf(squares, len(alone))
    if not len(alone) or min(tails) >= FALSE_ALARM / 2:
        return []
    return [
        f"The noise along {len(alone)} absent canaries has {math.sqrt(squares / len(alone)):.3g} "
        "times the plan's standard deviation."
    ]


def _bounds(
    scored: Scored | None,
    replays: Sequence[Replay],
    of_replay: OfReplay,
    delta: float,
    confidence: float,
) -> tuple[Bound, ...]:
    at: Any = {"delta": delta, "confidence": confidence}
    of_scores: list[Bound] = []
    if scored is not None:
        canaries = scored.scores, scored.present
        of_scores = [
            bounds.one_run(*canaries, **at),
            bounds.one_run_gdp(*canaries, **at),
            bounds.clopper_pearson(*canaries, **at),
            bounds.guesses(*canaries, claimed_mu=scored.mu, **at),
            bounds.pooled_t(*canaries, **at),
        ]
    # Each replay is wrong less often, so that the best of them is as often as was asked for.
    shared = 1 - (1 - confidence) / max(1, len(replays))
    replayed = [of_replay(replay, delta, shared) for replay in replays if not replay.faults]
    highest = sorted(replayed, key=lambda bound: -bound.epsilon)[:1]
    return (*of_scores, *(replace(bound, confidence=confidence) for bound in highest))
