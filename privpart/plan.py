"""Privacy plan: everything that the guarantee of a run depends on, fixed before it starts."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accounting import (
    Grouped,
    Guarantee,
    Mechanism,
    Participation,
    PrivacyReport,
    checks,
    guarantee,
    mechanism_from_dict,
)
from accounting.checks import ConfigError
from accounting.report import NoiseSource as NoiseOrigin
from privpart.adaptive_clipping import AdaptiveClipping, restarts
from privpart.clip import at_least_tiny

_MOST_CLIENTS = 2**53
"""Whole numbers up to here are floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlan:
    """What is promised to one client, whoever trains and on whatever data.

    Args:
        mechanism: its encoder sets the cost, its decoder the noise.
        participation: how often one client may take part; the server enforces it.
        clip_norm: bound on the joint L2 norm of one client's update in one round, > 0; with
            ``adaptive_clipping`` the one to begin with.
        noise_multiplier: standard deviation of one i.i.d. coordinate that enters the mechanism /
            clip_norm, on the scale of the sum; 0 trains without noise and without guarantee.
        report_goal: the public constant that the noised sum is divided by, 1 to 2^53.
        minimum_cohort: a round with fewer well-formed updates releases nothing, >= 1.
        adaptive_clipping: lets the clip norm follow the clients, at no more than the same cost.
        context: hash of all else that was fixed beforehand (model, data, optimisers, seeds).
    """

    mechanism: Mechanism
    participation: Participation
    clip_norm: float
    noise_multiplier: float
    report_goal: int
    minimum_cohort: int = 1
    adaptive_clipping: AdaptiveClipping | None = None
    context: str = ""

    def __post_init__(self) -> None:
        at_least_tiny(self.clip_norm)
        checks.nonnegative("noise_multiplier", self.noise_multiplier)
        checks.count("report_goal", self.report_goal, maximum=_MOST_CLIENTS)
        checks.count("minimum_cohort", self.minimum_cohort)
        if self.mechanism.rounds != self.participation.rounds:
            raise ConfigError(
                f"the mechanism has rounds={self.mechanism.rounds} but the participation "
                f"rounds={self.participation.rounds}: both must describe the same run."
            )
        if self.adaptive_clipping is not None:
            restarts(self.mechanism)
            self.adaptive_clipping.update_noise_multiplier(self.noise_multiplier)

    @property
    def rounds(self) -> int:
        """Rounds that the guarantee covers."""
        return self.mechanism.rounds

    def active(self, round_: int) -> tuple[int, ...] | None:
        """Return the groups of parameters that train in a round; None: there are no groups.

        After the last round none train.
        """
        if not isinstance(self.mechanism, Grouped):
            return None
        return self.mechanism.schedule[round_] if round_ < self.rounds else ()

    @property
    def update_noise_multiplier(self) -> float:
        """Noise multiplier of the updates: a little more if noised bits are released beside."""
        if self.adaptive_clipping is None:
            return self.noise_multiplier
        return self.adaptive_clipping.update_noise_multiplier(self.noise_multiplier)

    @property
    def hash(self) -> str:
        """SHA-256, in hex, of everything in the plan; in every message and ledger row."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        adaptive = self.adaptive_clipping
        return {
            "mechanism": self.mechanism.to_dict(),
            "participation": asdict(self.participation),
            "clip_norm": float(self.clip_norm),
            "noise_multiplier": float(self.noise_multiplier),
            "report_goal": self.report_goal,
            "minimum_cohort": self.minimum_cohort,
            "adaptive_clipping": None if adaptive is None else asdict(adaptive),
            "context": self.context,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PrivacyPlan":
        """Read what ``to_dict`` wrote.

        Raises:
            ConfigError: missing or unknown fields, or values out of range.
        """
        try:
            own = dict(values)
            own["mechanism"] = mechanism_from_dict(own["mechanism"])
            own["participation"] = Participation(**own["participation"])
            if (adaptive := own["adaptive_clipping"]) is not None:
                own["adaptive_clipping"] = AdaptiveClipping(**adaptive)
            return cls(**own)
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"not a privacy plan: {error}.") from None

    def guarantee(self) -> Guarantee:
        """Return the exact guarantee; an error if the plan adds no noise."""
        return guarantee(self.mechanism, self.participation, noise_multiplier=self.noise_multiplier)

    def report(
        self,
        delta: float,
        *,
        noise_source: NoiseOrigin = "unstated",
        earlier: Guarantee | None = None,
    ) -> PrivacyReport:
        """Return the guarantee with its assumptions, at ``delta`` in (0, 1).

        A run whose noise came from a ``SeededSource`` must say "seeded": not private. A server
        says it by itself: ``Server.report``.
        """
        return PrivacyReport.of(
            self.mechanism,
            self.participation,
            noise_multiplier=self.noise_multiplier,
            delta=delta,
            noise_source=noise_source,
            earlier=earlier,
        )
