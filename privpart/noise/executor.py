"""Executor: runs the operations of a noise program on integers, or on reals that it then rounds.

A program says where its real numbers are rounded (``accounting.mechanisms.program``); each of the
three ways is a few lines here. Every operation works on each coordinate alone, in numpy, whose
products and sums are rounded one by one, in a fixed order. So any slice of the coordinates gives
the same integers, on every machine.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accounting.checks import ConfigError
from accounting.mechanisms.program import OUT, ListedOp, NoiseProgram, NoiseRow
from privpart.noise.ziggurat import REAL_ERROR, Draws, Enclosure, are_allowed

Vector = NDArray[Any]
"""int32 or int64 for integers, float64 for reals."""

DrawsOf = Callable[[int], Draws]
"""The draws of a round, made or made again."""
_UNIT_ROUNDOFF = 2.0**-53
_BLOCK = 2**14
"""Coordinates of a sum or a rounding that are computed together, in the processor's cache."""
_EXACT = 2.0**53
"""Whole numbers up to here are float64."""
_BITS = 64
"""Bits to which a doubtful draw is computed at first."""


class NoiseRangeError(ArithmeticError):
    """A register left its range: of Gaussian draws, with a probability below 1e-200."""


class Executor:
    """One program's arithmetic, for vectors of any length.

    Args:
        program: of a mechanism without groups.
        stddev: of one draw, in steps of the grid.

    Raises:
        ConfigError: registers, weights of draws or sums may leave what float64 computes exactly.

    Attributes:
        limit: bound on every register; a power of two, 32 standard deviations or more.
        integers: type of the registers that hold integers.
        state_type: type of the state registers.
    """

    def __init__(self, program: NoiseProgram, stddev: float) -> None:
        self.program = program
        self.stddev = stddev
        reach, most = 32 * stddev * program.spread(), _EXACT / 2.0**program.weight_bits
        if not 0 < reach <= most:
            raise ConfigError(
                f"the noise may grow to {reach:.3g} steps, beyond {most:.3g}. Use fewer steps; of "
                "a Toeplitz filter, non-increasing, nonnegative coefficients are always safe."
            )
        self.limit: float = 2.0 ** math.ceil(math.log2(reach))
        self._refuse_weights()
        self.integers = np.dtype(np.int32 if self.limit < 2**31 else np.int64)
        whole = program.rounded == "draws"
        self.state_type = self.integers if whole else np.dtype(np.float64)
        self._round_number = 0
        self._ops: list[ListedOp] = []
        self._row: NoiseRow | None = None

    def _refuse_weights(self) -> None:
        """Check the operations of all rounds: a later round could not be mended.

        Programs without a ``filter_error`` weight nothing but nodes of a tree. It is at least the
        sum of a round's coefficients, which are looked at only where it does not settle them.
        """
        most = self.program.filter_error()
        if self.program.rounded == "output" or not most:
            return
        for t in range(self.program.rounds):
            for _, terms, fresh in self.program.ops(t):
                for _, c in fresh:
                    weight, largest = c * self.stddev, self.limit * most
                    if not are_allowed(weight, largest):
                        largest = self.limit * sum(abs(factor) for _, factor in terms)
                    if not are_allowed(weight, largest):
                        raise ConfigError(
                            f"mechanism: in round {t} draws are weighted by {weight:.3g} steps and "
                            f"added to numbers up to {largest:.3g}; must be 2^-20 to 2^50, and up "
                            "to 2^50. Use an encoder whose entries are nearer to its diagonal's."
                        )

    def filter_error(self, moved: float) -> float:
        """Return by how much a filter's error may differ between two histories, in steps.

        The histories are those of one release with and without a client. The noise of the one that
        happens stays within ``limit``, and a client moves no register further than ``moved``.
        """
        return 2 * self.program.filter_error() * _UNIT_ROUNDOFF * (self.limit + moved)

    def begin(self, t: int) -> None:
        """Take the operations of round t, for any number of calls of ``run``."""
        self._round_number = t
        self._ops = self.program.round(t)
        self._row = self.program.row(t) if self.program.rounded == "output" else None

    def run(self, draws_of: DrawsOf, start: int, state: Vector, out: Vector) -> None:
        """Run the round on coordinates ``start`` to ``start + c``.

        Args:
            draws_of: where the draws come from.
            start: first coordinate, even.
            state: the state registers, shape (rows, c); updated in place.
            out: shape (c,), integers; receives the noise of the round's sum.

        Raises:
            NoiseRangeError: a register left its range.
        """
        if self._row is None:
            self._run_rounding(draws_of(self._round_number), start, state, out)
        else:
            self._run_real(self._row, draws_of, start, state, out)
        self._check_range(out)

    def recall(self, indices: Sequence[int], draws_of: DrawsOf, start: int, state: Vector) -> None:
        """Make the draws that the state consists of again; see ``NoiseProgram.kept_draws``."""
        for row, index in zip(state, indices, strict=True):
            draws_of(index).rounded(index, start, row, weight=self.stddev)

    def _run_rounding(self, draws: Draws, start: int, state: Vector, out: Vector) -> None:
        registers: dict[int, Vector] = {OUT: out}

        def register(r: int) -> Vector:
            if r not in registers:
                registers[r] = state[r] if r >= 0 else np.empty(len(out), self.integers)
            return registers[r]

        for target, terms, fresh in self._ops:
            to = register(target)
            sources = [(register(r), c) for r, c in terms]
            if fresh:
                ((index, c),) = fresh  # each draw is rounded by itself
                offset = _linear(sources) if sources else None
                largest = self.limit * sum(abs(c) for _, c in terms)
                draws.rounded(
                    index, start, to, weight=c * self.stddev, offset=offset, largest=largest
                )
            elif to.dtype == np.float64:
                _linear(sources, to)
                self._check_range(to)
            else:
                _whole(sources, to)

    def _run_real(
        self, row: NoiseRow, draws_of: DrawsOf, start: int, state: Vector, out: Vector
    ) -> None:
        registers: dict[int, Vector] = {}
        fresh_draw = np.empty(len(out))

        def register(r: int) -> Vector:
            if r not in registers:
                registers[r] = state[r] if r >= 0 else np.empty(len(out))
            return registers[r]

        for target, terms, fresh in self._ops:
            to = register(target)
            _linear([(register(r), c) for r, c in terms], to)
            for index, c in fresh:
                made_in = index if self.program.draws_again else self._round_number
                draws_of(made_in).real(index, start, fresh_draw)
                np.multiply(fresh_draw, c * self.stddev, out=fresh_draw)
                np.add(to, fresh_draw, out=to)
        self._round(row, draws_of, start, registers[OUT], out)

    def _round(
        self, row: NoiseRow, draws_of: DrawsOf, start: int, real: Vector, out: Vector
    ) -> None:
        """Round to the nearest integers; where floats do not settle it, from enclosures."""
        error = self._real_error(row)
        doubtful = np.zeros(len(out), np.bool_)
        scratch = np.empty(min(_BLOCK, len(out)))
        for first in range(0, len(out), _BLOCK):
            block = slice(first, first + _BLOCK)
            whole = np.rint(real[block], out=scratch[: len(out) - first])
            np.copyto(out[block], whole, casting="unsafe")
            np.subtract(real[block], whole, out=whole)
            np.greater(np.abs(whole, out=whole), 0.5 - error, out=doubtful[block])
        for i in np.flatnonzero(doubtful).tolist():
            out[i] = self._exactly(row.draws, draws_of, start + i)

    def _real_error(self, row: NoiseRow) -> float:
        """Bound on the error of OUT before it is rounded, in steps."""
        mixed = self.stddev * float(sum(map(abs, row.draws.values())))
        return 1.01 * (mixed * REAL_ERROR + row.roundings * _UNIT_ROUNDOFF * self.limit)

    def _exactly(
        self, draws: dict[tuple[int, int], Fraction], draws_of: DrawsOf, coordinate: int
    ) -> int:
        stddev = Fraction(self.stddev)
        bits = _BITS
        while True:
            low = high = Fraction(1, 2)
            for (made_in, index), c in draws.items():
                z = draws_of(made_in).enclosure(index, coordinate, bits)
                a, b = _scaled(z, c * stddev)
                low, high = low + a, high + b
            if low.__floor__() == high.__floor__():
                return low.__floor__()
            bits *= 2

    def _check_range(self, values: Vector) -> None:
        if not (-self.limit < values.min() and values.max() < self.limit):
            raise NoiseRangeError(
                "the noise left its range, which Gaussian draws never do: the state or the key of "
                "this run is damaged. Nothing was released."
            )


