"""Study file: arms that train parts of one model, compared at equal noise or equal epsilon.

An arm, a mechanism and a level of noise are a group. Each group tries the same points of the tuning
space, as many for each arm, and measures them on held-out users, who are public. The best trial's
values then train the final seeds, which are measured on the test examples. A trial's plan is
measured on held-out users (``Data.measured_on``, or a metric for tuning), so it holds no test
example: which values are chosen cannot depend on one.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from accounting import checks
from accounting.checks import ConfigError
from privpart.study.cell import BasePlan, Cell, Changes, FileTable, read_file

LEAST_SEEDS = 5
"""Final seeds that an interval over seeds asks for."""
WITHOUT_NOISE = "none"
"""Name of the level, and of the mechanism, of trainings without noise."""
_FIXED = (
    "data.metric",
    "data.measured_on",
    "data.held_out",
    "data.seed",
    "privacy.noise_multiplier",
    "privacy.target_epsilon",
    "privacy.mechanism",
    "privacy.delta",
)
"""Fields of the plan that the study sets, or that make groups comparable."""
_MOST_TRIALS = 10_000
_NEAR = 1 / 6
"""Share of a range on either side of the best point that refining covers."""
Value = TypeVar("Value")


def _distinct(values: Sequence[Value]) -> Sequence[Value]:
    if twice := [value for i, value in enumerate(values) if value in values[:i]]:
        raise ConfigError(f"{twice[0]} is listed twice.")
    return values


Levels = Annotated[list[Annotated[float, Field(gt=0)]], AfterValidator(_distinct)]
Seeds = Annotated[list[int], Field(min_length=1), AfterValidator(_distinct)]


class Range(FileTable):
    """Values from ``low`` to ``high``, spread evenly or, with ``scale = "log"``, by ratio."""

    low: float
    high: float
    scale: Literal["linear", "log"] = "linear"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low < self.high:
            raise ConfigError(f"low={self.low:g}: must be below high={self.high:g}.")
        if self.scale == "log":
            checks.positive("low", self.low)
        return self

    def at(self, share: float) -> float:
        """Return the value at a share of the way, in [0, 1), to three significant digits."""
        value = self.low + (self.high - self.low) * share
        if self.scale == "log":
            value = self.low * (self.high / self.low) ** share
        return float(f"{value:.3g}")

    def share(self, value: float) -> float:
        """Return the share of the way at which a value lies, the inverse of ``at``."""
        if self.scale == "log":
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Noise(FileTable):
    """Levels: budgets that each mechanism's noise is solved for, or noise multipliers."""

    epsilon: Levels = Field(default_factory=list)
    multiplier: Levels = Field(default_factory=list)
    none: bool = False

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.epsilon and self.multiplier:
            raise ConfigError("has both epsilon and multiplier; give one of them.")
        if not (self.epsilon or self.multiplier or self.none):
            raise ConfigError("has no level; give epsilon, multiplier or none = true.")
        return self

    def levels(self) -> dict[str, Changes]:
        """Return name -> changes of the plan, of the levels with noise."""
        field = "target_epsilon" if self.epsilon else "noise_multiplier"
        return {f"{v:g}": {f"privacy.{field}": v} for v in self.epsilon or self.multiplier}


class Trials(FileTable):
    """Table ``[tuning]``: how each group's values are chosen.

    ``space`` has a range or a list of choices for each field of the plan; all groups share its
    points, which ``seed`` draws, and the trainings of a trial have the ``seeds``. The ``held_out``
    users are public: not trained on and not tested on. ``metric`` names an own function that
    measures a module on them, for a plan with a metric of its own.
    """

    trials: int = Field(ge=1, le=_MOST_TRIALS)
    refine: int = Field(default=0, ge=0, le=_MOST_TRIALS)
    seed: int = 0
    seeds: Seeds
    held_out: int = Field(default=0, ge=0)
    metric: str | None = None
    space: dict[str, Range | Annotated[list[Any], Field(min_length=1)]] = Field(min_length=1)

    def points(self) -> list[Changes]:
        """Return the points: a low-discrepancy sequence, shifted by the seed.

        Point k has the coordinates frac(shift + k g^-j), where g solves g^(d+1) = g + 1 (Roberts
        2018), so that any number of points covers the space evenly.
        """
        return [
            {
                field: values.at(share)
                if isinstance(values, Range)
                else values[math.floor(share * len(values))]
                for (field, values), share in zip(self.space.items(), shares, strict=True)
            }
            for shares in self._shares(self.trials, "trials")
        ]

    def near(self, best: Changes) -> list[Changes]:
        """Return the points that refine a best one: within a sixth of each range, same choices."""
        points: list[Changes] = []
        for shares in self._shares(self.refine, "refine"):
            point = dict(best)
            for (field, values), share in zip(self.space.items(), shares, strict=True):
                if isinstance(values, Range):
                    moved = values.share(best[field]) + _NEAR * (2 * share - 1)
                    point[field] = values.at(min(max(moved, 0.0), 1.0))
            points.append(point)
        return points

    def _shares(self, count: int, stage: str) -> list[list[float]]:
        """Return points of the unit cube, shifted by the seed and the stage."""
        size = len(self.space)
        ratio = 2.0
        for _ in range(64):
            ratio = (1 + ratio) ** (1 / (size + 1))
        digest = hashlib.shake_256(f"privpart study|{stage}|{self.seed}".encode()).digest(4 * size)
        shift = [int.from_bytes(digest[4 * j : 4 * j + 4], "big") / 2**32 for j in range(size)]
        return [[(shift[j] + k * ratio ** -(j + 1)) % 1 for j in range(size)] for k in range(count)]


