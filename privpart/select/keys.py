"""Keys: how each client, or the whole round, chooses what to select.

Structured keys are computed from a client's data and reveal something about it, so they are
``DeviceOnly``. Random keys contain no client data. Shared keys are the same for all clients of a
round and follow from a public seed, so they are public; FEDSELECT is then a broadcast of a
smaller model (Charles et al. 2022, section 4.1.2).

Keys are returned in ascending order, so the position of a slice in the client's model does not
reveal its rank, and with m = K the client's model equals the server's bit for bit.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from privpart.select.disclosure import DeviceOnly
from privpart.select.primitive import Keys

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


def pad(keys: Keys, m: int, size: int, generator: np.random.Generator) -> Keys:
    """Add random decoys up to m keys, so that the number of keys reveals nothing.

    Args:
        keys: distinct keys, at most m.
        m: number of keys to return, at most ``size``.
        size: number of keys that exist, K.
        generator: random generator of this device.
    """
    if not len(keys) <= checks.count("m", m) <= size:
        raise ConfigError(f"m={m}: must be at least the {len(keys)} keys and at most K={size}.")
    unused = np.setdiff1d(np.arange(size), keys)
    decoys = generator.choice(unused, m - len(keys), replace=False)
    return tuple(sorted([*keys, *decoys.tolist()]))


@dataclass(frozen=True, slots=True)
class StructuredKeys:
    """Choose exactly m keys from a client's own data, with decoys if it has fewer than m.

    Args:
        counts: returns the counts of keys in a client's data, given the client.
        m: number of keys, or a function of the client; public and independent of private data.
        strategy: ``top``, ``random`` or ``random_top``.
        data_seed: seed of the simulated devices' draws.
        always: keys that every client selects, for instance padding and out-of-vocabulary tokens.
    """

    counts: Callable[[int], Counts]
    m: int | Callable[[int], int]
    strategy: Strategy
    data_seed: int
    always: Keys = ()

    def __call__(self, round_: int, client: int) -> DeviceOnly[Keys]:
        """Return the keys of ``client`` in a round."""
        m = self.m if isinstance(self.m, int) else self.m(client)
        private = DeviceOnly(self.counts(client))
        return private.on_device(lambda counts: self._choose(counts, m, round_, client))

    def _choose(self, counts: Counts, m: int, round_: int, client: int) -> Keys:
        if not len(self.always) <= m <= len(counts):
            raise ConfigError(f"m={m}: must be from {len(self.always)} to K={len(counts)}.")
        remaining = counts.copy()
        # keys that everybody selects are not chosen again
        remaining[list(self.always)] = 0
        room = m - len(self.always)
        generator = np.random.default_rng((self.data_seed, client, round_))
        chosen = self.strategy(remaining, room, generator) if room else ()
        # the decoys stay the same: an observer could tell changing ones from the client's own keys
        decoys = np.random.default_rng((self.data_seed, client))
        return pad(tuple(sorted((*self.always, *chosen))), m, len(counts), decoys)


@dataclass(frozen=True, slots=True)
class IndependentKeys:
    """Draw m random keys for each client in each round; they contain no client data.

    Args:
        size: number of keys that exist, K.
        m: number of keys, or a function of the client; from 1 to K.
        data_seed: seed of the simulated devices' draws.
    """

    size: int
    m: int | Callable[[int], int]
    data_seed: int

    def __call__(self, round_: int, client: int) -> DeviceOnly[Keys]:
        """Return the keys of ``client`` in a round."""
        m = self.m if isinstance(self.m, int) else self.m(client)
        if not m <= self.size:
            raise ConfigError(f"m={m}: must be at most K={self.size}.")
        generator = np.random.default_rng((self.data_seed, client, round_))
        return DeviceOnly(_sample(np.arange(self.size), m, generator))


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Draw the same m random keys for all clients of a round, from public coins.

    Args:
        size: number of keys that exist, K.
        m: number of keys, from 1 to K.
        seed: public seed of the coins.
    """

    size: int
    m: int
    seed: int

    def __post_init__(self) -> None:
        if not checks.count("m", self.m) <= checks.count("size", self.size):
            raise ConfigError(f"m={self.m}: must be at most K={self.size}.")
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


def _by_frequency(counts: Counts) -> NDArray[np.int64]:
    if counts.ndim != 1 or not np.all(counts >= 0):
        raise ConfigError(f"counts of shape {counts.shape}: must be (K,), without negative counts.")
    order = np.argsort(-counts, kind="stable")
    return order[: np.count_nonzero(counts)]


def _sample(among: NDArray[np.int64], m: int, generator: np.random.Generator) -> Keys:
    m = checks.count("m", m)
    chosen = generator.choice(among, min(m, len(among)), replace=False)
    return tuple(sorted(chosen.tolist()))
