"""Noise program: a mechanism's noise as linear operations on draws and registers.

A mechanism states its noise once, as the operations of each round. The server runs them on tensors
(``privpart.noise.stream``), ``NoiseProgram.matrix`` runs them on unit vectors, and the size of
the state and the number of draws are read from them. So what the accountant assumes and what the
server adds cannot differ.

A register holds one vector of the model's length. State registers, numbered from 0, keep their
value between rounds and are zero before round 0; ``OUT`` is the noise of the round's sum; the
negative numbers below ``OUT`` are scratch, whose value is lost when the round ends.

The server adds integers, so a program also says where real numbers are rounded. In each of the
three ways the released sums are a function of what the real-valued mechanism releases for the same
updates, so they cost what it costs (``docs/concepts/noise.md`` has the argument):

    "draws"    Each draw is rounded where it is made, together with the other terms of its
               operation; all registers hold integers. Either the terms are integers themselves
               (nodes of a tree), or they are a filter f of the integers released so far, and the
               noise of round t is round(b z_t - f).
    "buffers"  The same filter, with state registers that hold real functions of those integers.
    "output"   The noise of a round is a sum of draws, without state, and only OUT is rounded.

A filter that is computed in floating point misses f by an error that depends on what was released.
``filter_error`` bounds it, and the server shortens the clip norm by its effect.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

OUT = -1
"""The register that holds the noise of the round's sum when the round ends."""
SCRATCH = -2
"""The first of the scratch registers; -3, -4, ... are others."""


class Op(NamedTuple):
    """``target`` <- the sum of coefficient x source, over registers and fresh draws.

    Attributes:
        target: register to write; as a source it stands for its value before the operation.
        terms: (register, coefficient) pairs. May be an iterator, which is read at most once, so
            that counting draws need not compute thousands of coefficients.
        draws: (index, coefficient) pairs; a draw is a vector of independent standard normals.
    """

    target: int
    terms: Iterable[tuple[int, float]] = ()
    draws: Sequence[tuple[int, float]] = ()


class ListedOp(NamedTuple):
    """An ``Op`` whose terms are a list."""

    target: int
    terms: list[tuple[int, float]]
    draws: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class NoiseProgram:
    """The noise of a run.

    Attributes:
        rounds: number of rounds n.
        ops: the operations of round t (from 0), in order.
        rows: how many of the first state registers may still matter after so many rounds, 0 to n.
            This is what a saved state contains.
        spread: an upper bound on the standard deviation of every register, at unit draws. May
            take as long as ``Mechanism.prefix_variance``.
        rounded: where real numbers become integers, see above.
        filter_error: for programs whose operations multiply integers by fractions, a bound on the
            floating-point error of OUT before rounding and of a draw, in multiples of 2^-53 times
            the largest value of a register.
        kept_draws: which draw each row holds after so many rounds, if every kept row is a draw;
            such a state need not be saved. None: rows hold sums.
        weight_bits: in programs that round draws and have no ``filter_error``, coefficients are
            multiples of 2^-weight_bits, so that their products with integers are exact.
        draws_again: whether a draw is made in more than one round, or by ``kept_draws``. Draw i is
            then first made in round i; else a draw is made in one round only.
    """

    rounds: int
    ops: Callable[[int], Iterable[Op]]
    rows: Callable[[int], int]
    spread: Callable[[], float]
    rounded: Literal["draws", "buffers", "output"] = "draws"
    filter_error: Callable[[], float] = float
    kept_draws: Callable[[int], list[int]] | None = None
    weight_bits: int = 0
    draws_again: bool = False

    def round(self, t: int) -> list[ListedOp]:
        """Return the operations of round t, with listed terms: to be run any number of times.

        The target's old value, if it is a term, comes first.
        """
        return [
            ListedOp(target, sorted(terms, key=lambda term: term[0] != target), draws)
            for target, terms, draws in self.ops(t)
        ]

    def state_rows(self) -> int:
        """Return the number of state registers: the most that matter after any round."""
        return max(map(self.rows, range(1, self.rounds + 1)))

    def draws(self) -> int:
        """Return the number of draws of all rounds."""
        return sum(len(op.draws) for t in range(self.rounds) for op in self.ops(t))

    def row(self, t: int) -> dict[int, Fraction]:
        """Return the exact coefficient of each draw in the noise of a round without state."""
        registers: dict[int, dict[int, Fraction]] = {}
        for target, terms, draws in self.ops(t):
            mixed = {index: Fraction(c) for index, c in draws}
            for register, c in terms:
                for index, weight in registers[register].items():
                    mixed[index] = mixed.get(index, Fraction(0)) + weight * Fraction(c)
            registers[target] = mixed
        return registers[OUT]

    def matrix(self) -> NDArray[np.float64]:
        """Return N, shape (n, draws): row t is how the noise of round t mixes the draws."""
        run = [self.round(t) for t in range(self.rounds)]
        last = max(index for ops in run for op in ops for index, _ in op.draws)
        draw = np.eye(last + 1)
        nothing = np.zeros(last + 1)
        registers: dict[int, NDArray[np.float64]] = {}
        noise = []
        for ops in run:
            for target, terms, draws in ops:
                fresh = sum((c * draw[index] for index, c in draws), nothing)
                registers[target] = sum((c * registers.get(r, nothing) for r, c in terms), fresh)
            noise.append(registers[OUT])
        return np.stack(noise)
