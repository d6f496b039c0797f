"""Messages: what the server asks of a round's cohort, and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoundTask:
    """What one round asks of its clients.

    Attributes:
        round: from 0.
        clients: ids of the cohort; chosen without looking at data.
        clip_norm: bound on the L2 norm of each update, this round.
        plan: hash of the plan; it comes back in every update.
        active: groups of parameters that train in this round, by the plan's public schedule; None
            if the model has no groups.
    """

    round: int
    clients: tuple[int, ...]
    clip_norm: float
    plan: str
    active: tuple[int, ...] | None = None

    def update(self, client: int, delta: Tensor) -> "ClientUpdate":
        """Return a client's answer to this task."""
        return ClientUpdate(client, delta, self.round, self.plan)

    def sum_of(self, clients: Sequence[int], total: Tensor, unclipped: int) -> "CohortSum":
        """Return the answer of several clients to this task."""
        return CohortSum(tuple(clients), total, unclipped, self.clip_norm, self.round, self.plan)


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """What one client sends: its id and the change of the part that was active, shape (c,).

    Attributes:
        client: whole number; who it is must come from whoever authenticates the client.
        delta: after - before.
        round: the round that it answers; an old answer sent again is refused.
        plan: hash of the plan under which the client trained; another plan's is refused.
    """

    client: int
    delta: Tensor
    round: int
    plan: str


@dataclass(frozen=True, slots=True)
class CohortSum:
    """The sum of some clients' clipped updates: what simulated clients may answer in place of each.

    The server cannot clip what it does not see, so this is no message of a client's, and none that
    comes over a network becomes one: it is the word of code that the operator runs.

    Attributes:
        clients: whose updates are in it, each once; those with nothing to add count too.
        total: sum of after - before, each clipped to ``clip_norm``; shape (c,), float64.
        unclipped: how many were no longer than the clip norm; those with nothing to add are not.
        clip_norm: that of the task.
        round: the round that it answers.
        plan: hash of the plan.
    """

    clients: tuple[int, ...]
    total: Tensor
    unclipped: int
    clip_norm: float
    round: int
    plan: str
