"""Store: one file with a line per training, durable as soon as it is added.

Results are found by the key of their cell, so whatever has the same cells resumes from them. A key
covers the plan and its author's code; the file names the version of everything else.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from accounting.checks import ConfigError, delta_warning
from privpart.run import package
from privpart.run.begin import versions
from privpart.run.store import append_durably, damage_named, lock, make_private, one_line, opened

FILE = "sweep.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The result of one cell.

    Attributes:
        accuracy: in [0, 1], or the plan's own metric; not finite if the training diverged.
        epsilon: the plan's, as if its noise were secret; None without noise.
        noise_multiplier: the plan's, solved for if it has a target.
        delta: at which epsilon holds.
        trained: parameters that train.
        parameter_count: parameters of the whole network.
        plan: as JSON.
        engine: how the clients were computed.
        cpu_seconds: processor time.
    """

    accuracy: float
    epsilon: float | None
    noise_multiplier: float
    delta: float
    trained: int
    parameter_count: int
    plan: str
    engine: str
    cpu_seconds: float

    @property
    def plan_hash(self) -> str:
        """``PlanFile.hash`` of the plan."""
        return hashlib.sha256(self.plan.encode()).hexdigest()

    @property
    def names_metric(self) -> bool:
        """Whether the plan names a metric of its author's, which may be any number."""
        return "metric" in json.loads(self.plan)["data"]

    @property
    def delta_warning(self) -> str:
        """The warning about delta beside the clients that the plan's tables count; "" if none."""
        tables = json.loads(self.plan)
        sampling = tables.get("privacy", {}).get("sampling") or {}
        stated = tables.get("data", {}).get("users") or sampling.get("population")
        return "" if self.epsilon is None else delta_warning(self.delta, stated)


class Store:
    """Results of cells; a context, in which no other process can add to them.

    Args:
        folder: of the file.
        create: add results, after making the folder and the file where they are missing; otherwise
            the results that are there are read, also while another process adds some.

    Raises:
        ConfigError: the folder has no store, the file is not one, another process adds to it, or it
            has results of another version, which must not be compared with those of this one.
    """

    def __init__(self, folder: str | Path, *, create: bool = False) -> None:
        self._path = Path(folder) / FILE
        self._locks = ExitStack()
        self.axes: list[str] = []
        self.noise_axes: list[str] = []
        self._cells: dict[str, tuple[dict[str, str], int, CellResult | str]] = {}
        self._made_by: dict[str, str] = {}
        try:
            if create:
                if not self._path.parent.exists():
                    make_private(self._path.parent)
                # two processes that append would overwrite each other's lines
                busy = f"{folder}: another process trains these cells. Wait for its end."
                file_lock = lock(self._path.with_suffix(".lock"), busy)
                self._locks.callback(file_lock.release)
                if not self._path.exists():
                    append_durably(self._path, b"", 0)
            with opened(self._path) as file:
                data = file.read()
        except FileNotFoundError:
            raise ConfigError(f"{folder} has no sweep: no {FILE} in it.") from None
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be opened as a sweep: {one_line(error)}."
            ) from None
        with damage_named(self._path):
            # what follows the last end of a line was cut off by a crash
            self._size = data.rfind(b"\n") + 1
            for line in data[: self._size].splitlines():
                self._read(json.loads(line))
        if create:
            self._name_version(folder)

    def _name_version(self, folder: str | Path) -> None:
        mine = {**versions(), "files": package.running()}
        changed = [name for name in mine if self._made_by.get(name) != mine[name]]
        if changed and self.results():
            self._locks.close()
            made_by, here = (
                ", ".join(f"{name} {own.get(name, 'unknown')[:12]}" for name in changed)
                for own in (self._made_by, mine)
            )
            raise ConfigError(
                f"{folder}: its results are of another version ({made_by}; here {here}), and must "
                "not be mixed with new ones. Take another folder, or that version."
            )
        if changed:
            self._append({"made_by": mine})

    def _read(self, line: dict[str, Any]) -> None:
        if "axes" in line:
            self.axes, self.noise_axes = line["axes"], line["noise_axes"]
            return
        if "made_by" in line:
            self._made_by = line["made_by"]
            return
        outcome = line["error"] if line["result"] is None else CellResult(**line["result"])
        # of several trainings of one cell the last counts
        self._cells.pop(line["key"], None)
        self._cells[line["key"]] = (line["labels"], line["seed"], outcome)

    def _append(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        append_durably(self._path, data, self._size)
        self._size += len(data)
        self._read(line)

    def describe(self, axes: Sequence[str], noise_axes: Sequence[str] = ()) -> None:
        """Store the names of the axes, in order, and which of them set the noise."""
        if (list(axes), list(noise_axes)) != (self.axes, self.noise_axes):
            self._append({"axes": list(axes), "noise_axes": list(noise_axes)})

    def add(
        self, key: str, labels: Mapping[str, str], seed: int, outcome: CellResult | str
    ) -> None:
        """Store the result of a cell, or its error, durably."""
        error = outcome if isinstance(outcome, str) else None
        result = None if isinstance(outcome, str) else asdict(outcome)
        line = {"key": key, "labels": dict(labels), "seed": seed, "error": error, "result": result}
        self._append(line)

    def results(self) -> dict[str, CellResult]:
        """Return the result of each cell that is done, by key."""
        return {k: r for k, (*_, r) in self._cells.items() if isinstance(r, CellResult)}

    def errors(self) -> list[tuple[str, int, str]]:
        """Return labels, as JSON, seed and error of each cell that failed."""
        return [
            (json.dumps(labels, sort_keys=True), seed, outcome)
            for labels, seed, outcome in self._cells.values()
            if isinstance(outcome, str)
        ]

    def by_labels(self) -> list[tuple[dict[str, str], list[CellResult | str]]]:
        """Return labels, in order, and the outcome of each seed."""
        points: dict[str, list[tuple[int, Any]]] = {}
        for labels, seed, outcome in self._cells.values():
            points.setdefault(json.dumps(labels, sort_keys=True), []).append((seed, outcome))
        # by seed alone: outcomes have no order
        return [
            (json.loads(labels), [outcome for _, outcome in sorted(pairs, key=itemgetter(0))])
            for labels, pairs in sorted(points.items())
        ]

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()
