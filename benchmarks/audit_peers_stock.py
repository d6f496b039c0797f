"""Stock attacks: DLG, iDLG and Inverting Gradients, written as their papers and scripts give them.

Each stops at its own number of iterations or at the budget of processor seconds, whichever is
first. Targets, images and labels are those of the normalised network; see ``audit_peers_cases``.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

ROUNDS = 300  # of 20 L-BFGS steps, in the scripts of DLG and iDLG
GOOD = 1e-6  # where iDLG's script stops
STEPS = 4800  # of Adam, in Inverting Gradients
TV = 0.1
_TRIAL = 4  # steps that are timed before the number of steps is fixed
Shape = Sequence[int]
Target = Sequence[Tensor]


class OutOfBudgetError(Exception):
    """The processor seconds of an attack are spent."""


def dlg(
    model: nn.Module, target: Target, shape: Shape, budget: float, generator: torch.Generator
) -> Tensor:
    """Return images found together with their labels by torch's L-BFGS (Zhu et al. 2019)."""
    x = torch.randn(*shape, generator=generator).requires_grad_(True)
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    y = torch.randn(shape[0], classes, generator=generator).requires_grad_(True)
    _lbfgs(model, lambda: cross_entropy(model(x), y.softmax(1)), target, [x, y], budget)
    return x.detach()


def idlg(
    model: nn.Module, target: Target, shape: Shape, budget: float, generator: torch.Generator
) -> Tensor:
    """Return one image found by torch's L-BFGS, with the label inferred (Zhao et al. 2020)."""
    label = target[-2].sum(1).argmin().reshape(1)
    x = torch.randn(*shape, generator=generator).requires_grad_(True)
    _lbfgs(model, lambda: cross_entropy(model(x), label), target, [x], budget)
    return x.detach()


def _lbfgs(
    model: nn.Module,
    loss: Callable[[], Tensor],
    target: Target,
    unknowns: list[Tensor],
    budget: float,
) -> None:
    weights = list(model.parameters())
    solver = torch.optim.LBFGS(unknowns, lr=1)
    end = time.process_time() + budget

    def closure() -> Tensor:
        if time.process_time() > end:
            raise OutOfBudgetError
        solver.zero_grad()
        mine = torch.autograd.grad(loss(), weights, create_graph=True)
        gap = sum((a - b).square().sum() for a, b in zip(mine, target, strict=True))
        gap.backward(inputs=unknowns)
        return gap

    try:
        for _ in range(ROUNDS):
            solver.step(closure)
            if not float(closure().detach()) > GOOD:
                return
    except OutOfBudgetError:
        return


def inverting_gradients(
    model: nn.Module,
    target: Target,
    labels: Tensor,
    shape: Shape,
    bounds: tuple[float, float],
    budget: float,
    generator: torch.Generator,
) -> Tensor:
    """Return images found by signed Adam on the cosine (Geiping et al. 2020).

    The decay of the step size needs the number of steps before the first one: it is what the
    budget allows at the speed of a few steps that do not count, and 4800 at most.
    """

    def run(steps: int) -> Tensor:
        x = torch.randn(*shape, generator=generator).requires_grad_(True)
        solver = torch.optim.Adam([x], lr=0.1)
        at = [int(steps / part) for part in (8 / 3, 8 / 5, 8 / 7)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(solver, at, gamma=0.1)
        for _ in range(steps):
            solver.zero_grad()
            mine = torch.autograd.grad(cross_entropy(model(x), labels), weights, create_graph=True)
            dot = sum((a * b).sum() for a, b in zip(mine, target, strict=True))
            length = sum(a.square().sum() for a in mine).sqrt()
            across = (x[..., 1:] - x[..., :-1]).abs().mean()
            down = (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
            (1 - dot / (length * size) + TV * (across + down)).backward(inputs=[x])
            x.grad.sign_()
            solver.step()
            schedule.step()
            with torch.no_grad():
                x.clamp_(*bounds)
        return x.detach()

    weights, size = list(model.parameters()), sum(b.square().sum() for b in target).sqrt()
    start = time.process_time()
    run(_TRIAL)
    each = (time.process_time() - start) / _TRIAL
    return run(max(1, min(STEPS, round(budget / each))))
