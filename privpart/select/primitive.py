"""Primitive: FEDSELECT and its inverse, as the paper defines them.

Charles et al. 2022, "Federated Select", equations (4) and (5). This is the reference that the rest
of the package must agree with; devices, bytes and privacy play no part in it.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError

X = TypeVar("X")
Y = TypeVar("Y")
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
    return [[select(x, key) for key in client_keys] for client_keys in keys]


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
