"""Keys: how each client, or the whole round, chooses what to select.

Structured keys are computed from a client's data and reveal something about it, so they are
``DeviceOnly``. Random keys contain no client data. Shared keys are the same for all clients of a
round and follow from a public seed, so they are public; FEDSELECT is then a broadcast of a
smaller model (Charles et al. 2022, section 4.1.2).

Keys are returned in ascending order, so the position of a slice in the client's model does not
reveal its rank, and with m = K the client's model equals the server's bit for bit.

Slices outside a round's shared keys receive no update from any cohort, so their sums need no noise
in that round: each slice is a group of ``accounting.Grouped``, with a noise stream over its own
rounds (``Turns``). This requires zero-out adjacency, keys drawn from public coins, and clients that
are clipped jointly over all that they send. Parameters that train in every round form group 0, if
there are any; it has the largest sensitivity and so determines epsilon.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.plan import Rounds
from privpart.select.delivery import DeviceOnly
from privpart.select.layout import Keys, Layout

Counts = NDArray[np.int64]
"""Number of occurrences of each key in one client's data, shape (K,)."""

Strategy = Callable[[Counts, int, np.random.Generator], Keys]
"""Choose at most m keys from a client's counts."""


def top(counts: Counts, m: int, generator: np.random.Generator) -> Keys:
    """Return the m most frequent keys among those that occur; ties go to the lower key.

    >>> top(np.array([5, 0, 7, 1]), 2, np.random.default_rng(0))
    (0, 2)
    """
    occurring = _by_frequency(counts)[: checks.count("m", m)]
    return tuple(sorted(occurring.tolist()))


def random(counts: Counts, m: int, generator: np.random.Generator) -> Keys:
    """Return m keys drawn at random from those that occur."""
    return _sample(_by_frequency(counts), m, generator)


def random_top(counts: Counts, m: int, generator: np.random.Generator) -> Keys:
    """Return m keys drawn at random from the 2m most frequent ones."""
    return _sample(_by_frequency(counts)[: 2 * checks.count("m", m)], m, generator)


@dataclass(frozen=True, slots=True)
class StructuredKeys:
    """Choose exactly m keys from a client's own data, with decoys if it has fewer than m.

    Args:
        counts: returns the counts of keys in a client's data, given the client.
        m: number of keys, public and independent of private data.
        strategy: ``top``, ``random`` or ``random_top``.
        data_seed: seed of the simulated devices' draws.
        always: keys that every client selects, for instance padding and out-of-vocabulary tokens.
    """

    counts: Callable[[int], Counts]
    m: int
    strategy: Strategy
    data_seed: int
    always: Keys = ()

    def __call__(self, round_: int, client: int) -> DeviceOnly[Keys]:
        """Return the keys of ``client`` in a round."""
        private = DeviceOnly(self.counts(client))
        return private.on_device(lambda counts: self._choose(counts, round_, client))

    def _choose(self, counts: Counts, round_: int, client: int) -> Keys:
        if not len(self.always) <= checks.count("m", self.m) <= len(counts):
            raise ConfigError(f"m={self.m}: must be from {len(self.always)} to K={len(counts)}.")
        remaining = counts.copy()
        # keys that everybody selects are not chosen again
        remaining[list(self.always)] = 0
        room = self.m - len(self.always)
        generator = np.random.default_rng((self.data_seed, client, round_))
        chosen = self.strategy(remaining, room, generator) if room else ()
        keys = sorted((*self.always, *chosen))
        # decoys hide the number of keys; changing ones could be told from the client's own keys
        coins = np.random.default_rng((self.data_seed, client))
        unused = np.setdiff1d(np.arange(len(counts)), keys)
        decoys = coins.choice(unused, self.m - len(keys), replace=False)
        return tuple(sorted([*keys, *decoys.tolist()]))


