"""Noise stream: the correlated noise of a mechanism, one vector of integers per round.

``next()`` is the noise of this round's *sum*, in steps of the grid: the difference of two
consecutive prefix-sum noises. The server adds it to the round's integer sum; the sums of the noised
sums are then the prefix sums that the mechanism promises, rounded. A mechanism with groups has one
stream per group of parameters, and a round draws noise for its active groups only.

The state is as secret as the noise: with it, the rounds' noise can be removed.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from accounting import Mechanism, checks, fingerprint
from accounting.checks import ConfigError
from privpart.grid import Grid, noise_bits
from privpart.noise.executor import Executor
from privpart.noise.source import SALT_BYTES, NoiseSource
from privpart.noise.ziggurat import Draws
from privpart.plan import PrivacyPlan

SCHEMA = "privpart/noise/2"
GROUPED_SCHEMA = "privpart/grouped-noise/2"
# Coordinates that a round's operations run on before the next ones; a multiple of a block.
_PIECE = 2**19


class _Rounds:
    """Rounds of noise that are drawn once each, in order: the same for one vector and for groups.

    An interruption may leave part of the state ahead of the rest, so it ends the object.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.mechanism = mechanism
        self.round = 0
        self._interrupted = False

    @contextmanager
    def _next_round(self) -> Iterator[None]:
        if self.round >= self.mechanism.rounds:
            raise ConfigError(
                f"the noise of all {self.mechanism.rounds} planned rounds is used up: another "
                "round is not covered by the guarantee. Plan more rounds from the start."
            )
        self._check_complete()
        self._interrupted = True
        yield
        self._interrupted = False
        self.round += 1

    @contextmanager
    def _resuming(self, rounds: int) -> Iterator[None]:
        self._interrupted = True
        yield
        self._interrupted = False
        self.round = rounds

    def _check_complete(self) -> None:
        if self._interrupted:
            raise ConfigError(
                f"round {self.round} was interrupted halfway, and its state is lost. Load the last "
                "saved state into a new stream."
            )

    def _checked_round(
        self, state: Mapping[str, Any], identity: Mapping[str, object], keys: set[str]
    ) -> int:
        """Return the round of a state of this stream: with its identity, ``keys`` and no others."""
        if self.round or self._interrupted:
            raise ConfigError(
                f"state: this stream has done {self.round} rounds, and going back would repeat "
                "their noise. Load the state into a new stream."
            )
        expected = {*identity, "round", *keys}
        for fault, names in (
            ("missing", expected - state.keys()),
            ("unknown", state.keys() - expected),
        ):
            if names:
                raise ConfigError(f"state: {fault} {', '.join(sorted(map(str, names)))}.")
        for key, value in identity.items():
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

    def __copy__(self) -> NoReturn:
        raise TypeError("a noise stream is never copied; a copy would repeat its noise.")


