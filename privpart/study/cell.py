"""Cell: one training of many, made from a base plan by changes of its fields.

Each cell is a whole plan: it is checked like any other, and its hash says whether it was trained.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from accounting.checks import ConfigError, parsed_toml, text_of
from privpart.settings.faults import field_of, sentence_of
from privpart.training.plan_file import PlanFile, validated

Changes = Mapping[str, Any]
"""Dotted name of a plan field -> its new value."""


class FileTable(BaseModel):
    """A table of a file that people write."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


AnyFile = TypeVar("AnyFile", bound=FileTable)


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        labels: axis -> name of the value that this cell has.
        seed: of model, data and noise; the run is a simulation and not private.
        plan: to train.
        code: what ``PlanFile.code`` returned of it.
    """

    labels: Mapping[str, str]
    seed: int
    plan: PlanFile
    code: dict[str, Any] | None = None

    @cached_property
    def key(self) -> str:
        """SHA-256, in hex, of all that the result depends on, one's own code included."""
        # without labels: two sweeps that train the same plan share its result
        content = [self.seed, self.plan.context(self.code)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def name(self) -> str:
        """What errors call the cell."""
        labels = ", ".join(f"{axis}={value}" for axis, value in self.labels.items())
        return f"the cell with {labels or 'no axis'}, seed {self.seed}"


@dataclass(frozen=True)
class BasePlan:
    """The plan whose changed copies are trained.

    Attributes:
        tables: of the plan file.
        folder: what paths in it are relative to.
    """

    tables: Mapping[str, Any]
    folder: Path = Path()
    _codes: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _cells: dict[str, Cell] = field(default_factory=dict, repr=False, compare=False)

    def cell(self, labels: Mapping[str, str], seed: int, changes: Sequence[Changes]) -> Cell:
        """Return the base plan with all changes and a seed; an error names the cell."""
        # a study asks for the same cells again and again, and to check a plan takes long
        key = repr((labels, seed, changes))
        if key not in self._cells:
            plan = self._plan(seed, changes)
            # cells that name the same code need not read it again
            names = repr((sorted(plan.references().items()), plan.model.weights))
            if names not in self._codes:
                self._codes[names] = plan.code()
            self._cells[key] = Cell(labels, seed, plan, self._codes[names])
        return self._cells[key]

    def plan(self, changes: Sequence[Changes], name: str, in_python: bool = False) -> PlanFile:
        """Return the base plan with all changes, under a name for errors; see ``validated``."""
        values = self._changed(changes)
        return validated(values, name=name, folder=self.folder, in_python=in_python)

    def _changed(self, changes: Sequence[Changes]) -> dict[str, Any]:
        # changes are written into nested tables, which all cells share
        values = deepcopy(dict(self.tables))
        for change in changes:
            _apply(values, change)
        return values

    def _plan(self, seed: int, changes: Sequence[Changes]) -> PlanFile:
        values = self._changed(changes)
        model = values.get("model", {})
        # a network that keeps all its weights has no seed
        keeps = isinstance(model, dict) and "factory" in model and "seed" not in model
        seeds = {"data.seed": seed} | ({} if keeps else {"model.seed": seed})
        _apply(values, seeds)
        pairs = (f"{key}={value}" for table in (*changes, seeds) for key, value in table.items())
        return validated(values, name=f"the cell with {', '.join(pairs)}", folder=self.folder)


def read_file(path: Path, kind: type[AnyFile], what: str) -> tuple[AnyFile, BasePlan]:
    """Return a TOML file of many trainings, a ``what``, and its base plan.

    The file's ``plan`` holds the plan's tables, or names a plan file relative to it.

    Raises:
        ConfigError: no such file, not valid TOML, unknown fields, or values out of range.
    """
    file = checked(_json_of_toml(path), kind, f"{path} is not a valid {what}")
    plan: str | dict[str, Any] | None = vars(file)["plan"]
    if plan is None or isinstance(plan, dict):
        return file, BasePlan(plan or {}, path.parent)
    named = path.parent / plan
    return file, BasePlan(json.loads(_json_of_toml(named)), named.parent)


def checked(content: bytes, kind: type[AnyFile], fault: str) -> AnyFile:
    """Return a file of many trainings from its content as JSON; errors begin with ``fault``."""
    try:
        return kind.model_validate_json(content, strict=True)
    except ValidationError as error:
        # Beside another schema, that of a file of another kind, nothing else helps.
        listed = [one for one in error.errors() if one["loc"] == ("schema",)] or error.errors()
        # Of a value of several types, pydantic says of each why it is none; one it is nearly.
        by_type = sorted(listed, key=lambda one: not one["type"].endswith("_type"))
        faults = {field_of(one): one for one in by_type}
        sentences = [sentence_of(one, kind) for one in faults.values()]
        text = f" {sentences[0]}" if len(sentences) == 1 else "\n  ".join(["", *sentences])
        raise ConfigError(f"{fault}:{text}") from None


def _json_of_toml(path: Path) -> bytes:
    """Return a TOML file as JSON, which pydantic validates strictly."""
    return to_json(parsed_toml(text_of(path, str(path)), str(path)))


def _apply(values: dict[str, Any], changes: Changes) -> None:
    for name, value in changes.items():
        *tables, last = name.split(".")
        table = values
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{name}: {part} is a value of the plan, not a table.")
        if isinstance(value, dict) and not tables:
            _refuse_lost(last, table.get(last), value)
        table[last] = value
        # the noise is given or solved for, never both
        if name == "privacy.target_epsilon":
            table.pop("noise_multiplier", None)
        elif name == "privacy.noise_multiplier":
            table.pop("target_epsilon", None)


def _refuse_lost(name: str, before: object, after: Mapping[str, Any]) -> None:
    """Refuse a table that drops values of the plan: most likely, a key was not quoted."""
    lost = sorted(before.keys() - after.keys()) if isinstance(before, dict) else []
    if lost:
        key = min(after, default="KEY")
        raise ConfigError(
            f"{name}: replaces the whole table of the plan, which also has {lost[0]}. To change a "
            f'value of it, quote its name: "{name}.{key}".'
        )
