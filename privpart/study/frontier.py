"""Frontier: what each arm of a study reaches at each level of noise, beside the first arm.

Arms are compared at the same mechanism and level, seed by seed: trainings of one seed share the
partition, the cohorts and, where a model has a seed, the start. Intervals are Student's t at 95 %,
of one comparison each; they cover the seeds of the trainings and not the choice of the values.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, Literal

from scipy.special import stdtrit

from privpart.study.stages import ChosenPoint, Results, chosen_points, trials_of
from privpart.study.store import CellResult
from privpart.study.study_file import Group, Study

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
    """What one group reached, by seed of the final stage; metrics are finite numbers.

    ``cpu_seconds`` are those of all its trainings, trials included.
    """

    group: Group
    choice: ChosenPoint
    by_seed: Mapping[int, CellResult]
    cpu_seconds: float

    @property
    def any(self) -> CellResult:
        """One of the results; all have the same plan, up to the seeds."""
        return next(iter(self.by_seed.values()))


def reached_of(study: Study, results: Results) -> list[Reached]:
    """Return what each group reached that has a final result with a finite metric."""
    reached = []
    for group, best in chosen_points(study, results).items():
        # a training that diverged has no mean; it counts as a missing seed
        by_seed = {
            cell.seed: results[cell.key]
            for cell in study.final_cells(group, best.point)
            if cell.key in results and math.isfinite(results[cell.key].accuracy)
        }
        trials = [c for _, cells in trials_of(study, group, results) for c in cells]
        spent = [results[cell.key] for cell in trials] + [*by_seed.values()]
        if by_seed:
            reached.append(Reached(group, best, by_seed, sum(r.cpu_seconds for r in spent)))
    return reached


def rows_of(study: Study, reached: Sequence[Reached]) -> list[dict[str, Any]]:
    """Return one row per group that has a final result; columns: docs/tutorials/sweep.md."""
    references = {
        (r.group.mechanism, r.group.level): r for r in reached if r.group.arm == study.reference
    }
    return [_row(study, r, references.get((r.group.mechanism, r.group.level))) for r in reached]


def _row(study: Study, reached: Reached, reference: Reached | None) -> dict[str, Any]:
    interval = Interval.of([result.accuracy for result in reached.by_seed.values()])
    result = reached.any
    return {
        **reached.group.labels,
        "epsilon": result.epsilon,
        "delta": result.delta if result.epsilon is not None else None,
        "noise_multiplier": result.noise_multiplier,
        "trained": result.trained,
        "parameters": result.parameter_count,
        "seeds": len(reached.by_seed),
        "missing_seeds": len(study.file.final.seeds) - len(reached.by_seed),
        "metric": interval.mean,
        "low": interval.low,
        "high": interval.high,
        **_difference(study, reached, reference),
        "trials": study.trials,
        "held_out_metric": reached.choice.score,
        **reached.choice.point,
        "cpu_seconds": round(reached.cpu_seconds, 1),
    }


def _difference(study: Study, reached: Reached, reference: Reached | None) -> dict[str, Any]:
    columns = ("difference", "difference_low", "difference_high", "verdict")
    if reached is reference:
        return dict(zip(columns, (0.0, None, None, "reference"), strict=True))
    base = {} if reference is None else reference.by_seed
    # pairs of one seed: what the seed's partition and start add cancels out
    both = sorted(reached.by_seed.keys() & base.keys())
    if not both:
        return dict.fromkeys(columns)
    gain = Interval.of([reached.by_seed[seed].accuracy - base[seed].accuracy for seed in both])
    values = (gain.mean, gain.low, gain.high, gain.verdict(study.file.better))
    return dict(zip(columns, values, strict=True))


def tuning_rows(study: Study, results: Results) -> Iterator[dict[str, Any]]:
    """Yield one row per training of the tuning, whose metric is that on held-out users."""
    chosen = chosen_points(study, results)
    for group in study.groups:
        best = chosen.get(group)
        for number, (point, cells) in enumerate(trials_of(study, group, results)):
            more = {"trial": number, "chosen": best is not None and best.trial == number}
            for cell in cells:
                if cell.key in results:
                    yield _training(group, cell.seed, results[cell.key], point, more)


def final_rows(reached: Sequence[Reached]) -> Iterator[dict[str, Any]]:
    """Yield one row per training of the final stage, whose metric is that on test examples."""
    for r in reached:
        for seed, result in r.by_seed.items():
            yield _training(r.group, seed, result, r.choice.point, {})


def _training(
    group: Group, seed: int, result: CellResult, point: Mapping[str, Any], more: dict[str, Any]
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
