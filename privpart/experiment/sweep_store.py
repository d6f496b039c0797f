"""Sweep store: one SQLite file with a row per cell, and the points that the rows make.

Importing it does not load torch: showing a sweep needs none.
"""

import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from statistics import mean, stdev

from accounting.checks import ConfigError, delta_warning

FILE = "sweep.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS sweep (axes TEXT NOT NULL, noise_axes TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS cells (
    key TEXT PRIMARY KEY, labels TEXT NOT NULL, seed INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('done', 'failed')), error TEXT,
    accuracy REAL, epsilon REAL, delta REAL, noise_multiplier REAL,
    trained INTEGER, numbers INTEGER, tuned INTEGER, plan TEXT, engine TEXT, cpu_seconds REAL
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The result of one cell.

    Attributes:
        accuracy: on the test examples that were not held out, in [0, 1].
        epsilon: the plan's, as if its noise were secret; None without noise.
        noise_multiplier: the plan's, solved for if it has a target.
        delta: at which epsilon holds.
        trained: parameters that train.
        parameter_count: parameters of the whole network.
        tuned: candidates that were trained; 1 if nothing is tuned.
        plan: the plan with the best held-out accuracy among them, as JSON.
        engine: how the clients were computed.
        cpu_seconds: processor time.
    """

    accuracy: float
    epsilon: float | None
    noise_multiplier: float
    delta: float
    trained: int
    parameter_count: int
    tuned: int
    plan: str
    engine: str
    cpu_seconds: float

    @property
    def plan_hash(self) -> str:
        """``PlanFile.hash`` of the plan."""
        return hashlib.sha256(self.plan.encode()).hexdigest()

    @property
    def delta_warning(self) -> str:
        """The warning about delta beside the clients that the plan's tables count; "" if none."""
        tables = json.loads(self.plan)
        sampling = tables.get("privacy", {}).get("sampling") or {}
        stated = tables.get("data", {}).get("users") or sampling.get("population")
        return "" if self.epsilon is None else delta_warning(self.delta, stated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the grid, over its seeds.

    Attributes:
        labels: axis -> value.
        seeds: of the cells that are done.
        failed: number of cells that failed.
        mean: accuracy, in [0, 1], or the plan's own metric; None if no cell is done, or one
            diverged: its metric is not finite.
        deviation: standard deviation over seeds; None below two seeds, or without a mean.
        epsilon: None without noise, or if no cell is done.
        noise_multiplier: None if no cell is done.
        delta: at which epsilon holds; None if no cell is done.
        trained: parameters that train; None if no cell is done.
        tuned: candidates that each cell chose among; 1 if nothing is tuned. No epsilon covers the
            choice.
        own_metric: whether the plan names a metric of its author's, which may be any number.
    """

    labels: dict[str, str]
    seeds: tuple[int, ...]
    failed: int
    mean: float | None
    deviation: float | None
    epsilon: float | None
    noise_multiplier: float | None
    delta: float | None
    trained: int | None
    tuned: int
    own_metric: bool


class SweepStore:
    """Rows of a sweep; a context that closes its file.

    Args:
        folder: of the sweep.
        create: make the folder and a new store where they are missing.

    Raises:
        ConfigError: the folder has no sweep, or the file is not a sweep's.
    """

    def __init__(self, folder: str | Path, *, create: bool = False) -> None:
        path = Path(folder) / FILE
        try:
            if create:
                path.parent.mkdir(parents=True, exist_ok=True)
            elif not path.exists():
                raise ConfigError(f"{folder} has no sweep: no {FILE} in it.")
            self._file = sqlite3.connect(path)
            self._file.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path} cannot be opened as a sweep: {error}.") from None

    def describe(self, axes: Sequence[str], noise_axes: Sequence[str]) -> None:
        """Keep the names of the axes, in order, and which of them set the noise."""
        with self._file:
            self._file.execute("DELETE FROM sweep")
            self._file.execute(
                "INSERT INTO sweep VALUES (?, ?)", (json.dumps(axes), json.dumps(noise_axes))
            )

    def finished(self) -> set[str]:
        """Return the keys of the cells that are done."""
        return {key for (key,) in self._file.execute("SELECT key FROM cells WHERE status='done'")}

    def results(self) -> dict[str, CellResult]:
        """Return the result of each cell that is done, by key."""
        names = [field.name for field in fields(CellResult)]
        columns = ", ".join({"parameter_count": "numbers"}.get(name, name) for name in names)
        query = f"SELECT key, {columns} FROM cells WHERE status='done'"
        return {
            key: CellResult(**dict(zip(names, values, strict=True)))
            for key, *values in self._file.execute(query)
        }

    def add(
        self, key: str, labels: Mapping[str, str], seed: int, outcome: CellResult | str
    ) -> None:
        """Keep the result of a cell, or its error, durably."""
        if isinstance(outcome, str):
            found: list[object] = ["failed", outcome, *[None] * 10]
        else:
            found = ["done", None, outcome.accuracy, outcome.epsilon, outcome.delta]
            found += [outcome.noise_multiplier, outcome.trained, outcome.parameter_count]
            found += [outcome.tuned, outcome.plan, outcome.engine, outcome.cpu_seconds]
        row = (key, json.dumps(dict(labels), sort_keys=True), seed, *found)
        with self._file:
            self._file.execute(f"REPLACE INTO cells VALUES ({', '.join('?' * len(row))})", row)

    @property
    def axes(self) -> list[str]:
        """Names of the axes, in order."""
        return self._described("axes")

    @property
    def noise_axes(self) -> list[str]:
        """Names of the axes that set the noise."""
        return self._described("noise_axes")

    def errors(self) -> list[tuple[str, int, str]]:
        """Return labels, seed and error of each cell that failed."""
        query = "SELECT labels, seed, error FROM cells WHERE status='failed' ORDER BY rowid"
        return list(self._file.execute(query))

    def points(self) -> list[Point]:
        """Return the points of the grid, ordered by the other axes, then by noise."""
        self._file.row_factory = sqlite3.Row
        grouped: dict[str, list[sqlite3.Row]] = {}
        for row in self._file.execute("SELECT * FROM cells ORDER BY labels, seed"):
            grouped.setdefault(row["labels"], []).append(row)
        self._file.row_factory = None
        points = [_point(json.loads(labels), rows) for labels, rows in grouped.items()]
        other = [axis for axis in self.axes if axis not in self.noise_axes]
        return sorted(
            points,
            key=lambda p: ([p.labels.get(a, "") for a in other], p.noise_multiplier or 0.0),
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "SweepStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _described(self, column: str) -> list[str]:
        row = self._file.execute(f"SELECT {column} FROM sweep").fetchone()
        return json.loads(row[0]) if row else []


def _point(labels: dict[str, str], rows: Sequence[sqlite3.Row]) -> Point:
    done = [row for row in rows if row["status"] == "done"]
    first = done[0] if done else None
    accuracies = [row["accuracy"] for row in done]
    finite = bool(done) and all(own is not None and isfinite(own) for own in accuracies)
    return Point(
        labels=labels,
        seeds=tuple(row["seed"] for row in done),
        failed=len(rows) - len(done),
        mean=mean(accuracies) if finite else None,
        deviation=stdev(accuracies) if finite and len(done) > 1 else None,
        epsilon=first["epsilon"] if first else None,
        noise_multiplier=first["noise_multiplier"] if first else None,
        delta=first["delta"] if first else None,
        trained=first["trained"] if first else None,
        tuned=max((row["tuned"] for row in done), default=1),
        own_metric=first is not None and "metric" in json.loads(first["plan"])["data"],
    )
