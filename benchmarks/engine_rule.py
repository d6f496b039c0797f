"""Engine rule: the method that the engine's rule gives, beside every other one, by cohort.

Run: ``python benchmarks/engine_rule.py``; writes benchmarks/results/engine_rule.json. ``--resume``
keeps cases that were measured.

Of each case of engine_cases.py and each size of the cohort, all methods that apply and plain
PyTorch, in its layouts, take turns in one process of one thread. A cohort is computed in chunks:
where one has two full ones, a larger one has more of the same and is not measured.
"""

import frame

from dataclasses import replace
from typing import Any

import torch
from engine_cases import CASES, SMALLEST, Case, Plain
from engine_speed import Engine

from privpart.engines.methods import Method
from privpart.engines.options import EngineOptions

COHORTS = [3, 6, 10, 25, 50]
_LEAST_SECONDS = 0.1
"""Of rounds in a turn."""
METHODS = {
    "loop": Method(),
    "vectorized": Method(vectorized=True),
    "ghost": Method(ghost_sum=True),
}
METHOD = {
    "seconds": "processor seconds of a round, least and median of the turns",
    "rule": "the method that the rule gives for this cohort",
    "of_best": "seconds of the rule's method over those of the fastest one, of the least",
    "of_loop": "seconds of the plain loop, the engine's own, over those of the rule's method",
    "of_plain": "seconds of plain PyTorch, in the layout of the engine, over the same",
    "of_faster_layout": "the same in plain PyTorch's faster layout",
    "ratio": "the worst cohort's",
}


def engine_of(case: Case, method: Method | None = None) -> Engine:
    """Return an engine that computes by this method, or by the rule's, after a round."""
    own = Engine(case)
    own.engine._fixed = method
    if method is not None and method.ghost_sum and own.engine.sums(own.task, own.start) is None:
        raise RuntimeError("ghost clipping does not apply")
    own.round()
    return own


def cell(case: Case, turns: int, limit: float) -> dict[str, Any]:
    """Time all ways to compute one cohort in turns, in fewer if they take ``limit`` seconds."""
    chosen = engine_of(case).engine.method
    ways: dict[str, frame.Job] = {}
    for layout in case.layouts:
        ways[f"plain, {layout}"] = Plain(
            case, case.users(), range(case.clients), layout=layout
        ).round
    rounded = case.precision == "bfloat16"
    for name, method in METHODS.items():
        try:
            ways[name] = engine_of(case, replace(method, bfloat16=rounded)).round
        except RuntimeError:
            continue  # torch.func does not support the network, or no sums are allowed
    times = frame.in_turns(ways, turns, at_least=_LEAST_SECONDS, warm=False, limit=limit)
    seconds = {
        name: {which: of(s.cpu for s in spent) for which, of in list(frame.WHICH.items())[:2]}
        for name, spent in times.items()
    }
    least = {name: row["least"] for name, row in seconds.items()}
    rule = next(n for n, m in METHODS.items() if replace(m, bfloat16=rounded) == chosen)
    return {
        "rule": rule,
        "of_best": least[rule] / min(least[name] for name in METHODS if name in least),
        "of_loop": least["loop"] / least[rule],
        "of_plain": least["plain, contiguous"] / least[rule],
        "of_faster_layout": min(s for n, s in least.items() if "plain" in n) / least[rule],
        "turns": len(times["loop"]),
        "seconds": seconds,
    }


def measure(name: str, cohorts: list[int], turns: int, limit: float) -> dict[str, Any]:
    """Measure the cohorts of a case."""
    case = CASES[name]
    full = EngineOptions().chunk_size(case.model().dim)
    cells = {}
    for smaller, clients in zip([0, *cohorts], cohorts, strict=False):
        if smaller < 2 * full:
            cells[str(clients)] = cell(replace(case, clients=clients), turns, limit)
            frame.show(f"{name}, {clients}", cells[str(clients)])
    worst = {
        "of_best": max(row["of_best"] for row in cells.values()),
        **{of: min(row[of] for row in cells.values()) for of in ("of_loop", "of_plain")},
    }
    return {"ratio": worst, "cohorts": cells}


def main() -> None:
    given = frame.options(
        __doc__,
        "engine_rule.json",
        quick={"turns": 1, "cases": SMALLEST, "cohorts": COHORTS[:1]},
        turns=5,
        seconds=60.0,
        cases=frame.among(CASES),
        cohorts=COHORTS,
        resume=False,
    )
    torch.set_num_threads(1)
    result = frame.Result(given.result, "torch")
    result.cases(
        given.cases,
        lambda name: measure(name, given.cohorts, given.turns, given.seconds),
        resume=given.resume,
        method=METHOD,
    )


if __name__ == "__main__":
    main()
