"""GPU speed: rounds of simulated clients on a CUDA device, beside plain PyTorch on the same device.

Run: ``python benchmarks/gpu_speed.py``; writes benchmarks/results/gpu.json. Plain PyTorch is the
loop over clients of ``engine_cases.py`` with its data, parameters and sum on the device; and, where
clients take one step, ``torch.func.vmap`` of the gradient over all of them, by hand. All ways of a
case take turns in one process. Float32 products are not rounded to TF32 except in the ways that
say so: there the plain loop has ``allow_tf32`` everywhere, the engine ``precision="tf32"``.

"engine" returns the sum of the cohort (``sums=True``); "engine, each update" hands every clipped
update over on the CPU, as for a server that clips again, which then adds them up.
"""

import frame

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from engine_cases import CASES, CLIP, DEFAULT, SMALLEST, Case, Plain
from engine_speed import Engine
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

_TURN = 0.15
_LEAST = 3
"""Rounds before the first turn."""
_COHORT = {"ResNet-18 GN, full": 8, "wide transformer, full": 8, "wide transformer, LoRA": 8}
"""Clients of a round, where the CPU's benchmark has only a few."""
PAIRS = (
    ("engine", "plain"),
    ("engine, each update", "plain"),
    ("engine, TF32", "plain, TF32"),
    ("engine", "vmap by hand"),
)
METHOD = {
    "seconds": f"a turn is {_TURN} seconds of rounds, after three; ratios: of the least and "
    "of the median turns",
    "peak_bytes": "most that torch had allocated while a way was made and settled, without what "
    "other ways hold",
    "difference_of_sums": "to plain PyTorch's, whose batches have another order",
}


class ByHand:
    """Clients of one step: the gradients of all by vmap."""

    def __init__(self, case: Case) -> None:
        self.plain = Plain(case, case.users(), range(case.clients), device="cuda")
        users = self.plain.users
        rows = torch.stack([users.indices[client] for client in range(case.clients)]).cuda()
        self.x, self.y, self.rate = users.x[rows], users.y[rows], case.rate
        named = dict(self.plain.module.named_parameters())
        trained = {id(p) for p in self.plain.trained}
        self.own = {k: p.detach() for k, p in named.items() if id(p) in trained}
        self.other = {k: p.detach() for k, p in named.items() if id(p) not in trained}
        self.gradients = vmap(grad(self._loss), in_dims=(None, 0, 0))

    def _loss(self, own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(self.plain.module, own | self.other, (x,)), y)

    def round(self) -> Tensor:
        each = self.gradients(self.own, self.x, self.y)
        flat = torch.cat([-self.rate * g.flatten(1) for g in each.values()], dim=1)
        return (CLIP / flat.norm(dim=1)).clamp(max=1.0) @ flat


class EachUpdate(Engine):
    """The engine, without sums: updates are added up on the CPU."""

    def round(self) -> Tensor:
        total = torch.zeros(len(self.start))
        for update in self.engine.run(self.task, self.start):
            total += update.update
        return total


def ways_of(case: Case) -> dict[str, Callable[[], Any]]:
    """Return functions that make each way."""
    plain = partial(Plain, case, case.users(), range(case.clients), device="cuda")
    ways: dict[str, Callable[[], Any]] = {
        "plain": plain,
        "engine": partial(Engine, case, device="cuda"),
        "engine, each update": partial(EachUpdate, case, device="cuda"),
        "plain, TF32": plain,
        "engine, TF32": partial(Engine, case, device="cuda", precision="tf32"),
    }
    return ways | ({"vmap by hand": partial(ByHand, case)} if case.local().steps == 1 else {})


def _round(name: str, way: Any) -> Tensor:
    precision = "tf32" if "TF32" in name else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision
    total: Tensor = way.round()
    torch.cuda.synchronize()
    return total


def _settled(name: str, make: Callable[[], Any]) -> tuple[Any, Tensor, dict[str, Any]]:
    """Return a way after its first rounds, the sum of the last, and what was measured of them."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    way, seconds = make(), []
    while len(seconds) < _LEAST:
        began = time.perf_counter()
        total = _round(name, way).cpu().double()
        seconds.append(time.perf_counter() - began)
    row = {
        "first_round_seconds": seconds[0],
        "settling_seconds": sum(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "method": str(way.engine.method) if isinstance(way, Engine) else name,
    }
    return way, total, row


def measure(case: Case, turns: int, limit: float) -> dict[str, Any]:
    """Measure all ways of a case, in fewer turns if they take ``limit`` seconds."""
    until = time.perf_counter() + limit
    made: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    sums: dict[str, Tensor] = {}
    for name, make in ways_of(case).items():
        try:
            made[name], sums[name], rows[name] = _settled(name, make)
        except Exception as error:  # one way that fails leaves the others
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    jobs = {name: partial(_round, name, way) for name, way in made.items()}
    left = until - time.perf_counter()
    times = frame.in_turns(jobs, turns, at_least=_TURN, warm=False, limit=left)
    spread = {name: frame.spreads(own) for name, own in times.items()}
    for name, own in spread.items():
        for which, seconds in (("most", "wall_least"), ("median", "wall_median")):
            rows[name][f"rounds_per_second_{which}"] = 1 / own[seconds]
    reference = sums.get("plain", torch.zeros(1, dtype=torch.float64))
    return {
        "clients": case.clients,
        "turns": max(len(own) for own in times.values()),
        "ratio": {
            f"{name} / {base}": {
                which: spread[base][f"wall_{which}"] / spread[name][f"wall_{which}"]
                for which in ("least", "median")
            }
            for name, base in PAIRS
            if name in spread and base in spread
        },
        "difference_of_sums": {
            name: float((s - reference).norm() / reference.norm()) for name, s in sums.items()
        },
        "ways": rows,
    }


def main() -> None:
    given = frame.options(
        __doc__,
        "gpu.json",
        quick={"turns": 1, "cases": SMALLEST},
        turns=9,
        seconds=600.0,
        cases=frame.among(CASES, DEFAULT),
    )
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: engine_speed.py measures the same on the CPU")
    ends = time.perf_counter() + given.seconds
    result = frame.Result(given.result, "torch", device=torch.cuda.get_device_name())
    cases: dict[str, Any] = {}
    for place, name in enumerate(given.cases):
        case = replace(CASES[name], clients=_COHORT.get(name, CASES[name].clients))
        share = (ends - time.perf_counter()) / (len(given.cases) - place)
        cases[name] = measure(case, given.turns, share)
        torch.cuda.empty_cache()
        frame.show(name, cases[name], "ratio", "difference_of_sums")
        result.write(method=METHOD, cases=cases)


if __name__ == "__main__":
    main()
