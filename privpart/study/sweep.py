"""Sweep: a base plan, axes that change its fields, and seeds; every combination is a cell.

Its table has a row per point of the grid, over the seeds.
"""

import itertools
import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from pydantic import Field

from accounting.checks import ConfigError
from privpart.study.cell import BasePlan, Cell, Changes, FileTable, read_file
from privpart.study.store import CellResult, Store

_NOISE = ("privacy.noise_multiplier", "privacy.target_epsilon")


class SweepFile(FileTable):
    """A whole sweep, as people write it.

    ``grid`` has the values of each dotted field, a list or a table that names them; ``joint`` has
    fields that change together, by axis and name. Each seed is that of model, data and noise.
    """

    sweep_schema: Literal["privpart/sweep/1"] = Field(alias="schema")
    plan: str | dict[str, Any]
    seeds: list[int] = Field(min_length=1)
    grid: dict[str, list[Any] | dict[str, Any]] = Field(default_factory=dict)
    joint: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)

    def axes(self) -> dict[str, dict[str, Changes]]:
        """Return axis -> name of a value -> its changes."""
        axes: dict[str, dict[str, Changes]] = {
            field: {name: {field: value} for name, value in _named(values).items()}
            for field, values in self.grid.items()
        }
        for axis, values in self.joint.items():
            if axis in axes:
                raise ConfigError(f"joint.{axis}: the grid has an axis of that name already.")
            axes[axis] = dict(values)
        if empty := [axis for axis, values in axes.items() if not values]:
            raise ConfigError(f"axis {empty[0]} has no values.")
        return axes


@dataclass(frozen=True, slots=True)
class Sweep:
    """The cells of a sweep file, in the order of the axes, seeds last.

    ``noise_axes`` set the noise, or the epsilon that it is solved for.
    """

    cells: tuple[Cell, ...]
    axes: tuple[str, ...]
    noise_axes: tuple[str, ...]


def read_sweep(path: str | Path) -> Sweep:
    """Return the cells of a TOML file; every plan is checked before any is trained.

    Raises:
        ConfigError: no such file, not valid TOML, fields that plans do not have, values out of
            range, an axis without values, or the same cell twice.
    """
    return sweep_of(*read_file(Path(path), SweepFile, "sweep"))


def sweep_of(file: SweepFile, base: BasePlan) -> Sweep:
    """Return the cells of a sweep file; raises as ``read_sweep``."""
    axes = file.axes()
    cells = tuple(
        base.cell(
            {axis: name for axis, (name, _) in zip(axes, point, strict=True)},
            seed,
            [changes for _, changes in point],
        )
        for point in itertools.product(*(values.items() for values in axes.values()))
        for seed in file.seeds
    )
    # by key, which ignores labels: one value under two names would count twice
    if len({cell.key for cell in cells}) < len(cells):
        raise ConfigError("the sweep has the same cell twice: a value or a seed is listed twice.")
    noise_axes = tuple(
        axis
        for axis, values in axes.items()
        if any(field in changes for changes in values.values() for field in _NOISE)
    )
    return Sweep(cells, tuple(axes), noise_axes)


def _named(values: list[Any] | dict[str, Any]) -> dict[str, Any]:
    if isinstance(values, dict):
        return values
    return {v if isinstance(v, str) else json.dumps(v): v for v in values}


def sweep_rows(store: Store) -> list[dict[str, Any]]:
    """Return the table of a sweep: a row per point, ordered by the other axes, then by noise.

    Results are None if no cell of a point is done. ``mean_accuracy``, in [0, 1], or
    ``mean_metric``, of a plan with a metric of its own, is None too if a training diverged, and
    ``standard_deviation`` below two seeds.
    """
    points = [
        (labels, [o for o in outcomes if isinstance(o, CellResult)], len(outcomes))
        for labels, outcomes in store.by_labels()
    ]
    others = [axis for axis in store.axes if axis not in store.noise_axes]
    points.sort(
        key=lambda p: ([p[0].get(a, "") for a in others], p[1][0].noise_multiplier if p[1] else 0.0)
    )
    return [
        {axis: labels.get(axis, "") for axis in store.axes} | _columns(done, count - len(done))
        for labels, done, count in points
    ]


def _columns(done: list[CellResult], failed: int) -> dict[str, Any]:
    first = done[0] if done else None
    names_metric = first is not None and first.names_metric
    metrics = [result.accuracy for result in done]
    finite = bool(done) and all(map(isfinite, metrics))
    centre = mean(metrics) if finite else None
    fields = ("noise_multiplier", "epsilon", "delta", "trained")
    return {
        **{name: getattr(first, name, None) for name in fields},
        "mean_accuracy": None if names_metric else centre,
        "mean_metric": centre if names_metric else None,
        "standard_deviation": stdev(metrics) if finite and len(done) > 1 else None,
        "seeds": len(done),
        "failed": failed,
        "noise_source": "seeded",
    }
