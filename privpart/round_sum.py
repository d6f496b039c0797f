"""Round sum: what a round's clients sent, refused or clipped and added up."""

from collections.abc import Callable

import torch

from privpart.clip import add, clip
from privpart.messages import CohortSum, RoundTask, well_formed, well_formed_sum

_UNCLIPPED = 1 - 1e-5
"""A client clips in float32: its update is then this close to the clip norm, or closer."""


class RoundSum:
    """The sum of one round, and who is in it.

    Args:
        task: what the round asked.
        dim: numbers in an update.
        may_take_part: whether the limits allow a client in this round.
        bits: whether to count the updates that were not clipped, for adaptive clipping.

    Attributes:
        total: shape (dim,), float64.
        came: ids of the clients that are in it.
        received: updates of any kind.
        summed: clients that came in sums.
        bits: +1/2 for each that was not clipped, -1/2 for each other.

    Guarantees:
        Whatever comes as an update, nothing is raised for it, and leaving one client out changes
        the sum by at most the clip norm.
    """

    def __init__(
        self, task: RoundTask, dim: int, may_take_part: Callable[[int], bool], *, bits: bool
    ) -> None:
        self.total = torch.zeros(dim, dtype=torch.float64)
        self.came: set[int] = set()
        self.received, self.summed, self.bits = 0, 0, 0.0
        self._task, self._may_take_part, self._count_bits = task, may_take_part, bits

    def add(self, update: object) -> None:
        """Clip and add an update from whomever, or refuse it."""
        self.received += 1
        task, shape = self._task, self.total.shape
        if not well_formed(update, task.round, task.plan, shape) or update.client in self.came:
            return
        if not self._may_take_part(update.client):
            return
        clipped = clip(update.delta.detach(), task.clip_norm)  # zeros if not finite
        if self._count_bits:
            self.bits += 0.5 if clipped.norm() <= task.clip_norm * _UNCLIPPED else -0.5
        add(self.total, clipped)
        self.came.add(update.client)

    def add_sum(self, part: object) -> None:
        """Add a sum whose maker is trusted, or refuse it: there is no half of it."""
        self.received += len(part.clients) if isinstance(part, CohortSum) else 1
        if not well_formed_sum(part, self._task, self.total.shape):
            return
        clients = part.clients
        if not self.came.isdisjoint(clients) or not all(map(self._may_take_part, clients)):
            return
        self.bits += part.unclipped - 0.5 * len(clients)
        self.total += part.total
        self.summed += len(clients)
        self.came.update(clients)
