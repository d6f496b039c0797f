"""Ratios: one table of the benchmarks' results and their targets.

Run: ``python benchmarks/ratios.py``, after the others; writes benchmarks/results/ratios.md.

It measures nothing: every figure comes from a file of benchmarks/results, with the load of the
machine when that file was written. "Least" compares the fastest repeats of both sides, which other
programs disturb least; "median" compares the medians.
"""

import frame

from collections.abc import Iterator
from typing import Any

Row = tuple[str, str, list[float], str]
"""Subject, what it is compared with, ratio of the least times and of the medians, target."""
WHICH = ("least", "median")
HEAD = ["what", "beside", "least", "median", "aim", "load"]


def at_most(aim: float | None) -> str:
    return f"{aim:g} or less" if aim else ""


def accounting(found: dict[str, Any]) -> Iterator[Row]:
    """Yield seconds of the other libraries over ours."""
    rows = {name: row["seconds"] for name, row in found["rows"].items()}
    warm, cold = "exact epsilon of a tree, warm", "privpart epsilon, whole command"
    for ours, name in (
        (warm, "dp-accounting RDP, one Gaussian, warm"),
        (warm, "dp-accounting PLD, one Gaussian, warm"),
        (cold, "dp-accounting RDP, cold start"),
        (cold, "Opacus RDP, cold start"),
    ):
        yield ours, name, [rows[name] / rows[ours]], ""


def engine(found: dict[str, Any]) -> Iterator[Row]:
    """Yield seconds of plain PyTorch over the engine's."""
    for name, case in found["cases"].items():
        aim = f"{case['aim']:g}" if case["aim"] else ""
        pair = [case["ratio"][f"wall_{which}"] for which in WHICH]
        yield f"a round of {name}, 2 workers", "plain PyTorch, 2 processes", pair, aim


def short_job(found: dict[str, Any]) -> Iterator[Row]:
    """Yield seconds of plain PyTorch over the engine's, of whole jobs."""
    for name, case in found["cases"].items():
        for kind, row in case["jobs"].items():
            if kind != "plain":
                pair = [row[f"wall_ratio_{which}"] for which in WHICH]
                yield f"5 rounds of {name}, {kind}", "plain PyTorch, 2 processes", pair, "1"


def gpu(found: dict[str, Any]) -> Iterator[Row]:
    """Yield seconds of plain PyTorch on a GPU over the engine's on the same one."""
    for name, case in found["cases"].items():
        for both, row in case["ratio"].items():
            ours, _, base = both.partition(" / ")
            yield f"a round of {name}, GPU, {ours}", base, [row[which] for which in WHICH], ""


def noise(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the processor time of integer noise over that of the float32 noise of before."""
    exact, *others = found["draw"]["nanoseconds"].items()
    for name, row in others:
        aim = at_most(found["draw"]["aim"]) if name.startswith("float32") else ""
        pair = [exact[1][f"cpu_{which}"] / row[f"cpu_{which}"] for which in WHICH]
        yield "cost of an exact draw", name, pair, aim
    for name, own in found["streams"].items():
        pair, aim = [own["ratio"][f"cpu_{which}"] for which in WHICH], at_most(own["aim"])
        yield f"cost of a round's noise, {name}", "the same in float32, before", pair, aim


def server_round(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the processor time of a round and its commit over that of its noise, and vectors."""
    aims, model = found["machine"]["aims"], "a float32 model"
    for name, case in found["cases"].items():
        pair = [case["ratio"][f"cpu_{which}"] for which in WHICH]
        title = f"cost of a round and its commit, {name}"
        yield title, "its noise alone", pair, at_most(aims["ratio"])
        written = [case["written_vectors"]]
        yield f"cost in bytes of a commit, {name}", model, written, at_most(aims["written"])
    for name, own in found["memory"].items():
        title = f"cost in memory of a late round, {name}, momentum"
        yield title, model, [own["peak_vectors"]], at_most(aims["memory"])


def partial_training(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the figures of full training over those of partial training."""
    full, *parts = found["rows"]
    for row in parts:
        pair = [full[f"seconds_{which}"] / row[f"seconds_{which}"] for which in WHICH]
        yield f"ResNet-18 step, {row['part']}", "the same step, all trained", pair, ""
        memory = [full["peak_bytes"] / row["peak_bytes"]]
        yield f"ResNet-18 peak memory, {row['part']}", "the same, all trained", memory, ""


def attacks(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the time of plain autograd, or of one restart, over ours."""
    for network, ratios in found["ratios"].items():
        for name, row in ratios.items():
            ours, _, others = name.partition(" / ")
            if others == "plain":
                pair = [1 / row[which] for which in WHICH]
                yield f"{ours} iteration, {network}", "plain autograd", pair, "1"
            else:
                aim = "4" if network.startswith("LeNet") and "=16" in name else ""
                yield f"{others}, {network}", "one restart", [row[which] for which in WHICH], aim


def peers(found: dict[str, Any]) -> Iterator[Row]:
    """Yield seconds of other simulators over ours."""
    for name, case in found["cases"].items():
        for side, ratios in case["seconds_of_the_side_per_second_of_ours"].items():
            pair = [ratios[f"of_{which}"] for which in WHICH]
            yield f"a round of {name}, 2 workers", side, pair, ""


PARTS = (
    *(accounting, noise, server_round, engine, short_job),
    *(gpu, peers, partial_training, attacks),
)


def main() -> None:
    given = frame.options(__doc__)
    lines, machines = [], set()
    for part in PARTS:
        found = frame.Result(frame.RESULTS / f"{part.__name__}.json").old
        if not found:
            continue
        machine = found["machine"]
        machines.add(f"{machine['processor']}, {machine['cores']} cores, {machine['system']}")
        for what, beside, ratios, aim in part(found):
            least, middle = f"{ratios[0]:.2f}", "".join(f"{ratio:.2f}" for ratio in ratios[1:])
            lines.append([what, beside, least, middle, aim, f"{machine['load_average']:.1f}"])
    text = f"""# Ratios

Made by `make bench`. So many times as fast, or as small, as what stands beside. A cost
is so many times that of what stands beside, in processor time, the less the better.

{frame.markdown(HEAD, lines)}

Machine: {"; ".join(sorted(machines))}. Versions: in each file beside this.
"""
    if not given.quick:
        (frame.RESULTS / "ratios.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
