"""Messages: ids of clients, the task of a round, the answers to it, and what admits an answer.

What admits an answer returns the reason of a refusal for anything else, and raises nothing.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeGuard, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting import Participation
from accounting.checks import ConfigError
from privpart.clip import is_clipped
from privpart.grid import Grid, centred, is_modulus

ClientId = int | str
"""A whole number of magnitude below 2^256, or a string of 1 to 256 characters.

The number 1 and the string "1" are two clients. Strings are compared letter by letter, as they are.
"""

_LARGEST_ID = 2**256
_LONGEST_ID = 256


def client_id(value: object) -> ClientId:
    """Return the id of a client as a Python int or str; NumPy's integers and strings are accepted.

    Raises:
        ConfigError: a value of another type, or out of range.

    >>> client_id(np.uint64(2**64 - 1))
    18446744073709551615
    """
    found = value.item() if isinstance(value, np.integer | np.str_) else value
    if is_client_id(found):
        return found
    raise ConfigError(
        f"client id {_shown(value)} of type {type(value).__name__}: must be a whole number of "
        f"magnitude below 2^256, or a string of 1 to {_LONGEST_ID} characters."
    )


def _shown(value: object) -> str:
    if isinstance(value, str):
        return ascii(value[:80])
    if isinstance(value, int) and value.bit_length() > _LARGEST_ID.bit_length():
        return f"with {value.bit_length()} bits"  # Python writes out no int of a million digits
    return repr(value)[:80]


def is_client_id(value: object) -> TypeGuard[ClientId]:
    """Return whether a value is an id: exactly an int or str, in range and encodable as UTF-8."""
    if type(value) is int:
        return -_LARGEST_ID < value < _LARGEST_ID
    if type(value) is not str or not 0 < len(value) <= _LONGEST_ID:
        return False
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def id_order(client: ClientId) -> tuple[int, str]:
    """Return a key for ``sorted``: whole numbers in their order, then strings in theirs."""
    return (client, "") if isinstance(client, int) else (_LARGEST_ID, client)


@dataclass(frozen=True, slots=True)
class RoundTask:
    """The task that the server gives to the clients of one round.

    Attributes:
        round: number of the round, from 0.
        clients: ids of the cohort; chosen without looking at data.
        clip_norm: bound on the L2 norm of each update in this round.
        plan: hash of the plan; every update repeats it.
        active: groups of parameters that train in this round, by the plan's public schedule; None
            if the model has no groups.
        sum_clip_norm: clip norm of updates that an engine sums before the server rounds them to its
            grid, a little shorter than ``clip_norm``; 0 if it must not sum; None: ``clip_norm``.
        grid: the public grid of the run, for clients that round their updates themselves; None for
            a run without noise.
    """

    round: int
    clients: tuple[ClientId, ...]
    clip_norm: float
    plan: str
    active: tuple[int, ...] | None = None
    sum_clip_norm: float | None = None
    grid: Grid | None = None

    def update(self, client: ClientId, update: Tensor) -> "ClientUpdate":
        """Return the answer of one client to this task."""
        return ClientUpdate(client, update, self.round, self.plan)

    def sum_of(
        self, clients: Sequence[ClientId], total: Tensor, norms: Sequence[float]
    ) -> "CohortSum":
        """Return the joint answer of several simulated clients to this task.

        Args:
            clients: their ids.
            total: see ``CohortSum``.
            norms: of their updates, before or after clipping; NaN of one that is not finite.
        """
        unclipped = sum(not is_clipped(norm, self.clip_norm) for norm in norms)
        not_finite = sum(map(math.isnan, norms))
        return CohortSum(
            tuple(clients), total, unclipped, not_finite, self.clip_norm, self.round, self.plan
        )


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """The answer of one client: its id and the change of the c active parameters.

    Attributes:
        client: id of the client; it must come from an authenticated channel.
        update: parameters after local training minus those before, shape (c,); all NaN if the
            training did not stay finite, which counts as zeros.
        round: round of the task; the server refuses an answer to an earlier round.
        plan: hash of the plan under which the client trained; the server refuses another plan's.
    """

    client: ClientId
    update: Tensor
    round: int
    plan: str


@dataclass(frozen=True, slots=True)
class CohortSum:
    """The sum of the clipped updates of several clients that the operator simulates.

    The server cannot clip updates that it does not see, so it trusts the maker of the sum. A sum is
    therefore never a client's message, and nothing that arrives over a network becomes one: only
    code that the operator runs makes it.

    Attributes:
        clients: ids of the clients in the sum, each once, including those whose update is zero.
        total: sum of the updates, clipped to the task's ``sum_clip_norm``; shape (c,), float64.
        unclipped: number of clients whose update, perhaps zero, ``is_clipped`` says was not.
        not_finite: number of those whose update was not finite, and is zero.
        clip_norm: clip norm of the task.
        round: round of the task.
        plan: hash of the plan.
    """

    clients: tuple[ClientId, ...]
    total: Tensor
    unclipped: int
    not_finite: int
    clip_norm: float
    round: int
    plan: str


@dataclass(frozen=True, slots=True)
class ModularSum:
    """The sum modulo 2^bits of clients that clipped and rounded their updates themselves.

    A protocol of secure aggregation makes it: the server sees no update and cannot clip it again,
    so the report asserts the clipping. A client that does not follow the protocol may move the sum
    as far as it likes. It learns no more of the others: every sum is noised and released, whatever
    its length, and wraps around after the noise (``privpart.grid.wrap``).

    Attributes:
        clients: ids of the clients in the sum, each once.
        total: sum of their ``grid.residues`` modulo 2^bits, shape (c,), int64.
        bits: at least ``grid.modulus_bits`` of so many clients, so that no sum wraps around.
        clip_norm: clip norm of the task.
        round: round of the task.
        plan: hash of the plan.
    """

    clients: tuple[ClientId, ...]
    total: Tensor
    bits: int
    clip_norm: float
    round: int
    plan: str


Reason = Literal[
    "malformed",
    "another round",
    "another plan",
    "wrong shape or type",
    "twice in a round",
    "participation limit",
    "separation",
    "not asked",
    "declined",
    "modulus",
]
"""Why an answer is refused, or a client is not asked.