@dataclass(frozen=True, slots=True)
class IndependentKeys:
    """Draw m of K = ``size`` keys for each client in each round; they contain no client data."""

    size: int
    m: int
    data_seed: int

    def __post_init__(self) -> None:
        _refuse_more_than_all(self.m, self.size)

    def __call__(self, round_: int, client: int) -> DeviceOnly[Keys]:
        """Return the keys of ``client`` in a round."""
        generator = np.random.default_rng((self.data_seed, client, round_))
        return DeviceOnly(_sample(np.arange(self.size), self.m, generator))


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Draw the same m of K = ``size`` keys for all clients of a round, from public coins."""

    size: int
    m: int
    seed: int

    def __post_init__(self) -> None:
        _refuse_more_than_all(self.m, self.size)
        checks.count("seed", self.seed, minimum=0)

    def __call__(self, round_: int, client: int) -> Keys:
        """Return the keys of a round; they are equal for all clients, machines and versions."""
        coins = f"privpart keys|{self.seed}|{checks.count('round', round_, minimum=0)}|"

        def coin(key: int) -> bytes:
            return hashlib.sha256(f"{coins}{key}".encode()).digest()

        # by SHA-256, since generators of libraries change between versions
        drawn = sorted(range(self.size), key=coin)[: self.m]
        return tuple(sorted(drawn))

    def rounds_of_keys(self, rounds: int) -> list[list[int]]:
        """Return, per key, the rounds that draw it, ascending; the accountant needs these."""
        rounds_by_key: list[list[int]] = [[] for _ in range(self.size)]
        for number in range(checks.count("rounds", rounds)):
            for key in self(number, 0):
                rounds_by_key[key].append(number)
        return rounds_by_key


KeyChooser = StructuredKeys | IndependentKeys | SharedKeys


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Groups of slices and the rounds in which they train.

    Attributes:
        groups: positions of each group in the model's flat vector. The server's vector is their
            concatenation. Slices that no round draws keep their start values.
        schedule: per round, the groups that train, ascending.
    """

    groups: tuple[Tensor, ...]
    schedule: Rounds

    @classmethod
    def of(cls, layout: Layout, choosers: Sequence[KeyChooser], rounds: int) -> "Turns":
        """Draw the keys of all rounds and group the slices by them.

        Slices of a key space without shared keys train in every round.
        """
        always = [layout.shared]
        groups: list[Tensor] = []
        members: list[list[int]] = []
        drawn: list[list[int]] = [[] for _ in range(rounds)]
        for table, choose in zip(layout.tables, choosers, strict=True):
            if not isinstance(choose, SharedKeys):
                always.append(table.flatten())
                continue
            for key, numbers in enumerate(choose.rounds_of_keys(rounds)):
                if numbers:
                    groups.append(table[key])
                    members.append(numbers)
        # shared parameters train in every round, as group 0
        if len(first := torch.cat(always).sort().values):
            groups.insert(0, first)
            members.insert(0, list(range(rounds)))
        for group, numbers in enumerate(members):
            for number in numbers:
                drawn[number].append(group)
        return cls(tuple(groups), tuple(map(tuple, drawn)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of parameters of each group."""
        return tuple(map(len, self.groups))

    @property
    def order(self) -> Tensor:
        """Positions in the model of the server's vector: all groups, concatenated, shape (d',)."""
        return torch.cat(self.groups)

    def whole(self, first: Tensor, parameters: Tensor) -> Tensor:
        """Return ``first``, shape (d,), with the server's vector, shape (d',), at its positions."""
        model = first.clone()
        model[self.order] = parameters
        return model

    def active_part(self, update: Tensor, round_: int, active: Sequence[int] | None) -> Tensor:
        """Return the part of an update, shape (d,), that the server sums in a round."""
        if active != self.schedule[round_]:
            raise ConfigError(
                f"round {round_}: the plan trains other groups than the public keys draw. Take the "
                "model and the plan from the same plan file."
            )
        return torch.cat([update[self.groups[group]] for group in self.schedule[round_]])


def _refuse_more_than_all(m: int, size: int) -> None:
    if not checks.count("m", m) <= checks.count("size", size):
        raise ConfigError(f"m={m}: must be at most K={size}.")


def _by_frequency(counts: Counts) -> NDArray[np.int64]:
    if counts.ndim != 1 or not np.all(counts >= 0):
        raise ConfigError(f"counts of shape {counts.shape}: must be (K,), without negative counts.")
    # stable: ties go to the lower key on every machine
    order = np.argsort(-counts, kind="stable")
    return order[: np.count_nonzero(counts)]


def _sample(among: NDArray[np.int64], m: int, generator: np.random.Generator) -> Keys:
    m = checks.count("m", m)
    chosen = generator.choice(among, min(m, len(among)), replace=False)
    return tuple(sorted(chosen.tolist()))