def _scaled(z: Enclosure, c: Fraction) -> Enclosure:
    return (c * z[0], c * z[1]) if c >= 0 else (c * z[1], c * z[0])


def _linear(sources: Sequence[tuple[Vector, float]], to: Vector | None = None) -> Vector:
    """Return the sum of coefficient x source in float64; the target, if it is a source, is first.

    Each product and each sum is rounded once, so that ``filter_error`` bounds the sum's error.
    """
    if not sources:
        nothing = np.zeros(0) if to is None else to
        nothing[:] = 0
        return nothing
    total = np.empty(len(sources[0][0])) if to is None else to
    scratch = np.empty(min(_BLOCK, len(total)))
    for start in range(0, len(total), _BLOCK):
        block = slice(start, start + _BLOCK)
        _add_up(sources, block, total[block], scratch[: len(total) - start])
    return total


def _add_up(
    sources: Sequence[tuple[Vector, float]], block: slice, total: Vector, scaled: Vector
) -> None:
    (first, c), *others = sources
    if c == 1:
        np.copyto(total, first[block])
    else:
        np.multiply(first[block], c, out=total)
    for source, c in others:
        if c == 1:
            np.add(total, source[block], out=total)
        elif c == -1:
            np.subtract(total, source[block], out=total)
        else:
            np.multiply(source[block], c, out=scaled)
            np.add(total, scaled, out=total)


def _whole(sources: Sequence[tuple[Vector, float]], to: Vector) -> None:
    """Add up integers; every coefficient is 1 or -1."""
    if not sources:
        to[:] = 0
        return
    (first, c), *others = sources
    if c == 1:
        if first is not to:
            np.copyto(to, first)
    else:
        np.negative(first, out=to)
    for source, c in others:
        if c == 1:
            np.add(to, source, out=to)
        elif c == -1:
            np.subtract(to, source, out=to)
        else:
            raise ValueError(f"coefficient {c}: registers of integers add and subtract only.")
