"""Index: which client holds which rows, in a few bytes per client, and their order in training.

A million clients are three arrays (ids, ends, rows) instead of a million Python objects: 24 MB with
ids of 64 bits and an example each. The arrays are tensors, so worker processes can share them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice, pairwise
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from accounting.checks import ConfigError
from privpart.messages import ClientId, client_id, id_order, is_client_id
from privpart.settings.client import LocalTraining

_Array = np.ndarray[Any, Any]

_INT64 = range(-(2**63), 2**63)


class ClientIds(Sequence[ClientId]):
    """Ids in ascending order: whole numbers, then strings; see ``id_order``.

    They are a tensor if all are whole numbers of 64 bits with sign, else a list.
    """

    __slots__ = ("_values",)

    def __init__(self, ascending: Tensor | list[ClientId]) -> None:
        self._values = ascending

    @classmethod
    def of(cls, ids: Iterable[object], name: str = "ids") -> tuple["ClientIds", list[int]]:
        """Return the ids in order, and the place in ``ids`` that each one had."""
        values = _valid(ids, name)
        places = sorted(range(len(values)), key=lambda place: id_order(values[place]))
        for before, after in pairwise(places):
            if values[before] == values[after]:
                raise ConfigError(
                    f"{name}[{before}] and {name}[{after}] are both client {values[after]!r}: "
                    "each client must have an id of its own."
                )
        ordered = [values[place] for place in places]
        if all(type(value) is int and value in _INT64 for value in ordered):
            return cls(torch.tensor(ordered, dtype=torch.int64)), places
        return cls(ordered), places

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, place: int) -> ClientId: ...
    @overload
    def __getitem__(self, place: slice) -> list[ClientId]: ...
    def __getitem__(self, place: int | slice) -> ClientId | list[ClientId]:
        if isinstance(self._values, list):
            return self._values[place]
        picked: ClientId | list[ClientId] = self._values.numpy()[place].tolist()
        return picked

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._values if isinstance(self._values, list) else self._values.tolist())

    def __contains__(self, client: object) -> bool:
        return is_client_id(client) and self.find(client) is not None

    def find(self, client: ClientId) -> int | None:
        """Return the place of a client, by binary search; None if it is not among them."""
        if isinstance(self._values, list):
            place = bisect_left(self._values, id_order(client), key=id_order)
        elif type(client) is not int or client not in _INT64:
            return None
        else:
            # a scalar of the array's own type: NumPy would compare other types as floats
            place = int(self._values.numpy().searchsorted(np.int64(client)))
        return place if place < len(self) and self[place] == client else None

    def at(self, places: _Array) -> "ClientIds":
        """Return the ids at places, ascending."""
        if isinstance(self._values, list):
            return ClientIds([self._values[place] for place in places.tolist()])
        return ClientIds(self._values[torch.from_numpy(places)])

    def shared(self) -> "ClientIds":
        """Return a copy in shared memory, where the ids are a tensor."""
        return self if isinstance(self._values, list) else ClientIds(_share(self._values))


class Index:
    """The rows of each client's examples.

    ``index[client]`` returns the rows of a client, shape (its n,), int64; iterating yields the rows
    of each client in the order of ``ids``.

    Attributes:
        ids: ids of the clients, ascending.
    """

    __slots__ = ("_ends", "_rows", "ids")

    def __init__(self, ids: ClientIds, ends: Tensor, rows: Tensor) -> None:
        self.ids = ids
        self._ends = ends
        self._rows = rows

    @classmethod
    def of_rows(
        cls, indices: Mapping[Any, Any] | Iterable[Any], ids: Iterable[ClientId] | None = None
    ) -> "Index":
        """Return the index of a list of rows per client, or of a dict from client to rows.

        ``ids`` are the clients', in the order of the list; by default 0, 1, 2, ...
        """
        if isinstance(indices, Mapping):
            if ids is not None:
                raise ConfigError("ids: indices is a dict, which already contains them.")
            ids, indices = indices.keys(), indices.values()
        parts = [_as_rows(rows, f"indices[{place}]") for place, rows in enumerate(indices)]
        if not parts:
            raise ConfigError("indices: is empty; must hold the rows of at least one client.")
        client_ids = ClientIds(torch.arange(len(parts)))
        if ids is not None:
            client_ids, places = ClientIds.of(ids)
            if len(client_ids) != len(parts):
                raise ConfigError(
                    f"ids: {len(client_ids)} ids for {len(parts)} clients' rows; each client needs "
                    "both."
                )
            parts = [parts[place] for place in places]
        ends = torch.from_numpy(np.fromiter(map(len, parts), np.int64, len(parts)).cumsum())
        return cls(client_ids, ends, torch.cat(parts))

    @classmethod
    def of_owners(cls, owners: object, name: str = "user") -> "Index":
        """Return the index of a list, array, tensor or column that names each example's client.

        ``name`` is that of the column in messages.
        """
        values = _column(owners, name)
        if isinstance(values, np.ndarray):
            distinct, places = np.unique(values, return_inverse=True)
            ids = ClientIds(torch.from_numpy(distinct))
        else:
            distinct_ids = list(dict.fromkeys(values))
            # sort distinct ids only: there are far fewer of them than examples
            ids, order = ClientIds.of(distinct_ids, name)
            place_of = {distinct_ids[at]: place for place, at in enumerate(order)}
            places = np.fromiter(map(place_of.__getitem__, values), np.int64, len(values))
        if not len(values):
            raise ConfigError(f"{name}: is empty; must name the client of each example.")
        ends = torch.from_numpy(np.bincount(places, minlength=len(ids)).cumsum())
        rows = torch.from_numpy(places.argsort(kind="stable"))
        return cls(ids, ends, rows)

    @classmethod
    def of_equal_parts(cls, rows: Tensor, clients: int) -> "Index":
        """Return the index of clients 0, 1, 2, ... with equal numbers of ``rows``, in order.

        Rows that remain belong to nobody.
        """
        size = len(rows) // clients
        ends = torch.arange(1, clients + 1) * size
        return cls(ClientIds(torch.arange(clients)), ends, rows[: clients * size])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, client: ClientId) -> Tensor:
        return self._at(self._place(client))

    def __iter__(self) -> Iterator[Tensor]:
        return (self._at(place) for place in range(len(self)))

    @property
    def rows(self) -> int:
        """Number of rows of all clients; a row counts as often as it is held."""
        return int(self._ends[-1])

    def owner(self, row: int) -> ClientId | None:
        """Return the first client that holds a row; None if nobody does."""
        places = (self._rows == row).nonzero()
        if not len(places):
            return None
        return self.ids[int(torch.searchsorted(self._ends, int(places[0]), right=True))]

    def held(self, rows: Tensor) -> Tensor:
        """Return those of some rows that a client holds."""
        return rows[torch.isin(rows, self._rows)]

    def empty(self) -> list[ClientId]:
        """Return the clients without rows."""
        ends = self._ends.numpy()
        places = np.flatnonzero(np.diff(ends, prepend=0) == 0)
        return [self.ids[place] for place in places.tolist()]

    def outside(self, rows: int) -> int | None:
        """Return a row that is not from 0 to ``rows - 1``; None if all are."""
        if not self.rows:
            return None
        # the extremes tell whether any row is out of range
        extremes = (int(self._rows.min()), int(self._rows.max()))
        return next((row for row in extremes if not 0 <= row < rows), None)

    def only(self, clients: Iterable[ClientId]) -> "Index":
        """Return the index of some of the clients, each once."""
        places = np.sort(np.array([self._place(client) for client in clients], dtype=np.int64))
        ends = self._ends.numpy()
        lengths = np.diff(ends, prepend=0)[places]
        new_ends = lengths.cumsum()
        # where each row lies behind its client's first one, before and after
        shifts = np.repeat(ends[places] - new_ends, lengths)
        rows = self._rows[torch.from_numpy(np.arange(len(shifts)) + shifts)]
        return Index(self.ids.at(places), torch.from_numpy(new_ends), rows)

    def shared(self) -> "Index":
        """Return a copy in shared memory, which other processes see without copying."""
        return Index(self.ids.shared(), _share(self._ends), _share(self._rows))

    def _at(self, place: int) -> Tensor:
        # NumPy reads an element in a fifth of a tensor's time
        ends: Any = self._ends.numpy()
        start, end = int(ends[place - 1]) if place else 0, int(ends[place])
        # a copy: code of users may write to it
        return self._rows[start:end].clone()

    def _place(self, client: ClientId) -> int:
        wanted = client_id(client)
        if (place := self.ids.find(wanted)) is not None:
            return place
        raise ConfigError(
            f"client {wanted!r}: is not among the {len(self)} clients, the first of which is "
            f"{self.ids[0]!r}. A number and its text are two clients."
        )


def _column(owners: object, name: str) -> _Array | list[ClientId]:
    """Return a column of ids as an array of int64, or as a list of Python's int and str."""
    if isinstance(owners, Tensor):
        owners = owners.detach().cpu().numpy()
    if isinstance(owners, str | bytes | Mapping) or not isinstance(owners, Iterable):
        raise ConfigError(
            f"{name}: is a {type(owners).__name__}; must be a list or column with the client of "
            "each example."
        )
    if not hasattr(owners, "__array__"):
        return _valid(owners, name)
    array = np.asarray(owners)
    if array.ndim != 1 or array.dtype.kind not in "iuOUT":
        raise ConfigError(
            f"{name}: has type {array.dtype} and shape {array.shape}; must be whole numbers or "
            "strings, an id per example and no gap. Fill gaps, then convert it with .astype(int) "
            "or .astype(str)."
        )
    if array.dtype.kind == "i" or (array.dtype.kind == "u" and array.dtype != np.uint64):
        return array.astype(np.int64, copy=False)
    return _valid(array.tolist(), name)


