"""Ratios: one table of the benchmarks' results and their targets.

Run: ``python benchmarks/ratios.py``, after the others; writes benchmarks/results/ratios.md.

It measures nothing: every figure comes from a file of benchmarks/results, with the load of the
machine when that file was written. "Least" compares the fastest repeats of both sides, which other
programs disturb least; "median" compares the medians.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = tuple[str, str, float, float | None, str]
"""Subject, what it is compared with, ratio of the least times, of the medians, target."""


def accounting(found: dict[str, Any]) -> Iterator[Row]:
    """Yield seconds of the other libraries over ours."""
    rows = {name: row["seconds"] for name, row in found["rows"].items()}
    ours, cold = rows["exact epsilon of a tree, warm"], rows["privpart epsilon, whole command"]
    for name in ("dp-accounting RDP, one Gaussian, warm", "dp-accounting PLD, one Gaussian, warm"):
        yield "exact epsilon of a tree, warm", name, rows[name] / ours, None, ""
    for name in ("dp-accounting RDP, cold start", "Opacus RDP, cold start"):
        yield "privpart epsilon, whole command", name, rows[name] / cold, None, ""


def engine(found: dict[str, Any]) -> Iterator[Row]:
    """Yield seconds of plain PyTorch over the engine's."""
    for name, case in found["cases"].items():
        aim = f"{case['aim']:g}" if case["aim"] else ""
        ratios = (case["ratio"][f"wall_{which}"] for which in WHICH)
        yield f"a round of {name}, 2 workers", "plain PyTorch, 2 processes", *ratios, aim


def short_job(found: dict[str, Any]) -> Iterator[Row]:
    """Yield seconds of plain PyTorch over the engine's, of whole jobs."""
    for name, case in found["cases"].items():
        for kind, row in case["jobs"].items():
            if kind != "plain":
                ratios = (row[f"wall_ratio_{which}"] for which in WHICH)
                yield f"5 rounds of {name}, {kind}", "plain PyTorch, 2 processes", *ratios, "1"


def gpu(found: dict[str, Any]) -> Iterator[Row]:
    """Yield seconds of plain PyTorch on a GPU over the engine's on the same one."""
    for name, case in found["cases"].items():
        for pair, row in case["ratio"].items():
            ours, _, base = pair.partition(" / ")
            yield f"a round of {name}, GPU, {ours}", base, row["least"], row["median"], ""


def noise(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the processor time of integer noise over that of the float32 noise of before."""
    draw = found["draw"]
    rows = draw["nanoseconds"]
    exact = rows["exact draw"]
    for name, row in rows.items():
        if name != "exact draw":
            aim = at_most(draw) if name.startswith("float32") else ""
            ratios = (exact[f"cpu_{which}"] / row[f"cpu_{which}"] for which in WHICH)
            yield "cost of an exact draw", name, *ratios, aim
    for name, own in found["streams"].items():
        ratios = (own["ratio"][f"cpu_{which}"] for which in WHICH)
        yield (
            f"cost of a round's noise, {name}",
            "the same in float32, before",
            *ratios,
            at_most(own),
        )


def server_round(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the processor time of a round and its commit over that of its noise, and vectors."""
    aims = found["machine"]["aims"]
    for name, case in found["cases"].items():
        ratios = (case["ratio"][f"cpu_{which}"] for which in WHICH)
        aim = f"{aims['ratio']:g} or less"
        yield f"cost of a round and its commit, {name}", "its noise alone", *ratios, aim
        written = "" if name.startswith("BLT") else f"{aims['written']:g} or less"
        vectors = case["written_vectors"]
        yield f"cost in bytes of a commit, {name}", "a float32 model", vectors, None, written
    for name, own in found["memory"].items():
        aim = f"{aims['memory']:g} or less" if name == "independent" else ""
        peak = own["peak_vectors"]
        yield f"cost in memory of a round, {name}, momentum", "a float32 model", peak, None, aim


WHICH = ("least", "median")


def at_most(own: dict[str, Any]) -> str:
    """Return the aim of a ratio, or nothing."""
    return f"{own['aim']:g} or less" if own["aim"] else ""


def partial_training(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the figures of full training over those of partial training."""
    full, *parts = found["rows"]
    for row in parts:
        seconds = [full[k] / row[k] for k in ("seconds_least", "seconds_median")]
        yield f"ResNet-18 step, {row['part']}", "the same step, all trained", *seconds, ""
        memory = full["peak_bytes"] / row["peak_bytes"]
        yield f"ResNet-18 peak memory, {row['part']}", "the same, all trained", memory, None, ""


def attacks(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the time of plain autograd, or of one restart, over ours."""
    for network, ratios in found["ratios"].items():
        for name, row in ratios.items():
            if name.endswith("/ plain"):
                ours = f"{name.removesuffix(' / plain')} iteration, {network}"
                yield ours, "plain autograd", 1 / row["least"], 1 / row["median"], "1"
            else:
                aim = "4" if network.startswith("LeNet") and "=16" in name else ""
                ours = f"{name.partition(' / ')[2]}, {network}"
                yield ours, "one restart", row["least"], row["median"], aim


def peers(found: dict[str, Any]) -> Iterator[Row]:
    """Yield seconds of other simulators over ours."""
    for name, case in found["cases"].items():
        for side, ratios in case["seconds_of_the_side_per_second_of_ours"].items():
            least, median = ratios["of_least"], ratios["of_median"]
            yield f"a round of {name}, 2 workers", side, least, median, ""


PARTS = (
    accounting,
    noise,
    server_round,
    engine,
    short_job,
    gpu,
    peers,
    partial_training,
    attacks,
)


def main() -> None:
    """Write the table and print it."""
    lines = [
        "# Ratios",
        "",
        "Made by `make bench`. So many times as fast, or as small, as what stands beside. A cost",
        "is so many times that of what stands beside, in processor time, the less the better.",
        "",
        "| what | beside | least | median | aim | load |",
        "|---|---|---|---|---|---|",
    ]
    machines = set()
    for part in PARTS:
        path = RESULTS / f"{part.__name__}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        machine = found["machine"]
        machines.add(f"{machine['processor']}, {machine['cores']} cores, {machine['system']}")
        for what, beside, least, median, aim in part(found):
            middle = "" if median is None else f"{median:.2f}"
            load = f"{machine['load_average']:.1f}"
            lines.append(f"| {what} | {beside} | {least:.2f} | {middle} | {aim} | {load} |")
    lines += ["", f"Machine: {'; '.join(sorted(machines))}. Versions: in each file beside this."]
    text = "\n".join(lines) + "\n"
    (RESULTS / "ratios.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
