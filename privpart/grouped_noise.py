"""Grouped noise: the noise of a grouped mechanism, one stream per group of parameters.

A round draws noise for its active groups only. Each group has a stream id of its own at the source,
so no two groups ever have the same draws, whatever their mechanisms.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accounting import Grouped, Mechanism, checks, fingerprint
from accounting.checks import ConfigError
from privpart.keystream import NoiseSource
from privpart.noise import NoiseStream

SCHEMA = "privpart/grouped-noise/1"
_OWN = ("schema", "mechanism", "round")


class GroupedNoise:
    """The noise that the server adds to the active parameters; used like ``NoiseStream``.

    Args:
        mechanism: what the accountant reads its sensitivity from.
        stddev: of one i.i.d. coordinate that enters the mechanism.
        source: of the i.i.d. draws.
        stream: id of the first group's stream at the source; group g has ``stream + g``.
        dtype: as for ``NoiseStream``.

    Attributes:
        round: rounds done, of the whole run.

    Raises:
        ConfigError: as ``NoiseStream``.

    >>> from accounting import Independent
    >>> from privpart import SeededSource
    >>> mechanism = Grouped([[0, 1], [1]], [Independent(1), Independent(2)], [3, 2])
    >>> noise = GroupedNoise(mechanism, stddev=1.0, source=SeededSource(0))
    >>> noise.next().shape, noise.next().shape
    (torch.Size([5]), torch.Size([2]))
    """

    def __init__(
        self,
        mechanism: Grouped,
        *,
        stddev: float,
        source: NoiseSource,
        stream: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.mechanism = mechanism
        first = checks.count("stream", stream, minimum=0)
        self.groups = [
            NoiseStream(own, dim=size, stddev=stddev, source=source, stream=first + g, dtype=dtype)
            for g, (own, size) in enumerate(zip(mechanism.mechanisms, mechanism.sizes, strict=True))
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
        parts = [self.groups[g].next() for g in self.mechanism.schedule[self.round]]
        self._interrupted = False
        self.round += 1
        return torch.cat(parts)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all groups' states; keys "g.name" are group g's, see ``NoiseStream``."""
        self._check_whole()
        state: dict[str, Any] = {
            "schema": SCHEMA,
            "mechanism": fingerprint(self.mechanism),
            "round": self.round,
        }
        for g, group in enumerate(self.groups):
            state |= {f"{g}.{key}": value for key, value in group.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, bit for bit, where ``state_dict()`` was taken; see ``NoiseStream``.

        Raises:
            ConfigError: this stream has begun, or the state is of another mechanism, or its groups
                do not stand where the schedule has them after that many rounds.
        """
        if self.round or self._interrupted:
            raise ConfigError("state: this stream has begun. Load into a new stream.")
        done = self._checked_round(state)
        parts: list[dict[str, Any]] = [{} for _ in self.groups]
        for key, value in state.items():
            number, dot, name = key.partition(".")
            if not dot and key in _OWN:
                continue
            if not (dot and number.isdecimal() and int(number) < len(parts)):
                raise ConfigError(f"state: unknown {key}.")
            parts[int(number)][name] = value
        for g, (part, rounds) in enumerate(zip(parts, self.mechanism.active_rounds(), strict=True)):
            expected = sum(t < done for t in rounds)
            if str(part.get("round")) != str(expected):
                raise ConfigError(
                    f"state['{g}.round']={part.get('round')!r}: after {done} rounds group {g} was "
                    f"active in {expected}."
                )
        self._interrupted = True  # until every group stands where it should
        for group, part in zip(self.groups, parts, strict=True):
            group.load_state_dict(part)
        self.round, self._interrupted = done, False

    def _checked_round(self, state: Mapping[str, Any]) -> int:
        for key, value in (("schema", SCHEMA), ("mechanism", fingerprint(self.mechanism))):
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
    """Return the noise of any mechanism, None if ``stddev`` is 0.

    The ids of groups begin at ``stream`` + 2: a server has two streams of its own, 0 for the
    updates and 1 for bits beside them.
    """
    if stddev == 0:
        return None
    if isinstance(mechanism, Grouped):
        return GroupedNoise(mechanism, stddev=stddev, source=source, stream=stream + 2)
    return NoiseStream(mechanism, dim=dim, stddev=stddev, source=source, stream=stream)
