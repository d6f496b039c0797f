"""Noised metrics of a run, as its ledger keeps them: what may be published of its learning curve.

They are released: to plot them, to stop by them, to choose a round or a setting by them costs
nothing beyond what the run's report already states.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accounting.checks import ConfigError
from privpart.plan import PrivacyPlan
from privpart.run.evaluations import Evaluation
from privpart.run.ledger import LEDGER, Ledger
from privpart.run.store import damage_named


@dataclass(frozen=True, slots=True)
class NoisedMetrics:
    """The metrics that a run released so far."""

    names: tuple[str, ...]  # of the metrics
    # standard deviation of the noise of every value. That users differ is not in it, nor that a
    # user who did not answer counts as 0
    standard_error: float
    evaluations: tuple[tuple[int, dict[str, float]], ...]  # (round, values by name), ascending
    planned: int  # number of evaluations that the plan has

    @classmethod
    def of(cls, plan: PrivacyPlan, evaluations: list[Evaluation]) -> "NoisedMetrics | None":
        """Return the metrics of a ledger; None if the plan has none."""
        if (metrics := plan.metrics) is None:
            return None
        pairs = (
            (evaluation.round, zip(metrics.names, evaluation.values, strict=True))
            for evaluation in evaluations
        )
        values = tuple((number, dict(named)) for number, named in pairs)
        return cls(metrics.names, metrics.standard_error, values, len(metrics.rounds))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per evaluation, ready for JSON."""
        return [
            {"round": number, "metrics": values, "standard_error": self.standard_error}
            for number, values in self.evaluations
        ]

    def text(self) -> str:
        """Return how many were released and the newest values, for people."""
        done = f"{len(self.evaluations)} of {self.planned}"
        if not self.evaluations:
            return f"{done} times"
        number, values = self.evaluations[-1]
        shown = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        noise = f"noise of each: standard deviation {self.standard_error:.2g}"
        return f"{done} times; after round {number} {shown} ({noise})"

    def score(self, name: str | None = None) -> float:
        """Return the newest value of a metric, by default of the first one.

        Raises:
            ConfigError: there is no such metric, or nothing was evaluated yet.
        """
        name = self.names[0] if name is None else name
        if name not in self.names:
            raise ConfigError(f"metric={name!r}: must be one of {', '.join(self.names)}.")
        if not self.evaluations:
            raise ConfigError("metrics: the run has released none yet.")
        return self.evaluations[-1][1][name]


def noised_metrics(folder: str | Path) -> NoisedMetrics:
    """Return the metrics that the run in a folder released, which is only read.

    Raises:
        ConfigError: there is no run, its ledger was changed, or its plan has no metrics.
    """
    ledger = Ledger(Path(folder))
    # Called for its checks of chain and signature.
    ledger.rows()
    with damage_named(Path(folder) / LEDGER):
        plan = PrivacyPlan.from_dict(ledger.facts["plan"])
        metrics = NoisedMetrics.of(plan, ledger.evaluations)
    if metrics is None:
        raise ConfigError(f"{folder}: the run's plan has no [privacy.metrics].")
    return metrics
