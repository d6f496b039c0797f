"""Noise stream: the correlated noise of a mechanism, one vector of integers per round.

``next()`` is the noise of this round's *sum*, in steps of the grid: the difference of two
consecutive prefix-sum noises. The server adds it to the round's integer sum; the sums of the noised
sums are then the prefix sums that the mechanism promises, rounded. A mechanism with groups has one
stream per group of parameters, and a round draws noise for its active groups only.

The state is as secret as the noise: with it, the rounds' noise can be removed. The streams of one
vector and of several groups are one file, because they save and resume alike.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from accounting import Mechanism, checks, fingerprint
from accounting.checks import ConfigError
from privpart.noise.executor import Executor
from privpart.noise.source import SALT_BYTES, NoiseSource
from privpart.noise.ziggurat import Draws

SCHEMA = "privpart/noise/2"
GROUPED_SCHEMA = "privpart/grouped-noise/2"
_GROUPED_KEYS = ("schema", "mechanism", "round")
_PIECE = 2**19
"""Coordinates that a round's operations run on before the next ones; a multiple of a block."""


class NoiseStream:
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
        self.mechanism = mechanism
        self._program = mechanism.noise_program()
        self.dim = checks.count("dim", dim)
        self.stddev = checks.positive("stddev", stddev)
        if not 1 <= self.stddev <= 2.0**30:
            raise ConfigError(f"stddev={stddev:g}: must lie from 1 to 2^30 steps of the grid.")
        self.stream = checks.count("stream", stream, minimum=0)
        self._executor = Executor(self._program, self.stddev)
        source.claim(self.stream)
        self.source = source
        self.round = 0
        self._salts = [(0, source.salt())]
        self._interrupted = False
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
        if self.round >= self.mechanism.rounds:
            raise ConfigError(
                f"the noise of all {self.mechanism.rounds} planned rounds is used up: another "
                "round is not covered by the guarantee. Plan more rounds from the start."
            )
        self._check_whole()
        noise = torch.empty(self.dim, dtype=self.dtype) if out is None else out
        self._check_writable(noise)
        self._interrupted = True
        values = noise.numpy()
        self._executor.begin(self.round)

        def run(pieces: list[slice]) -> None:
            draws = _SaltedDraws(self)
            for piece in pieces:
                state = self._state[:, piece]
                self._executor.run(draws, piece.start, state, values[piece])

        _in_threads(run, list(self._pieces()))
        self._interrupted = False
        self.round += 1
        return noise

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for the metadata and tensors of a safetensors file.

        One tensor "state", shape (vectors in use, d), shares memory with the stream; it is missing
        if the draws can be made again from the key. The other entries are strings, ints and a
        float. Keep all of it as secret as the noise.
        """
        self._check_whole()
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
        if self.round or self._interrupted:
            raise ConfigError(
                f"state: this stream has done {self.round} rounds, and going back would repeat "
                "their noise. Load the state into a new stream."
            )
        rounds = self._checked_round(state)
        salts = _checked_salts(state["salts"], rounds, self.source.private)
        kept = self._program.rows(rounds)
        if self._program.kept_draws is None:
            own = self._checked_tensor(state["state"], (kept, self.dim))
            self._state[:kept] = own
        self.round = rounds
        self._salts = [*salts, (rounds, self.source.salt())]
        if self._program.kept_draws is not None:
            self._interrupted = True  # until every draw is made again
            self._recall(self._program.kept_draws(rounds))
            self._interrupted = False

    def _recall(self, indices: list[int]) -> None:
        def run(pieces: list[slice]) -> None:
            draws = _SaltedDraws(self)
            for piece in pieces:
                rows = self._state[: len(indices), piece]
                self._executor.recall(indices, draws, piece.start, rows)

        _in_threads(run, list(self._pieces()))

    def _checked_round(self, state: Mapping[str, Any]) -> int:
        own = self._identity() | {"source": self.source.identity}
        expected = {*own, "round", "salts"}
        if self._program.kept_draws is None:
            expected |= {"state"}
        for fault, odd in (
            ("missing", expected - state.keys()),
            ("unknown", state.keys() - expected),
        ):
            if odd:
                raise ConfigError(f"state: {fault} {', '.join(sorted(map(str, odd)))}.")
        for key, value in own.items():
            if str(state[key]) != str(value):
                raise ConfigError(
                    f"state[{key!r}]={state[key]!r}: this stream has {value!r}. Load a state only "
                    "into a stream like the one it was taken from."
                )
        return _checked_rounds(state["round"], self.mechanism.rounds)

    def _checked_tensor(self, value: object, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise ConfigError("state['state']: must be a dense tensor.")
        if tuple(value.shape) != shape:
            raise ConfigError(
                f"state['state']: has shape {tuple(value.shape)}; after that many rounds it is "
                f"{shape}."
            )
        own = torch.from_numpy(self._state).dtype
        if value.dtype is not own:
            raise ConfigError(f"state['state']: has {value.dtype}; this stream has {own}.")
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

    def __copy__(self) -> NoReturn:
        raise TypeError("a noise stream is never copied; a copy would repeat its noise.")

    def _check_whole(self) -> None:
        if self._interrupted:
            raise ConfigError(
                f"round {self.round} was interrupted halfway, and its state is lost. Load the last "
                "saved state into a new stream."
            )

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


def _checked_rounds(value: object, most: int) -> int:
    text = str(value)  # metadata of a file are strings
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise ConfigError(f"state['round']={value!r}: must be a whole number from 0 to {most}.")
    return int(text)


def _checked_salts(text: object, rounds: int, private: bool) -> list[tuple[int, bytes]]:
    """Return (first round, salt) of every attempt that was committed."""
    try:
        said = json.loads(str(text))
        salts = [(first, bytes.fromhex(salt)) for first, salt in said]
    except (TypeError, ValueError, RecursionError):
        raise ConfigError("state['salts']: must be a list of rounds and salts.") from None
    if not private:
        if salts:
            raise ConfigError("state['salts']: a seeded source has no salts.")
        return [(0, b"")] if rounds else []
    firsts = [first for first, _ in salts]
    ordered = all(type(first) is int for first in firsts) and firsts == sorted(set(firsts))
    whole = not rounds or (bool(firsts) and firsts[0] == 0 and firsts[-1] < rounds)
    if not (ordered and whole and all(len(salt) == SALT_BYTES for _, salt in salts)):
        raise ConfigError(
            f"state['salts']: must hold {SALT_BYTES} bytes for each attempt, from round 0 on."
        )
    return salts


class GroupedNoise:
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
        self.mechanism = mechanism
        self._planned = groups
        first = checks.count("stream", stream, minimum=0)
        self.groups = [
            NoiseStream(own, dim=size, stddev=stddev, source=source, stream=first + g)
            for g, (own, size) in enumerate(zip(groups.mechanisms, groups.sizes, strict=True))
        ]
        self.round = 0
        self._interrupted = False

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
        if self.round >= self.mechanism.rounds:
            raise ConfigError(
                f"the noise of all {self.mechanism.rounds} planned rounds is used up: another "
                "round is not covered by the guarantee. Plan more rounds from the start."
            )
        self._check_whole()
        self._interrupted = True
        active = [self.groups[g] for g in self._planned.schedule[self.round]]
        dim = sum(group.dim for group in active)
        noise = torch.empty(dim, dtype=self.dtype) if out is None else out[:dim]
        for group, part in zip(active, torch.split(noise, [g.dim for g in active]), strict=True):
            if group.dtype is self.dtype:
                group.next(out=part)
            else:
                part.copy_(group.next())
        self._interrupted = False
        self.round += 1
        return noise

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all groups' states; group g's keys are "g.name", see ``NoiseStream``."""
        self._check_whole()
        state: dict[str, Any] = {
            "schema": GROUPED_SCHEMA,
            "mechanism": fingerprint(self.mechanism),
            "round": self.round,
        }
        for g, group in enumerate(self.groups):
            state |= {f"{g}.{key}": value for key, value in group.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, bit for bit, where ``state_dict()`` was taken; see ``NoiseStream``.

        Raises:
            ConfigError: this stream has begun, the state is of another mechanism, or a group's
                round is not the one that the schedule has after that many rounds.
        """
        if self.round or self._interrupted:
            raise ConfigError("state: this stream has begun. Load the state into a new stream.")
        done = self._checked_round(state)
        parts: list[dict[str, Any]] = [{} for _ in self.groups]
        for key, value in state.items():
            number, dot, name = key.partition(".")
            if not dot and key in _GROUPED_KEYS:
                continue
            if not (dot and number.isdecimal() and int(number) < len(parts)):
                raise ConfigError(f"state: unknown {key}.")
            parts[int(number)][name] = value
        for g, (part, rounds) in enumerate(zip(parts, self._planned.active_rounds(), strict=True)):
            expected = sum(t < done for t in rounds)
            if str(part.get("round")) != str(expected):
                raise ConfigError(
                    f"state['{g}.round']={part.get('round')!r}: after {done} rounds group {g} was "
                    f"active in {expected}."
                )
        self._interrupted = True  # until every group is loaded
        for group, part in zip(self.groups, parts, strict=True):
            group.load_state_dict(part)
        self.round = done
        self._interrupted = False

    def _checked_round(self, state: Mapping[str, Any]) -> int:
        for key, value in (("schema", GROUPED_SCHEMA), ("mechanism", fingerprint(self.mechanism))):
            if state.get(key) != value:
                raise ConfigError(f"state[{key!r}]={state.get(key)!r}: this stream has {value!r}.")
        return _checked_rounds(state.get("round"), self.mechanism.rounds)

    def __copy__(self) -> NoReturn:
        raise TypeError("a noise stream is never copied; a copy would repeat its noise.")

    def _check_whole(self) -> None:
        if self._interrupted:
            raise ConfigError(
                f"round {self.round} was interrupted halfway, and its state is lost. Load the last "
                "saved state into a new stream."
            )


def noise_stream(
    mechanism: Mechanism, dim: int, stddev: float, source: NoiseSource, stream: int
) -> NoiseStream | GroupedNoise:
    """Return the noise of any mechanism.

    The ids of groups begin at ``stream`` + 2, because a server has two other streams: 0 for the
    updates and 1 for the bits of adaptive clipping.
    """
    if mechanism.groups is not None:
        return GroupedNoise(mechanism, stddev=stddev, source=source, stream=stream + 2)
    return NoiseStream(mechanism, dim=dim, stddev=stddev, source=source, stream=stream)
