"""Engine tables: the tables of docs/engine.md about the CPU, from the results of the benchmarks.

Run: ``python benchmarks/engine_tables.py``, after the others; prints Markdown. It measures nothing.
"""

import frame

import math
from collections.abc import Iterator
from typing import Any

Rows = Iterator[list[str]]
NAMES = {
    "EMNIST CNN, full": "FedPT's EMNIST network, all trained",
    "EMNIST CNN, partial": "the same, dense1 frozen",
    "EMNIST CNN, last layer": "EMNIST network, last layer alone",
    "ResNet-18 GN, full": "ResNet-18 with GroupNorm",
    "wide transformer, full": "transformer (width 128, 4 layers, 64 words)",
    "wide transformer, LoRA": "the same, LoRA of rank 8",
    "wide transformer, LoRA, batches of 2": "transformer (width 128), LoRA, batches of 2",
    "LSTM, full": "LSTM of 256 units",
    "one step, full": "100 clients of one step",
    "one step, partial": "the same, dense1 frozen",
    "MLP, full": "MLP of 199,210 parameters",
}
COHORTS = ("3", "6", "10", "25", "50")


def cases(name: str, part: str = "cases") -> dict[str, Any]:
    """Return the cases of a file of benchmarks/results, or another part of it."""
    found: dict[str, Any] = frame.Result(frame.RESULTS / f"{name}.json").old[part]
    return found


def pair(row: dict[str, float], form: str) -> str:
    """Return the least and the median of a row, under names of a form."""
    return " / ".join(_short(row[form.format(which)]) for which in ("least", "median"))


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def rounds() -> Rows:
    """Yield seconds of plain PyTorch over the engine's: of rounds, and of jobs."""
    jobs = cases("short_job")
    for name, case in cases("engine").items():
        cells = [pair(case["ratio"], f"{clock}_{{}}") for clock in ("wall", "cpu")]
        own = jobs[name]["jobs"] if name in jobs else {}
        for kind in ("engine, 2 workers", "engine"):
            cells.append(pair(own[kind], "wall_ratio_{}") if own else "")
        yield [NAMES[name], f"{case['aim']:g}", *cells]


def bound() -> Rows:
    """Yield the share of a client's time that products take, and what bounds an engine by it."""
    for name, case in cases("engine_bound").items():
        aim, share = cases("engine")[name]["aim"], case["share"]
        of_peak = "not counted" if name.startswith("LSTM") else f"{case['of_peak']:.2f}"
        yield [NAMES[name], of_peak, f"{share:.2f}", f"{aim:g}", f"{1 / share:.2f}"]


def rule() -> Rows:
    """Yield the rule's method by cohort: its seconds over the fastest's, and the loop's over it."""
    for name, case in cases("engine_rule").items():
        cells = [case["cohorts"].get(cohort) for cohort in COHORTS]
        shown = [
            f"{own['rule']} {own['of_best']:.2f}, {_short(own['of_loop'])}" if own else ""
            for own in cells
        ]
        yield [name, *shown]


def precision() -> Rows:
    """Yield milliseconds of rounds in float32 and in bfloat16."""
    for name, case in cases("engine_precision").items():
        methods = ", vectorized" * case["methods"]["float32"].startswith("vectorized")
        least = [f"{1e3 * case['seconds'][p]['cpu_least']:.0f}" for p in ("float32", "bfloat16")]
        title = f"{NAMES[name]}{methods}"
        yield [title, *least, pair(case["ratio"], "cpu_{}"), f"{case['difference']:.2g}"]


def sweep() -> Rows:
    """Yield the seconds of a cell of a sweep over those of its training alone."""
    for name, case in cases("sweep_cost").items():
        for jobs, row in case["ratio"].items():
            cells = [_short(row[which]) for which in ("cell_least", "whole_least")]
            yield [name, f"{case['cells']}", jobs.split()[0], f"{case['alone']:.2f}", *cells]


def server() -> Rows:
    """Yield nanoseconds a parameter of a server's round and commit, and of its parts."""
    for name, case in cases("server_round").items():
        mechanism, _, momentum = name.rsplit(", ", 2)
        least = {part: row["cpu_least"] for part, row in case["nanoseconds"].items()}
        parts = [case["parts_mean"][part]["cpu"] for part in PARTS]
        cells = [least["noise alone"], *parts, least["round and commit"]]
        ratio = pair(case["ratio"], "cpu_{}")
        yield [mechanism, momentum.split()[-1], *(f"{cell:.1f}" for cell in cells), ratio]


def memory() -> Rows:
    """Yield vectors of the peak of a late round."""
    for name, own in cases("server_round", "memory").items():
        mechanism, dim = name.rsplit(", ", 1)
        cells = [own["by_part"][part] for part in ("restored", "round", "written")]
        power = f"10^{math.log10(float(dim.split()[0])):.0f}"
        yield [mechanism, power, *(f"{cell:.1f}" for cell in cells), f"{own['peak_gib']:.2f}"]


PARTS = ("clip, round and add", "add noise, divide, move", "hash", "write")
TABLES = {
    "Rounds": (
        ["what", "aim", "a round", "CPU", "5 rounds, 2 workers", "the same, 1 process"],
        rounds,
    ),
    "Bound": (["what", "of that rate", "share of products", "aim", "so at most"], bound),
    "Rule": (["what", *(f"{count} clients" for count in COHORTS)], rule),
    "bfloat16": (
        ["what", "float32, ms", "bfloat16", "least / median", "difference"],
        precision,
    ),
    "Sweep": (["what", "cells", "jobs", "alone, CPU s", "another cell", "the whole"], sweep),
    "Server": (
        [
            *("what", "momentum", "noise alone", "clip, round, add", "add noise, divide, step"),
            *("hash", "write", "round and commit", "ratio"),
        ],
        server,
    ),
    "Memory": (
        ["what", "parameters", "restoring", "a round", "writing its state", "peak, GiB"],
        memory,
    ),
}


def main() -> None:
    for title, (head, rows) in TABLES.items():
        print(f"{title}\n\n{frame.markdown(head, rows())}\n")


if __name__ == "__main__":
    main()
