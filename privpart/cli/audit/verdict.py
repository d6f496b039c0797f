"""Verdict: what scores and replays prove about epsilon, beside what the accountant says.

Bounds are printed at the confidence that was asked for. A VIOLATION is held to a stricter one, with
all bounds together: a correct server would otherwise fail one audit in twenty, because the worst
client's epsilon is the accountant's.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scipy import stats

from accounting import Guarantee
from attacks import bounds
from attacks.bounds import Bound
from attacks.replay import ASSUMPTION, Replay
from privpart.cli.audit.replica import Scored
from privpart.run.canaries import AUDIT_SCHEMA

SURE = 0.9999
"""Confidence of a VIOLATION."""

Verdict = Literal["consistent", "VIOLATION"]


@dataclass(frozen=True, slots=True)
class EpsilonAudit:
    """What an audit found.

    Attributes:
        about: what was audited, ready for JSON.
        claimed: the accountant's guarantee, without that of an earlier run.
        delta: at which every epsilon is stated.
        confidence: of the bounds.
        scored: the canaries; None if only a replay was made.
        replays: paired replays, one per group of parameters.
    """

    about: dict[str, Any]
    claimed: Guarantee
    delta: float
    confidence: float
    scored: Scored | None
    replays: tuple[Replay, ...] = ()

    @property
    def epsilon(self) -> float:
        """The accountant's epsilon."""
        return self.claimed.epsilon(self.delta)

    def bounds(self) -> tuple[Bound, ...]:
        """Return the bounds at the audit's confidence, each on its own."""
        return self._bounds(self.confidence)

    def reasons(self) -> tuple[str, ...]:
        """Return what contradicts the accountant or the mechanism, a sentence each."""
        share = (1 - SURE) / max(1, 4 * (self.scored is not None) + len(self.replays))
        above = [b for b in self._bounds(1 - share) if b.epsilon > self.epsilon]
        found = [f"{b}; the accountant says {self.epsilon:.4g}." for b in above]
        return (*found, *dict.fromkeys(f for replay in self.replays for f in replay.faults))

    @property
    def verdict(self) -> Verdict:
        """Whether a bound passes the accountant's epsilon, or the noise is not the mechanism's."""
        return "VIOLATION" if self.reasons() else "consistent"

    @property
    def visible(self) -> float | None:
        """Share of the accountant's mu that the observer of the canaries can see at all."""
        return None if self.scored is None else self.scored.mu / self.claimed.mu

    def measured(self) -> str:
        """Return the sentence for a run's report; its method is fixed, not the best of several."""
        found = self.bounds()
        chosen = found[-1] if self.replays else next(b for b in found if b.method == "pooled t")
        least = math.floor(chosen.epsilon * 1000) / 1000
        return f"epsilon at least {least:.3f} ({chosen.method}, {100 * chosen.confidence:g} %)"

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain values under a schema name, ready for JSON."""
        scored = self.scored
        values: dict[str, Any] = {
            "schema": AUDIT_SCHEMA,
            **self.about,
            "delta": self.delta,
            "accountant": {"epsilon": self.epsilon, "mu": self.claimed.mu},
            "verdict": self.verdict,
            "verdict_confidence": SURE,
            "reasons": list(self.reasons()),
            "measured": self.measured(),
            "bounds": [asdict(bound) for bound in self.bounds()],
            "replays": [asdict(replay) for replay in self.replays],
        }
        if scored is None:
            return values
        plain = bounds.estimate(scored.scores, scored.present, delta=self.delta)
        return values | {
            "canaries": {
                "count": len(scored.scores),
                "present": int(scored.present.sum()),
                "visible_mu": scored.mu,
                "visible_share": self.visible,
            },
            "estimate_not_a_bound": asdict(plain),
        }

    def _bounds(self, confidence: float) -> tuple[Bound, ...]:
        found = () if self.scored is None else _of_scores(self.scored, self.delta, confidence)
        worst = [_of_replay(replay, self.delta, confidence) for replay in self.replays]
        best = max(worst, key=lambda bound: bound.epsilon, default=None)
        return (*found, *(() if best is None else (best,)))


def _of_scores(scored: Scored, delta: float, confidence: float) -> Sequence[Bound]:
    scores, present = scored.scores, scored.present
    return (
        bounds.one_run(scores, present, delta=delta, confidence=confidence),
        bounds.clopper_pearson(scores, present, delta=delta, confidence=confidence),
        bounds.guesses(scores, present, delta=delta, claimed_mu=scored.mu, confidence=confidence),
        bounds.pooled_t(scores, present, delta=delta, confidence=confidence),
    )


def _of_replay(replay: Replay, delta: float, confidence: float) -> Bound:
    """Return a replay's bound at another confidence."""
    least = float(stats.chi2.ppf(1 - confidence, replay.draws))
    highest = replay.sigma * math.sqrt(replay.draws / least) * (1 + 1e-9)
    mu = replay.signal / highest
    return bounds.from_mu("paired replay", ASSUMPTION, mu, delta=delta, confidence=confidence)
