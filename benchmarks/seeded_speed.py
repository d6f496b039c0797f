"""Seeded parameters' speed: the frozen weights of FedPT's ResNet-18 compared with torch.randn.

Run: ``python benchmarks/seeded_speed.py``; writes benchmarks/results/seeded.json.

The task: 10,985,472 Gaussian float32 parameters in 16 tensors, the 3x3 convolutions that FedPT's
Table 10 freezes. All rows take turns in one run, on one thread, so other load slows them alike.
``torch.randn`` gives different bits on different processors, so it could not generate the frozen
part; it shows what a random tensor costs at least.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accounting_speed import machine  # sets one thread, before torch loads
from torch import Tensor

from privpart import He, PartialModel
from privpart.models import MODELS
from privpart.start_values import GENERATOR, seeded_tensor, tensors_fingerprint

RESULT = Path(__file__).parent / "results" / "seeded.json"
REPEATS = 15
FREEZE_ALL = MODELS["resnet18_gn"].ladder["freeze-0-1-2-3"]


def in_turns(jobs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of every job, REPEATS times each, after a warm-up turn."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(REPEATS + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def shake(name: str, shape: torch.Size, table: "np.ndarray[Any, Any]") -> Tensor:
    """Return a tensor of generator version 1, for comparison: SHAKE-128 words and one gather."""
    words = np.frombuffer(hashlib.shake_128(name.encode()).digest(2 * shape.numel()), "<u2")
    return torch.from_numpy(table[words] * np.float32(0.1)).reshape(shape)


def measure() -> tuple[int, dict[str, list[float]]]:
    """Return how many parameters were generated, and the seconds of every row."""
    model = PartialModel(MODELS["resnet18_gn"].build, train=FREEZE_ALL, seed=1)
    parameters = dict(model.module.named_parameters())
    frozen = {name: parameters[name] for name in model.frozen}
    shapes = {name: tensor.shape for name, tensor in frozen.items()}
    outs = {name: torch.empty(shape) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(0)
    table = np.linspace(-4, 4, 1 << 16).astype(np.float32)
    he = He()

    def seeded() -> list[Tensor]:
        return [seeded_tensor(1, name, shape, he) for name, shape in shapes.items()]

    def randn() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in shapes.values()]

    def randn_in_place() -> None:
        for out in outs.values():
            torch.randn(out.shape, generator=generator, out=out)

    def version_1() -> list[Tensor]:
        return [shake(name, shape, table) for name, shape in shapes.items()]

    return sum(t.numel() for t in frozen.values()), in_turns(
        {
            f"seeded_tensor (generator {GENERATOR})": seeded,
            "torch.randn": randn,
            "torch.randn into existing memory": randn_in_place,
            "generator 1 (SHAKE-128)": version_1,
            "fingerprint": lambda: tensors_fingerprint(frozen),
        }
    )


def main() -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    facts = machine()
    numbers, times = measure()
    rows = {
        name: {
            "least_seconds": min(seconds),
            "median_seconds": statistics.median(seconds),
            "most_seconds": max(seconds),
            "nanoseconds_per_number": 1e9 * min(seconds) / numbers,
        }
        for name, seconds in times.items()
    }
    print(f"{numbers:,} numbers, {facts['processor']}, 1 thread, load {facts['load_average']:.2f}")
    for name, row in rows.items():
        print(
            f"{name:36} least {1e3 * row['least_seconds']:7.1f} ms, "
            f"median {1e3 * row['median_seconds']:7.1f}, most {1e3 * row['most_seconds']:7.1f}, "
            f"{row['nanoseconds_per_number']:6.2f} ns per number"
        )
    result = {"machine": facts, "numbers": numbers, "repeats": REPEATS, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
