"""Messages: what the server asks of a round's cohort, and what comes back.

Admission: which messages are updates at all, and whose client may still take part.

Whatever arrives, nothing is raised.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, fields
from typing import TypeGuard

import torch
from torch import Tensor

from accounting import Participation


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

    def update(self, client: int, update: Tensor) -> "ClientUpdate":
        """Return a client's answer to this task."""
        return ClientUpdate(client, update, self.round, self.plan)

    def sum_of(self, clients: Sequence[int], total: Tensor, unclipped: int) -> "CohortSum":
        """Return the answer of several clients to this task."""
        return CohortSum(tuple(clients), total, unclipped, self.clip_norm, self.round, self.plan)


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """What one client sends: its id and the change of the part that was active, shape (c,).

    Attributes:
        client: whole number; who it is must come from whoever authenticates the client.
        update: parameters after local training - before, shape (c,).
        round: the round that it answers; an old answer sent again is refused.
        plan: hash of the plan under which the client trained; another plan's is refused.
    """

    client: int
    update: Tensor
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


_ACCEPTED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_FIELDS = [field.name for field in fields(ClientUpdate)]
_IDS = 2**63
"""Client ids are whole numbers that a database column holds."""


def well_formed(
    update: object, round_: int, plan: str, shape: torch.Size
) -> TypeGuard[ClientUpdate]:
    """Whether ``update`` answers this round of this plan with a vector of this shape.

    Exact types only: a subclass may run code of its own when it is looked at. Numbers that are not
    finite are no fault of form: the clip turns them into zeros, so that whether a round is released
    does not depend on them.
    """
    if type(update) is not ClientUpdate or not all(hasattr(update, name) for name in _FIELDS):
        return False
    if not _is_id(update.client):
        return False
    if type(update.round) is not int or update.round != round_:
        return False
    if type(update.plan) is not str or update.plan != plan:
        return False
    return _is_vector(update.update, _ACCEPTED, shape)


def well_formed_sum(part: object, task: RoundTask, shape: torch.Size) -> TypeGuard[CohortSum]:
    """Whether a sum answers the task and is no longer than one of clipped updates can be.

    Whoever made it is trusted with its clipping: this finds mistakes.
    """
    if type(part) is not CohortSum or type(part.clients) is not tuple:
        return False
    asked = (task.round, task.plan, task.clip_norm)
    if (part.round, part.plan, part.clip_norm) != asked or type(part.round) is not int:
        return False
    clients = len(part.clients)
    if not all(map(_is_id, part.clients)) or len(set(part.clients)) < clients:
        return False
    if type(part.unclipped) is not int or not 0 <= part.unclipped <= clients:
        return False
    if not _is_vector(part.total, {torch.float64}, shape):
        return False
    return bool(part.total.norm() <= clients * task.clip_norm * (1 + 1e-9))  # not if it is NaN


def may_take_part(limits: Participation, rounds: Sequence[int], round_: int) -> bool:
    """Whether a client that took part in ``rounds``, ascending, may do so in ``round_`` as well."""
    if not rounds:
        return True
    far_enough = round_ - rounds[-1] >= limits.min_separation
    return len(rounds) < limits.max_participations and far_enough


def _is_id(client: object) -> bool:
    return type(client) is int and 0 <= client < _IDS


def _is_vector(vector: object, types: Container[torch.dtype], shape: torch.Size) -> bool:
    if type(vector) is not Tensor or vector.dtype not in types:
        return False
    if vector.layout is not torch.strided or vector.device.type != "cpu":
        return False
    return vector.shape == shape and _has_its_numbers(vector)


def _has_its_numbers(vector: Tensor) -> bool:
    """Whether the memory of a vector is as long as it says: reading beyond it would crash."""
    last = vector.storage_offset() + (vector.numel() - 1) * vector.stride(0)
    return (last + 1) * vector.element_size() <= vector.untyped_storage().nbytes()