def _valid(ids: Iterable[object], name: str) -> list[ClientId]:
    """Return ids as Python's int and str."""
    values: list[Any] = list(ids)
    # distinct ones only, where equal values have one type
    if set(map(type, values)) <= {int, str} and all(map(is_client_id, set(values))):
        return values
    for place, value in enumerate(values):
        try:
            values[place] = client_id(value)
        except ConfigError as error:
            raise ConfigError(f"{name}[{place}]: {error}") from None
    return values


def _as_rows(rows: object, name: str) -> Tensor:
    """Return rows as int64."""
    try:
        tensor = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{name}: must be a list of rows, whole numbers.") from None
    # torch makes floats of an empty list
    kind = torch.int64 if tensor.shape == (0,) else tensor.dtype
    if kind.is_floating_point or kind.is_complex or kind is torch.bool or tensor.dim() != 1:
        raise ConfigError(
            f"{name}: has type {kind} and shape {tuple(tensor.shape)}; must be rows, whole numbers "
            "of shape (n,). torch.nonzero(mask).flatten() returns those of a mask."
        )
    return tensor.to(torch.int64)


def _share(tensor: Tensor) -> Tensor:
    return tensor.clone().share_memory_()  # type: ignore[no-untyped-call,no-any-return]


def batch_rows(local: LocalTraining, examples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the rows of each batch: passes in fresh random orders, cut off after ``steps``.

    The orders are drawn from ``generator``. A client without examples has no batches.
    """
    if not examples:
        return iter(())
    passes = range(local.epochs) if local.steps is None else count()
    batches = (
        batch
        for _ in passes
        for batch in torch.split(torch.randperm(examples, generator=generator), local.batch_size)
    )
    return islice(batches, local.steps)


def moved(rows: Iterable[Tensor], device: torch.device) -> Iterable[Tensor]:
    """Return rows of examples on a device, in one copy, because each waits for the device."""
    if device.type == "cpu":
        return rows
    batches = list(rows)
    if not batches:
        return batches
    return torch.split(torch.cat(batches).to(device), [len(batch) for batch in batches])
