"""Turns: which slices train when, where the keys of a round are public and the same for everyone.

Slices outside a round's keys receive nothing from anyone, whoever is in the cohort, so their sums
need no noise in that round: each slice is a group of ``accounting.Grouped``, with a noise stream
over its own rounds. This holds for zero-out adjacency, for keys that are drawn from public coins,
and for clients that are clipped over all that they send together. What trains in every round is
group 0, and the dearest: it decides epsilon, unless there is nothing of the kind.
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
    """Groups of slices, and the rounds in which they train.

    Attributes:
        groups: positions of each group in a model's flat vector. The server's vector holds them one
            after the other; slices that no round of the run draws are in none, and stay as they
            began.
        schedule: per round, the groups that train, ascending.
    """

    groups: tuple[Tensor, ...]
    schedule: Rounds

    @classmethod
    def of(cls, layout: Layout, choosers: Sequence[KeyChooser], rounds: int) -> "Turns":
        """Draw the keys of all rounds.

        Args:
            layout: of the server's model.
            choosers: per key space; those that are not shared train in every round.
            rounds: of the run.
        """
        always, groups, members = [layout.shared], list[Tensor](), list[list[int]]()
        drawn: list[list[int]] = [[] for _ in range(rounds)]
        for table, choose in zip(layout.tables, choosers, strict=True):
            if not isinstance(choose, SharedKeys):
                always.append(table.flatten())
                continue
            for key, own in enumerate(choose.rounds_of_keys(rounds)):
                if own:
                    groups.append(table[key])
                    members.append(own)
        if len(first := torch.cat(always).sort().values):
            groups.insert(0, first)
            members.insert(0, list(range(rounds)))
        for group, own in enumerate(members):
            for number in own:
                drawn[number].append(group)
        return cls(tuple(groups), tuple(map(tuple, drawn)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers per group."""
        return tuple(len(group) for group in self.groups)

    @property
    def order(self) -> Tensor:
        """Positions of all groups, one after the other: the server's vector, shape (d',)."""
        return torch.cat(self.groups)

    def whole(self, first: Tensor, parameters: Tensor) -> Tensor:
        """Return the model's flat vector, shape (d,), with the server's, shape (d',), in it."""
        found = first.clone()
        found[self.order] = parameters
        return found

    def active_part(self, update: Tensor, round_: int, active: Sequence[int] | None) -> Tensor:
        """Return what of an update, shape (d,), trained in a round: what the server sums.

        Raises:
            ConfigError: the task has other groups than this round.
        """
        if active != self.schedule[round_]:
            raise ConfigError(
                f"round {round_}: the plan trains other groups than the public keys say. The model "
                "and the plan must be of the same file."
            )
        return torch.cat([update[self.groups[group]] for group in self.schedule[round_]])
