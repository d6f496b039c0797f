"""Workload: the models that an optimiser makes of the rounds' sums, as a matrix A of its choices.

SGD with momentum m and learning rates l_0, ..., l_{n-1} moves the model after round t by l_t v_t,
with v_t = m v_{t-1} + g_t and g_t the noised sum. So model t is row t of A g,

    A_ts = sum of l_r m^(r - s) over s <= r <= t,

and its noise is row t of A times the noise of the rounds. Without momentum, at a constant rate, A
is all ones below the diagonal: prefix sums (Denisov et al. 2022, section 4).
"""

from dataclasses import dataclass

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.sensitivity import Array


@dataclass(frozen=True, slots=True)
class Workload:
    """What a server's optimiser makes of the noised sums; the default is their prefix sums.

    Args:
        momentum: of SGD, in [0, 1), without dampening.
        learning_rates: one per round, > 0, in any unit; () is 1 in every round.

    >>> Workload(momentum=0.5).models(np.eye(3))
    array([[1.  , 0.  , 0.  ],
           [1.5 , 1.  , 0.  ],
           [1.75, 1.5 , 1.  ]])
    """

    momentum: float = 0.0
    learning_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not checks.nonnegative("momentum", self.momentum) < 1:
            raise ConfigError(f"momentum={self.momentum}: must be at least 0 and below 1.")
        for rate in self.learning_rates:
            checks.positive("learning_rates", rate)

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """Read a workload as people type it: ``momentum=0.9``."""
        name, _, value = text.partition("=")
        try:
            momentum = float(value)
        except ValueError:
            momentum = -1.0
        if name.strip() != "momentum" or not 0 <= momentum < 1:
            raise ConfigError(
                f"workload={text}: must be momentum=M, that of the server's SGD, with M at least 0 "
                "and below 1."
            )
        return cls(momentum)

    def to_dict(self) -> dict[str, object]:
        """Return the workload in short, ready for JSON."""
        rates = "by round" if self.learning_rates else "constant"
        return {"momentum": self.momentum, "learning_rates": rates}

    def __str__(self) -> str:
        rates = ", rates by round" if self.learning_rates else ""
        return f"SGD with momentum {self.momentum:g}{rates}"

    def models(self, sums: Array) -> Array:
        """Return A times ``sums``, shape (n, ...), a row per model; A itself of the unit matrix."""
        n = len(sums)
        if len(self.learning_rates) not in (0, n):
            raise ConfigError(
                f"learning_rates: {len(self.learning_rates)} of them, for {n} rounds; give one per "
                "round."
            )
        moved = np.array(sums, dtype=np.float64)
        for t in range(1, n) if self.momentum else ():
            moved[t] += self.momentum * moved[t - 1]
        if self.learning_rates:
            moved *= np.reshape(self.learning_rates, (n, *[1] * (moved.ndim - 1)))
        return np.cumsum(moved, axis=0)

    def response(self, t: Array) -> Array:
        """Return A_t0 at a constant rate, (1 - m^(t + 1)) / (1 - m): A is Toeplitz then."""
        return (1 - self.momentum ** (t + 1)) / (1 - self.momentum)

    def constant(self, kind: str) -> "Workload":
        """Return this workload; refuse rates that change, which fits of ``kind`` do not know."""
        if len(set(self.learning_rates)) > 1:
            raise ConfigError(
                f"learning_rates: fits of {kind!r} take a constant rate; kind='dense' takes any."
            )
        return self


PREFIX = Workload()
"""Prefix sums: plain SGD at a constant rate."""
