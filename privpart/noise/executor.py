"""Executor: runs the operations of a noise program on tensors."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accounting.mechanisms.program import OUT, ListedOp

Draw = Callable[[int, Tensor], None]
"""Write draw number i, already scaled, into a vector."""


def execute(ops: Sequence[ListedOp], draw: Draw, state: Tensor, out: Tensor) -> None:
    """Run one round's operations on c coordinates.

    Every operation works on each coordinate alone, and adds up in a fixed order: the target's old
    value, the draws, the other terms. So any slice of the coordinates gives the same bits.

    Args:
        ops: of one round, from ``NoiseProgram.round``.
        draw: where the draws come from.
        state: the state registers, shape (rows, c); updated in place.
        out: shape (c,); receives the noise of the round's sum.
    """
    registers = {OUT: out}

    def register(r: int) -> Tensor:
        if r not in registers:
            registers[r] = state[r] if r >= 0 else torch.empty_like(out)
        return registers[r]

    for target, terms, draws in ops:
        to = register(target)
        sources = [(register(r), c) for r, c in terms]
        first = 1 if sources and sources[0][0] is to else 0
        for place, (index, c) in enumerate(draws, start=first):
            fresh = torch.empty_like(to) if place else to
            draw(index, fresh)
            sources.insert(place, (fresh, c))
        _add_up(sources, to)


def _add_up(sources: Sequence[tuple[Tensor, float]], to: Tensor) -> None:
    if not sources:
        to.zero_()
        return
    (x, a), *others = sources
    if others and 1 in (a, others[0][1]):  # both in one pass, which takes half the time of two
        y, b = others.pop(0)
        torch.add(x, y, alpha=b, out=to) if a == 1 else torch.add(y, x, alpha=a, out=to)
    elif a != 1:
        torch.mul(x, a, out=to)
    elif x is not to:
        to.copy_(x)
    for y, b in others:
        to.add_(y, alpha=b)
