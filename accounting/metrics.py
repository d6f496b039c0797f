"""Metrics: noised means over users, released beside the models of a run, and what they cost.

Each user who evaluates does so once after each evaluated round, with a vector of m numbers in
[0, 1], which is at most sqrt(m) long. The noise of each release is independent, so n of them have
the sensitivity sqrt(n), in such lengths. Users in turns would be fewer in each and lose more than
they save: with each in k of n evaluations, the noise of a mean grows as n / sqrt(k).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accounting import checks
from accounting.checks import ConfigError
from accounting.guarantee import guarantee
from accounting.mechanisms.independent import Independent
from accounting.participation import Participation
from accounting.report import MetricsClaim

_MOST_NAMES, _MOST_USERS = 16, 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The promise to users who evaluate.

    Args:
        names: of the m metrics, each once.
        users: how many evaluate; the public constant that a noised sum is divided by.
        rounds: after which they do, from 0, ascending.
        noise_multiplier: standard deviation of the noise of a sum / sqrt(m), > 0.
        also_train: whether they may train, too, so that they pay for both; otherwise they are
            others, and no user pays for both.

    >>> metrics = Metrics(names=("accuracy",), users=100, rounds=(4, 9), noise_multiplier=2.0)
    >>> round(metrics.claim().cost.mu, 6), round(metrics.standard_error, 6)
    (0.707107, 0.02)
    """

    names: tuple[str, ...]
    users: int
    rounds: tuple[int, ...]
    noise_multiplier: float
    also_train: bool = False

    def __post_init__(self) -> None:
        named = all(isinstance(name, str) for name in self.names)
        if not named or not 0 < len(set(self.names)) == len(self.names) <= _MOST_NAMES:
            raise ConfigError(f"metrics.names: must be 1 to {_MOST_NAMES} names, each once.")
        checks.count("metrics.users", self.users, maximum=_MOST_USERS)
        checks.positive("metrics.noise_multiplier", self.noise_multiplier)
        for number in self.rounds:
            checks.count("metrics.rounds", number, minimum=0)
        if not self.rounds or list(self.rounds) != sorted(set(self.rounds)):
            raise ConfigError("metrics.rounds: must be one round or more, each once, ascending.")
        if type(self.also_train) is not bool:
            raise ConfigError(f"metrics.also_train={self.also_train!r}: must be true or false.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Metrics":
        """Return the metrics whose fields, with lists for tuples, are in a dictionary."""
        return cls(**{**values, **{name: tuple(values[name]) for name in ("names", "rounds")}})

    @property
    def mechanism(self) -> Independent:
        """Fresh noise in each evaluation."""
        return Independent(len(self.rounds))

    @property
    def participation(self) -> Participation:
        """Every user in every evaluation."""
        return Participation(len(self.rounds), len(self.rounds), 1)

    @property
    def length(self) -> float:
        """The longest that the vector of one user can be: sqrt(m)."""
        return math.sqrt(len(self.names))

    @property
    def standard_error(self) -> float:
        """Standard deviation of the noise of each released mean, rounded up."""
        return self.noise_multiplier * self.length / self.users * (1 + 2.0**-50)

    def claim(self) -> MetricsClaim:
        """Return what the metrics cost, for a report."""
        count = len(self.rounds)
        after = "a round" if count == 1 else f"each of {count} rounds"
        released = f"{', '.join(self.names)} of {self.users:,} users after {after}"
        cost = guarantee(self.mechanism, self.participation, noise_multiplier=self.noise_multiplier)
        return MetricsClaim(cost, released, self.also_train)

    def refuse_beside(self, rounds: int, noise_multiplier: float, *, sampled: bool) -> None:
        """Refuse metrics of a training that no guarantee covers together with them.

        Raises:
            ConfigError: the training has no noise, samples, or is shorter.
        """
        if sampled:
            raise ConfigError(
                "metrics: cannot be combined with sampling; no proof covers a guarantee that is "
                "amplified together with one that is not."
            )
        if not noise_multiplier:
            raise ConfigError(
                "metrics: the training has no noise, so nothing is promised that they could keep. "
                "Measure on public data, or add noise."
            )
        if self.rounds[-1] >= rounds:
            raise ConfigError(
                f"metrics.rounds: has round {self.rounds[-1]}; the last one is {rounds - 1}."
            )
