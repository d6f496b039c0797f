"""Grouped: disjoint groups of parameters, each with a mechanism over its own active rounds only.

FedPart (Wang et al. 2024) trains one group of layers in most rounds, and all of them in some. A
group's stream then has as many steps as the group has active rounds, so its noise is that of a
shorter run: 28 steps instead of 100 for FedPart's ResNet-8 in four cycles.

With groups 0 and 1 that train in rounds (0, 1), (0), (1), and trees of two rounds for both, C has a
block per group, and a column per group and round in which it trains:

    1 . . .    group 0 in rounds 0 and 1 (columns 0 and 2)
    . . 1 .
    1 . 1 .
    . 1 . .    group 1 in rounds 0 and 2 (columns 1 and 3)
    . . . 1
    . 1 . 1
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import SCHEMA, Mechanism, interleaved
from accounting.participation import FixedOrder, Participation
from accounting.sensitivity import Array, Sensitivity, gram_sensitivity, same_rounds

_MOST_DENSE_ROUNDS = 4096


@dataclass(frozen=True, slots=True)
class Grouped:
    """One mechanism per group of parameters, under one joint clip.

    Args:
        schedule: per round, the groups that train in it, ascending, from 0; none may be empty.
            Public, and chosen without the data.
        mechanisms: per group, a mechanism over as many rounds as the group is active.
        sizes: per group, its number of parameters, >= 1. A model's vector holds the groups one
            after the other. They weigh the noise in ``prefix_variance``, not the sensitivity.

    Holds for updates that are clipped JOINTLY over the active groups: sum_g ||d_g||^2 <= 1. If each
    group were clipped to 1 on its own, a round with M groups would be worth the sum of the groups
    and not their maximum, up to M times as much: divide the clip norm by sqrt(M), or clip jointly.

    Each group streams its own mechanism's noise, from draws of its own, in its active rounds;
    elsewhere its prefix sum and its noise stay as they are.

    >>> from accounting import BinaryTree, Participation
    >>> both = Grouped([[0, 1], [0], [1]], [BinaryTree(2), BinaryTree(2)], [10, 20])
    >>> both.sensitivity(Participation(3)).squared  # of one tree over 3 rounds: 2 as well
    2.0
    """

    schedule: tuple[tuple[int, ...], ...]
    mechanisms: tuple[Mechanism, ...]
    sizes: tuple[int, ...]

    name = "grouped"
    restart_every = None

    def __post_init__(self) -> None:
        mechanisms = _sequence("mechanisms", self.mechanisms)
        for mechanism in mechanisms:
            if not isinstance(mechanism, Mechanism) or mechanism.groups is not None:
                raise ConfigError(f"mechanisms: {mechanism!r}: one ungrouped mechanism per group.")
        sizes = _sequence("sizes", self.sizes)
        sizes = tuple(checks.count(f"sizes[{g}]", size) for g, size in enumerate(sizes))
        if len(sizes) != len(mechanisms):
            raise ConfigError(
                f"sizes has {len(sizes)} entries for {len(mechanisms)} mechanisms: one per group."
            )
        by_round = enumerate(_sequence("schedule", self.schedule))
        schedule = tuple(_groups(t, groups, len(sizes)) for t, groups in by_round)
        given = ("schedule", schedule), ("mechanisms", mechanisms), ("sizes", sizes)
        for name, value in given:
            object.__setattr__(self, name, value)
        for g, (mechanism, active) in enumerate(zip(mechanisms, self.active_rounds(), strict=True)):
            if mechanism.rounds != len(active):
                raise ConfigError(
                    f"group {g} is active in {len(active)} rounds, its mechanism has "
                    f"rounds={mechanism.rounds}: both must be the same, and at least 1."
                )

    @property
    def groups(self) -> "Grouped":
        """The groups are this mechanism's own fields."""
        return self

    @property
    def rounds(self) -> int:
        """Number of rounds n, of all groups together."""
        return len(self.schedule)

    def active_rounds(self) -> list[list[int]]:
        """Return, per group, the rounds in which it trains, ascending."""
        return [
            [t for t, groups in enumerate(self.schedule) if g in groups]
            for g in range(len(self.mechanisms))
        ]

    def to_dict(self) -> dict[str, Any]:
        """Every field, for JSON; see ``mechanism_from_dict``."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "schedule": [list(groups) for groups in self.schedule],
            "mechanisms": [mechanism.to_dict() for mechanism in self.mechanisms],
            "sizes": list(self.sizes),
        }

    def cells(self) -> list[tuple[int, int]]:
        """Return (round, group) of every active group of every round, in order."""
        return [(t, g) for t, groups in enumerate(self.schedule) for g in groups]

    def encoder(self) -> Array:
        """C, shape (released values, cells): one parameter per group; block-diagonal by group."""
        return interleaved(self, [mechanism.encoder().T for mechanism in self.mechanisms]).T

    def decoder(self) -> Array:
        """B, shape (cells, released values): row (t, g) is group g's prefix sum after round t."""
        return interleaved(self, [mechanism.decoder() for mechanism in self.mechanisms])

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Of all groups together under one joint clip; see ``grouped_sensitivity``.

        One participation: the largest of the groups' own. More: a bound from n x n matrices.
        """
        same_rounds(self.rounds, participation)
        if isinstance(participation, FixedOrder):
            return replace(self.sensitivity(participation.in_any_order()), exact=False)
        if participation.max_participations == 1:
            by_group = [m.sensitivity(Participation(m.rounds)) for m in self.mechanisms]
            return self._named(max(by_group, key=lambda s: (s.squared, s.exact)))
        if self.rounds > _MOST_DENSE_ROUNDS:
            raise ConfigError(
                f"rounds={self.rounds}: groups under several participations work on n x n matrices "
                f"here, up to {_MOST_DENSE_ROUNDS} rounds. Plan one participation."
            )
        grams = [c.T @ c for c in (mechanism.encoder() for mechanism in self.mechanisms)]
        return self._named(grouped_sensitivity(grams, self.active_rounds(), participation))

    def _named(self, sensitivity: Sensitivity) -> Sensitivity:
        lengths = sorted({len(active) for active in self.active_rounds()})
        span = " to ".join(str(length) for length in lengths[:: max(1, len(lengths) - 1)])
        groups = f"{len(self.mechanisms)} groups in {span} of {self.rounds} rounds"
        return replace(sensitivity, rule=f"joint clipping, {groups}, {sensitivity.rule}")

    def variance_by_group(self) -> Array:
        """Return the noise variance of each group's prefix sum after each round, (n, groups).

        At z = clip_norm = 1; 0 before a group's first active round.
        """
        variance = np.zeros((self.rounds, len(self.mechanisms)))
        pairs = zip(self.mechanisms, self.active_rounds(), strict=True)
        for g, (mechanism, active) in enumerate(pairs):
            steps = np.cumsum(np.bincount(active, minlength=self.rounds))
            variance[:, g] = np.concatenate([[0.0], mechanism.prefix_variance()])[steps]
        return variance

    def noise_program(self) -> NoReturn:
        """Each group's mechanism has a program; there is none for all groups together."""
        raise ConfigError("mechanism=grouped: its noise is one program per group.")

    def prefix_variance(self) -> Array:
        """Return the noise variance of a parameter's prefix sum after each round, shape (n,).

        It is the mean over all parameters: ``variance_by_group`` weighted by ``sizes``.
        """
        return np.asarray(self.variance_by_group() @ self.sizes / sum(self.sizes))


