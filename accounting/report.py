"""Privacy report: a guarantee with everything without which its epsilon means nothing.

Epsilon is never stated without delta, unit, adjacency and the assumptions under which it holds
(Ponomareva et al. 2023, "How to DP-fy ML", section 5.3).
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from accounting.guarantee import Method, guarantee
from accounting.mechanisms import Mechanism
from accounting.participation import Participation

SCHEMA = "privpart/epsilon/1"


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something the guarantee rests on.

    Attributes:
        code: stable short name.
        text: what must be true.
        status: "assumed" (nobody checked) or "enforced" (the code that ran makes it so).
        consequence: what becomes of the guarantee if it is false.
    """

    code: str
    text: str
    status: Literal["assumed", "enforced"]
    consequence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyReport:
    """One line of a budget; ``to_dict`` is the JSON of the command line."""

    mechanism: str
    rounds: int
    max_participations: int
    min_separation: int
    noise_multiplier: float
    epsilon: float
    delta: float
    mu: float
    rho: float
    advantage: float
    sensitivity_squared: float
    sensitivity_exact: bool
    sensitivity_rule: str
    effective_noise_multiplier: float
    method: Method
    assumptions: tuple[Assumption, ...]
    unit: str = "client"
    adjacency: str = "zero-out"

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        participation: Participation,
        *,
        noise_multiplier: float,
        delta: float,
        method: Method = "exact",
    ) -> "PrivacyReport":
        """Account for a planned run; arguments as in ``guarantee``, delta in (0, 1)."""
        run = guarantee(mechanism, participation, noise_multiplier=noise_multiplier, method=method)
        sensitivity = mechanism.sensitivity(participation)
        return cls(
            mechanism=mechanism.name,
            rounds=participation.rounds,
            max_participations=participation.max_participations,
            min_separation=participation.min_separation,
            noise_multiplier=float(noise_multiplier),
            epsilon=run.epsilon(delta),
            delta=float(delta),
            mu=run.mu,
            rho=run.rho,
            advantage=run.advantage(),
            sensitivity_squared=sensitivity.squared,
            sensitivity_exact=sensitivity.exact,
            sensitivity_rule=sensitivity.rule,
            effective_noise_multiplier=run.effective_noise_multiplier,
            method=method,
            assumptions=_assumptions(participation),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values under a schema name, ready for JSON."""
        return {"schema": SCHEMA, **asdict(self)}


def _assumptions(participation: Participation) -> tuple[Assumption, ...]:
    k, b = participation.max_participations, participation.min_separation
    times = "one round" if k == 1 else f"{k} rounds, each {b} or more after the one before"
    return (
        Assumption(
            "participation",
            f"each client takes part in at most {times}",
            "assumed",
            "the sensitivity, and so epsilon, is larger than stated",
        ),
        Assumption(
            "clipping",
            "every update is clipped to clip_norm over all trained parameters jointly",
            "assumed",
            "no guarantee",
        ),
        Assumption(
            "divisor",
            "the noised sum is divided by a public constant, never by the realised cohort",
            "assumed",
            "the size of the cohort leaks, and one client weighs more than accounted",
        ),
        Assumption(
            "noise",
            "the noise is secret, fresh, and from the mechanism named here",
            "assumed",
            "no guarantee",
        ),
        Assumption(
            "choices",
            "what trains, when, and with which hyperparameters was chosen without private data",
            "assumed",
            "the choice is an additional release that this epsilon does not cover",
        ),
    )
