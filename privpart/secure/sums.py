"""Sums: what the server takes from a protocol of secure aggregation, since it sees no update.

Clients clip and round their updates to the public grid themselves, and a protocol adds them modulo
2^k. The server takes the sum around zero, adds the noise, and only then lets it wrap around: after
the noise this is post-processing, so whatever others put into a sum, what is released depends on a
client only through its noised sum.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting.checks import ConfigError
from accounting.sensitivity import Array
from privpart.grid import Grid, quantise
from privpart.messages import ClientId, Reason, RoundTask

# A modular sum has room for 2^6 standard deviations of a draw: 10 of a mechanism whose noise, of
# several draws, has six times that of one.
_ROOM_BITS = 6
# So that the sum of two numbers around zero, and their noise, are exact in float64.
MOST_MODULUS_BITS = 51


@dataclass(frozen=True, slots=True)
class ModularSum:
    """The sum modulo 2^bits of clients that clipped and rounded their updates themselves.

    A protocol of secure aggregation makes it: the server sees no update and cannot clip it again,
    so the report asserts the clipping. Every sum is noised and released, whatever its length: were
    a long one refused, a client that adds a number at will could test the others' sum, which has no
    noise yet, by the rounds that are not released.

    Attributes:
        clients: ids of the clients in the sum, each once.
        total: sum of their ``residues`` modulo 2^bits, shape (c,), int64.
        bits: at least ``modulus_bits`` of so many clients, so that no sum wraps around.
        clip_norm: clip norm of the task.
        round: round of the task.
        plan: hash of the plan.
        parties: how many parties the protocol made sure of, each the sum of its own clients; a
            plan with ``secure`` has a least number of them.
    """

    types: ClassVar = {torch.int64}

    clients: tuple[ClientId, ...]
    total: Tensor
    bits: int
    clip_norm: float
    round: int
    plan: str
    parties: int = 0

    def fault(self, task: RoundTask) -> Reason | None:
        """Refuse a sum that might have wrapped around, or is of fewer parties than planned."""
        if not self.clients or task.grid is None or type(self.parties) is not int:
            return "malformed"
        if self.parties < task.parties:
            return "too few parties"
        if not is_modulus(self.bits, task.grid, len(self.clients)):
            return "modulus"
        return None if self.total.min() >= 0 and self.total.max() < 2**self.bits else "modulus"

    def around_zero(self) -> NDArray[np.int64]:
        """Return the sum around zero."""
        residue = self.total.resolve_neg().numpy() & (2**self.bits - 1)  # its memory may change
        return centred(residue, self.bits)


def modulus_bits(grid: Grid, clients: int) -> int:
    """Return the least k such that noised sums of so many updates modulo 2^k do not wrap around.

    Entries of an update's integers are at most ``grid.norm``, so those of the sum lie within
    clients x norm, and with the room for noise below half of the modulus on both sides.

    Raises:
        ConfigError: more than 2^51 would be needed, above which the server's sum is not exact.
    """
    largest = clients * math.floor(grid.norm) + (1 << (grid.bits + _ROOM_BITS))
    if largest.bit_length() >= MOST_MODULUS_BITS:
        raise ConfigError(
            f"{clients} clients: their sum needs a modulus above 2^{MOST_MODULUS_BITS}, and would "
            "not be exact; ask fewer at a time."
        )
    return largest.bit_length() + 1


def is_modulus(bits: object, grid: Grid, clients: int) -> bool:
    """Return whether sums of so many updates modulo 2^bits do not wrap around, and are exact."""
    try:
        least = modulus_bits(grid, clients)
    except ConfigError:
        return False
    return type(bits) is int and least <= bits <= MOST_MODULUS_BITS


def residues(update: Tensor, clip_norm: float, grid: Grid, bits: int) -> NDArray[np.int64]:
    """Return a clipped update as whole numbers modulo 2^bits: a client's part of a secure sum."""
    integers = np.zeros(len(update), np.int32)
    quantise(update, clip_norm, grid, integers)
    wide: NDArray[np.int64] = integers.astype(np.int64)
    wide &= 2**bits - 1
    return wide


def centred(total: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """Return numbers modulo 2^bits as those from -2^(bits-1) up to 2^(bits-1), exclusive.

    >>> centred(np.array([0, 1, 7]), 3).tolist()
    [0, 1, -1]
    """
    numbers: NDArray[np.int64] = total - ((total >= 2 ** (bits - 1)).astype(np.int64) << bits)
    return numbers


def wrap(numbers: Array, bits: int) -> None:
    """Replace whole numbers, below 2^53, by those from -2^(bits-1) below 2^(bits-1)."""
    numbers -= 2.0**bits * np.floor(numbers * 2.0**-bits + 0.5)
