"""Messages: ids of clients, the task of a round, the answers to it, and why one is refused."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeGuard, get_args

import numpy as np
import torch
from torch import Tensor

from accounting import Participation
from accounting.checks import ConfigError
from privpart.clip import is_clipped
from privpart.grid import Grid

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
    plain = value.item() if isinstance(value, np.integer | np.str_) else value
    if is_client_id(plain):
        return plain
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
    # surrogates have no UTF-8, and a ledger could not write them
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def id_order(client: ClientId) -> tuple[int, str]:
    """Return a key for ``sorted``: whole numbers in their order, then strings in theirs."""
    return (client, "") if isinstance(client, int) else (_LARGEST_ID, client)


@dataclass(frozen=True, slots=True)
class RoundTask:
    """The task that the server gives to the clients of one round.

    Attributes:
        round: from 0.
        clients: ids of the cohort; chosen without looking at data.
        clip_norm: bound on the L2 norm of each update in this round.
        plan: hash of the plan; every update repeats it.
        active: groups of parameters that train in this round; None if the model has no groups.
        sum_clip_norm: clip norm of updates that an engine sums before the server rounds them to its
            grid, a little shorter than ``clip_norm``; 0 if it must not sum; None: ``clip_norm``.
        grid: the public grid of the run, for clients that round their updates themselves; None for
            a run without noise.
        parties: least number of parties of a secure sum; 0 if the plan asks for no such sums.
    """

    round: int
    clients: tuple[ClientId, ...]
    clip_norm: float
    plan: str
    active: tuple[int, ...] | None = None
    sum_clip_norm: float | None = None
    grid: Grid | None = None
    parties: int = 0

    def update(self, client: ClientId, update: Tensor) -> "ClientUpdate":
        """Return the answer of one client to this task."""
        return ClientUpdate(client, update, self.round, self.plan)

    def sum_of(
        self, clients: Sequence[ClientId], total: Tensor, norms: Sequence[float]
    ) -> "CohortSum":
        """Return the joint answer of several simulated clients to this task, see ``CohortSum``.

        ``norms`` are those of their updates, before or after clipping; NaN if not finite.
        """
        unclipped = sum(not is_clipped(norm, self.clip_norm) for norm in norms)
        counts = unclipped, sum(map(math.isnan, norms))
        return CohortSum(tuple(clients), total, *counts, self.clip_norm, self.round, self.plan)


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

    types: ClassVar = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

    client: ClientId
    update: Tensor
    round: int
    plan: str

    def fault(self, task: RoundTask) -> "Reason | None":
        """NaN and infinity are admitted: no value decides whether a round is released."""


@dataclass(frozen=True, slots=True)
class CohortSum:
    """The sum of the clipped updates of several clients that the operator simulates.

    The server trusts its maker. A sum is therefore never a client's message, and nothing that
    arrives over a network becomes one: only code that the operator runs makes it.
    """

    types: ClassVar = {torch.float64}

    # ids of the clients in the sum, each once, including those whose update is zero
    clients: tuple[ClientId, ...]
    # sum of the updates, clipped to the task's ``sum_clip_norm``; shape (c,), float64
    total: Tensor
    unclipped: int  # number of clients whose update, perhaps zero, ``is_clipped`` says was not
    not_finite: int  # number of those whose update was not finite, and is zero
    clip_norm: float  # clip norm of the task
    round: int  # round of the task
    plan: str  # hash of the plan

    def fault(self, task: RoundTask) -> "Reason | None":
        """Find mistakes only: the maker of the sum is trusted to have clipped each update."""
        clients = len(self.clients)
        if type(self.unclipped) is not int or type(self.not_finite) is not int:
            return "malformed"
        if not 0 <= self.not_finite <= self.unclipped <= clients:
            return "malformed"
        short = self.total.norm() <= clients * task.clip_norm * (1 + 1e-9)  # False if NaN
        return None if short else "malformed"


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
    "too few parties",
]
"""Why an answer is refused, or a client is not asked.

No reason depends on the values in a client's update.
"""


@dataclass(frozen=True, slots=True)
class RefusedAnswer:
    """An answer over a network that an engine refused, for the server to count."""

    reason: Reason  # why it was refused
    # who was asked and is not in the round for it, as the engine knows and not as the answer says;
    # empty if nobody asked
    clients: tuple[ClientId, ...] = ()


def refusal(answer: object, kind: type[Any], task: RoundTask, shape: torch.Size) -> Reason | None:
    """Return why an answer, of any content, is refused; None if it counts. Raises nothing.

    It must be of exactly the kind, since a subclass could run its own code when it is inspected:
    ``ClientUpdate`` from a client, ``CohortSum`` or ``ModularSum`` by another door. ``shape`` is
    that of an update.
    """
    if type(answer) is RefusedAnswer:
        reason: object = getattr(answer, "reason", None)
        known: dict[str, Reason] = {name: name for name in get_args(Reason)}
        return known.get(reason, "malformed") if type(reason) is str else "malformed"
    checked: Any = answer
    if type(checked) is not kind or not all(hasattr(checked, own.name) for own in fields(kind)):
        return "malformed"
    # types before values: comparing an object of a sender's choice could run its code
    several = kind is not ClientUpdate
    clients = checked.clients if several else (checked.client,)
    clip_norm = checked.clip_norm if several else task.clip_norm
    types = type(checked.round) is int, type(checked.plan) is str, type(clip_norm) in (int, float)
    if not (all(types) and type(clients) is tuple and all(map(is_client_id, clients))):
        return "malformed"
    if checked.round != task.round:
        return "another round"
    if (checked.plan, clip_norm) != (task.plan, task.clip_norm):
        return "another plan"
    if len(set(clients)) < len(clients):
        return "twice in a round"
    if not _is_vector(checked.total if several else checked.update, checked.types, shape):
        return "wrong shape or type"
    fault: Reason | None = checked.fault(task)
    return fault


def named_clients(answer: object, kind: type[Any]) -> Sequence[object]:
    """Return what an answer of a kind, or a refused one, names as its clients, of any content."""
    if type(answer) not in (kind, RefusedAnswer):
        return ()
    if type(answer) is ClientUpdate:
        return (getattr(answer, "client", None),)
    clients = getattr(answer, "clients", None)
    return clients if type(clients) is tuple else ()


def limit_reached(limits: Participation, rounds: Sequence[int], round_: int) -> Reason | None:
    """Return why a client that took part in ``rounds``, ascending, may not in ``round_``."""
    if len(rounds) >= limits.max_participations:
        return "participation limit"
    if rounds and round_ - rounds[-1] < limits.min_separation:
        return "separation"
    return None


def _is_vector(vector: object, types: Collection[torch.dtype], shape: torch.Size) -> bool:
    if type(vector) is not Tensor or vector.dtype not in types:
        return False
    if vector.layout is not torch.strided or vector.device.type != "cpu":
        return False
    return vector.shape == shape and _fits_its_memory(vector)


def _fits_its_memory(vector: Tensor) -> bool:
    """Return whether the vector's storage is long enough; reading beyond it would crash."""
    # a storage may have been resized under its tensors
    last = vector.storage_offset() + (vector.numel() - 1) * vector.stride(0)
    try:
        return (last + 1) * vector.element_size() <= vector.untyped_storage().nbytes()
    except RuntimeError:  # it has no memory, such as one inside torch.func.grad
        return False
