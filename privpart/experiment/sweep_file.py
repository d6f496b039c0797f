"""Sweep file: one training many times, over fields of its plan and over seeds.

A sweep file has a base plan, axes that change fields of it, and seeds. Each cell is a whole plan:
it is checked like any other, and its hash says whether it has been trained.
"""

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import to_json

from accounting.checks import ConfigError
from privpart.experiment.plan_file import PlanFile, validated

Changes = Mapping[str, Any]
"""Dotted name of a plan field -> its new value."""


class Tuning(BaseModel):
    """Table ``[tune]``: fields whose best value each cell chooses by held-out accuracy.

    Attributes:
        held_out: share of the test examples to choose by, in (0, 1); the others measure.
        grid: field -> values to try.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    held_out: float = Field(default=0.5, gt=0, lt=1)
    grid: dict[str, list[Any]] = Field(min_length=1)


class SweepFile(BaseModel):
    """A whole sweep, as people write it. ``read_sweep_file`` makes it from a TOML file.

    Attributes:
        sweep_schema: "schema" in the file; names the version of this format.
        plan: tables of the base plan. A file may name a plan file instead, relative to its folder.
        seeds: each is the seed of the model, of the data and of the noise.
        grid: dotted field -> its values: a list, or a table that names them.
        joint: axis -> name -> the fields that change together.
        tune: fields that each cell chooses for itself; None tunes nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    sweep_schema: Literal["privpart/sweep/1"] = Field(alias="schema")
    plan: str | dict[str, Any]
    seeds: list[int] = Field(min_length=1)
    grid: dict[str, list[Any] | dict[str, Any]] = Field(default_factory=dict)
    joint: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    tune: Tuning | None = None
    _folder: Path = PrivateAttr(default_factory=Path)

    @property
    def folder(self) -> Path:
        """The folder that paths to one's own code are relative to."""
        return self._folder

    @property
    def tables(self) -> dict[str, Any]:
        """The tables of the base plan, once a plan file that is only named has been read."""
        if isinstance(self.plan, str):
            raise TypeError(f"plan={self.plan}: the file was not read")
        return self.plan


@dataclass(frozen=True)
class Cell:
    """One training of a sweep.

    Attributes:
        labels: axis -> name of the value that this cell has.
        seed: of model, data and noise; the run is a simulation and not private.
        candidates: plans to choose among by held-out accuracy; one if nothing is tuned.
        held_out: share of the test examples to choose by; 0 if nothing is tuned.
        codes: what ``PlanFile.code`` returned of each candidate; None asks them. Cells that name
            the same code need not read it again.
    """

    labels: Mapping[str, str]
    seed: int
    candidates: tuple[PlanFile, ...]
    held_out: float
    codes: tuple[dict[str, Any] | None, ...] | None = None

    @cached_property
    def key(self) -> str:
        """SHA-256, in hex, of all that the result depends on, one's own code included."""
        codes = self.codes or tuple(plan.code() for plan in self.candidates)
        plans = (plan.context(code) for plan, code in zip(self.candidates, codes, strict=True))
        content = [self.seed, self.held_out, *plans]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Sweep:
    """The cells of a sweep file.

    Attributes:
        cells: in the order of the axes, seeds last.
        axes: their names, in order.
        noise_axes: names of the axes that set the noise, or the epsilon that it is solved for.
    """

    cells: tuple[Cell, ...]
    axes: tuple[str, ...]
    noise_axes: tuple[str, ...]


_NOISE = ("privacy.noise_multiplier", "privacy.target_epsilon")


def read_sweep(path: str | Path) -> Sweep:
    """Return the cells of a TOML file; every plan is checked before any is trained.

    Raises:
        ConfigError: no such file, not valid TOML, fields that plans do not have, values out of
            range, an axis without values, or the same cell twice.
    """
    return sweep_of(read_sweep_file(path))


def read_sweep_file(path: str | Path) -> SweepFile:
    """Return a TOML file's sweep, with a plan that it names read; raises as ``read_sweep``."""
    path = Path(path)
    try:
        file = SweepFile.model_validate_json(json_of_toml(path), strict=True)
    except ValidationError as error:
        faults = "\n".join(
            f"  {'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}."
            for fault in error.errors()
        )
        raise ConfigError(f"{path} is not a valid sweep:\n{faults}") from None
    base, folder = base_tables(path, file.plan)
    found = file.model_copy(update={"plan": base})
    found._folder = folder
    return found


