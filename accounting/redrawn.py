"""Bins that every pass draws anew: each pass is a random allocation of its own.

Whatever the passes before it released, a pass with fresh bins and independent noise is dominated by
one random allocation (``random_allocation``), so E passes are dominated by the product of E of them
(Dong, Roth and Su 2022, Theorem 3.2). With one draw for all passes their noise adds up instead,
which costs more: who is in which bin would be learned pass by pass.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from accounting import checks
from accounting.checks import ConfigError
from accounting.composed import ComposedGuarantee
from accounting.guarantee import Guarantee, mu_upper
from accounting.random_allocation import AllocatedGuarantee, BallsInBins, Shares
from accounting.report import Assumption
from accounting.subsampled import sampling_assumptions


@dataclass(frozen=True)
class RedrawnGuarantee:
    """The guarantee of independent noise on bins drawn anew, under add-or-remove adjacency.

    A pass that is cut off costs as much as a whole one.

    Args:
        noise_multiplier: noise standard deviation on the sum / clip norm, > 0.
        sampling: how members are put into bins, with ``redraw``.

    >>> again = RedrawnGuarantee(2.0, BallsInBins(bins=100, rounds=1000, redraw=True))
    >>> again.epsilon(1e-5) < AllocatedGuarantee(2.0, BallsInBins(100, 1000)).epsilon(1e-5)
    True
    """

    noise_multiplier: float
    sampling: BallsInBins

    adjacency: ClassVar[str] = "add-or-remove"

    def __post_init__(self) -> None:
        checks.positive("noise_multiplier", self.noise_multiplier)
        if not isinstance(self.sampling, BallsInBins) or not self.sampling.redraw:
            raise ConfigError(f"sampling={self.sampling!r}: must be BallsInBins with redraw.")

    @property
    def mu(self) -> float:
        """Without the bins being hidden, rounded up."""
        return mu_upper(float(self.sampling.passes), self.noise_multiplier)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The conditions of the amplification, besides clipping and secret noise."""
        return sampling_assumptions("balls-in-bins", self.sampling.how, sees="who is in which bin")

    def dominating(self) -> Shares | Guarantee:
        """Return one release that dominates the run, for composition with others."""
        alone = AllocatedGuarantee(self.noise_multiplier, BallsInBins(self.sampling.bins, 1))
        one = alone.dominating()
        if isinstance(one, Guarantee):
            return Guarantee(self.mu)
        return replace(one, draws=self.sampling.passes)

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` in (0, 1)."""
        return min(Guarantee(self.mu).epsilon(delta), self._composed.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at ``epsilon`` >= 0."""
        return min(Guarantee(self.mu).delta(epsilon), self._composed.delta(epsilon))

    @cached_property
    def _composed(self) -> ComposedGuarantee:
        return ComposedGuarantee((self.dominating(),))
