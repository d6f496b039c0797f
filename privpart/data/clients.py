"""Clients: who may take part, and what each holds.

``Clients`` is the protocol. ``IndexedClients`` fetches rows when a client takes part, and checks
them; ``check_clients`` asks all clients of a population for their examples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
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
    """Some of a population's clients.

    Attributes:
        of: the population.
        ids: of those that remain.
    """

    of: Clients
    ids: Sequence[ClientId]

    def examples(self, client: ClientId, /) -> Batch:
        """Return one client's examples, as the population does."""
        return self.of.examples(client)


@dataclass(frozen=True, slots=True)
class RemoteClients:
    """Clients whose examples are on nodes of their own, and never here.

    Attributes:
        ids: ids of all clients.
    """

    ids: Sequence[ClientId]

    def examples(self, client: ClientId, /) -> Batch:
        """Raise: nobody but a client's node has its examples.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"client {client!r}: its examples are on its node, not here.")


class IndexedClients:
    """Clients whose rows are fetched when they take part, from whatever holds them.

    The examples of the first client are fetched once at the start. Those of all others must have
    the same structure, types and numbers of dimensions, and be finite. Whole numbers may differ in
    length from client to client, as texts padded to their longest do; floats may not.

    Args:
        index: which client holds which rows.
        fetch: returns the examples in some rows, a nest of tensors; pickled if there are workers.

    Raises:
        ConfigError: here and in ``examples``: a client without rows, or examples as above, by the
            names of client, tensor and row.
    """

    def __init__(self, index: Index, fetch: Callable[[Tensor], Batch]) -> None:
        self.index = index
        self.fetch = fetch
        refuse_empty(index)
        first = index.ids[0]
        self._kinds = kinds_of(first, self._fetched(first), index[first])

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ids(self) -> Sequence[ClientId]:
        """Ids of all clients, ascending."""
        return self.index.ids

    def examples(self, client: ClientId) -> Batch:
        """Return one client's examples, checked."""
        batch, rows = self._fetched(client), self.index[client]
        refuse_other_kinds(client, kinds_of(client, batch, rows), self.ids[0], self._kinds)
        return batch

    def _fetched(self, client: ClientId) -> Batch:
        rows = self.index[client]
        try:
            batch = self.fetch(rows)
            count = count_rows(batch)
        except ConfigError as error:
            raise ConfigError(f"client {client!r}: {error}") from error.__cause__
        except Exception as error:
            # code of the user's, or of a library that reads files
            why = " ".join(str(error).split())
            raise ConfigError(
                f"client {client!r}: its examples ({shown_rows(rows)}) could not be made: "
                f"{type(error).__name__}: {why[:500]}"
            ) from error
        if count != len(rows):
            raise ConfigError(
                f"client {client!r}: {count} examples were made of its {len(rows)} rows; must be "
                "one per row."
            )
        return batch


def check_clients(clients: Clients, *, limit: int | None = None) -> int:
    """Ask clients for their examples, as training would, and return how many were asked.

    Args:
        clients: the population.
        limit: most clients to ask, the first ones; None asks all.

    Raises:
        ConfigError: the first fault: two clients with one id, a value that is not an id, a client
            without examples, values that are not finite, or examples unlike the first client's.
    """
    maximum = None if limit is None else checks.count("limit", limit)
    kinds: Kinds = {}
    distinct: set[ClientId] = set()
    # ids of all clients, also beyond the limit: reading them asks nobody
    for listed in clients.ids:
        client = client_id(listed)
        if client in distinct:
            raise ConfigError(f"client {client!r}: two clients have this id.")
        distinct.add(client)
    if not distinct:
        raise ConfigError("clients: there is no client.")
    first = client_id(clients.ids[0])
    asked = 0
    for asked, listed in enumerate(islice(clients.ids, maximum), 1):  # noqa: B007  counted
        client = client_id(listed)
        batch = clients.examples(client)
        batch_kinds = kinds_of(client, batch, None)
        kinds = kinds or batch_kinds
        refuse_other_kinds(client, batch_kinds, first, kinds)
    return asked


def kinds_of(client: ClientId, batch: Batch, rows: Tensor | None) -> Kinds:
    """Return types and shapes of a client's examples.

    Args:
        client: the client, for messages.
        batch: its examples.
        rows: the numbers of its rows, for messages; None counts them from 0.

    Raises:
        ConfigError: no example, no tensor, tensors of different lengths, or values not finite.
    """
    try:
        rows_of_batch = count_rows(batch)
    except ConfigError as error:
        raise ConfigError(f"client {client!r}: {error}") from None
    if not rows_of_batch:
        raise ConfigError(f"client {client!r}: has no example; leave it out.")
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


def refuse_other_kinds(client: ClientId, actual: Kinds, first: ClientId, expected: Kinds) -> None:
    """Check that a client's examples are like those of the first client.

    Raises:
        ConfigError: other tensors, another type, another shape.
    """
    if actual == expected:
        return
    if actual.keys() != expected.keys():
        raise ConfigError(
            f"client {client!r}: its examples are {', '.join(actual)}; those of client {first!r} "
            f"are {', '.join(expected)}."
        )
    for name, (kind, shape) in actual.items():
        wanted, like = expected[name]
        if kind is not wanted:
            raise ConfigError(
                f"client {client!r}: {name} has type {kind}; that of client {first!r} has {wanted}."
            )
        # token ids are padded to the longest text of a client, images are not
        free = not kind.is_floating_point and len(shape) == len(like)
        if shape != like and not free:
            raise ConfigError(
                f"client {client!r}: an example of {name} has shape {shape}; that of client "
                f"{first!r} has {like}."
            )


def refuse_empty(index: Index) -> None:
    """Check that each client holds a row.

    Raises:
        ConfigError: by the id of the first client that does not.
    """
    if empty := index.empty():
        more = f" (and {len(empty) - 1} more)" if len(empty) > 1 else ""
        raise ConfigError(f"client {empty[0]!r}{more}: has no example; leave it out.")


def shown_rows(rows: Tensor) -> str:
    """Return the numbers of rows for a message, at most five of them."""
    shown = ", ".join(str(row) for row in rows[:5].tolist())
    return f"row{'s' * (len(rows) > 1)} {shown}{', ...' * (len(rows) > 5)}"
