"""Noise stream: the correlated noise of a mechanism, one flat vector per round.

``next()`` is the noise of this round's *sum*: the difference of two consecutive prefix-sum noises
(B z)_t - (B z)_{t-1}. The server adds it to the round's sum; the sums of the noised sums are then
exactly the prefix sums that the mechanism promises. A mechanism with groups has one stream per
group of parameters, and a round draws noise for its active groups only.

The state is as secret as the noise: with it, the rounds' noise can be removed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accounting import Mechanism, checks, fingerprint
from accounting.checks import ConfigError
from privpart.engines.device import one_thread
from privpart.noise.executor import Draw, execute
from privpart.noise.source import BLOCK, NoiseSource, checked_stddev

SCHEMA = "privpart/noise/1"
GROUPED_SCHEMA = "privpart/grouped-noise/1"
_GROUPED_KEYS = ("schema", "mechanism", "round")
_MOST = 1e30
_SEVERAL = "several sources"


class NoiseStream:
    """The noise that the server adds, in ``state_vectors`` vectors of memory.

    Args:
        mechanism: the object that the accountant reads its sensitivity from.
        dim: length d of the trainable part, >= 1.
        stddev: of one i.i.d. coordinate that enters the mechanism: noise_multiplier x clip_norm.
        source: where the i.i.d. draws come from.
        stream: id of this stream at the source, >= 0. Two streams of one source need two ids:
            under one id they would have the same draws.
        device: of the noise and the state. Draws are made on the cpu.
        dtype: torch.float32 or torch.float64, of the noise, the state and the arithmetic. In
            float32 the mechanism that runs is the accounted one up to relative 1e-6.

    Attributes:
        round: rounds done, which is also the round that ``next()`` is for (from 0).

    Raises:
        ConfigError: a value out of range, a filter whose noise grows beyond float32, or a stream id
            that this secret source already feeds.

    >>> from accounting import BinaryTree
    >>> from privpart import SeededSource
    >>> stream = NoiseStream(BinaryTree(8), dim=5, stddev=2.0, source=SeededSource(0))
    >>> stream.next().shape, stream.round, stream.state_vectors
    (torch.Size([5]), 1, 3)
    """

    def __init__(
        self,
        mechanism: Mechanism,
        *,
        dim: int,
        stddev: float,
        source: NoiseSource,
        stream: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not isinstance(mechanism, Mechanism):
            raise ConfigError(
                f"mechanism={mechanism!r}: must be a mechanism of the accounting package."
            )
        self.mechanism = mechanism
        self._program = mechanism.noise_program()
        self.dim = checks.count("dim", dim)
        self.stddev = checked_stddev(stddev)
        _check_bounded(mechanism, self.stddev)
        self.stream = checks.count("stream", stream, minimum=0)
        if dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"dtype={dtype}: must be torch.float32 or torch.float64.")
        self.device = torch.device(device)
        self.dtype = dtype
        source.claim(self.stream)
        self.source = source
        self.round = 0
        self._history = source.identity
        self._interrupted = False
        self._state = self._zeros(self._program.state_rows(), self.dim)

    @property
    def state_vectors(self) -> int:
        """Vectors of length d kept between rounds: ``accounting.footprint``'s, and nothing else."""
        return len(self._state)

    def next(self, *, out: Tensor | None = None) -> Tensor:
        """Return the noise of this round's sum, shape (d,), and go to the next round.

        Args:
            out: contiguous vector to write into, of this stream's dtype and device. Reusing one
                saves the system's time for allocating memory, up to a third of the call.

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
        noise = torch.empty(self.dim, dtype=self.dtype, device=self.device) if out is None else out
        self._check_writable(noise)
        self._interrupted = True
        with one_thread():
            ops = self._program.round(self.round)
            for piece in self._pieces():
                execute(ops, self._draw_from(piece.start), self._state[:, piece], noise[piece])
        self._interrupted = False
        self.round += 1
        return noise

    def cumulative(self) -> Tensor:
        """Return the noise on the prefix sum so far: the sum of all ``next()``, shape (d,).

        Draws every round again, so that ``next()`` need not keep a sum; this takes as long as all
        rounds so far. To have it in every round, add up ``next()`` instead.

        Raises:
            ConfigError: an earlier round had another source, whose draws are gone.
        """
        self._check_whole()
        if self._history != self.source.identity:
            raise ConfigError(
                "cumulative: rounds before the resumption had another source, whose draws cannot "
                "be made again. Add up next() instead."
            )
        total = torch.zeros(self.dim, dtype=torch.float64, device=self.device)
        with one_thread():
            for piece in self._pieces():
                part = total[piece]
                state = self._zeros(len(self._state), len(part))
                noise = self._zeros(len(part))
                draw = self._draw_from(piece.start)
                for t in range(self.round):
                    execute(self._program.round(t), draw, state, noise)
                    part += noise
        return total.to(self.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state: one tensor "state", shape (vectors in use, d), on the cpu.

        The other entries are strings, ints and a float, for the metadata of a safetensors file.
        Keep it as secret as the noise.
        """
        self._check_whole()
        kept = self._program.rows(self.round)
        return {
            **self._identity(),
            "round": self.round,
            "source": self._history,
            "state": self._state[:kept].to("cpu", copy=True),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, bit for bit, where ``state_dict()`` was taken; numbers may be strings.

        With the same source, the draws that follow are those of the undisturbed run. With a new
        source they are new, so a round that was drawn but never released can be run again without
        adding the same noise to two sums. Never resume before a round that was released.

        Raises:
            ConfigError: this stream has begun (going back would repeat its noise), or the state is
                of another mechanism, dim, stddev, stream or dtype, lacks a key, has an unknown
                one, a round out of range, or a tensor of another shape or with a NaN in it.
        """
        if self.round or self._interrupted:
            raise ConfigError(
                f"state: this stream has done {self.round} rounds, and going back would repeat "
                "their noise. Load the state into a new stream."
            )
        rounds = self._checked_round(state)
        kept = _checked_tensor(state["state"], (self._program.rows(rounds), self.dim))
        if kept.dtype is not self.dtype:
            raise ConfigError(f"state['state']: has {kept.dtype}; this stream has {self.dtype}.")
        self._state[: len(kept)].copy_(kept)
        self.round = rounds
        self._history = self.source.identity
        if rounds and state["source"] != self.source.identity:
            self._history = _SEVERAL

    def _checked_round(self, state: Mapping[str, Any]) -> int:
        own = self._identity()
        expected = {*own, "round", "source", "state"}
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
        if not isinstance(state["source"], str):
            raise ConfigError(f"state['source']={state['source']!r}: must be a string.")
        text = str(state["round"])
        if not (text.isascii() and text.isdigit() and int(text) <= self.mechanism.rounds):
            raise ConfigError(
                f"state['round']={state['round']!r}: must be a whole number from 0 to "
                f"{self.mechanism.rounds}."
            )
        return int(text)

    def _identity(self) -> dict[str, str | int | float]:
        return {
            "schema": SCHEMA,
            "mechanism": fingerprint(self.mechanism),
            "dim": self.dim,
            "stddev": self.stddev,
            "stream": self.stream,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def _draw_from(self, start: int) -> Draw:
        def draw(index: int, into: Tensor) -> None:
            here = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
            self.source.normal(
                index, len(here), stream=self.stream, start=start, stddev=self.stddev, out=here
            )
            if here is not into:
                into.copy_(here)

        return draw

    def _pieces(self) -> Iterator[slice]:
        # pieces that stay in the processor's cache; another device takes the whole vector
        size = BLOCK if self.device.type == "cpu" else self.dim
        for start in range(0, self.dim, size):
            yield slice(start, min(start + size, self.dim))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _check_whole(self) -> None:
        if self._interrupted:
            raise ConfigError(
                f"round {self.round} was interrupted halfway, and its state is lost. Load the last "
                "saved state into a new stream."
            )

    def _check_writable(self, out: Tensor) -> None:
        fits = out.shape == (self.dim,) and out.dtype is self.dtype and out.is_contiguous()
        if not fits or out.device.type != self.device.type:
            raise ConfigError(
                f"out: has shape {tuple(out.shape)}, {out.dtype}, on {out.device}; must be a "
                f"contiguous vector of {self.dim} {self.dtype} numbers on {self.device}."
            )


def _check_bounded(mechanism: Mechanism, stddev: float) -> None:
    """Refuse a mechanism whose noise grows beyond float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        largest = stddev * float(np.sqrt(mechanism.prefix_variance().max()))
    if not largest < _MOST:
        raise ConfigError(
            f"mechanism={mechanism.name}: its noise grows to {largest:.3g}, beyond float32. "
            "Non-increasing, nonnegative coefficients are always safe."
        )


def _checked_tensor(value: object, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise ConfigError("state['state']: must be a dense tensor.")
    if tuple(value.shape) != shape:
        raise ConfigError(
            f"state['state']: has shape {tuple(value.shape)}; after that many rounds it is {shape}."
        )
    if not bool(torch.isfinite(value).all()):
        raise ConfigError("state['state']: every number must be finite.")
    return value


class GroupedNoise:
    """The noise that the server adds to the active parameters; used like ``NoiseStream``.

    Each group has its own stream id at the source, so no two groups have the same draws.

    Args:
        mechanism: the object that the accountant reads its sensitivity from; it has groups.
        stddev: of one i.i.d. coordinate that enters the mechanism.
        source: where the i.i.d. draws come from.
        stream: id of the first group's stream at the source; group g has ``stream + g``.
        dtype: as for ``NoiseStream``.

    Attributes:
        round: rounds done, of the whole run.

    Raises:
        ConfigError: as ``NoiseStream``.

    >>> from accounting import Grouped, Independent
    >>> from privpart import SeededSource
    >>> mechanism = Grouped([[0, 1], [1]], [Independent(1), Independent(2)], [3, 2])
    >>> noise = GroupedNoise(mechanism, stddev=1.0, source=SeededSource(0))
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
        dtype: torch.dtype = torch.float32,
    ) -> None:
        groups = mechanism.groups
        if groups is None:
            raise ConfigError(f"mechanism={mechanism.name}: has no groups; use a NoiseStream.")
        self.mechanism = mechanism
        self._planned = groups
        first = checks.count("stream", stream, minimum=0)
        self.groups = [
            NoiseStream(own, dim=size, stddev=stddev, source=source, stream=first + g, dtype=dtype)
            for g, (own, size) in enumerate(zip(groups.mechanisms, groups.sizes, strict=True))
        ]
        self.round = 0
        self._interrupted = False

    def next(self) -> Tensor:
        """Return the noise of this round's sum over its active groups, one after the other.

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
        parts = [self.groups[g].next() for g in self._planned.schedule[self.round]]
        self._interrupted = False
        self.round += 1
        return torch.cat(parts)

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
        text = str(state.get("round"))
        if not (text.isascii() and text.isdigit() and int(text) <= self.mechanism.rounds):
            raise ConfigError(
                f"state['round']={state.get('round')!r}: must be a whole number from 0 to "
                f"{self.mechanism.rounds}."
            )
        return int(text)

    def _check_whole(self) -> None:
        if self._interrupted:
            raise ConfigError(
                f"round {self.round} was interrupted halfway, and its state is lost. Load the last "
                "saved state into a new stream."
            )


def noise_stream(
    mechanism: Mechanism, dim: int, stddev: float, source: NoiseSource, stream: int
) -> NoiseStream | GroupedNoise | None:
    """Return the noise of any mechanism; None if ``stddev`` is 0.

    The ids of groups begin at ``stream`` + 2, because a server has two other streams: 0 for the
    updates and 1 for the bits of adaptive clipping.
    """
    if stddev == 0:
        return None
    if mechanism.groups is not None:
        return GroupedNoise(mechanism, stddev=stddev, source=source, stream=stream + 2)
    return NoiseStream(mechanism, dim=dim, stddev=stddev, source=source, stream=stream)
