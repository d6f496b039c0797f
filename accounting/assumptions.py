"""Assumptions: what a guarantee rests on, who checked it, and what is left without it."""

from dataclasses import dataclass
from typing import Literal, get_args

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms import BinaryTree, Mechanism
from accounting.participation import Participation

REQUIRED = {"participation", "clipping", "divisor", "noise", "choices", "floating-point"}
Status = Literal["enforced", "verified", "vouched", "asserted", "violated"]
Severity = Literal["critical", "theoretical", "negligible"]


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something the guarantee rests on.

    Attributes:
        code: stable short name.
        text: what must be true.
        status: "enforced" (the code that ran makes it so), "verified" (checked afterwards, as
            against a ledger), "vouched" (whoever asked for the report answers for it), "asserted"
            (nobody checked) or "violated".
        consequence: what becomes of the guarantee if it is false.
        severity: of that: "critical" (no such guarantee), "theoretical" (no known attack) or
            "negligible".
        evidence: what the status rests on; empty if asserted.
    """

    code: str
    text: str
    status: Status
    consequence: str
    severity: Severity = "critical"
    evidence: str = ""

    def __post_init__(self) -> None:
        checks.choice(f"status of {self.code}", self.status, get_args(Status))
        if self.status in ("enforced", "verified", "vouched") and not self.evidence:
            raise ConfigError(f"evidence is empty: say why {self.code} is {self.status}.")
        checks.choice(f"severity of {self.code}", self.severity, get_args(Severity))


def of_run(mechanism: Mechanism, participation: Participation, unit: str) -> tuple[Assumption, ...]:
    """Return what an unamplified run assumes; nobody has checked any of it yet."""
    prefix = isinstance(mechanism, BinaryTree) and mechanism.release == "prefix"
    return (*_always(participation, unit), *((_PREFIX_ONLY,) if prefix else ()))


_PREFIX_ONLY = Assumption(
    "release",
    "only the noised prefix sums leave the server, and what follows from them, such as the models: "
    "no tree node, no virtual round, no state of the noise",
    "asserted",
    'the sensitivity is that of release="nodes"',
)


def _always(participation: Participation, unit: str) -> tuple[Assumption, ...]:
    k, b = participation.max_participations, participation.min_separation
    times = "one round" if k == 1 else f"{k} rounds, each {b} or more after the one before"
    return (
        Assumption(
            "participation",
            f"each {unit} takes part in at most {times}",
            "asserted",
            "the sensitivity, and so epsilon, is larger than stated",
        ),
        Assumption(
            "clipping",
            "every update is clipped to clip_norm over all trained parameters jointly",
            "asserted",
            "no guarantee",
        ),
        Assumption(
            "divisor",
            "the noised sum is divided by a public constant, never by the realised cohort",
            "asserted",
            f"the size of the cohort leaks, and one {unit} weighs more than accounted",
        ),
        Assumption(
            "noise",
            "the noise is secret, fresh, and from the mechanism named here",
            "asserted",
            "no guarantee",
        ),
        Assumption(
            "choices",
            "what trains, when, and with which hyperparameters was chosen without private data",
            "asserted",
            "the choice is an additional release that this epsilon does not cover",
        ),
        Assumption(
            "floating-point",
            "sums and noise in floating point behave like real numbers",
            "asserted",
            "low-order bits may tell more than accounted (Mironov 2012)",
            "theoretical",
        ),
    )
