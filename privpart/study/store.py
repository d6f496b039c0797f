"""Store: one SQLite file with a row per training, durable as soon as it is added.

Rows are found by the key of their cell, so whatever has the same cells resumes from them. Importing
this does not load torch: showing results needs none.
"""

import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import mean, stdev

from accounting.checks import ConfigError, delta_warning

FILE = "sweep.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS sweep (axes TEXT NOT NULL, noise_axes TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS cells (
    key TEXT PRIMARY KEY, labels TEXT NOT NULL, seed INTEGER NOT NULL, error TEXT, result TEXT
);
"""


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
    def delta_warning(self) -> str:
        """The warning about delta beside the clients that the plan's tables count; "" if none."""
        tables = json.loads(self.plan)
        sampling = tables.get("privacy", {}).get("sampling") or {}
        stated = tables.get("data", {}).get("users") or sampling.get("population")
        return "" if self.epsilon is None else delta_warning(self.delta, stated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of a grid, over its seeds.

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
    own_metric: bool


class Store:
    """Results of cells; a context that closes its file.

    Args:
        folder: of the file.
        create: make the folder and a new store where they are missing.

    Raises:
        ConfigError: the folder has no store, or the file is not one.
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
            self._file.execute("SELECT result FROM cells LIMIT 1")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path} cannot be opened as a sweep: {error}.") from None

    def describe(self, axes: Sequence[str], noise_axes: Sequence[str] = ()) -> None:
        """Store the names of the axes, in order, and which of them set the noise."""
        with self._file:
            self._file.execute("DELETE FROM sweep")
            self._file.execute(
                "INSERT INTO sweep VALUES (?, ?)", (json.dumps(axes), json.dumps(noise_axes))
            )

    def add(
        self, key: str, labels: Mapping[str, str], seed: int, outcome: CellResult | str
    ) -> None:
        """Store the result of a cell, or its error, durably."""
        error = outcome if isinstance(outcome, str) else None
        result = None if isinstance(outcome, str) else json.dumps(asdict(outcome))
        row = (key, json.dumps(dict(labels), sort_keys=True), seed, error, result)
        with self._file:
            self._file.execute("REPLACE INTO cells VALUES (?, ?, ?, ?, ?)", row)

    def results(self) -> dict[str, CellResult]:
        """Return the result of each cell that is done, by key."""
        query = "SELECT key, result FROM cells WHERE error IS NULL"
        return {key: CellResult(**json.loads(row)) for key, row in self._file.execute(query)}

    def errors(self) -> list[tuple[str, int, str]]:
        """Return labels, seed and error of each cell that failed."""
        query = "SELECT labels, seed, error FROM cells WHERE error IS NOT NULL ORDER BY rowid"
        return list(self._file.execute(query))

    @property
    def axes(self) -> list[str]:
        """Names of the axes, in order."""
        return self._described("axes")

    @property
    def noise_axes(self) -> list[str]:
        """Names of the axes that set the noise."""
        return self._described("noise_axes")

    def points(self) -> list[Point]:
        """Return the points of the grid, ordered by the other axes, then by noise."""
        grouped: dict[str, dict[int, CellResult | None]] = {}
        query = "SELECT labels, seed, result FROM cells ORDER BY labels, seed"
        for labels, seed, result in self._file.execute(query):
            done = None if result is None else CellResult(**json.loads(result))
            grouped.setdefault(labels, {})[seed] = done
        points = [_point(json.loads(labels), results) for labels, results in grouped.items()]
        other = [axis for axis in self.axes if axis not in self.noise_axes]
        return sorted(
            points,
            key=lambda p: ([p.labels.get(a, "") for a in other], p.noise_multiplier or 0.0),
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _described(self, column: str) -> list[str]:
        row = self._file.execute(f"SELECT {column} FROM sweep").fetchone()
        return json.loads(row[0]) if row else []


def _point(labels: dict[str, str], results: Mapping[int, CellResult | None]) -> Point:
    done = {seed: result for seed, result in results.items() if result is not None}
    first = next(iter(done.values()), None)
    metrics = [result.accuracy for result in done.values()]
    finite = bool(done) and all(map(isfinite, metrics))
    return Point(
        labels=labels,
        seeds=tuple(done),
        failed=len(results) - len(done),
        mean=mean(metrics) if finite else None,
        deviation=stdev(metrics) if finite and len(done) > 1 else None,
        epsilon=first.epsilon if first else None,
        noise_multiplier=first.noise_multiplier if first else None,
        delta=first.delta if first else None,
        trained=first.trained if first else None,
        own_metric=first is not None and "metric" in json.loads(first.plan)["data"],
    )
