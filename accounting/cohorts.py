"""Cohorts: who takes part in each round, drawn from a secret key as the accountant assumes.

The sampler that an amplified guarantee names is the object that draws: its probability, bins or
separation are read from it here and there. Words of 64 bits come from SHAKE-256 of key, purpose and
round, so the cohorts of a run can be drawn again from the key, in any process. Whoever has the key,
or sees who takes part, is not covered by the amplification.

A member joins if 53 bits are below its probability, rounded down for Poisson sampling, where less
is safer, and exact for ``BMinSep``, whose probability is a multiple of 2^-53; its start is exact to
about 2^-52. Bins are exactly uniform.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from accounting.monte_carlo import BMinSep
from accounting.random_allocation import BallsInBins
from accounting.subsampled import PoissonSampling

Members = NDArray[np.int64]
Sampling = PoissonSampling | BallsInBins | BMinSep

KEY_BYTES = 32


def cohorts(sampling: Sampling, *, members: int, rounds: int, key: bytes) -> Iterator[Members]:
    """Yield the members of each round, ascending, 0 to members - 1.

    Args:
        sampling: the sampler of the guarantee. In the groups of ``PoissonSampling`` member i joins
            only rounds that leave the remainder i mod groups.
        members: how many there are; the population, where the sampler names one.
        rounds: how many cohorts; for bins, their own number of rounds.
        key: 32 secret bytes from the operating system, for this run alone.

    Raises:
        ConfigError: a value out of range, or one that the sampler contradicts.

    >>> drawn = list(cohorts(BallsInBins(2, 4), members=5, rounds=4, key=bytes(32)))
    >>> sorted([*drawn[0].tolist(), *drawn[1].tolist()])
    [0, 1, 2, 3, 4]
    >>> bool((drawn[0] == drawn[2]).all())
    True
    """
    members, rounds = checks.count("members", members), checks.rounds(rounds)
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ConfigError(f"key: must be {KEY_BYTES} secret bytes.")
    if isinstance(sampling, BallsInBins):
        if rounds != sampling.rounds:
            raise ConfigError(f"rounds={rounds}: the bins are for {sampling.rounds} rounds.")
        return _bins(sampling, members, key)
    if not isinstance(sampling, PoissonSampling | BMinSep):
        raise ConfigError(f"sampling={sampling!r}: must be a sampler of this package.")
    if members != sampling.population:
        raise ConfigError(f"members={members}: the sampler has population={sampling.population}.")
    if isinstance(sampling, PoissonSampling):
        return _poisson(sampling, members, rounds, key)
    return _separated(sampling, members, rounds, key)


def _poisson(sampling: PoissonSampling, members: int, rounds: int, key: bytes) -> Iterator[Members]:
    group = np.arange(members) % sampling.groups
    threshold = np.uint64(int(sampling.probability * 2.0**53))
    for t in range(rounds):
        joins = (_words(key, "poisson", t, members) >> np.uint64(11)) < threshold
        yield np.flatnonzero(joins & (group == t % sampling.groups))


def _bins(sampling: BallsInBins, members: int, key: bytes) -> Iterator[Members]:
    bins = sampling.bins
    words = _words(key, "bins", 0, members)
    limit = np.uint64(2**64 // bins * bins - 1)  # words above it would make some bins likelier
    again = 1
    while (words > limit).any():
        words = np.where(words > limit, _words(key, "bins", again, members), words)
        again += 1
    own = words % np.uint64(bins)
    for t in range(sampling.rounds):
        yield np.flatnonzero(own == t % bins)


def _separated(sampling: BMinSep, members: int, rounds: int, key: bytes) -> Iterator[Members]:
    b, p = sampling.min_separation, sampling.probability
    threshold = np.uint64(int(p * 2.0**53))
    # stationary: free from round 0 with weight 1, from rounds 1 to b - 1 with weight p each
    start = _words(key, "start", 0, members) / 2.0**64 * (1 + (b - 1) * p)
    free = np.where(start < 1, 0, np.minimum(1 + np.floor((start - 1) / p), b - 1)).astype(np.int64)
    for t in range(rounds):
        joins = (_words(key, "b-min-sep", t, members) >> np.uint64(11)) < threshold
        now = np.flatnonzero(joins & (free <= t))
        free[now] = t + b
        yield now


def _words(key: bytes, purpose: str, index: int, count: int) -> NDArray[np.uint64]:
    named = b"privpart cohorts 1|" + purpose.encode() + b"|" + index.to_bytes(8, "little") + key
    return np.frombuffer(hashlib.shake_256(named).digest(8 * count), dtype="<u8").astype(np.uint64)