class NoiseStream(_Rounds):
    """The noise that the server adds, in ``state_vectors`` vectors of memory.

    Args:
        mechanism: the object that the accountant reads its sensitivity from.
        dim: length d of the trainable part, >= 1.
        stddev: of one i.i.d. coordinate that enters the mechanism, in steps of the grid, from 1 to
            2^30; see ``Grid``.
        source: where the i.i.d. draws come from.
        stream: id of this stream at the source, >= 0. Two streams of one source need two ids:
            under one id they would have the same draws.

    Attributes:
        round: rounds done, which is also the round that ``next()`` is for (from 0).

    Guarantees:
        The noise is that of the real-valued mechanism, rounded as ``accounting.mechanisms.program``
        states; the integers are the same on every machine.

    Raises:
        ConfigError: a value out of range, a filter whose noise grows beyond 2^52 steps, or a stream
            id that this secret source already feeds.

    >>> from accounting import BinaryTree
    >>> from privpart import SeededSource
    >>> stream = NoiseStream(BinaryTree(8), dim=5, stddev=2.0**20, source=SeededSource(0))
    >>> stream.next().dtype, stream.round, stream.state_vectors
    (torch.int32, 1, 3)
    """

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        dim: int,
        stddev: float,
        source: NoiseSource,
        stream: int = 0,
    ) -> None:
        if not isinstance(mechanism, Mechanism):
            raise ConfigError(
                f"mechanism={mechanism!r}: must be a mechanism of the accounting package."
            )
        super().__init__(mechanism)
        self._program = mechanism.noise_program()
        self.dim = checks.count("dim", dim)
        self.stddev = checks.positive("stddev", stddev)
        if not 1 <= self.stddev <= 2.0**30:
            raise ConfigError(f"stddev={stddev:g}: must lie from 1 to 2^30 steps of the grid.")
        self.stream = checks.count("stream", stream, minimum=0)
        self._executor = Executor(self._program, self.stddev)
        # after every check: a refused stream must not use up its id
        source.claim(self.stream)
        self.source = source
        self._salts = [(0, source.salt())]
        rows = self._program.state_rows()
        self._state = np.zeros((rows, self.dim), self._executor.state_type)

    @property
    def state_vectors(self) -> int:
        """Vectors of length d kept between rounds: ``accounting.footprint``'s, and nothing else."""
        return len(self._state)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the noise: torch.int32, or torch.int64 if it may need more."""
        return torch.int32 if self._executor.integers == np.int32 else torch.int64

    def filter_error(self, moved: float) -> float:
        """Return a bound on what floating point adds to a client's effect on a coordinate.

        Args:
            moved: bound on how far the client moves a register, in steps: the sum of the norms of
                its updates.

        Returns:
            Steps; 0 for mechanisms whose registers hold sums of draws.
        """
        return self._executor.filter_error(moved)

    def next(self, *, out: Tensor | None = None) -> Tensor:
        """Return the noise of this round's sum, shape (d,), and go to the next round.

        Args:
            out: contiguous vector to write into, of this stream's dtype. Reusing one saves the
                system's time for allocating memory, up to a third of the call.

        Raises:
            ConfigError: all planned rounds are done (one more could open a new level of the tree,
                which nobody accounted for), or an earlier call was interrupted halfway.
        """
        noise = torch.empty(self.dim, dtype=self.dtype) if out is None else out
        self._check_writable(noise)
        values = noise.numpy()

        def run(pieces: list[slice]) -> None:
            draws = _SaltedDraws(self)
            for piece in pieces:
                state = self._state[:, piece]
                self._executor.run(draws, piece.start, state, values[piece])

        with self._next_round():
            self._executor.begin(self.round)
            _in_threads(run, list(self._pieces()))
        return noise

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for the metadata and tensors of a safetensors file.

        One tensor "state", shape (vectors in use, d), shares memory with the stream; it is missing
        if the draws can be made again from the key. The other entries are strings, ints and a
        float. Keep all of it as secret as the noise.
        """
        self._check_complete()
        salts = [(first, salt.hex()) for first, salt in self._salts if first < self.round and salt]
        state: dict[str, Any] = {
            **self._identity(),
            "round": self.round,
            "source": self.source.identity,
            "salts": json.dumps(salts),
        }
        if self._program.kept_draws is None:
            state["state"] = torch.from_numpy(self._state[: self._program.rows(self.round)])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict()`` was taken; numbers may be strings.

        A round that was drawn but never committed is drawn again under a new salt, so it never has
        one noise under two sums. The draws of a seeded source have no salt: they are those of the
        undisturbed run. Never resume before a round that was released.

        Raises:
            ConfigError: this stream has begun (going back would repeat its noise), or the state is
                of another mechanism, dim, stddev, stream or source, lacks a key, has an unknown
                one, a round or number out of range, or a tensor of another shape or type.
        """
        identity = self._identity() | {"source": self.source.identity}
        rounds = self._checked_round(state, identity, self._state_keys())
        salts = _checked_salts(state["salts"], rounds, self.source.private)
        if self._program.kept_draws is None:
            rows = self._program.rows(rounds)
            self._state[:rows] = self._checked_tensor(state["state"], (rows, self.dim))
        # a fresh salt: rounds that were drawn and lost are drawn anew, never under their old noise
        self._salts = [*salts, (rounds, self.source.salt())]
        with self._resuming(rounds):
            if self._program.kept_draws is not None:
                self._recall(self._program.kept_draws(rounds))

    def _recall(self, indices: list[int]) -> None:
        def run(pieces: list[slice]) -> None:
            draws = _SaltedDraws(self)
            for piece in pieces:
                rows = self._state[: len(indices), piece]
                self._executor.recall(indices, draws, piece.start, rows)

        _in_threads(run, list(self._pieces()))

    def _state_keys(self) -> set[str]:
        """Keys of a saved state, besides the identity and the round."""
        return {"salts"} if self._program.kept_draws is not None else {"salts", "state"}

    def _checked_tensor(self, value: object, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise ConfigError("state['state']: must be a dense tensor.")
        if tuple(value.shape) != shape:
            raise ConfigError(
                f"state['state']: has shape {tuple(value.shape)}; after that many rounds it is "
                f"{shape}."
            )
        dtype = torch.from_numpy(self._state).dtype
        if value.dtype is not dtype:
            raise ConfigError(f"state['state']: has {value.dtype}; this stream has {dtype}.")
        numbers = value.numpy()
        limit = self._executor.limit
        if numbers.size and not (-limit < numbers.min() and numbers.max() < limit):
            raise ConfigError(f"state['state']: every number must lie between +-{limit:g}.")
        return numbers

    def _identity(self) -> dict[str, str | int | float]:
        return {
            "schema": SCHEMA,
            "mechanism": fingerprint(self.mechanism),
            "dim": self.dim,
            "stddev": self.stddev,
            "stream": self.stream,
        }

    def salt_of(self, round_: int) -> bytes:
        """Return the salt of the attempt in which a round was drawn."""
        return next(salt for first, salt in reversed(self._salts) if first <= round_)

    def _pieces(self) -> Iterator[slice]:
        for start in range(0, self.dim, _PIECE):
            yield slice(start, min(start + _PIECE, self.dim))

    def _check_writable(self, out: Tensor) -> None:
        fits = out.shape == (self.dim,) and out.dtype is self.dtype and out.is_contiguous()
        if not fits or out.device.type != "cpu":
            raise ConfigError(
                f"out: has shape {tuple(out.shape)}, {out.dtype}, on {out.device}; must be a "
                f"contiguous vector of {self.dim} {self.dtype} numbers on the cpu."
            )


class _SaltedDraws:
    """The draws of each round under its salt; for one thread."""

    def __init__(self, stream: NoiseStream) -> None:
        self._stream = stream
        self._of_salt: dict[bytes, Draws] = {}

    def __call__(self, round_: int) -> Draws:
        salt = self._stream.salt_of(round_)
        if salt not in self._of_salt:
            self._of_salt[salt] = self._stream.source.draws(self._stream.stream, salt)
        return self._of_salt[salt]


def _in_threads(run: Callable[[list[slice]], None], pieces: list[slice]) -> None:
    """Run the pieces on as many threads as torch may use; which one runs which changes nothing."""
    threads = min(torch.get_num_threads(), len(pieces))
    if threads == 1:
        run(pieces)
        return
    ends = [len(pieces) * k // threads for k in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(run, pieces[i:j]) for i, j in pairwise(ends)]:
            done.result()


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


class GroupedNoise(_Rounds):
    """The noise that the server adds to the active parameters; used like ``NoiseStream``.

    Each group has its own stream id at the source, so no two groups have the same draws.

    Args:
        mechanism: the object that the accountant reads its sensitivity from; it has groups.
        stddev: of one i.i.d. coordinate that enters the mechanism, as for ``NoiseStream``.
        source: where the i.i.d. draws come from.
        stream: id of the first group's stream at the source; group g has ``stream + g``.

    Attributes:
        round: rounds done, of the whole run.

    Raises:
        ConfigError: as ``NoiseStream``.

    >>> from accounting import Grouped, Independent
    >>> from privpart import SeededSource
    >>> mechanism = Grouped([[0, 1], [1]], [Independent(1), Independent(2)], [3, 2])
    >>> noise = GroupedNoise(mechanism, stddev=2.0**20, source=SeededSource(0))
    >>> noise.next().shape, noise.next().shape
    (torch.Size([5]), torch.Size([2]))
    """

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        stddev: float,
        source: NoiseSource,
        stream: int = 0,
    ) -> None:
        groups = mechanism.groups
        if groups is None:
            raise ConfigError(f"mechanism={mechanism.name}: has no groups; use a NoiseStream.")
        super().__init__(mechanism)
        self._planned = groups
        first = checks.count("stream", stream, minimum=0)
        self.groups = [
            NoiseStream(part, dim=size, stddev=stddev, source=source, stream=first + g)
            for g, (part, size) in enumerate(zip(groups.mechanisms, groups.sizes, strict=True))
        ]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the noise: torch.int64 if any group may need it."""
        return max((group.dtype for group in self.groups), key=lambda dtype: dtype.itemsize)

    def filter_error(self, moved: float) -> float:
        """Return the largest of the groups', see ``NoiseStream.filter_error``."""
        return max(group.filter_error(moved) for group in self.groups)

    def next(self, *, out: Tensor | None = None) -> Tensor:
        """Return the noise of this round's sum over its active groups, one after the other.

        Args:
            out: vector to write into, at least that long, of this noise's dtype.

        Raises:
            ConfigError: as ``NoiseStream.next``.
        """
        with self._next_round():
            active = [self.groups[g] for g in self._planned.schedule[self.round]]
            dims = [group.dim for group in active]
            noise = torch.empty(sum(dims), dtype=self.dtype) if out is None else out[: sum(dims)]
            for group, part in zip(active, torch.split(noise, dims), strict=True):
                # a group may need fewer bits than the widest one, whose type all of them have
                if group.dtype is self.dtype:
                    group.next(out=part)
                else:
                    part.copy_(group.next())
        return noise

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all groups' states; group g's keys are "g.name", see ``NoiseStream``."""
        self._check_complete()
        state: dict[str, Any] = {**self._identity(), "round": self.round}
        for g, group in enumerate(self.groups):
            state |= {f"{g}.{key}": value for key, value in group.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, bit for bit, where ``state_dict()`` was taken; see ``NoiseStream``.

        Raises:
            ConfigError: this stream has begun, the state is of another mechanism, or a group's
                round is not the one that the schedule has after that many rounds.
        """
        # all keys before any group is loaded, so that a refused state leaves no group loaded
        prefixed = (
            {f"{g}.{key}" for key in (*group._identity(), "source", "round", *group._state_keys())}
            for g, group in enumerate(self.groups)
        )
        rounds = self._checked_round(state, self._identity(), set().union(*prefixed))
        parts: list[dict[str, Any]] = [{} for _ in self.groups]
        for key in state.keys() - {*self._identity(), "round"}:
            number, _, name = key.partition(".")
            parts[int(number)][name] = state[key]
        for g, (part, active) in enumerate(zip(parts, self._planned.active_rounds(), strict=True)):
            expected = sum(t < rounds for t in active)
            if str(part["round"]) != str(expected):
                raise ConfigError(
                    f"state['{g}.round']={part['round']!r}: after {rounds} rounds group {g} was "
                    f"active in {expected}."
                )
        with self._resuming(rounds):
            for group, part in zip(self.groups, parts, strict=True):
                group.load_state_dict(part)

    def _identity(self) -> dict[str, str]:
        return {"schema": GROUPED_SCHEMA, "mechanism": fingerprint(self.mechanism)}


