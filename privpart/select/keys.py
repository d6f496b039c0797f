"""Keys: how a client, or the round, chooses what to select.

Structured keys come from a client's own data and say something about it: they are ``DeviceOnly``.
Random keys carry no data. Shared ones, equal for a whole round, are ``Released`` as soon as the
seed is: then FEDSELECT is a broadcast of a smaller model (Charles et al. 2022, section 4.1.2).

Keys come back in ascending order: a slice's place in the client's model does not depend on its
rank, and with m = K the client's model is the server's, bit for bit.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from privpart.select.disclosure import DeviceOnly, Released
from privpart.select.primitive import Keys

Counts = NDArray[np.int64]
"""How often each key occurs in one client's data, shape (K,)."""

Strategy = Callable[[Counts, int, np.random.Generator], Keys]
"""Chooses at most m keys from a client's counts."""


def top(counts: Counts, m: int, generator: np.random.Generator) -> Keys:
    """Return the m most frequent keys that occur; of equals, the lower one.

    >>> top(np.array([5, 0, 7, 1]), 2, np.random.default_rng(0))
    (0, 2)
    """
    occurring = _by_frequency(counts)[: checks.count("m", m)]
    return tuple(sorted(occurring.tolist()))


def random(counts: Counts, m: int, generator: np.random.Generator) -> Keys:
    """Return m keys at random among those that occur."""
    return _sample(_by_frequency(counts), m, generator)


def random_top(counts: Counts, m: int, generator: np.random.Generator) -> Keys:
    """Return m keys at random among the 2m most frequent that occur."""
    return _sample(_by_frequency(counts)[: 2 * checks.count("m", m)], m, generator)


def pad(keys: Keys, m: int, size: int, generator: np.random.Generator) -> Keys:
    """Add random other keys until there are m, so that their number says nothing.

    Args:
        keys: at most m, distinct.
        m: at most size.
        size: K.
        generator: of this device.
    """
    if not len(keys) <= checks.count("m", m) <= size:
        raise ConfigError(f"m={m}: must be at least the {len(keys)} keys and at most K={size}.")
    others = np.setdiff1d(np.arange(size), keys)
    decoys = generator.choice(others, m - len(keys), replace=False)
    return tuple(sorted([*keys, *decoys.tolist()]))


@dataclass(frozen=True, slots=True)
class StructuredKeys:
    """Exactly m keys of a client's own data; decoys fill up where it has fewer.

    Args:
        counts: how often each key occurs in a client's data, by client.
        m: keys of a client, by client if they differ; public, unrelated to what a device holds.
        strategy: ``top``, ``random`` or ``random_top``.
        data_seed: of a simulation's draws.
        always: keys that every client takes, for instance padding and out-of-vocabulary tokens.
    """

    counts: Callable[[int], Counts]
    m: int | Callable[[int], int]
    strategy: Strategy
    data_seed: int
    always: Keys = ()

    def __call__(self, round_: int, client: int) -> DeviceOnly[Keys]:
        """Return a client's keys in a round."""
        m = self.m if isinstance(self.m, int) else self.m(client)
        own = DeviceOnly(self.counts(client))
        return own.on_device(lambda counts: self._choose(counts, m, round_, client))

    def _choose(self, counts: Counts, m: int, round_: int, client: int) -> Keys:
        if not len(self.always) <= m <= len(counts):
            raise ConfigError(f"m={m}: must be from {len(self.always)} to K={len(counts)}.")
        left = counts.copy()
        left[list(self.always)] = 0
        room = m - len(self.always)
        generator = np.random.default_rng((self.data_seed, client, round_))
        chosen = self.strategy(left, room, generator) if room else ()
        # decoys that changed from round to round would stand out against keys that stay
        decoys = np.random.default_rng((self.data_seed, client))
        return pad(tuple(sorted((*self.always, *chosen))), m, len(counts), decoys)


@dataclass(frozen=True, slots=True)
class IndependentKeys:
    """Keys that each device draws by itself, anew in each round; they carry no data.

    Args:
        size: K.
        m: keys of a client, by client if they differ; from 1 to K.
        data_seed: of a simulation's draws.
    """

    size: int
    m: int | Callable[[int], int]
    data_seed: int

    def __call__(self, round_: int, client: int) -> DeviceOnly[Keys]:
        """Return a client's keys in a round."""
        m = self.m if isinstance(self.m, int) else self.m(client)
        if not m <= self.size:
            raise ConfigError(f"m={m}: must be at most K={self.size}.")
        generator = np.random.default_rng((self.data_seed, client, round_))
        return DeviceOnly(_sample(np.arange(self.size), m, generator))


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """The same m random keys for everyone in a round: a function of public coins.

    Args:
        size: K.
        m: from 1 to K.
        seed: public.
    """

    size: int
    m: int
    seed: int

    def __post_init__(self) -> None:
        if not checks.count("m", self.m) <= checks.count("size", self.size):
            raise ConfigError(f"m={self.m}: must be at most K={self.size}.")
        checks.count("seed", self.seed, minimum=0)

    def __call__(self, round_: int, client: int) -> Released[Keys]:
        """Return the keys of a round, whoever asks; the same on every machine and version."""
        coins = f"privpart keys|{self.seed}|{checks.count('round', round_, minimum=0)}|"

        def coin(key: int) -> bytes:
            return hashlib.sha256(f"{coins}{key}".encode()).digest()

        drawn = sorted(range(self.size), key=coin)[: self.m]
        return Released(tuple(sorted(drawn)), "drawn from public coins")

    def rounds_of_keys(self, rounds: int) -> list[list[int]]:
        """Return, per key, the rounds that draw it, ascending; what an accountant needs to know."""
        found: list[list[int]] = [[] for _ in range(self.size)]
        for number in range(checks.count("rounds", rounds)):
            for key in self(number, 0).value:
                found[key].append(number)
        return found


KeyChooser = StructuredKeys | IndependentKeys | SharedKeys


def _by_frequency(counts: Counts) -> NDArray[np.int64]:
    if counts.ndim != 1 or not np.all(counts >= 0):
        raise ConfigError(f"counts of shape {counts.shape}: must be (K,), and none below zero.")
    order = np.argsort(-counts, kind="stable")
    return order[: np.count_nonzero(counts)]


def _sample(among: NDArray[np.int64], m: int, generator: np.random.Generator) -> Keys:
    m = checks.count("m", m)
    chosen = generator.choice(among, min(m, len(among)), replace=False)
    return tuple(sorted(chosen.tolist()))
