"""Cohorts: who takes part in each round of a plan that samples, drawn from the key of the noise.

An amplified guarantee holds only if every member is drawn as the accountant assumes and nobody who
sees the releases learns who was. So the cohorts come from ``accounting.cohorts`` by the plan's own
sampler, under a key that is as secret as the noise; ``fit`` and ``RunFolder`` take no others for
such a plan. A run that is resumed draws the same ones.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import overload

from accounting import cohorts
from accounting.checks import ConfigError
from privpart.messages import ClientId, client_id
from privpart.noise.source import NoiseSource
from privpart.plan import PrivacyPlan


class SampledCohorts(Sequence[tuple[ClientId, ...]]):
    """The cohorts of a run whose plan samples. Not for release: who takes part is secret.

    Args:
        plan: the plan, with its sampling.
        ids: the population, in an order that no data decided and that stays; each id once.
        source: of the run's noise, whose key the cohorts come from.

    Attributes:
        source: of the run's noise.
        population: ``ids_hash`` of the population.
    """

    def __init__(self, plan: PrivacyPlan, ids: Iterable[object], source: NoiseSource) -> None:
        if plan.sampling is None:
            raise ConfigError("plan: has no sampling, so nothing says how cohorts are drawn.")
        self.source = source
        self.plan_hash = plan.hash
        named = distinct_ids(ids)
        self.population = ids_hash(named)
        # kept, to draw the same cohorts again in a run that begins anew
        self._plan, self._ids = plan, named
        drawn = cohorts(
            plan.sampling, members=len(named), rounds=plan.rounds, key=source.cohort_key()
        )
        self._cohorts = [tuple(named[i] for i in members.tolist()) for members in drawn]

    def __len__(self) -> int:
        return len(self._cohorts)

    @overload
    def __getitem__(self, index: int) -> tuple[ClientId, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[ClientId, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[ClientId, ...] | list[tuple[ClientId, ...]]:
        return self._cohorts[index]

    def __repr__(self) -> str:
        return f"SampledCohorts(<{len(self)} rounds>)"

    def again(self) -> "SampledCohorts":
        """Return the same cohorts, drawn again from the key."""
        return SampledCohorts(self._plan, self._ids, self.source)

    def not_sampled(self, round_: int, clients: Iterable[ClientId]) -> set[ClientId]:
        """Return those of the ``clients`` that were not drawn for a round."""
        return set(clients).difference(self._cohorts[round_])


def distinct_ids(ids: Iterable[object]) -> Sequence[ClientId]:
    """Return the ids of a population as Python's int and str; a range stays what it is."""
    if isinstance(ids, range):  # of a million users, a list is 40 MB
        return ids
    named = [client_id(value) for value in ids]
    if len(set(named)) < len(named):
        twice = Counter(named).most_common(1)[0][0]
        raise ConfigError(f"clients: two have the id {twice!r}; each must have its own.")
    return named


def ids_hash(ids: Iterable[object]) -> str:
    """Return 20 hex digits of the ids of a population, in order."""
    digest = hashlib.sha256()
    for value in ids:
        digest.update(f"{client_id(value)!r}\n".encode())
    return digest.hexdigest()[:20]