No reason depends on the values in a client's update.
"""


@dataclass(frozen=True, slots=True)
class RefusedAnswer:
    """An answer over a network that an engine refused, for the server to count.

    Attributes:
        reason: why it was refused.
        clients: who was asked and is not in the round for it, as the engine knows and not as the
            answer says; empty if nobody asked.
    """

    reason: Reason
    clients: tuple[ClientId, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """How a round's simulated clients trained. Not for release: no guarantee covers it.

    Attributes:
        losses: mean loss of each client's first step; None if it took none, or if the way in which
            it was computed does not show it.
        norms: norm of each client's update before clipping; NaN or infinite if the update is.
        clipped: number of clients whose update was longer than the clip norm, or not finite.
    """

    losses: tuple[float | None, ...]
    norms: tuple[float, ...]
    clipped: int


_ACCEPTED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_Answer = TypeVar("_Answer", ClientUpdate, CohortSum, ModularSum, RefusedAnswer)


def _is_whole(answer: object, kind: type[_Answer]) -> TypeGuard[_Answer]:
    """Return whether an answer is exactly of a type, with all of its fields set.

    A subclass could run its own code when it is inspected.
    """
    return type(answer) is kind and all(hasattr(answer, own.name) for own in fields(kind))


def admitted(update: object, round_: int, plan: str, shape: torch.Size) -> ClientUpdate | Reason:
    """Return ``update`` if it answers this round of this plan with a vector of this shape.

    Anything else gets the reason to refuse it. NaN and infinity are admitted, because the clip
    turns such an update into zeros; whether a round is released then does not depend on them.
    """
    if not _is_whole(update, ClientUpdate) or not is_client_id(update.client):
        return "malformed"
    if type(update.round) is not int or type(update.plan) is not str:
        return "malformed"
    if update.round != round_:
        return "another round"
    if update.plan != plan:
        return "another plan"
    if not _is_vector(update.update, _ACCEPTED, shape):
        return "wrong shape or type"
    return update


def sender(update: object) -> ClientId | None:
    """Return the id that an update names, of any content; None if it names none."""
    named = getattr(update, "client", None) if type(update) is ClientUpdate else None
    return named if is_client_id(named) else None


def named_clients(part: object) -> tuple[object, ...] | None:
    """Return what a sum or a refused answer names as its clients, of any content.

    None if it is neither, or has no tuple of them.
    """
    several = type(part) in (CohortSum, ModularSum, RefusedAnswer)
    clients = getattr(part, "clients", None) if several else None
    return clients if type(clients) is tuple else None


def refusal(answer: object) -> Reason | None:
    """Return why an engine refused an answer; None if it did not."""
    if type(answer) is not RefusedAnswer:
        return None
    reason: object = getattr(answer, "reason", None)
    known: dict[str, Reason] = {own: own for own in get_args(Reason)}
    return known.get(reason, "malformed") if type(reason) is str else "malformed"


def admitted_sum(part: object, task: RoundTask, shape: torch.Size) -> CohortSum | Reason:
    """Return a sum if it answers the task and is no longer than clipped updates allow.

    Anything else gets the reason to refuse it. This finds mistakes only: the maker of the sum is
    trusted to have clipped each update.
    """
    if not _is_whole(part, CohortSum) or type(part.clients) is not tuple:
        return "malformed"
    clients = len(part.clients)
    if not all(map(is_client_id, part.clients)):
        return "malformed"
    if type(part.unclipped) is not int or type(part.not_finite) is not int:
        return "malformed"
    if not 0 <= part.not_finite <= part.unclipped <= clients:
        return "malformed"
    if other := _not_of(task, part):
        return other
    if not _is_vector(part.total, {torch.float64}, shape):
        return "wrong shape or type"
    short = part.total.norm() <= clients * task.clip_norm * (1 + 1e-9)  # False if NaN
    return part if short else "malformed"


def admitted_modular(
    part: object, task: RoundTask, shape: torch.Size
) -> tuple[ModularSum, NDArray[np.int64]] | Reason:
    """Return a sum, and its numbers around zero, if it answers the task and could not wrap around.

    Anything else gets the reason to refuse it. A sum that is longer than so many clipped updates is
    admitted: were it refused, a client that adds a number at will could test the others' sum, which
    has no noise yet, round by round that is not released.
    """
    if not _is_whole(part, ModularSum) or type(part.clients) is not tuple or task.grid is None:
        return "malformed"
    if not part.clients or not all(map(is_client_id, part.clients)):
        return "malformed"
    if other := _not_of(task, part):
        return other
    if not _is_vector(part.total, {torch.int64}, shape):
        return "wrong shape or type"
    numbers = part.total.resolve_neg().numpy().copy()
    if not is_modulus(part.bits, task.grid, len(part.clients)):
        return "modulus"
    if numbers.min() < 0 or numbers.max() >= 2**part.bits:
        return "modulus"
    return part, centred(numbers, part.bits)


def _not_of(task: RoundTask, part: CohortSum | ModularSum) -> Reason | None:
    """Return why a sum does not answer a task; None if it does."""
    if type(part.round) is not int or part.round != task.round:
        return "another round"
    if type(part.plan) is not str or type(part.clip_norm) not in (int, float):
        return "malformed"
    if (part.plan, part.clip_norm) != (task.plan, task.clip_norm):
        return "another plan"
    return "twice in a round" if len(set(part.clients)) < len(part.clients) else None


def limit_reached(limits: Participation, rounds: Sequence[int], round_: int) -> Reason | None:
    """Return why a client that took part in ``rounds``, ascending, may not in ``round_``."""
    if len(rounds) >= limits.max_participations:
        return "participation limit"
    if rounds and round_ - rounds[-1] < limits.min_separation:
        return "separation"
    return None


def may_take_part(limits: Participation, rounds: Sequence[int], round_: int) -> bool:
    """Return whether a client that took part in ``rounds``, ascending, may in ``round_``."""
    return limit_reached(limits, rounds, round_) is None


def _is_vector(vector: object, types: Container[torch.dtype], shape: torch.Size) -> bool:
    if type(vector) is not Tensor or vector.dtype not in types:
        return False
    if vector.layout is not torch.strided or vector.device.type != "cpu":
        return False
    return vector.shape == shape and _fits_its_memory(vector)


def _fits_its_memory(vector: Tensor) -> bool:
    """Return whether the vector's storage is long enough; reading beyond it would crash."""
    last = vector.storage_offset() + (vector.numel() - 1) * vector.stride(0)
    try:
        return (last + 1) * vector.element_size() <= vector.untyped_storage().nbytes()
    except RuntimeError:  # it has no memory, such as one inside torch.func.grad
        return False
