"""Key histogram: how many clients selected each key, with noise, at a price.

Cache hits, popular slices, dropping what nobody selects: all are functions of these counts, and the
counts are functions of private data. One client changes at most m of them by 1 each, which is an L2
sensitivity of sqrt(m).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from accounting import Guarantee, Independent, Participation, checks, guarantee
from accounting.checks import ConfigError
from privpart.noise.source import NoiseSource
from privpart.select.disclosure import Released, ServerSees
from privpart.select.layout import distinct_keys
from privpart.select.primitive import Keys

STREAM = 2**31
"""Stream of draws of the histogram, away from those of the server's updates."""


class KeyHistogram:
    """One noised histogram of keys per round.

    Args:
        size: K.
        keys_per_client: most keys of one client that count, m, from 1 to K.
        noise_multiplier: > 0; the noise has a standard deviation of this times sqrt(m).
        participation: of the run; a client beyond its limits does not count.
        source: the run's; ``SecretSource`` unless the run is a simulation.

    Not kept in a run folder: a run that is resumed under the same key must not make another one,
    for its noise would begin again with that of round 0.
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
        self._counted: dict[int, list[int]] = {}

    def guarantee(self) -> Guarantee:
        """Return what all histograms of the run together cost one client."""
        rounds = Independent(self.participation.rounds)
        return guarantee(rounds, self.participation, noise_multiplier=self.noise_multiplier)

    def with_updates(self, updates: Guarantee) -> Guarantee:
        """Return the guarantee of histograms and model together: mu^2 adds."""
        return updates.compose(self.guarantee())

    def release(self, keys: Mapping[int, ServerSees[Keys]]) -> Released[Tensor]:
        """Return the noised counts of the next round, shape (K,), float32.

        Args:
            keys: by client. Who sends more than m keys, one twice or one out of range does not
                count, nor who took part as often as planned.

        Raises:
            ConfigError: all planned rounds are done.
        """
        if self.round >= self.participation.rounds:
            raise ConfigError(f"all {self.participation.rounds} planned histograms are released.")
        counts = torch.zeros(self.size)
        for client, seen in keys.items():
            if self._may_take_part(client) and (own := self._countable(seen.at_party())):
                counts[own] += 1
                self._counted.setdefault(client, []).append(self.round)
        stddev = math.nextafter(self.noise_multiplier * math.sqrt(self.keys_per_client), math.inf)
        noise = self._source.normal(self.round, self.size, stream=STREAM, stddev=stddev)
        self.round += 1
        why = self.guarantee() if self._source.private else "a simulation: its noise is seeded"
        return Released(counts + noise, why)

    def _may_take_part(self, client: int) -> bool:
        limits, rounds = self.participation, self._counted.get(client)
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
