"""Attack speed: an iteration beside plain PyTorch autograd, and what one more restart costs.

Run: ``python benchmarks/attack_speed.py``; writes benchmarks/results/attacks.json.

Milliseconds of processor time per iteration, single thread, float32 for Adam and float64 for
L-BFGS-B. "Plain" is the loop that one would write by hand: the same objective and optimiser on
the module itself, with ``torch.autograd.grad(..., create_graph=True)``. Repeats of all rows are
interleaved, so that a busy machine is busy for each of them; the least and the median are kept.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy loads

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attacks import Observation, cosine_tv, observe
from attacks.networks import resnet8, smooth_lenet
from attacks.reconstruct import matching_loss

RESULT = Path(__file__).parent / "results" / "attacks.json"
REPEATS, STEPS, MANY = 5, 150, (4, 16, 32)


def generator() -> torch.Generator:
    """The same draws for every row."""
    return torch.Generator().manual_seed(0)


def plain_adam(model: nn.Module, seen: Observation, steps: int) -> Tensor:
    """Cosine matching with a total variation prior, as written by hand."""
    weights = list(model.parameters())
    target = [seen.update[name].float() for name, _ in model.named_parameters()]
    x = torch.rand(seen.shape, generator=generator()).requires_grad_(True)
    solver = torch.optim.Adam([x], lr=0.1)
    size = torch.stack([g.square().sum() for g in target]).sum().sqrt()
    for _ in range(steps):
        mine = torch.autograd.grad(cross_entropy(model(x), seen.labels), weights, create_graph=True)
        dot = torch.stack([(a * b).sum() for a, b in zip(mine, target, strict=True)]).sum()
        length = torch.stack([a.square().sum() for a in mine]).sum().sqrt()
        across = (x[..., 1:] - x[..., :-1]).abs().mean() + (
            x[..., 1:, :] - x[..., :-1, :]
        ).abs().mean()
        (slope,) = torch.autograd.grad(1 - dot / (length * size) + 3e-3 * across / 2, x)
        x.grad = slope.sign()
        solver.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    return x


def plain_match(model: nn.Module, seen: Observation) -> Callable[[], Any]:
    """One evaluation of the matching loss and its slope, as written by hand, in float64."""
    twin, x = model.double(), torch.rand(seen.shape, dtype=torch.float64, generator=generator())
    weights, target = list(twin.parameters()), list(seen.update.values())
    scale = sum(float(g.square().sum()) for g in target)

    def once() -> tuple[Tensor, ...]:
        image = x.clone().requires_grad_(True)
        mine = torch.autograd.grad(
            cross_entropy(twin(image), seen.labels), weights, create_graph=True
        )
        parts = [(a - b).square().sum() for a, b in zip(mine, target, strict=True)]
        return torch.autograd.grad(torch.stack(parts).sum() / scale, image)

    return once


def our_match(model: nn.Module, seen: Observation) -> Callable[[], Any]:
    """One evaluation of ``dlg``'s objective."""
    loss = matching_loss(model, seen, seen.labels)
    x = torch.rand(seen.shape, dtype=torch.float64, generator=generator())

    def once() -> tuple[Tensor, ...]:
        image = x.clone().requires_grad_(True)
        return torch.autograd.grad(loss(image), image)

    return once


def jobs(
    build: Callable[[], nn.Module], shape: tuple[int, ...], restarts: tuple[int, ...]
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Name -> (job, iterations times restarts in it)."""
    model = build().eval()
    x, y = torch.rand(shape, generator=generator()), torch.tensor([3])
    seen = observe(model, x, y)
    found = {
        "plain autograd, cosine": (lambda: plain_adam(model, seen, STEPS), STEPS),
        "cosine_tv, 1 restart": (lambda: cosine_tv(model, seen, restarts=1, steps=STEPS), STEPS),
    }
    for count in restarts:
        found[f"cosine_tv, {count} restarts, each"] = (
            lambda count=count: cosine_tv(model, seen, restarts=count, steps=STEPS),
            STEPS * count,
        )
    theirs, ours = plain_match(build().eval(), seen), our_match(model, seen)
    found["plain autograd, squared"] = (lambda: [theirs() for _ in range(STEPS)], STEPS)
    found["dlg, squared"] = (lambda: [ours() for _ in range(STEPS)], STEPS)
    return found


def measured(found: dict[str, tuple[Callable[[], Any], int]], repeats: int) -> dict[str, Any]:
    """Milliseconds per iteration of each job, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for repeat in range(repeats + 1):
        for name, (job, iterations) in found.items():
            start = time.process_time()
            job()
            if repeat:  # the first is not counted
                times[name].append(1e3 * (time.process_time() - start) / iterations)
    return {
        name: {"least_ms": min(values), "median_ms": median(values), "max_ms": max(values)}
        for name, values in times.items()
    }


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """Of least times: below 1 is faster than plain, above 4 is four times cheaper."""
    least = {name: row["least_ms"] for name, row in rows.items()}
    found = {
        "cosine_tv / plain": least["cosine_tv, 1 restart"] / least["plain autograd, cosine"],
        "dlg / plain": least["dlg, squared"] / least["plain autograd, squared"],
    }
    for name, value in least.items():
        if "restarts, each" in name:
            found[f"one restart / {name}"] = least["cosine_tv, 1 restart"] / value
    return found


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    cases = {
        "LeNet, 28x28": jobs(lambda: smooth_lenet(generator(), size=28), (1, 1, 28, 28), MANY),
        "ResNet-8 of width 16, 32x32": jobs(
            lambda: resnet8(generator(), width=16), (1, 3, 32, 32), (4,)
        ),
    }
    rows = {name: measured(found, REPEATS) for name, found in cases.items()}
    result = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": 1,
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
            "system": platform.system(),
            "packages": {name: metadata.version(name) for name in ("numpy", "scipy", "torch")},
        },
        "repeats": REPEATS,
        "iterations": STEPS,
        "rows": rows,
        "ratios": {name: ratios(row) for name, row in rows.items()},
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["ratios"], indent=2))


if __name__ == "__main__":
    main()
