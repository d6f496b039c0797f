"""Attack speed: one iteration compared with plain PyTorch autograd, and the cost of restarts.

Run: ``python benchmarks/attack_speed.py``; writes benchmarks/results/attacks.json.

Milliseconds of processor time per iteration, single thread, float32 for Adam and float64 for
L-BFGS-B. "Plain" is a hand-written loop: the same objective, prior and optimiser on the module
itself, with ``torch.autograd.grad(..., create_graph=True)``. Our time includes the checks, the copy
of the model and the reported residual. The jobs take turns of half a second or more. Ratios are
those of the least times, of the medians, and the least and greatest over the turns.
"""

import frame

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.functional import cross_entropy

from attacks import Observation, cosine_tv, observe
from attacks.networks import drawn, smooth_lenet
from attacks.reconstruction.reconstruct import matching_loss
from privpart.models import resnet8

TURNS, TURN = 9, 0.6  # seconds
Iterations = Callable[[int], Any]


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
        mine = grad(cross_entropy(model(x), seen.labels), weights, create_graph=True)
        dot = torch.stack([(a * b).sum() for a, b in zip(mine, target, strict=True)]).sum()
        length = torch.stack([a.square().sum() for a in mine]).sum().sqrt()
        across = (x[..., 1:] - x[..., :-1]).abs().mean()
        down = (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
        (slope,) = grad(1 - dot / (length * size) + 3e-3 * (across + down) / 2, x)
        x.grad = slope.sign()
        solver.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    return x


def plain_loss(model: nn.Module, seen: Observation) -> Callable[[Tensor], Tensor]:
    """Return a hand-written matching loss, in float64."""
    twin, target = model.double(), list(seen.update.values())
    weights, scale = list(twin.parameters()), sum(float(g.square().sum()) for g in target)

    def loss(image: Tensor) -> Tensor:
        mine = grad(cross_entropy(twin(image), seen.labels), weights, create_graph=True)
        parts = [(a - b).square().sum() for a, b in zip(mine, target, strict=True)]
        return torch.stack(parts).sum() / scale

    return loss


def gradients(loss: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Iterations:
    """Return a function that evaluates a loss and its gradient so many times."""
    x = torch.rand(shape, dtype=torch.float64, generator=generator())

    def run(steps: int) -> None:
        for _ in range(steps):
            image = x.clone().requires_grad_(True)
            grad(loss(image), image)

    return run


def jobs(
    build: Callable[[], nn.Module], shape: tuple[int, ...], restarts: tuple[int, ...]
) -> dict[str, tuple[Iterations, int]]:
    """Map each job to a function of the number of steps, and the restarts in it."""
    model = build().eval()
    seen = observe(model, torch.rand(shape, generator=generator()), torch.tensor([3]))
    ours = matching_loss(model, seen, seen.labels)
    return {
        "plain autograd, squared": (gradients(plain_loss(build().eval(), seen), seen.shape), 1),
        "dlg, squared": (gradients(ours, seen.shape), 1),
        "plain autograd, cosine": (partial(plain_adam, model, seen), 1),
    } | {
        f"cosine_tv, restarts={count}": (
            lambda steps, count=count: cosine_tv(model, seen, restarts=count, steps=steps),
            count,
        )
        for count in (1, *restarts)
    }


def measured(rows: dict[str, tuple[Iterations, int]], turns: int) -> dict[str, list[float]]:
    """Return milliseconds per iteration and restart of each job in each turn."""
    steps = {  # a warm-up determines the steps of a turn
        name: max(20, round(TURN / frame.seconds(partial(job, 20)).cpu * 20)) if turns > 1 else 20
        for name, (job, _) in rows.items()
    }
    times = frame.in_turns(
        {name: partial(rows[name][0], steps[name]) for name in rows}, turns, warm=False
    )
    return {
        name: [1e3 * spent.cpu / steps[name] / rows[name][1] for spent in own]
        for name, own in times.items()
    }


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
    many = [name for name in times if name.startswith("cosine_tv") and name != one]
    return {
        "cosine_tv / plain": ratio(times, one, "plain autograd, cosine"),
        "dlg / plain": ratio(times, "dlg, squared", "plain autograd, squared"),
    } | {f"{one} / {name}, each": ratio(times, one, name) for name in many}


def main() -> None:
    given = frame.options(__doc__, "attacks.json", quick={"turns": 1}, turns=TURNS)
    torch.set_num_threads(1)
    result = frame.Result(given.result, "numpy", "scipy", "torch")
    lenet = partial(smooth_lenet, size=28)
    resnet = partial(drawn, partial(resnet8, classes=100, width=16, norm="batch"))
    cases = {"LeNet, 28x28": jobs(lambda: lenet(generator()), (1, 1, 28, 28), (4, 16, 32))}
    if not given.quick:
        of_resnet = jobs(lambda: resnet(generator()), (1, 3, 32, 32), (4,))
        cases["ResNet-8 of width 16, 32x32"] = of_resnet
    times = {case: measured(rows, given.turns) for case, rows in cases.items()}
    for case, rows in times.items():
        for name, row in ratios(rows).items():
            frame.show(f"{case}: {name}", row)
    result.write(
        turns=given.turns,
        seconds_per_turn=TURN,
        milliseconds={
            case: {
                name: {"least": min(turns), "median": median(turns), "max": max(turns)}
                for name, turns in rows.items()
            }
            for case, rows in times.items()
        },
        ratios={case: ratios(rows) for case, rows in times.items()},
    )


if __name__ == "__main__":
    main()
