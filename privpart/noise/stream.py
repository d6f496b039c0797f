"""Noise stream: runs a mechanism's noise program, one vector of integers per round.

``next()`` is the noise of this round's *sum*, in steps of the grid: the difference of two
consecutive prefix-sum noises. The server adds it to the round's integer sum; the sums of the noised
sums are then the prefix sums that the mechanism promises, rounded. A mechanism with groups has one
program per group of parameters, and a round draws noise for its active groups only.

A program says where its real numbers are rounded (``accounting.mechanisms.program``); each of the
three ways is a few lines of ``Executor``. Every operation works on each coordinate alone, in numpy,
whose products and sums are rounded one by one, in a fixed order. So any slice of the coordinates
gives the same integers, on every machine.

Draws are addressed, so registers follow from the key and the salts: whoever saves the state after
every round saves registers now and then only (``NoiseStream.checkpoint``), and a stream that loads
older ones runs the rounds in between again.

The state is as secret as the noise: with it, the rounds' noise can be removed.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting import Mechanism, checks, fingerprint
from accounting.checks import ConfigError
from accounting.mechanisms.program import OUT, ListedOp, NoiseProgram
from privpart.grid import Grid, noise_bits
from privpart.noise.enclosures import nearest_integer
from privpart.noise.source import SALT_BYTES, NoiseSource
from privpart.noise.ziggurat import REAL_ERROR, Draws, are_allowed
from privpart.plan import PrivacyPlan

SCHEMA = "privpart/noise/2"
MOST_SECONDS = 20.0
"""Seconds, by ``_seconds``, of the rounds that a stream runs again when it loads a saved state."""
Vector = NDArray[Any]
"""int32 or int64 for integers, float64 for reals."""
DrawsOf = Callable[[int], Draws]
"""The draws of a round, made or made again."""
# Coordinates that a round's operations run on before the next ones; a multiple of a block.
_PIECE = 2**19
# Coordinates of a sum or a rounding that are computed together, in the processor's cache.
_BLOCK = 2**14
_UNIT_ROUNDOFF = 2.0**-53
# Terms of a run up to which all rounds are listed when it begins: some 20 MB.
_MOST_LISTED = 2**17
# Whole numbers up to here are float64.
_EXACT = 2.0**53
# Bound on the size of every draw.
_LARGEST_DRAW = 16


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
        rows: how many of the first state registers matter after so many rounds, 0 to n.
    """

    def __init__(self, program: NoiseProgram, stddev: float) -> None:
        self.program = program
        self.stddev = stddev
        reach, exact = 32 * stddev * program.spread(), _EXACT / 2.0**program.weight_bits
        if not 0 < reach <= exact:
            raise ConfigError(
                f"the noise may grow to {reach:.3g} steps, beyond {exact:.3g}. Use fewer steps; of "
                "a Toeplitz filter, non-increasing, nonnegative coefficients are always safe."
            )
        self.limit: float = 2.0 ** math.ceil(math.log2(reach))
        self._refuse_weights()
        self.integers = np.dtype(np.int32 if self.limit < 2**31 else np.int64)
        integer_state = program.rounded == "draws"
        self.state_type = self.integers if integer_state else np.dtype(np.float64)
        self.rows = [program.rows(t) for t in range(program.rounds + 1)]
        self._listed: list[list[ListedOp]] = []
        # a round has at most as many operations, of as many terms each, as registers
        if program.rounds * (max(self.rows) + 2) ** 2 <= _MOST_LISTED:
            self._listed = [program.round(t) for t in range(program.rounds)]
        self._round_number = 0
        self._ops: list[ListedOp] = []
        self._row: dict[int, Fraction] | None = None

    def _refuse_weights(self) -> None:
        """Check the operations of all rounds: a later round could not be mended.

        Programs without a ``filter_error`` weight nothing but nodes of a tree. It is at least the
        sum of a round's coefficients, which are looked at only where it does not settle them.
        """
        factors = self.program.filter_error()
        if self.program.rounded == "output" or not factors:
            return
        for t in range(self.program.rounds):
            for _, terms, fresh in self.program.ops(t):
                for _, c in fresh:
                    weight, largest = c * self.stddev, self.limit * factors
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
        happens stays within ``limit``, and a client moves no register further than ``moved``, the
        sum of the norms of its updates. It is 0 where registers hold sums of draws.
        """
        return 2 * self.program.filter_error() * _UNIT_ROUNDOFF * (self.limit + moved)

    def begin(self, t: int) -> None:
        """Take the operations of round t, for any number of calls of ``run``."""
        self._round_number = t
        self._ops = self._listed[t] if self._listed else self.program.round(t)
        self._row = self.program.row(t) if self.program.rounded == "output" else None

    def run(self, draws_of: DrawsOf, start: int, state: Vector, out: Vector) -> None:
        """Run the round on coordinates ``start`` to ``start + c``.

        Raises:
            NoiseRangeError: a register left its range.
        """
        if self._row is None:
            self._run_rounding(draws_of, start, state, out)
        else:
            self._run_real(self._row, draws_of, start, out)
        self._check_range(out)

    def recall(self, indices: Sequence[int], draws_of: DrawsOf, start: int, state: Vector) -> None:
        """Make the draws that the state consists of again; see ``NoiseProgram.kept_draws``."""
        for row, index in zip(state, indices, strict=True):
            draws_of(index).rounded(index, start, row, weight=self.stddev)

    def _run_rounding(self, draws_of: DrawsOf, start: int, state: Vector, out: Vector) -> None:
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
                offset = _linear(sources, np.empty(len(out))) if sources else None
                largest = self.limit * sum(abs(c) for _, c in terms)
                # a draw that is made again is that of another round, and of its salt
                made = index if self.program.draws_again else self._round_number
                draws_of(made).rounded(
                    index, start, to, weight=c * self.stddev, offset=offset, largest=largest
                )
            else:
                _linear(sources, to)
                if to.dtype == np.float64:
                    self._check_range(to)

    def _run_real(
        self, row: dict[int, Fraction], draws_of: DrawsOf, start: int, out: Vector
    ) -> None:
        """Round a sum of draws; where floats do not settle it, from enclosures."""
        real = self._sum_of_draws(row, draws_of, start, np.zeros(len(out)))
        nearest = np.rint(real)
        np.copyto(out, nearest, casting="unsafe")
        doubtful = np.abs(real - nearest) > 0.5 - self._real_error(row)
        for i in np.flatnonzero(doubtful).tolist():
            terms = [
                (partial(draws_of(index).enclosure, index, start + i), c * Fraction(self.stddev))
                for index, c in row.items()
            ]
            out[i] = nearest_integer(terms)

    def _sum_of_draws(
        self, row: dict[int, Fraction], draws_of: DrawsOf, start: int, to: Vector
    ) -> Vector:
        fresh = np.empty(len(to))
        for index, c in row.items():
            draws_of(index).real(index, start, fresh)
            to += np.multiply(fresh, float(c) * self.stddev, out=fresh)
        return to

    def _real_error(self, row: dict[int, Fraction]) -> float:
        """Bound on the error of a sum of draws: three roundings of each term, one of each sum."""
        mixed = self.stddev * float(sum(map(abs, row.values())))
        return 1.01 * mixed * (REAL_ERROR + (len(row) + 3) * _LARGEST_DRAW * _UNIT_ROUNDOFF)

    def _check_range(self, values: Vector) -> None:
        if not (-self.limit < values.min() and values.max() < self.limit):
            raise NoiseRangeError(
                "the noise left its range, which Gaussian draws never do: the state or the key of "
                "this run is damaged. Nothing was released."
            )


def _linear(sources: Sequence[tuple[Vector, float]], to: Vector) -> Vector:
    """Write the sum of coefficient x source; the target, if it is a source, is first.

    Of reals, each product and each sum is rounded once, so that ``filter_error`` bounds the sum's
    error. Integers add and subtract only: numpy refuses to write another product into them.
    """
    if not sources:
        to[:] = 0
        return to
    scratch = np.empty(min(_BLOCK, len(to)), to.dtype)
    (first, c), *terms = sources
    for start in range(0, len(to), _BLOCK):
        block = slice(start, start + _BLOCK)
        total = to[block]
        if abs(c) == 1:
            (np.positive if c == 1 else np.negative)(first[block], out=total)
        else:
            np.multiply(first[block], c, out=total)
        for source, factor in terms:
            if abs(factor) == 1:
                (np.add if factor == 1 else np.subtract)(total, source[block], out=total)
            else:
                np.add(total, np.multiply(source[block], factor, out=scratch[: len(total)]), total)
    return to


@dataclass(frozen=True, slots=True)
class _Part:
    """The noise of one group of parameters, or of all of them.

    Attributes:
        executor: of the program, which counts the part's own rounds.
        stream: id of its draws at the source.
        rounds: rounds of the run in which it has noise, ascending.
        state: its registers, shape (rows, coordinates).
        key: of its registers in a saved state; "" if their draws can be made again.
    """

    executor: Executor
    stream: int
    rounds: Sequence[int]
    state: Vector
    key: str

    def done(self, round_: int) -> int:
        """Return how many of the part's rounds are before a round of the run."""
        return bisect_left(self.rounds, round_)

    def rows(self, round_: int) -> Vector:
        """Return the registers that matter after so many rounds of the run."""
        return self.state[: self.executor.rows[self.done(round_)]]


