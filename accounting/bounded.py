"""Samples of bounded size: the steps of ``accounting.truncated``, composed."""

from dataclasses import dataclass
from functools import cached_property

from accounting.composed import ComposedGuarantee
from accounting.guarantee import Guarantee
from accounting.truncated import TruncatedSteps


@dataclass(frozen=True)
class TruncatedGuarantee(TruncatedSteps):
    """The guarantee of Gaussian steps on samples of bounded size; arguments as ``TruncatedSteps``.

    >>> run = TruncatedGuarantee(1.0, probability=0.01, population=10_000, most=180, steps=10)
    >>> 0 < run.epsilon(1e-6) < 1
    True
    """

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on epsilon at ``delta`` in (0, 1)."""
        return min(Guarantee(self.mu).epsilon(delta), self._composed.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on delta at ``epsilon`` >= 0."""
        return min(Guarantee(self.mu).delta(epsilon), self._composed.delta(epsilon))

    @cached_property
    def _composed(self) -> ComposedGuarantee:
        return ComposedGuarantee((self,))
