"""Short job: a training of five rounds from a cold start, beside plain PyTorch in two processes.

Run: ``python benchmarks/short_job.py``; writes benchmarks/results/short_job.json. A job is a whole
command: imports, start-up and rounds. The plain job is the fairest one: the process that is started
computes half of the clients of each round on one thread, and a second process the other half. All
jobs of all cases take turns; results are written after each turn; ``--resume`` adds to the turns
of the result.
"""

import frame

import statistics
from typing import Any

import torch
from engine_cases import CASES, SMALLEST, Plain
from engine_speed import Engine
from torch.multiprocessing import get_context

ROUNDS = 5
KINDS = ("plain", "engine", "engine, 2 workers")
NAMES = ["ResNet-18 GN, full", "wide transformer, LoRA", "LSTM, full", "one step, full"]
"""A case of each kind of network: all of them would take half an hour."""
METHOD = {
    "job": f"{ROUNDS} rounds by a command, imports and start-up included",
    "ratio": "seconds of plain PyTorch in two processes over those of the job",
    "seconds": "wall-clock and processor seconds of each turn",
}
Times = list[tuple[float, float]]


def half(name: str, part: int) -> None:
    case = CASES[name]
    clients = range(part, case.clients, 2)
    plain = Plain(case, case.users(), clients, layout=case.layouts[-1])
    for _ in range(ROUNDS):
        plain.round()


def job(kind: str, name: str) -> None:
    torch.set_num_threads(1)
    if kind == "plain":
        other = get_context("spawn").Process(target=half, args=(name, 1))
        other.start()
        half(name, 0)
        other.join()
        return
    engine = Engine(CASES[name], workers=2 if kind.endswith("workers") else 1)
    for _ in range(ROUNDS):
        engine.round()
    engine.close()


def timed(kind: str, name: str) -> frame.Seconds:
    """Return the seconds of a job, of all its processes."""
    return frame.seconds(lambda: frame.apart(job, kind, name), clock=frame.children)


def row(times: Times, plain: Times) -> dict[str, float]:
    cells = {}
    for place, clock in enumerate(frame.Seconds._fields):
        own, base = [t[place] for t in times], [t[place] for t in plain]
        for which, of in (("least", min), ("median", statistics.median)):
            cells[f"{clock}_{which}"] = of(own)
            cells[f"{clock}_ratio_{which}"] = of(base) / of(own)
    return {key: round(value, 3) for key, value in cells.items()}


def main() -> None:
    given = frame.options(
        __doc__,
        "short_job.json",
        quick={"turns": 1, "cases": SMALLEST},
        cases=frame.among(CASES, NAMES),
        kinds=frame.among(KINDS[1:]),
        turns=3,
        resume=False,
    )
    result = frame.Result(given.result, "torch", threads="one of each process")
    old = result.old.get("seconds") if given.resume else None
    times: dict[str, dict[str, Times]] = old or {
        name: {kind: [] for kind in ("plain", *given.kinds)} for name in given.cases
    }
    done = min(len(own) for kinds in times.values() for own in kinds.values())
    for _ in range(done, given.turns):
        for name, kinds in times.items():
            for kind, own in kinds.items():
                own.append(timed(kind, name))
        cases: dict[str, Any] = {
            name: {
                "turns": len(kinds["plain"]),
                "jobs": {kind: row(own, kinds["plain"]) for kind, own in kinds.items()},
            }
            for name, kinds in times.items()
        }
        result.write(method=METHOD, cases=cases, seconds=times)
    for name, kinds in times.items():
        for kind, own in kinds.items():
            frame.show(f"{name}: {kind}", row(own, kinds["plain"]))


if __name__ == "__main__":
    main()