class NoiseStream:
    """The noise that the server adds, in ``state_vectors`` vectors of memory.

    Args:
        mechanism: the object that the accountant reads its sensitivity from.
        dim: length d of the trainable part, >= 1.
        stddev: of one i.i.d. coordinate that enters the mechanism, in steps of the grid, from 1 to
            2^30; see ``Grid``.
        source: where the i.i.d. draws come from.
        stream: id of this stream at the source, >= 0. Two streams of one source need two ids:
            under one id they would have the same draws. Group g has the id ``stream + g``.

    Attributes:
        round: rounds done, which is also the round that ``next()`` is for (from 0).
        dtype: type of the noise: torch.int32, or torch.int64 if it may need more.

    Guarantees:
        The noise is that of the real-valued mechanism, rounded as ``accounting.mechanisms.program``
        states; the integers are the same on every machine.

    >>> from accounting import BinaryTree
    >>> from privpart import SeededSource
    >>> stream = NoiseStream(BinaryTree(8), dim=5, stddev=2.0**20, source=SeededSource(0))
    >>> stream.next().dtype, stream.round, stream.state_vectors
    (torch.int32, 1, 3)
    """

    def __init__(
        self, mechanism: Mechanism, *, dim: int, stddev: float, source: NoiseSource, stream: int = 0
    ) -> None:
        if not isinstance(mechanism, Mechanism):
            raise ConfigError(
                f"mechanism={mechanism!r}: must be a mechanism of the accounting package."
            )
        self.mechanism = mechanism
        self.dim = checks.count("dim", dim)
        stddev = checks.positive("stddev", stddev)
        if not 1 <= stddev <= 2.0**30:
            raise ConfigError(f"stddev={stddev:g}: must lie from 1 to 2^30 steps of the grid.")
        first = checks.count("stream", stream, minimum=0)
        self._parts = _parts_of(mechanism, self.dim, stddev, first)
        wide = any(part.executor.integers == np.int64 for part in self._parts)
        self.dtype = torch.int64 if wide else torch.int32
        # after every check: a refused stream must not use up its ids
        for part in self._parts:
            source.claim(part.stream)
        self.source = source
        self.round = 0
        # how many times ``MOST_SECONDS`` so many rounds have taken, all of them run again
        self._spans = np.cumsum(_seconds(self._parts, mechanism.rounds)) // MOST_SECONDS
        self._interrupted = False
        self._salts = [(0, source.salt())]
        self._identity: dict[str, str | int | float] = {
            "schema": SCHEMA,
            "mechanism": fingerprint(mechanism),
            "dim": self.dim,
            "stddev": stddev,
            "stream": first,
            "source": source.identity,
        }

    @property
    def state_vectors(self) -> int:
        """Vectors of length d kept between rounds: ``accounting.footprint``'s, and nothing else."""
        return math.ceil(sum(part.state.size for part in self._parts) / self.dim)

    @property
    def checkpoint(self) -> int:
        """The last round, up to now, after which registers are to be saved; 0 if none was.

        Bringing them up to date takes at most about ``MOST_SECONDS``, by an estimate that follows
        from mechanism and d alone.
        """
        return int(np.searchsorted(self._spans, self._spans[self.round]))

    @property
    def registers(self) -> list[str]:
        """Names of the tensors of a state."""
        return [part.key for part in self._parts if part.key]

    def next(self, *, out: Tensor | None = None) -> Tensor:
        """Return the noise of this round's sum, and go to the next round.

        Args:
            out: contiguous vector to write into, shape (d,), of this stream's dtype. Reusing one
                saves the system's time for allocating memory, up to a third of the call.

        Returns:
            Shape (c,): the active groups, one after the other; c = d without groups.
        """
        if self.round >= self.mechanism.rounds:
            raise ConfigError(
                f"the noise of all {self.mechanism.rounds} planned rounds is used up: another "
                "round is not covered by the guarantee. Plan more rounds from the start."
            )
        noise = torch.empty(self.dim, dtype=self.dtype) if out is None else self._writable(out)
        with self._uninterrupted(self.round + 1):
            end = 0
            for part in self._parts:
                done = part.done(self.round)
                if done < len(part.rounds) and part.rounds[done] == self.round:
                    start, end = end, end + part.state.shape[1]
                    self._draw(part, done, noise[start:end].numpy())
        return noise[:end]

    def _draw(self, part: _Part, number: int, out: Vector) -> None:
        executor = part.executor
        # a group may need fewer bits than the widest one, whose type the noise has
        values = out if out.dtype == executor.integers else np.empty(len(out), executor.integers)
        executor.begin(number)

        def run(draws_of: DrawsOf, piece: slice) -> None:
            executor.run(draws_of, piece.start, part.state[:, piece], values[piece])

        self._run_pieces(part, run)
        if values is not out:
            out[:] = values

    def _recall(self, part: _Part) -> None:
        """Make the draws that a part's state consists of again."""
        if part.executor.program.kept_draws is None:
            return
        indices = part.executor.program.kept_draws(part.done(self.round))

        def run(draws_of: DrawsOf, piece: slice) -> None:
            rows = part.state[: len(indices), piece]
            part.executor.recall(indices, draws_of, piece.start, rows)

        self._run_pieces(part, run)

    def _replay(self, part: _Part, since: int) -> None:
        """Run a part's rounds since so many of the run again, for what they leave in registers."""
        if part.key and len(part.state):
            unused = np.empty(part.state.shape[1], part.executor.integers)
            for number in range(part.done(since), part.done(self.round)):
                self._draw(part, number, unused)

    def _run_pieces(self, part: _Part, run: Callable[[DrawsOf, slice], None]) -> None:
        """Run pieces on as many threads as torch may use; which one runs which changes nothing."""
        dim = part.state.shape[1]
        pieces = [slice(start, min(start + _PIECE, dim)) for start in range(0, dim, _PIECE)]

        def run_batch(batch: Sequence[slice]) -> None:
            # draws reuse their buffers, so each thread has its own
            of_salt = cache(lambda salt: self.source.draws(part.stream, salt))
            for piece in batch:
                run(lambda number: of_salt(self.salt_of(part.rounds[number])), piece)

        threads = min(torch.get_num_threads(), len(pieces))
        if threads == 1:
            run_batch(pieces)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run_batch, [pieces[k::threads] for k in range(threads)]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for the metadata and tensors of a safetensors file.

        A tensor "state" per part ("state.0", "state.1", ... of groups), shape (vectors in use, c),
        shares memory with the stream; it is missing if the draws can be made again from the key.
        The other entries are strings, ints and a float. Keep all of it as secret as the noise.
        """
        self._check_complete()
        salts = [(first, salt.hex()) for first, salt in self._salts if first < self.round and salt]
        tensors = {p.key: torch.from_numpy(p.rows(self.round)) for p in self._parts if p.key}
        return {**self._identity, "round": self.round, "salts": json.dumps(salts), **tensors}

    def load_state_dict(self, state: Mapping[str, Any], *, since: int | None = None) -> None:
        """Continue where ``state_dict()`` was taken; numbers may be strings.

        The tensors may be those after fewer rounds, ``since`` of them: the rounds in between are
        run again, under the salts of the state. They are left out where that is 0.

        A round that was drawn but never committed is drawn again under a new salt, so it never has
        one noise under two sums. The draws of a seeded source have no salt: they are those of the
        undisturbed run. Never resume before a round that was released.
        """
        registers = () if since == 0 else self.registers
        rounds = self._checked_round(state, registers)
        since = rounds if since is None else since
        if type(since) is not int or not 0 <= since <= rounds:
            raise ConfigError(f"since={since!r}: must be a whole number from 0 to {rounds}.")
        salts = _checked_salts(state["salts"], rounds, self.source.private)
        saved = [(part, part.rows(since)) for part in self._parts if part.key in registers]
        values = [_checked_rows(state, part, rows) for part, rows in saved]
        # a fresh salt: rounds that were drawn and lost are drawn anew, never under their old noise
        self._salts = [*salts, (rounds, self.source.salt())]
        self.round = rounds
        with self._uninterrupted(rounds):
            for (_, rows), value in zip(saved, values, strict=True):
                rows[:] = value
            for part in self._parts:
                self._recall(part)
                self._replay(part, since)

    def _checked_round(self, state: Mapping[str, Any], registers: Sequence[str]) -> int:
        """Return the round of a state of this stream, which has all of its keys and no others."""
        if self.round or self._interrupted:
            raise ConfigError(
                f"state: this stream has done {self.round} rounds, and going back would repeat "
                "their noise. Load the state into a new stream."
            )
        keys = {*self._identity, "round", "salts", *registers}
        for fault, names in (("missing", keys - state.keys()), ("unknown", state.keys() - keys)):
            if names:
                raise ConfigError(f"state: {fault} {', '.join(sorted(map(str, names)))}.")
        for key, value in self._identity.items():
            if str(state[key]) != str(value):
                raise ConfigError(
                    f"state[{key!r}]={state[key]!r}: this stream has {value!r}. Load a state only "
                    "into a stream like the one it was taken from."
                )
        text, last = str(state["round"]), self.mechanism.rounds  # metadata of a file are strings
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= last):
            raise ConfigError(
                f"state['round']={state['round']!r}: must be a whole number from 0 to {last}."
            )
        return int(text)

    @contextmanager
    def _uninterrupted(self, round_: int) -> Iterator[None]:
        """Come to a round; an interruption leaves parts out of step, and ends the stream."""
        self._check_complete()
        self._interrupted = True
        yield
        self._interrupted = False
        self.round = round_

    def _check_complete(self) -> None:
        if self._interrupted:
            raise ConfigError(
                f"round {self.round} was interrupted halfway, and its state is lost. Load the last "
                "saved state into a new stream."
            )

    def salt_of(self, round_: int) -> bytes:
        """Return the salt of the attempt in which a round was drawn."""
        return next(salt for first, salt in reversed(self._salts) if first <= round_)

    def draw_again(self, salt: bytes) -> None:
        """Draw the coming round under the salt of the attempt that was committed."""
        self._salts.append((self.round, salt))

    def _writable(self, out: Tensor) -> Tensor:
        fits = out.shape == (self.dim,) and out.dtype is self.dtype and out.is_contiguous()
        if not fits or out.device.type != "cpu":
            raise ConfigError(
                f"out: has shape {tuple(out.shape)}, {out.dtype}, on {out.device}; must be a "
                f"contiguous vector of {self.dim} {self.dtype} numbers on the cpu."
            )
        return out

    def __copy__(self) -> NoReturn:
        raise TypeError("a noise stream is never copied; a copy would repeat its noise.")


def _parts_of(mechanism: Mechanism, dim: int, stddev: float, stream: int) -> list[_Part]:
    groups = mechanism.groups
    sizes = [dim] if groups is None else groups.sizes
    mechanisms = [mechanism] if groups is None else groups.mechanisms
    rounds: Sequence[Sequence[int]] = [range(mechanism.rounds)]
    rounds = rounds if groups is None else groups.active_rounds()
    if sum(sizes) != dim:
        raise ConfigError(f"dim={dim}: the mechanism's groups have {sum(sizes)} parameters.")
    parts = []
    for number, (size, own) in enumerate(zip(sizes, mechanisms, strict=True)):
        executor = Executor(own.noise_program(), stddev)
        state = np.zeros((executor.program.state_rows(), size), executor.state_type)
        key = "state" if groups is None else f"state.{number}"
        key = key if executor.program.kept_draws is None else ""
        parts.append(_Part(executor, stream + number, rounds[number], state, key))
    return parts


def _seconds(parts: Sequence[_Part], rounds: int) -> Vector:
    """Return about how long 0, 1, ... rounds' registers take to make again, round by round.

    The nanoseconds are those of one thread of a processor of 2022, rounded up, per coordinate and
    row of registers, and per operation. Parts whose registers need not be saved take none.
    """
    spent = np.zeros(rounds + 1)
    for part in parts:
        rows = np.array(part.executor.rows[1:], np.float64)
        if part.key and rows.any():
            each = part.state.shape[1] * (12 + 3 * rows) + 1e5 + 3e3 * rows
            spent[np.array(part.rounds) + 1] += 1e-9 * each
    return spent


def _checked_rows(state: Mapping[str, Any], part: _Part, rows: Vector) -> Vector:
    """Return the saved registers of a part, which must be like ``rows``."""
    name, value = f"state[{part.key!r}]", state[part.key]
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise ConfigError(f"{name}: must be a dense tensor.")
    if value.shape != rows.shape:
        raise ConfigError(
            f"{name}: has shape {tuple(value.shape)}; after that many rounds it is {rows.shape}."
        )
    numbers: Vector = value.numpy()
    if numbers.dtype != rows.dtype:
        raise ConfigError(f"{name}: has {value.dtype}; this stream has {rows.dtype}.")
    limit = part.executor.limit
    if numbers.size and not (-limit < numbers.min() and numbers.max() < limit):
        raise ConfigError(f"{name}: every number must lie between +-{limit:g}.")
    return numbers


def _checked_salts(text: object, rounds: int, private: bool) -> list[tuple[int, bytes]]:
    """Return (first round, salt) of every attempt that was committed."""
    try:
        pairs = json.loads(str(text))
        salts = [(first, bytes.fromhex(salt)) for first, salt in pairs]
    except (TypeError, ValueError, RecursionError):
        raise ConfigError("state['salts']: must be a list of rounds and salts.") from None
    if not private:
        if salts:
            raise ConfigError("state['salts']: a seeded source has no salts.")
        return [(0, b"")] if rounds else []
    firsts = [first for first, _ in salts]
    ordered = all(type(first) is int for first in firsts) and firsts == sorted(set(firsts))
    complete = not rounds or (bool(firsts) and firsts[0] == 0 and firsts[-1] < rounds)
    if not (ordered and complete and all(len(salt) == SALT_BYTES for _, salt in salts)):
        raise ConfigError(
            f"state['salts']: must hold {SALT_BYTES} bytes for each attempt, from round 0 on."
        )
    return salts


def noise_and_grid(
    plan: PrivacyPlan, dim: int, noise_multiplier: float, source: NoiseSource, stream: int
) -> tuple[NoiseStream, Grid]:
    """Return the noise that a plan adds to sums of length ``dim``, and the grid it counts in.

    The id of the stream is 0 for updates and 1 for the bits of adaptive clipping. The ids of groups
    begin 2 later, because a server has these two.
    """
    bits = noise_bits(noise_multiplier, dim)
    first = stream if plan.mechanism.groups is None else stream + 2
    noise = NoiseStream(plan.mechanism, dim=dim, stddev=2.0**bits, source=source, stream=first)
    moved = plan.participation.max_participations * 2.0**bits / noise_multiplier
    # what floating point adds to a client's effect on a coordinate
    error = max(part.executor.filter_error(moved) for part in noise._parts)
    charge = math.sqrt(dim * plan.rounds) * error
    return noise, Grid.of(bits, noise_multiplier, dim, filter_charge=charge)