def _sequence(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}={value!r}: must be a list.")
    entries = tuple(value)
    if not entries:
        raise ConfigError(f"{name}: is empty; must have at least one entry.")
    return entries


def _groups(t: int, groups: object, count: int) -> tuple[int, ...]:
    name = f"schedule[{t}]"
    indices = tuple(checks.count(name, g, minimum=0) for g in _sequence(name, groups))
    if indices[-1] >= count or any(later <= earlier for earlier, later in pairwise(indices)):
        raise ConfigError(
            f"schedule[{t}]={list(indices)}: must name groups from 0 to {count - 1}, ascending."
        )
    return indices


def grouped_sensitivity(
    grams: Sequence[Array], rounds: Sequence[Sequence[int]], participation: Participation
) -> Sensitivity:
    """Return the squared sensitivity of all groups' releases together, jointly clipped to 1.

    A client's update of round t is split over the groups g that are active then, with parts d_tg
    and sum_g ||d_tg||^2 <= 1. All groups' noised streams together are ONE Gaussian release with a
    block-diagonal encoder, so nothing is composed M-fold. With X_g = C_g^T C_g its squared
    sensitivity over a pattern u is

        sup sum_g sum_{t,t' in u} X_g[t,t'] <d_tg, d_t'g>
            <= sum_{t,t' in u} Q[t,t'],   Q[t,t'] = max_{g active in t and t'} |X_g[t,t']|, or 0,

    because sum_g ||d_tg|| ||d_t'g|| <= 1 (Cauchy and Schwarz). So it is a maximum over groups, not
    a sum. It is called exact where no two rounds of a pattern interact. Clipping each group on its
    own would turn the maximum into a sum.
    """
    bound = np.zeros((participation.rounds, participation.rounds))
    for gram, active in zip(grams, rounds, strict=True):
        cells = np.ix_(active, active)
        bound[cells] = np.maximum(bound[cells], np.abs(gram))
    joint = gram_sensitivity(bound, participation)
    interact = np.triu(bound, participation.min_separation).any()
    exact = joint.exact and not (interact and participation.max_participations > 1)
    return Sensitivity(joint.squared, exact=exact, rule=joint.rule)
