"""Independent noise: C = I, fresh noise on every round's sum (unamplified DP-FedAvg)."""

from dataclasses import dataclass

import numpy as np

from accounting import checks
from accounting.mechanisms.mechanism import OneStream, prefix_sums
from accounting.mechanisms.program import OUT, NoiseProgram, Op
from accounting.participation import Participation
from accounting.sensitivity import Array, Sensitivity, same_rounds


@dataclass(frozen=True, slots=True)
class Independent(OneStream):
    """Fresh noise in every round; its error on the t-th prefix sum grows as sqrt(t).

    >>> Independent(3).prefix_variance()
    array([1., 2., 3.])
    """

    rounds: int

    name = "independent"
    restart_every = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", checks.rounds(self.rounds))

    @classmethod
    def from_options(cls, participation: Participation) -> "Independent":
        """Return the mechanism for a participation; it has no options."""
        return cls(participation.rounds)

    def encoder(self) -> Array:
        """C = I, shape (n, n)."""
        return np.eye(self.rounds)

    def decoder(self) -> Array:
        """B = A, shape (n, n)."""
        return prefix_sums(self.rounds)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """One unit per participation: k."""
        same_rounds(self.rounds, participation)
        return Sensitivity(
            float(participation.max_participations), exact=True, rule="one unit per participation"
        )

    def noise_program(self) -> NoiseProgram:
        """y_t = z_t: a fresh draw per round."""
        return NoiseProgram(
            self.rounds,
            ops=lambda t: [Op(OUT, draws=[(t, 1.0)])],
            rows=lambda _: 0,
            spread=lambda: 1.0,
            kept_draws=lambda _: [],
        )

    def prefix_variance(self) -> Array:
        """1, 2, ..., n."""
        return np.arange(1.0, self.rounds + 1.0)
