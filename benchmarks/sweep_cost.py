"""Sweep cost: processor seconds of a cell of a sweep, beside its training alone in a warm process.

Run: ``python benchmarks/sweep_cost.py``; writes benchmarks/results/sweep_cost.json. It needs
Debian's package dataset-fashion-mnist, or its files in the folder that FASHION_MNIST names.

Sweeps differ in noise and in the server's rate alone, so all cells of one share data, model and
start. Each is a whole command, with imports, checks, table and every process that it starts. Alone,
each cell is trained in a process that has imported everything and read the data. All take turns.

cell   seconds of the larger sweep less those of the smaller one, by the cells between them: what
       another cell costs
whole  seconds of the larger sweep by its cells, which share the start of the command
"""

import frame

import json
import statistics
import subprocess
import sys
import tempfile
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from privpart.study.cell import BasePlan
from privpart.study.runner import run_cell
from privpart.study.sweep import SweepFile, sweep_of
from privpart.training.plan_file import read
from privpart.training.task_data import read_task

EXAMPLES = Path(__file__).parent.parent / "examples"
SIZES = {"smaller": (2, 1), "larger": (4, 2)}
"""Values of the noise multiplier and of the server's rate: 2 cells, and 8."""
AIM = 1.1


def plans() -> dict[str, dict[str, Any]]:
    """Return the plans' tables: one of the examples, and two of Fashion-MNIST."""
    digits = dict(read(EXAMPLES / "digits.toml").tables)
    fashion = tomllib.loads((EXAMPLES / "fedpt_sweep.toml").read_text())["plan"]
    if frame.DATA is not None:
        fashion["data"]["directory"] = str(frame.DATA)
    fashion["privacy"]["rounds"] = 60
    last = fashion | {
        "model": {"name": "emnist_cnn", "sizes": {"classes": 10}, "seed": 0, "train": ["dense2.*"]},
        "data": fashion["data"] | {"users": 3000, "clients_per_round": 20},
        "client": {"learning_rate": 0.1, "batch_size": 16},
    }
    return {
        "digits, part of a CNN": digits,
        "Fashion-MNIST, all of a CNN, one step": fashion,
        "Fashion-MNIST, last layer of the EMNIST network": last,
    }


def sweep(plan: dict[str, Any], noise: int, rates: int) -> dict[str, Any]:
    """Return the tables of a sweep with so many values of each."""
    return {
        "schema": "privpart/sweep/1",
        "plan": plan,
        "seeds": [0],
        "grid": {
            "privacy.noise_multiplier": [1.0 + k for k in range(noise)],
            "server.learning_rate": [0.3 - 0.1 * k for k in range(rates)],
        },
    }


def command(tables: dict[str, Any], jobs: int) -> None:
    """Run ``privpart sweep`` in a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sweep.toml"
        path.write_text(_as_toml(tables))
        typed = ["sweep", str(path), "--out", str(Path(folder) / "out"), "-j", str(jobs)]
        line = [sys.executable, "-m", "privpart", *typed]
        subprocess.run(line, check=True, capture_output=True)


def _as_toml(tables: dict[str, Any]) -> str:
    """Return tables as TOML, each nested one inline."""

    def inline(value: Any) -> str:
        if isinstance(value, dict):
            return f"{{{', '.join(f'{json.dumps(k)} = {inline(v)}' for k, v in value.items())}}}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(inline, value))}]"
        return json.dumps(value)

    return "".join(f"{json.dumps(k)} = {inline(v)}\n" for k, v in tables.items())


def measure(plan: dict[str, Any], turns: int, jobs: list[int]) -> dict[str, Any]:
    """Time the sweeps of a plan, and their cells alone, in turns."""
    tables = {name: sweep(plan, *size) for name, size in SIZES.items()}
    large = tables["larger"]
    cells = sweep_of(SweepFile.model_validate(large), BasePlan(large["plan"])).cells
    keeping = lru_cache(maxsize=1)(read_task)

    def alone() -> None:
        for cell in cells:
            run_cell(cell, read=keeping)

    ways = {"alone": alone}
    clocks = {}
    for count in jobs:
        for name, own in tables.items():
            ways[f"{name}, {count}"] = lambda own=own, count=count: command(own, count)
            clocks[f"{name}, {count}"] = frame.children
    run_cell(cells[0], read=keeping)
    times = frame.in_turns(ways, turns, clocks=clocks, warm=False)
    spent = {name: [s.cpu for s in each] for name, each in times.items()}
    between = len(cells) - SIZES["smaller"][0] * SIZES["smaller"][1]
    ratio: dict[str, Any] = {}
    for which in ("least", "median"):
        of = frame.WHICH[which]
        one = of(spent["alone"]) / len(cells)
        for count in jobs:
            larger, smaller = (of(spent[f"{name}, {count}"]) for name in ("larger", "smaller"))
            ratio.setdefault(f"{count} jobs", {}).update(
                {
                    f"cell_{which}": (larger - smaller) / between / one,
                    f"whole_{which}": larger / len(cells) / one,
                }
            )
    return {
        "cells": len(cells),
        "alone": statistics.median(spent["alone"]) / len(cells),
        "ratio": ratio,
        "seconds": {name: frame.spread(each) for name, each in spent.items()},
    }


def main() -> None:
    every = plans()
    given = frame.options(
        __doc__,
        "sweep_cost.json",
        quick={"turns": 1, "cases": list(every)[:1], "jobs": [1]},
        turns=3,
        cases=frame.among(every),
        jobs=[1, 2],
        resume=False,
    )
    torch.set_num_threads(1)
    result = frame.Result(given.result, "torch", aim=AIM)
    result.cases(
        given.cases, lambda name: measure(every[name], given.turns, given.jobs), resume=given.resume
    )


if __name__ == "__main__":
    main()
