"""GPU speed: rounds of simulated clients on a CUDA device, beside plain PyTorch on the same device.

Run: ``python benchmarks/gpu_speed.py``; writes benchmarks/results/gpu.json. Plain PyTorch is the
loop over clients of ``engine_cases.py`` with its data, parameters and sum on the device; and, where
clients take one step, ``torch.func.vmap`` of the gradient over all of them, by hand. All ways of a
case take turns in one process. Float32 products are not rounded to TF32 except in the ways that
say so: there the plain loop has ``allow_tf32`` everywhere, the engine ``precision="tf32"``.

"engine" returns the sum of the cohort (``sums=True``); "engine, each update" hands every clipped
update over on the CPU, as for a server that clips again, which then adds them up.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_cases import CASES, CLIP, Case, Plain
from engine_speed import Engine
from machine import machine
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

RESULT = Path(__file__).parent / "results" / "gpu.json"
_TURN = 0.15
_LEAST, _PATIENCE = 3, 5.0
"""Rounds before the first turn, and seconds for the engine to choose a method."""
_COHORT = {"ResNet-18 GN, full": 8, "wide transformer, full": 8, "wide transformer, LoRA": 8}
"""Clients of a round, where the CPU's benchmark has only a few."""


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
        """Return the sum of the clipped updates."""
        each = self.gradients(self.own, self.x, self.y)
        flat = torch.cat([-self.rate * g.flatten(1) for g in each.values()], dim=1)
        factors = (CLIP / flat.norm(dim=1)).clamp(max=1.0)
        return factors @ flat


class EachUpdate(Engine):
    """The engine, without sums."""

    def round(self) -> Tensor:
        """Return the sum of the clipped updates, added up on the CPU."""
        total = torch.zeros(len(self.start))
        for update in self.engine.run(self.task, self.start):
            total += update.update
        return total


def _tf32(on: bool) -> None:
    precision = "tf32" if on else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision


def ways_of(case: Case) -> dict[str, Callable[[], Any]]:
    """Return functions that make each way."""
    cohort = range(case.clients)
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: Plain(case, case.users(), cohort, device="cuda"),
        "engine": lambda: Engine(case, device="cuda"),
        "engine, each update": lambda: EachUpdate(case, device="cuda"),
        "plain, TF32": lambda: Plain(case, case.users(), cohort, device="cuda"),
        "engine, TF32": lambda: Engine(case, device="cuda", precision="tf32"),
    }
    if case.local().steps == 1:
        ways["vmap by hand"] = lambda: ByHand(case)
    return ways


def _settled(name: str, make: Callable[[], Any]) -> tuple[Any, Tensor, dict[str, Any]]:
    """Return a way after its first rounds, the sum of the last, and what was measured of them."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _tf32("TF32" in name)
    way, seconds = make(), []
    said = getattr(way, "said", [name])
    while len(seconds) < _LEAST or (not said and sum(seconds) < _PATIENCE):
        began = time.perf_counter()
        total = way.round().cpu().double()
        seconds.append(time.perf_counter() - began)
    row = {
        "first_round_seconds": seconds[0],
        "settling_seconds": sum(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "said": said,
    }
    return way, total, row


def measure(case: Case, turns: int, deadline: float) -> dict[str, Any]:
    """Measure all ways of a case."""
    made: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    sums: dict[str, Tensor] = {}
    for name, make in ways_of(case).items():
        try:
            made[name], sums[name], rows[name] = _settled(name, make)
        except Exception as error:  # one way that fails leaves the others
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    done = 0
    while done < turns and (not done or time.perf_counter() < deadline):
        done += 1
        for name, way in made.items():
            _tf32("TF32" in name)
            seconds[name].append(_turn(way))
    for name, each in seconds.items():
        rows[name] |= {
            "rounds_per_second_most": 1 / min(each),
            "rounds_per_second_median": 1 / statistics.median(each),
        }
    ratios = {
        f"{name} / {base}": {
            "least": min(seconds[base]) / min(seconds[name]),
            "median": statistics.median(seconds[base]) / statistics.median(seconds[name]),
        }
        for name, base in (
            ("engine", "plain"),
            ("engine, each update", "plain"),
            ("engine, TF32", "plain, TF32"),
            ("engine", "vmap by hand"),
        )
        if name in seconds and base in seconds
    }
    reference = sums.get("plain", torch.zeros(1, dtype=torch.float64))
    return {
        "clients": case.clients,
        "turns": done,
        "ratio": ratios,
        "difference_of_sums": {
            name: float((s - reference).norm() / reference.norm()) for name, s in sums.items()
        },
        "ways": rows,
    }


def _turn(way: Any) -> float:  # noqa: ANN401
    """Return the seconds of a round, the mean over a while."""
    torch.cuda.synchronize()
    began, rounds = time.perf_counter(), 0
    while rounds == 0 or time.perf_counter() - began < _TURN:
        way.round()
        torch.cuda.synchronize()
        rounds += 1
    return (time.perf_counter() - began) / rounds


def main() -> None:
    """Write the results and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=600, help="at most, for all cases")
    parser.add_argument("--cases", nargs="*", default=list(CASES)[:9], choices=list(CASES))
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    ends = time.perf_counter() + options.seconds
    cases: dict[str, Any] = {}
    for place, name in enumerate(options.cases):
        case = replace(CASES[name], clients=_COHORT.get(name, CASES[name].clients))
        left = ends - time.perf_counter()
        share = left / (len(options.cases) - place)
        cases[name] = measure(case, options.turns, time.perf_counter() + share)
        torch.cuda.empty_cache()
        print(name, json.dumps(cases[name], indent=1), flush=True)
        _write(options.result, cases)


def _write(path: Path, cases: dict[str, Any]) -> None:
    device = torch.cuda.get_device_name()
    document = {
        "method": {
            "seconds": f"a turn is {_TURN} seconds of rounds, after three, and as many more as "
            "the engine needs to choose a method; ratios: of the least and of the median turns",
            "peak_bytes": "most that torch had allocated while a way was made and settled, "
            "without what other ways hold",
            "difference_of_sums": "to plain PyTorch's, whose batches have another order",
        },
        "machine": machine("torch") | {"device": device},
        "cases": cases,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
