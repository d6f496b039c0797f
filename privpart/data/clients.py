"""Clients: who may take part, and what each holds.

``Clients`` is the protocol. ``IndexedClients`` fetches rows when a client takes part, and checks
them; ``check_clients`` asks all clients of a population for their examples.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.data.batches import Batch, count_rows, not_finite, tensors_of
from privpart.data.index import Index
from privpart.messages import ClientId, client_id

Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name of a tensor -> its type, and its shape without the rows."""


class Clients(Protocol):
    """The population of a simulation. Anything with these two names conforms.

    ``examples`` is called when a client takes part, so the data may be larger than memory. torch's
    random numbers are then seeded by round and client.
    """

    @property
    def ids(self) -> Sequence[ClientId]:
        """Ids of all clients, each once; whole numbers or strings, see ``ClientId``."""
        ...

    def examples(self, client: ClientId, /) -> Batch:
        """Return one client's examples: a nest of tensors with a row per example, >= 1."""
        ...


@dataclass(frozen=True, slots=True)
class SomeClients:
    """Some of a population's clients, by their ids."""

    of: Clients
    ids: Sequence[ClientId]

    def examples(self, client: ClientId, /) -> Batch:
        """Return one client's examples, as the population does."""
        return self.of.examples(client)


@dataclass(frozen=True, slots=True)
class RemoteClients:
    """Clients whose examples are on nodes of their own, and never here."""

    ids: Sequence[ClientId]

    def examples(self, client: ClientId, /) -> Batch:
        """Raise ConfigError: nobody but a client's node has its examples."""
        raise ConfigError(f"client {client!r}: its examples are on its node, not here.")


class IndexedClients:
    """Clients whose rows are fetched when they take part, from whatever holds them.

    The examples of the first client are fetched once at the start. Those of all others must have
    the same structure, types and numbers of dimensions, and be finite. Whole numbers may differ in
    length from client to client, as texts padded to their longest do; floats may not.

    Args:
        index: which client holds which rows.
        fetch: returns the examples in some rows, a nest of tensors; pickled if there are workers.
    """

    def __init__(self, index: Index, fetch: Callable[[Tensor], Batch]) -> None:
        self.index = index
        self.fetch = fetch
        refuse_empty(index)
        _, self._kinds = self._read(index.ids[0])

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ids(self) -> Sequence[ClientId]:
        """Ids of all clients, ascending."""
        return self.index.ids

    def examples(self, client: ClientId) -> Batch:
        """Return one client's examples, checked."""
        batch, kinds = self._read(client)
        _refuse_other_kinds(client, kinds, self.ids[0], self._kinds)
        return batch

    def _read(self, client: ClientId) -> tuple[Batch, Kinds]:
        rows = self.index[client]
        try:
            batch = self.fetch(rows)
        except ConfigError as error:
            raise ConfigError(f"client {client!r}: {error}") from error.__cause__
        except Exception as error:
            # code of the user's, or of a library that reads files
            why = " ".join(str(error).split())
            raise ConfigError(
                f"client {client!r}: its examples (rows {rows[:5].tolist()}) could not be made: "
                f"{type(error).__name__}: {why[:500]}"
            ) from error
        return batch, _kinds_of(client, batch, rows)


def check_clients(clients: Clients, *, limit: int | None = None) -> int:
    """Ask clients for their examples, as training would, and return how many were asked.

    ``limit`` asks the first ones only.
    """
    maximum = None if limit is None else checks.count("limit", limit)
    # ids of all clients, also beyond the limit: reading them asks nobody
    ids = [client_id(client) for client in clients.ids]
    if twice := [client for client, count in Counter(ids).items() if count > 1]:
        raise ConfigError(f"client {twice[0]!r}: two clients have this id.")
    if not ids:
        raise ConfigError("clients: there is no client.")
    kinds: Kinds = {}
    for client in ids[:maximum]:
        client_kinds = _kinds_of(client, clients.examples(client), None)
        kinds = kinds or client_kinds
        _refuse_other_kinds(client, client_kinds, ids[0], kinds)
    return len(ids[:maximum])


def _kinds_of(client: ClientId, batch: Batch, rows: Tensor | None) -> Kinds:
    """Check a client's examples, of these rows (None: 0, 1, ...), and return their kinds."""
    try:
        count = count_rows(batch)
    except ConfigError as error:
        raise ConfigError(f"client {client!r}: {error}") from None
    if not count or (rows is not None and count != len(rows)):
        expected = "at least one" if rows is None else f"one for each of its {len(rows)} rows"
        raise ConfigError(f"client {client!r}: {count} examples were made; must be {expected}.")
    kinds: Kinds = {}
    for name, tensor in tensors_of(batch):
        if (bad := not_finite(tensor)) is not None:
            row = int(bad[0] if rows is None else rows[bad[0]])
            raise ConfigError(
                f"client {client!r}, row {row}: {name} holds NaN or infinity; must be finite "
                "numbers."
            )
        kinds[name] = (tensor.dtype, tuple(tensor.shape[1:]))
    return kinds


def _refuse_other_kinds(client: ClientId, actual: Kinds, first: ClientId, expected: Kinds) -> None:
    """Check that a client's examples are like those of the first client."""
    if _form(actual) != _form(expected):
        shown, wanted = (
            ", ".join(f"{name} {kind} {shape}" for name, (kind, shape) in kinds.items())
            for kinds in (actual, expected)
        )
        raise ConfigError(
            f"client {client!r}: its examples are {shown}; those of client {first!r} are {wanted}."
        )


def _form(kinds: Kinds) -> dict[str, object]:
    # token ids are padded to the longest text of a client, images are not
    return {
        name: (kind, shape if kind.is_floating_point else len(shape))
        for name, (kind, shape) in kinds.items()
    }


def refuse_empty(index: Index) -> None:
    """Check that each client holds a row."""
    if empty := index.empty():
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise ConfigError(f"client {empty[0]!r}{more}: has no example; leave it out.")
