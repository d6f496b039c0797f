"""Primitive: FEDSELECT and its inverse, as the paper defines them.

Charles et al. 2022, "Federated Select", equations (4) and (5). This is the reference that the rest
of the package must agree with; devices, bytes and privacy play no part in it.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError

X = TypeVar("X")
Y = TypeVar("Y")
X2 = TypeVar("X2")
Y2 = TypeVar("Y2")
U = TypeVar("U")

Keys = tuple[int, ...]
"""The keys that one client selects, each from 0 to K - 1."""


def fed_select(x: X, keys: Sequence[Keys], select: Callable[[X, int], Y]) -> list[list[Y]]:
    """Return, per client, select(x, k) for each of its keys in order: equation (4).

    Args:
        x: value at the server.
        keys: keys of each client, in any number; a key may repeat.
        select: select function psi; it may also transform the slice that it picks.

    >>> fed_select("abc", [(2, 0), (1,)], lambda x, k: x[k])
    [['c', 'a'], ['b']]
    """
    return [[select(x, key) for key in own] for own in keys]


def aggregate_mean(
    updates: Sequence[U],
    keys: Sequence[Keys],
    deselect: Callable[[U, Keys], Tensor],
    *,
    divisor: int,
) -> Tensor:
    """Return the sum of deselect(u, z) over all clients, divided by ``divisor``: equation (5).

    Args:
        updates: update of each client, at least one.
        keys: keys of each client.
        deselect: phi; maps an update to the server's shape, zero where nothing was selected.
        divisor: public constant >= 1 for all coordinates, N in the paper. Dividing each row by the
            number of clients that selected it would let a client that is alone on a row move the
            mean by its whole update.

    Returns:
        Mean update in the server's shape, float64.

    Raises:
        ConfigError: there are no updates, or not one list of keys for each.
    """
    if not updates or len(updates) != len(keys):
        raise ConfigError(
            f"{len(updates)} updates and {len(keys)} lists of keys: must be equally many, >= 1."
        )
    divisor = checks.count("divisor", divisor)
    parts = [deselect(u, z).double() for u, z in zip(updates, keys, strict=True)]
    return torch.stack(parts).sum(dim=0) / divisor


def everything(x: X, key: int) -> X:
    """Return x for every key: the select function that turns FEDSELECT into BROADCAST (3.3)."""
    return x


def with_broadcast(select: Callable[[X, int], Y]) -> Callable[[tuple[X, X2], int], tuple[Y, X2]]:
    """Return a select function on (x, y) that selects from x and broadcasts y (section 3.3)."""
    return lambda both, key: (select(both[0], key), both[1])


def pair_key(first: int, second: int, second_size: int) -> int:
    """Encode a pair of keys as one key in [K1 K2], in mixed radix."""
    return first * second_size + second


def both(
    first: Callable[[X, int], Y], second: Callable[[X2, int], Y2], second_size: int
) -> Callable[[tuple[X, X2], int], tuple[Y, Y2]]:
    """Return a select function on pairs (x1, x2), with keys from ``pair_key`` (section 3.3)."""

    def select(x: tuple[X, X2], key: int) -> tuple[Y, Y2]:
        one, two = divmod(key, second_size)
        return first(x[0], one), second(x[1], two)

    return select


def sequence_key(keys: Keys, size: int) -> int:
    """Encode m keys from [K] as one key in [K^m].

    >>> sequence_key((1, 0, 2), 3)
    11
    """
    one = 0
    for key in keys:
        one = one * size + key
    return one


def as_one_key(
    select: Callable[[X, int], Y], size: int, length: int
) -> Callable[[X, int], list[Y]]:
    """Return a select function that returns all m slices for one key from ``sequence_key``.

    Only of theoretical use: pregenerating its slices takes K^m of them, see ``all_sequences``.
    """

    def slices_of(x: X, one: int) -> list[Y]:
        return [select(x, one // size**place % size) for place in reversed(range(length))]

    return slices_of


def all_sequences(size: int, length: int) -> list[Keys]:
    """Return every sequence of ``length`` keys, in the order of ``sequence_key``."""
    return list(product(range(size), repeat=length))
