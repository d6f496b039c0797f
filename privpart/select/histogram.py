"""Key histogram: a differentially private count of the clients that selected each key.

Cache statistics, popular slices and unused slices are all functions of these counts, and the counts
depend on private data. One client changes at most m counts by 1 each, so the L2 sensitivity is
sqrt(m).
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from accounting import Guarantee, Independent, Participation, checks, guarantee
from accounting.checks import ConfigError
from privpart.noise.source import NoiseSource
from privpart.select.disclosure import Released, ServerSees
from privpart.select.layout import distinct_keys
from privpart.select.primitive import Keys

STREAM = 2**31
"""Stream of the histogram's draws, disjoint from the streams of the server's noise."""
_STEPS = 2**20
"""Steps of the grid in a count of 1."""


class KeyHistogram:
    """Release one noised histogram of keys per round.

    The state is not stored in a run folder: a histogram that is made when a run is resumed counts
    from round 0 again, with new noise.

    A count is 2^20 steps of the grid, and the noise a whole number of steps (``privpart.grid``).

    Args:
        size: number of keys, K.
        keys_per_client: maximum number of keys that count for one client, m, from 1 to K.
        noise_multiplier: > 0; the standard deviation of the noise is this value times sqrt(m).
        participation: limits of the run; a client that exceeds them does not count.
        source: noise source of the run, ``SecretSource`` unless the run is a simulation.
    """

    def __init__(
        self,
        *,
        size: int,
        keys_per_client: int,
        noise_multiplier: float,
        participation: Participation,
        source: NoiseSource,
    ) -> None:
        self.size = checks.count("size", size)
        self.keys_per_client = checks.count("keys_per_client", keys_per_client)
        if keys_per_client > size:
            raise ConfigError(f"keys_per_client={keys_per_client}: must be at most K={size}.")
        self.noise_multiplier = checks.positive("noise_multiplier", noise_multiplier)
        self.participation = participation
        self.round = 0
        self._source = source
        source.claim(STREAM)
        self._salt = source.salt()
        self._counted: dict[int, list[int]] = {}

    def guarantee(self) -> Guarantee:
        """Return the guarantee of all histograms of the run."""
        rounds = Independent(self.participation.rounds)
        return guarantee(rounds, self.participation, noise_multiplier=self.noise_multiplier)

    def with_updates(self, updates: Guarantee) -> Guarantee:
        """Return the guarantee of the histograms composed with that of the model: mu^2 adds."""
        return updates.compose(self.guarantee())

    def release(self, keys: Mapping[int, ServerSees[Keys]]) -> Released[Tensor]:
        """Return the noised counts of the next round, shape (K,), float32.

        Args:
            keys: keys of each client. A client does not count if it sends more than m keys, a
                repeated or invalid key, or if it has reached its participation limits.

        Raises:
            ConfigError: the histograms of all planned rounds are released.
        """
        if self.round >= self.participation.rounds:
            raise ConfigError(f"all {self.participation.rounds} planned histograms are released.")
        counts = np.zeros(self.size, np.int64)
        for client, seen in keys.items():
            if self._may_take_part(client) and (own := self._countable(seen.at_party())):
                counts[own] += 1
                self._counted.setdefault(client, []).append(self.round)
        stddev = math.nextafter(self.noise_multiplier * math.sqrt(self.keys_per_client), math.inf)
        noise = np.empty(self.size, np.int64)
        draws = self._source.draws(STREAM, self._salt)
        draws.rounded(self.round, 0, noise, weight=stddev * _STEPS)
        self.round += 1
        why = self.guarantee() if self._source.private else "a simulation: its noise is seeded"
        noised = (counts * _STEPS + noise) / _STEPS
        return Released(torch.from_numpy(noised).float(), why)

    def _may_take_part(self, client: int) -> bool:
        limits = self.participation
        rounds = self._counted.get(client)
        if not rounds:
            return True
        far_enough = self.round - rounds[-1] >= limits.min_separation
        return len(rounds) < limits.max_participations and far_enough

    def _countable(self, keys: Keys) -> list[int]:
        if len(keys) > self.keys_per_client:
            return []
        try:
            return list(distinct_keys(keys, self.size))
        except ConfigError:
            return []
