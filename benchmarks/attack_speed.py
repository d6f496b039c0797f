"""Attack speed: one iteration compared with plain PyTorch autograd, and the cost of restarts.

Run: ``python benchmarks/attack_speed.py``; writes benchmarks/results/attacks.json.

Milliseconds of processor time per iteration, single thread, float32 for Adam and float64 for
L-BFGS-B. "Plain" is a hand-written loop: the same objective, prior and optimiser on the module
itself, with ``torch.autograd.grad(..., create_graph=True)``. Our time includes the checks, the copy
of the model and the reported residual. The jobs take turns of half a second or more, so that other
load affects all of them alike. Ratios are those of the least times, of the medians, and the least
and greatest over the turns.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy loads

import torch
from machine import machine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attacks import Observation, cosine_tv, observe
from attacks.networks import relu_resnet8, smooth_lenet
from attacks.reconstruction.reconstruct import matching_loss

RESULT = Path(__file__).parent / "results" / "attacks.json"
REPEATS, MANY = 9, (4, 16, 32)
TURN = 0.6  # seconds


def generator() -> torch.Generator:
    """Return a generator with the same draws for every row."""
    return torch.Generator().manual_seed(0)


def plain_adam(model: nn.Module, seen: Observation, steps: int) -> Tensor:
    """Run hand-written cosine matching with a total variation prior."""
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
    """Return one hand-written evaluation of the matching loss and its gradient, in float64."""
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
    """Return one evaluation of ``dlg``'s objective and its gradient."""
    loss = matching_loss(model, seen, seen.labels)
    x = torch.rand(seen.shape, dtype=torch.float64, generator=generator())

    def once() -> tuple[Tensor, ...]:
        image = x.clone().requires_grad_(True)
        return torch.autograd.grad(loss(image), image)

    return once


def jobs(
    build: Callable[[], nn.Module], shape: tuple[int, ...], restarts: tuple[int, ...]
) -> dict[str, tuple[Callable[[int], Any], int]]:
    """Return name -> (function of the number of steps, restarts in it)."""
    model = build().eval()
    x, y = torch.rand(shape, generator=generator()), torch.tensor([3])
    seen = observe(model, x, y)
    theirs, ours = plain_match(build().eval(), seen), our_match(model, seen)
    found: dict[str, tuple[Callable[[int], Any], int]] = {
        "plain autograd, squared": (lambda steps: [theirs() for _ in range(steps)], 1),
        "dlg, squared": (lambda steps: [ours() for _ in range(steps)], 1),
        "plain autograd, cosine": (lambda steps: plain_adam(model, seen, steps), 1),
    }
    for count in (1, *restarts):
        found[f"cosine_tv, restarts={count}"] = (
            lambda steps, count=count: cosine_tv(model, seen, restarts=count, steps=steps),
            count,
        )
    return found


def measured(found: dict[str, tuple[Callable[[int], Any], int]]) -> dict[str, list[float]]:
    """Return milliseconds per iteration and restart of each job in each turn."""
    steps = dict.fromkeys(found, 20)
    times: dict[str, list[float]] = {name: [] for name in found}
    for repeat in range(REPEATS + 1):
        for name, (job, restarts) in found.items():
            start = time.process_time()
            job(steps[name])
            seconds = time.process_time() - start
            if repeat:
                times[name].append(1e3 * seconds / steps[name] / restarts)
            else:  # the warm-up determines the steps per turn
                steps[name] = max(20, round(TURN / seconds * steps[name]))
    return times


def ratio(times: dict[str, list[float]], above: str, below: str) -> dict[str, float]:
    """Return the ratio of the least times, of the medians, and of each turn."""
    turns = [a / b for a, b in zip(times[above], times[below], strict=True)]
    return {
        "least": min(times[above]) / min(times[below]),
        "median": median(times[above]) / median(times[below]),
        "turn_min": min(turns),
        "turn_median": median(turns),
        "turn_max": max(turns),
    }


def ratios(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return all ratios. Ours / plain below 1 is faster; one restart / one of N is its saving."""
    one = "cosine_tv, restarts=1"
    found = {
        "cosine_tv / plain": ratio(times, one, "plain autograd, cosine"),
        "dlg / plain": ratio(times, "dlg, squared", "plain autograd, squared"),
    }
    many = [name for name in times if name.startswith("cosine_tv") and name != one]
    return found | {f"{one} / {name}, each": ratio(times, one, name) for name in many}


def main() -> None:
    """Measure and write the results."""
    torch.set_num_threads(1)
    cases = {
        "LeNet, 28x28": jobs(lambda: smooth_lenet(generator(), size=28), (1, 1, 28, 28), MANY),
        "ResNet-8 of width 16, 32x32": jobs(
            lambda: relu_resnet8(generator(), width=16), (1, 3, 32, 32), (4,)
        ),
    }
    times = {name: measured(found) for name, found in cases.items()}
    result = {
        "machine": machine("numpy", "scipy", "torch"),
        "turns": REPEATS,
        "seconds_per_turn": TURN,
        "milliseconds": {
            case: {
                name: {"least": min(turns), "median": median(turns), "max": max(turns)}
                for name, turns in rows.items()
            }
            for case, rows in times.items()
        },
        "ratios": {case: ratios(rows) for case, rows in times.items()},
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["ratios"], indent=2))


if __name__ == "__main__":
    main()
