"""Frontier: what each arm of a study reaches at each level of noise, beside the first arm.

Arms are compared at the same mechanism and level, seed by seed: trainings of one seed share the
partition, the cohorts and, where a model has a seed, the start. Intervals are Student's t at 95 %,
of one comparison each; they cover the seeds of the trainings and not the choice of the values.

Importing it does not load torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, Literal

from scipy.special import stdtrit

if TYPE_CHECKING:  # only for annotations
    from privpart.experiment.study.stages import ChosenPoint, StudyTrial
    from privpart.experiment.study.study_file import Group, Study
    from privpart.experiment.sweep_store import CellResult

LEVEL = 0.95
Verdict = Literal["better", "worse", "undecided", "reference"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and its interval; both ends are None below two seeds."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Return the mean of independent values, and Student's interval around it."""
        centre = mean(values)
        if len(values) < 2:
            return cls(centre, None, None)
        half = float(stdtrit(len(values) - 1, (1 + LEVEL) / 2)) * stdev(values)
        half /= math.sqrt(len(values))
        return cls(centre, centre - half, centre + half)

    def verdict(self, better: str) -> Verdict:
        """Return whether a difference of this interval is better than none."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return "undecided"
        return "better" if (self.low > 0) == (better == "higher") else "worse"


@dataclass(frozen=True, slots=True)
class Reached:
    """What one group reached.

    Attributes:
        group: arm, mechanism and level.
        choice: of its trials.
        by_seed: seed -> result of the final stage, whose metric is a finite number.
        cpu_seconds: of all its trainings, trials included.
    """

    group: "Group"
    choice: "ChosenPoint"
    by_seed: Mapping[int, "CellResult"]
    cpu_seconds: float

    @property
    def any(self) -> "CellResult":
        """One of the results; all have the same plan, up to the seeds."""
        return next(iter(self.by_seed.values()))

    def metrics(self, seeds: Sequence[int] | None = None) -> list[float]:
        """Return the metric of each seed, in the order of the seeds."""
        return [self.by_seed[seed].accuracy for seed in sorted(seeds or self.by_seed)]


def rows_of(study: "Study", reached: Sequence[Reached]) -> list[dict[str, Any]]:
    """Return one row per group that has a final result; see docs/study.md for the columns."""
    reference = {
        (own.group.mechanism, own.group.level): own
        for own in reached
        if own.group.arm == study.reference
    }
    return [
        _row(study, own, reference.get((own.group.mechanism, own.group.level))) for own in reached
    ]


def _row(study: "Study", own: Reached, reference: Reached | None) -> dict[str, Any]:
    found, any_ = Interval.of(own.metrics()), own.any
    return {
        **own.group.labels,
        "epsilon": any_.epsilon,
        "delta": any_.delta if any_.epsilon is not None else None,
        "noise_multiplier": any_.noise_multiplier,
        "trained": any_.trained,
        "parameters": any_.parameter_count,
        "seeds": len(own.by_seed),
        "missing_seeds": len(study.file.final.seeds) - len(own.by_seed),
        "metric": found.mean,
        "low": found.low,
        "high": found.high,
        **_difference(study, own, reference),
        "trials": study.trials,
        "held_out_metric": own.choice.score,
        **own.choice.point,
        "cpu_seconds": round(own.cpu_seconds, 1),
    }


def _difference(study: "Study", own: Reached, reference: Reached | None) -> dict[str, Any]:
    columns = ("difference", "difference_low", "difference_high", "verdict")
    if own is reference:
        return dict(zip(columns, (0.0, None, None, "reference"), strict=True))
    both = sorted(set(own.by_seed) & set(reference.by_seed)) if reference else []
    if reference is None or not both:
        return dict.fromkeys(columns)
    pairs = zip(own.metrics(both), reference.metrics(both), strict=True)
    found = Interval.of([mine - theirs for mine, theirs in pairs])
    values = (found.mean, found.low, found.high, found.verdict(study.file.better))
    return dict(zip(columns, values, strict=True))


def tuning_rows(
    study: "Study",
    trials: Mapping["Group", Sequence["StudyTrial"]],
    results: Mapping[str, "CellResult"],
    chosen: Mapping["Group", "ChosenPoint"],
) -> Iterator[dict[str, Any]]:
    """Yield one row per training of the tuning, whose metric is that on held-out users."""
    for group, own in trials.items():
        best = chosen.get(group)
        for trial in own:
            taken = best is not None and best.trial == trial.number
            more = {"trial": trial.number, "chosen": taken}
            for cell in trial.cells:
                if cell.key in results:
                    yield _training(group, cell.seed, results[cell.key], trial.point, more)


def final_rows(reached: Sequence[Reached]) -> Iterator[dict[str, Any]]:
    """Yield one row per training of the final stage, whose metric is that on test examples."""
    for own in reached:
        for seed, result in own.by_seed.items():
            yield _training(own.group, seed, result, own.choice.point, {})


def _training(
    group: "Group", seed: int, result: "CellResult", point: Mapping[str, Any], more: dict[str, Any]
) -> dict[str, Any]:
    return {
        **group.labels,
        **more,
        "seed": seed,
        "epsilon": result.epsilon,
        "delta": result.delta,
        "noise_multiplier": result.noise_multiplier,
        "metric": result.accuracy,
        "trained": result.trained,
        "parameters": result.parameter_count,
        **point,
        "cpu_seconds": round(result.cpu_seconds, 2),
        "engine": result.engine,
        "plan_hash": result.plan_hash,
    }