def base_tables(path: Path, plan: str | dict[str, Any]) -> tuple[dict[str, Any], Path]:
    """Return the tables of a file's base plan, and what paths in them are relative to.

    Args:
        path: the file.
        plan: the tables, or a plan file relative to the file's folder.

    Raises:
        ConfigError: no such plan file, or it is not valid TOML.
    """
    if not isinstance(plan, str):
        return plan, path.parent
    named = path.parent / plan
    tables: dict[str, Any] = json.loads(json_of_toml(named))
    return tables, named.parent


def json_of_toml(path: Path) -> bytes:
    """Return a TOML file as JSON, which pydantic validates strictly.

    Raises:
        ConfigError: no such file, or it is not valid TOML.
    """
    try:
        return to_json(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}.") from None


def sweep_of(file: SweepFile) -> Sweep:
    """Return the cells of a sweep file whose plan is given as tables; raises as ``read_sweep``."""
    axes = _axes(file)
    cells = tuple(
        Cell(
            {axis: name for axis, (name, _) in zip(axes, point, strict=True)},
            seed,
            tuple(
                changed_plan(
                    file.tables,
                    [*(changes for _, changes in point), tuned, seeds_of(seed, file.tables)],
                    file.folder,
                )
                for tuned in _tuned(file.tune)
            ),
            file.tune.held_out if file.tune else 0.0,
        )
        for point in itertools.product(*(values.items() for values in axes.values()))
        for seed in file.seeds
    )
    if len({cell.key for cell in cells}) < len(cells):
        raise ConfigError("the sweep has the same cell twice: a value or a seed is listed twice.")
    noisy = tuple(
        axis
        for axis, values in axes.items()
        if any(field in changes for changes in values.values() for field in _NOISE)
    )
    return Sweep(cells, tuple(axes), noisy)


def _axes(file: SweepFile) -> dict[str, dict[str, Changes]]:
    """Return axis -> name of a value -> its changes."""
    axes: dict[str, dict[str, Changes]] = {
        field: {name: {field: value} for name, value in _named(values).items()}
        for field, values in file.grid.items()
    }
    for axis, named in file.joint.items():
        if axis in axes:
            raise ConfigError(f"joint.{axis}: the grid has an axis of that name already.")
        axes[axis] = dict(named)
    if empty := [axis for axis, values in axes.items() if not values]:
        raise ConfigError(f"axis {empty[0]} has no values.")
    return axes


def _named(values: list[Any] | dict[str, Any]) -> dict[str, Any]:
    if isinstance(values, dict):
        return values
    return {v if isinstance(v, str) else json.dumps(v): v for v in values}


def _tuned(tune: Tuning | None) -> Iterator[Changes]:
    if tune is None:
        yield {}
        return
    for point in itertools.product(*tune.grid.values()):
        yield dict(zip(tune.grid, point, strict=True))


def seeds_of(seed: int, base: Mapping[str, Any]) -> Changes:
    """Return the seeds of a cell; a network that keeps all its weights has none."""
    model = base.get("model", {})
    keeps = isinstance(model, dict) and "factory" in model and "seed" not in model
    return {"data.seed": seed} | ({} if keeps else {"model.seed": seed})


def changed_plan(base: Mapping[str, Any], changes: Sequence[Changes], folder: Path) -> PlanFile:
    """Return the base plan with all changes; an error names the cell."""
    values = deepcopy(dict(base))
    for field, value in (item for change in changes for item in change.items()):
        *tables, last = field.split(".")
        table = values
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{field}: {name} is a value of the plan, not a table.")
        table[last] = value
        if field == "privacy.target_epsilon":
            table.pop("noise_multiplier", None)
        elif field == "privacy.noise_multiplier":
            table.pop("target_epsilon", None)
    told = ", ".join(f"{field}={value}" for change in changes for field, value in change.items())
    return validated(values, name=f"the cell with {told}", folder=folder)
