"""Turns: which slices train in which round when all clients of a round use the same public keys.

Slices outside a round's keys receive no update from any cohort, so their sums need no noise in that
round: each slice is a group of ``accounting.Grouped``, with a noise stream over its own rounds.
This requires zero-out adjacency, keys drawn from public coins, and clients that are clipped jointly
over all that they send. Parameters that train in every round form group 0, if there are any; it
has the largest sensitivity and so determines epsilon.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accounting.checks import ConfigError
from privpart.plan import Rounds
from privpart.select.keys import KeyChooser, SharedKeys
from privpart.select.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Groups of slices and the rounds in which they train.

    Attributes:
        groups: positions of each group in the model's flat vector. The server's vector is their
            concatenation. Slices that no round draws belong to no group and keep their start
            values.
        schedule: per round, the groups that train, ascending.
    """

    groups: tuple[Tensor, ...]
    schedule: Rounds

    @classmethod
    def of(cls, layout: Layout, choosers: Sequence[KeyChooser], rounds: int) -> "Turns":
        """Draw the keys of all rounds and group the slices by them.

        Args:
            layout: layout of the server's model.
            choosers: one per key space; slices of a space without shared keys train in every round.
            rounds: number of rounds of the run.
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
        return tuple(len(group) for group in self.groups)

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
        """Return the part of an update, shape (d,), that the server sums in a round.

        Raises:
            ConfigError: ``active`` differs from the groups that the public keys draw for the round.
        """
        if active != self.schedule[round_]:
            raise ConfigError(
                f"round {round_}: the plan trains other groups than the public keys draw. Take the "
                "model and the plan from the same plan file."
            )
        return torch.cat([update[self.groups[group]] for group in self.schedule[round_]])
