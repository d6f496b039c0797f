"""Scheduled noise: independent noise on every round's sum, whose size follows a public schedule.

Round t's sum gets noise of s_t times the noise multiplier, so C = diag(1 / s_t): a client that
takes part in the rounds u moves C x by at most sum over u of 1 / s_t^2, squared. The schedule is
fixed before the first round; noise that follows the training would be a release of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accounting import checks, piecewise
from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import OneStream
from accounting.mechanisms.program import OUT, NoiseProgram, Op
from accounting.participation import FixedOrder, Participation
from accounting.sensitivity import Array, Sensitivity, heaviest, rounded_up, same_rounds

_RANGE = 1024.0  # factors lie from 1 / 1024 to 1024


@dataclass(frozen=True, slots=True)
class Scheduled(OneStream):
    """Independent noise that changes at given rounds.

    Args:
        rounds: number of rounds n.
        from_round: rounds at which a factor begins to hold, ascending; the first is 0.
        factor: per such round, the noise / the noise multiplier of the run, 1/1024 to 1024.

    >>> halved = Scheduled(4, from_round=(0, 2), factor=(1.0, 0.5))
    >>> halved.noise_per_round()
    array([1. , 1. , 0.5, 0.5])
    >>> round(halved.sensitivity(Participation(4, 2, 2)).squared, 6)
    5.0
    """

    rounds: int
    from_round: tuple[int, ...]
    factor: tuple[float, ...]

    name = "scheduled"
    restart_every = 1

    def __post_init__(self) -> None:
        rounds = checks.rounds(self.rounds)
        starts, factors = piecewise.checked("factor", self.from_round, self.factor)
        piecewise.refuse_beyond(starts, rounds)
        if not 1 / _RANGE <= min(factors) <= max(factors) <= _RANGE:
            raise ConfigError(f"factor={_some(factors)}: must lie from 1/1024 to 1024.")
        for name, value in (("rounds", rounds), ("from_round", starts), ("factor", factors)):
            object.__setattr__(self, name, value)

    @classmethod
    def from_options(
        cls,
        participation: Participation,
        *,
        from_round: tuple[int, ...] | None = None,
        factor: tuple[float, ...] | None = None,
    ) -> "Scheduled":
        """Return the mechanism for a participation; both options are needed."""
        if from_round is None or factor is None:
            raise ConfigError(
                "scheduled: needs from_round and factor, as from_round=0,100,factor=1,0.5."
            )
        return cls(participation.rounds, from_round, factor)

    def noise_per_round(self) -> Array:
        """Return s_t, the noise of each round's sum / noise multiplier, shape (n,)."""
        return piecewise.over(self.from_round, self.factor, self.rounds)

    def encoder(self) -> Array:
        """C = diag(1 / s_t), shape (n, n)."""
        return np.diag(1 / self.noise_per_round())

    def decoder(self) -> Array:
        """B = A diag(s_t), shape (n, n)."""
        return np.tril(np.tile(self.noise_per_round(), (self.rounds, 1)))

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Return the greatest sum of 1 / s_t^2 over the rounds of one client, exactly."""
        same_rounds(self.rounds, participation)
        cost = 1 / self.noise_per_round() ** 2
        k, b = participation.max_participations, participation.min_separation
        if isinstance(participation, FixedOrder):
            worst = max(float(cost[list(place)].sum()) for place in participation.places())
        else:
            worst = float(heaviest(cost, k, b))
        return Sensitivity(rounded_up(worst, k + 4), exact=True, rule="rounds of the least noise")

    def noise_program(self) -> NoiseProgram:
        """y_t = s_t z_t: a fresh draw per round."""
        noise = self.noise_per_round().tolist()
        return NoiseProgram(
            self.rounds,
            ops=lambda t: [Op(OUT, draws=[(t, noise[t])])],
            rows=lambda _: 0,
            spread=lambda: max(self.factor),
            kept_draws=lambda _: [],
        )

    def prefix_variance(self) -> Array:
        """s_1^2, s_1^2 + s_2^2, ..."""
        return np.cumsum(self.noise_per_round() ** 2)


def read_schedule(path: Path) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return ``from_round`` and ``factor`` of a CSV file with these two columns.

    Raises:
        ConfigError: the file cannot be read, or has other columns or no numbers.
    """
    hint = ", and a line for each round at which the noise changes, the first of them 0"
    name, columns = f"noise_schedule={path}", ("from_round", "factor")
    pairs = checks.two_columns(path, name, columns, int, hint)
    return tuple(start for start, _ in pairs), tuple(factor for _, factor in pairs)


def _some(values: Iterable[float]) -> str:
    return f"{', '.join(f'{value:g}' for value in values)}"[:80]
