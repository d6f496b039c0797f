"""Privacy plan: everything that the guarantee of a run depends on, fixed before it starts."""

from dataclasses import dataclass

from accounting import Guarantee, Mechanism, Participation, PrivacyReport, checks, guarantee
from accounting.checks import ConfigError
from accounting.report import NoiseSource as NoiseOrigin
from privpart.clip import at_least_tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlan:
    """What is promised to one client, whoever trains and on whatever data.

    Args:
        mechanism: its encoder sets the cost, its decoder the noise.
        participation: how often one client may take part; the server enforces it.
        clip_norm: bound on the joint L2 norm of one client's update in one round, > 0.
        noise_multiplier: standard deviation of one i.i.d. coordinate that enters the mechanism /
            clip_norm, on the scale of the sum; 0 trains without noise and without guarantee.
        report_goal: the public constant that the noised sum is divided by, >= 1.
    """

    mechanism: Mechanism
    participation: Participation
    clip_norm: float
    noise_multiplier: float
    report_goal: int

    def __post_init__(self) -> None:
        at_least_tiny(self.clip_norm)
        checks.nonnegative("noise_multiplier", self.noise_multiplier)
        checks.count("report_goal", self.report_goal)
        if self.mechanism.rounds != self.participation.rounds:
            raise ConfigError(
                f"the mechanism has rounds={self.mechanism.rounds} but the participation "
                f"rounds={self.participation.rounds}: both must describe the same run."
            )

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of one i.i.d. coordinate, on the scale of the sum."""
        return self.noise_multiplier * self.clip_norm

    def guarantee(self) -> Guarantee:
        """Return the exact guarantee; an error if the plan adds no noise."""
        return guarantee(self.mechanism, self.participation, noise_multiplier=self.noise_multiplier)

    def report(self, delta: float, *, noise_source: NoiseOrigin = "unstated") -> PrivacyReport:
        """Return the guarantee with its assumptions, at ``delta`` in (0, 1).

        A run whose noise came from a ``SeededSource`` must say "seeded": not private.
        """
        return PrivacyReport.of(
            self.mechanism,
            self.participation,
            noise_multiplier=self.noise_multiplier,
            delta=delta,
            noise_source=noise_source,
        )