def noise_and_grid(
    plan: PrivacyPlan, dim: int, noise_multiplier: float, source: NoiseSource, stream: int
) -> tuple[NoiseStream | GroupedNoise, Grid]:
    """Return the noise that a plan adds to sums of length ``dim``, and the grid that it counts in.

    Args:
        plan: has the mechanism, whose sensitivity the accountant reads, and the participation.
        dim: length d of a sum, >= 1.
        noise_multiplier: of the sum, > 0.
        source: where the i.i.d. draws come from.
        stream: id of the noise at the source: 0 of updates, 1 of the bits of adaptive clipping.
            The ids of groups begin 2 later, because a server has these two.

    Raises:
        ConfigError: as ``NoiseStream``, ``noise_bits`` and ``Grid.of``.
    """
    bits = noise_bits(noise_multiplier, dim)
    noise: NoiseStream | GroupedNoise
    if plan.mechanism.groups is not None:
        noise = GroupedNoise(plan.mechanism, stddev=2.0**bits, source=source, stream=stream + 2)
    else:
        noise = NoiseStream(plan.mechanism, dim=dim, stddev=2.0**bits, source=source, stream=stream)
    moved = plan.participation.max_participations * 2.0**bits / noise_multiplier
    charge = math.sqrt(dim * plan.rounds) * noise.filter_error(moved)
    return noise, Grid.of(bits, noise_multiplier, dim, filter_charge=charge)