class Freeze(FileTable):
    """Table ``[freeze]``: what to freeze is searched for by FedPT's four steps (section 3.1).

    The metric on held-out users may be worse by ``tolerance`` than that of the whole network, at
    every level of noise; below its deviation over seeds, chance decides.
    """

    tolerance: float = Field(ge=0)


class Final(FileTable):
    """Table ``[final]``: the seeds of the trainings that are tested."""

    seeds: Seeds


class StudyFile(FileTable):
    """A whole study, as people write it; docs/tutorials/sweep.md shows one with its keys."""

    study_schema: Literal["privpart/study/1"] = Field(alias="schema")
    plan: str | dict[str, Any]
    title: str = ""
    better: Literal["higher", "lower"] = "higher"
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    freeze: Freeze | None = None
    mechanisms: dict[str, dict[str, Any]] = Field(min_length=1)
    noise: Noise
    tuning: Trials
    final: Final
    smoke: bool = False

    @model_validator(mode="after")
    def _arms_seeds_and_mechanisms(self) -> Self:
        searches, seeds = self.freeze is not None, self.final.seeds
        both = sorted(set(self.tuning.seeds) & set(seeds))
        checks.refuse_first(
            {
                "arms: [freeze] searches for the arms; leave one of the two out.": (
                    searches and self.arms
                ),
                "arms: must be at least 2 items; there is no [freeze].": (
                    not searches and len(self.arms) < 2
                ),
                f"final.seeds: {min(both, default='')} is a seed of the tuning as well; the two "
                "must differ, or what was chosen by luck would look as good again.": both,
                f"final.seeds={seeds}: must be at least {LEAST_SEEDS}, for an interval; smoke = "
                "true accepts fewer.": len(seeds) < LEAST_SEEDS and not self.smoke,
                f"mechanisms.{WITHOUT_NOISE}: names the level without noise.": (
                    WITHOUT_NOISE in self.mechanisms
                ),
            }
        )
        return self


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One arm under one mechanism at one level of noise, by their names; "none" without noise."""

    arm: str
    mechanism: str
    level: str
    changes: tuple[Changes, ...]

    @property
    def labels(self) -> dict[str, str]:
        """Axis -> name, as a store of cells keeps them."""
        return {"arm": self.arm, "mechanism": self.mechanism, "level": self.level}


@dataclass(frozen=True)
class Study:
    """The groups of a study file, and the cells of each; a search adds arms to the file's."""

    file: StudyFile
    base: BasePlan
    arms: Mapping[str, Changes]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Mechanism by mechanism, those without noise first."""
        levels: list[tuple[str, str, tuple[Changes, ...]]] = []
        if self.file.noise.none:
            levels = [(WITHOUT_NOISE, WITHOUT_NOISE, ({"privacy.noise_multiplier": 0.0},))]
        for name, mechanism in self.file.mechanisms.items():
            for level, noise in self.file.noise.levels().items():
                levels.append((name, level, ({"privacy.mechanism": mechanism}, noise)))
        return tuple(
            Group(arm, mechanism, level, (*changes, change))
            for mechanism, level, changes in levels
            for arm, change in self.arms.items()
        )

    @property
    def reference(self) -> str:
        """The arm that the others are compared with."""
        return next(iter(self.arms))

    @property
    def sign(self) -> float:
        """1 if a higher metric is better, else -1."""
        return 1.0 if self.file.better == "higher" else -1.0

    @cached_property
    def points(self) -> list[Changes]:
        """The points of the tuning space that every group tries first."""
        return self.file.tuning.points()

    def checked_cells(self) -> list[Cell]:
        """Return cells that stand for all that may be trained, for a check before the first.

        They have each point of the space, and, since refining moves within them, both ends of each
        range.
        """
        points, tuning = list(self.points), self.file.tuning
        ranges = {f: v for f, v in tuning.space.items() if isinstance(v, Range) and tuning.refine}
        points += [{**points[0], f: v.at(end)} for f, v in ranges.items() for end in (0.0, 1.0)]
        return [
            cell
            for group in self.groups
            for number, point in enumerate(points)
            for cell in (*self.tuning_cells(group, number, point), *self.final_cells(group, point))
        ]

    @property
    def trials(self) -> int:
        """Points that every group tries in all."""
        return self.file.tuning.trials + self.file.tuning.refine

    @property
    def hash(self) -> str:
        """SHA-256, in hex, of the study's values and of the base plan's."""
        content = self.file.model_copy(update={"plan": dict(self.base.tables)}).model_dump_json()
        return hashlib.sha256(content.encode()).hexdigest()

    def tuning_cells(self, group: Group, number: int, point: Changes) -> list[Cell]:
        """Return the cells of one trial of a group, one per tuning seed."""
        labels = {**group.labels, "trial": str(number)}
        changes = [*group.changes, point, self._tuned_on]
        return [self.base.cell(labels, seed, changes) for seed in self.file.tuning.seeds]

    def final_cells(self, group: Group, point: Changes) -> list[Cell]:
        """Return the cells of a group with chosen values, one per final seed."""
        changes = [*group.changes, point, self._held_out]
        return [self.base.cell(group.labels, seed, changes) for seed in self.file.final.seeds]

    @property
    def _held_out(self) -> Changes:
        count = self.file.tuning.held_out
        return {"data.held_out": count} if count else {}

    @property
    def _tuned_on(self) -> Changes:
        """Changes that leave a trial nothing to measure on but held-out users."""
        metric = self.file.tuning.metric
        measured = {"data.measured_on": "held-out"} if metric is None else {"data.metric": metric}
        return {**self._held_out, **measured}


def read_study(path: str | Path) -> Study:
    """Return the study in a TOML file; one plan of each group is checked before any is trained.

    Raises:
        ConfigError: no such file, not valid TOML, fields that studies or plans do not have, or
            values out of range.
    """
    file, base = read_file(Path(path), StudyFile, "study")
    study = Study(file, base, file.arms or {"full": {"model.train": ["*"]}})
    _refuse_metric(study)
    _refuse_other_changes(study)
    for group in study.groups:
        study.tuning_cells(group, 0, study.points[0])
        study.final_cells(group, study.points[0])
    _refuse_other_users(study)
    return study


def _refuse_metric(study: Study) -> None:
    """Refuse a tuning that would read the test users, or nobody."""
    data, tuning = study.base.tables.get("data", {}), study.file.tuning
    plan_metric = data.get("metric") if isinstance(data, Mapping) else None
    checks.refuse_first(
        {
            f"tuning.metric={tuning.metric}: must name a function that measures on held-out users; "
            "by the plan's data.metric, values would be chosen on the test users.": (
                plan_metric is not None and tuning.metric in (None, plan_metric)
            ),
            "tuning.metric: the plan has no data.metric to replace; leave it out, and trials are "
            "measured by the accuracy on held-out users.": (
                plan_metric is None and tuning.metric is not None
            ),
            "tuning.held_out: is missing; trials are measured on those users.": (
                tuning.metric is None and not tuning.held_out
            ),
        }
    )


def _refuse_other_changes(study: Study) -> None:
    """Refuse arms and spaces that change what defines a group, or who is held out."""
    space, base = study.file.tuning.space, study.base.tables.get("data", {})
    for field in ("held_out", "measured_on"):
        if isinstance(base, Mapping) and field in base:
            raise ConfigError(f"plan: cannot set data.{field}, which the study sets.")
    same = (*_FIXED, "data", "model")
    _refuse_change("tuning.space", space, same, "which is the same in every trial")
    for name, changes in study.arms.items():
        _refuse_change(f"arms.{name}", changes, _FIXED, "which the study sets for all arms")
        _refuse_change("tuning.space", space, changes, f"because arms.{name} does")


def _refuse_change(where: str, fields: Iterable[str], fixed: Iterable[str], why: str) -> None:
    for field in fields:
        # it is one of them, holds one, or is in one
        if any(f"{f}.".startswith(f"{field}.") or field.startswith(f"{f}.") for f in fixed):
            raise ConfigError(f"{where}: cannot change {field}, {why}.")


def _refuse_other_users(study: Study) -> None:
    """Refuse arms with different data: who is held out, and who is tested on, depends on them."""
    arms: dict[str, str] = {}
    for group in study.groups:
        (cell, *_) = study.final_cells(group, study.points[0])
        arms.setdefault(cell.plan.data.model_dump_json(exclude={"seed"}), group.arm)
    if len(arms) > 1:
        first, other, *_ = arms.values()
        raise ConfigError(
            f"arms.{other}: has other values in [data] than arms.{first}, so other users would be "
            "held out; every arm must have the same."
        )
