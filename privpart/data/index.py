"""Index: which client holds which rows, in a few bytes per client.

A million clients are three arrays (ids, ends, rows) instead of a million Python objects: 16 MB with
whole numbers as ids and an example each, 48 MB with strings of 36 characters; a further example
takes 4 bytes, or none where each client's rows follow one another. The arrays are tensors, so
worker processes can share them.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import eq
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from accounting.checks import ConfigError
from privpart.messages import ClientId, client_id, is_client_id

_Array = np.ndarray[Any, Any]

# ids that are made into Python objects at a time
_SLICE = 4096


class ClientIds(Sequence[ClientId]):
    """Ids in ascending order: whole numbers, then strings; see ``id_order``.

    Whole numbers are 64 bits each, strings are UTF-8 in one array. Beyond 64 bits, whole numbers
    are Python's own.
    """

    __slots__ = ("_ends", "_numbers", "_text", "_unsigned")

    def __init__(
        self, numbers: Tensor | list[int], text: Tensor, ends: Tensor, *, unsigned: bool
    ) -> None:
        # int64, the bits of uint64, or a list of larger ones
        self._numbers = numbers
        # torch 2.13 cannot unpickle a tensor of uint64
        self._unsigned = unsigned
        self._text = text
        self._ends = ends

    @classmethod
    def of(cls, ids: Iterable[object], name: str = "ids") -> tuple["ClientIds", _Array]:
        """Return the ids in order, and the place in ``ids`` that each one had.

        Raises:
            ConfigError: an id of another type, or one that is there twice.
        """
        values = _valid(ids, name)
        of_numbers = [place for place, value in enumerate(values) if type(value) is int]
        of_strings = [place for place, value in enumerate(values) if type(value) is str]
        of_numbers.sort(key=values.__getitem__)
        of_strings.sort(key=values.__getitem__)
        places = of_numbers + of_strings
        ordered = [values[place] for place in places]
        for after, same in enumerate(map(eq, ordered[1:], ordered), 1):
            if same:
                raise ConfigError(
                    f"{name}[{places[after - 1]}] and {name}[{places[after]}] are both client "
                    f"{ordered[after]!r}: each client must have an id of its own."
                )
        numbers: list[Any] = ordered[: len(of_numbers)]
        strings: list[Any] = ordered[len(of_numbers) :]
        compact, unsigned = _compact(numbers)
        client_ids = cls(compact, *_joined(strings), unsigned=unsigned)
        return client_ids, np.array(places, dtype=np.int64)

    @classmethod
    def of_array(cls, numbers: _Array) -> "ClientIds":
        """Return ids of an array of distinct 64-bit whole numbers in ascending order."""
        unsigned = numbers.dtype == np.uint64
        return cls(torch.from_numpy(numbers.view(np.int64)), *_joined([]), unsigned=unsigned)

    def __len__(self) -> int:
        return len(self._numbers) + len(self._ends)

    @overload
    def __getitem__(self, place: int) -> ClientId: ...
    @overload
    def __getitem__(self, place: slice) -> list[ClientId]: ...
    def __getitem__(self, place: int | slice) -> ClientId | list[ClientId]:
        if isinstance(place, slice):
            return [self[position] for position in range(*place.indices(len(self)))]
        # negative places, and IndexError
        place = range(len(self))[place]
        if place >= len(self._numbers):
            return self._encoded()(place - len(self._numbers)).decode()
        if isinstance(self._numbers, list):
            return self._numbers[place]
        return int(self._array(self._numbers)[place])

    def __iter__(self) -> Iterator[ClientId]:
        for start in range(0, len(self._numbers), _SLICE):
            part = self._numbers[start : start + _SLICE]
            yield from part if isinstance(part, list) else self._array(part).tolist()
        yield from map(bytes.decode, map(self._encoded(), range(len(self._ends))))

    def __contains__(self, client: object) -> bool:
        return is_client_id(client) and self.find(client) is not None

    def find(self, client: ClientId) -> int | None:
        """Return the place of a client, by binary search; None if it is not among them."""
        if isinstance(client, str):
            encoded, at = client.encode(), self._encoded()
            place = bisect_left(range(len(self._ends)), encoded, key=at)
            same = place < len(self._ends) and at(place) == encoded
            return len(self._numbers) + place if same else None
        if isinstance(self._numbers, list):
            place = bisect_left(self._numbers, client)
            same = place < len(self._numbers) and self._numbers[place] == client
            return place if same else None
        numbers = self._array(self._numbers)
        limits = np.iinfo(numbers.dtype)
        if not limits.min <= client <= limits.max:
            return None
        # a scalar of the array's own type: NumPy would compare other types as floats
        place = int(numbers.searchsorted(numbers.dtype.type(client)))
        return place if place < len(numbers) and numbers[place] == client else None

    def as_array(self) -> _Array | list[int]:
        """Return the ids that are whole numbers, ascending; as a list if they exceed 64 bits."""
        return self._numbers if isinstance(self._numbers, list) else self._array(self._numbers)

    def shared(self) -> "ClientIds":
        """Return a copy in shared memory."""
        numbers = self._numbers if isinstance(self._numbers, list) else _share(self._numbers)
        text, ends = _share(self._text), _share(self._ends)
        return ClientIds(numbers, text, ends, unsigned=self._unsigned)

    def _array(self, numbers: Tensor) -> _Array:
        return numbers.numpy().view(np.uint64 if self._unsigned else np.int64)

    def _encoded(self) -> Callable[[int], bytes]:
        """Return a function from a string's place, counted from the first string, to its UTF-8."""
        text: Any = self._text.numpy()
        ends: Any = self._ends.numpy()
        text, ends = memoryview(text), memoryview(ends)
        return lambda place: bytes(text[ends[place - 1] if place else 0 : ends[place]])


class Index:
    """The rows of each client's examples.

    ``index[client]`` returns the rows of a client, shape (its n,), int64; iterating yields the rows
    of each client in the order of ``ids``.

    Attributes:
        ids: ids of the clients, ascending.
    """

    __slots__ = ("_ends", "_rows", "ids")

    def __init__(self, ids: Sequence[ClientId], ends: Tensor, rows: Tensor | None, /) -> None:
        self.ids = ids
        self._ends = ends
        self._rows = rows  # None: 0, 1, 2, ...

    @classmethod
    def of_rows(
        cls,
        indices: Mapping[Any, Any] | Iterable[Any],
        ids: Iterable[ClientId] | None = None,
        name: str = "indices",
    ) -> "Index":
        """Return the index of a list of rows per client, or of a dict from client to rows.

        Args:
            indices: per client, a tensor, array or list of rows.
            ids: the clients' ids, in the order of ``indices``; by default 0, 1, 2, ... A dict
                already contains them.
            name: name of ``indices`` in messages.

        Raises:
            ConfigError: ids and rows differ in number, two clients have one id, or what should be
                rows is not a list of whole numbers.
        """
        if isinstance(indices, Mapping):
            if ids is not None:
                raise ConfigError(f"ids: {name} is a dict, which already contains them.")
            ids, indices = indices.keys(), indices.values()
        rows_of_clients = [_as_rows(rows, f"{name}[{place}]") for place, rows in enumerate(indices)]
        if not rows_of_clients:
            raise ConfigError(f"{name}: is empty; must hold the rows of at least one client.")
        order: Iterable[int] = range(len(rows_of_clients))
        client_ids: Sequence[ClientId] = range(len(rows_of_clients))
        if ids is not None:
            client_ids, places = ClientIds.of(ids)
            if len(client_ids) != len(rows_of_clients):
                raise ConfigError(
                    f"ids: {len(client_ids)} ids for {len(rows_of_clients)} clients' rows; each "
                    "client needs both."
                )
            order = places.tolist()
        parts = [rows_of_clients[place] for place in order]
        ends = torch.from_numpy(np.fromiter(map(len, parts), np.int64, len(parts)).cumsum())
        return cls(client_ids, _narrow(ends), _narrow_rows(torch.cat(parts)))

    @classmethod
    def of_owners(cls, owners: object, name: str = "user") -> "Index":
        """Return the index of a column that names each example's client.

        Args:
            owners: per example, the id of its client: a list, an array, a tensor or a column.
            name: name of the column in messages.

        Raises:
            ConfigError: an entry that is not an id, such as NaN, or no entry at all.
        """
        values = as_owners(owners, name)
        ids: ClientIds
        if isinstance(values, np.ndarray):
            distinct, places = np.unique(values, return_inverse=True)
            ids = ClientIds.of_array(distinct)
        else:
            distinct_ids = list(dict.fromkeys(values))
            # sort distinct ids only: there are far fewer of them than examples
            ids, order = ClientIds.of(distinct_ids, name)
            rank = np.empty(len(order), dtype=np.int64)
            rank[order] = np.arange(len(order))
            place_of = dict(zip(distinct_ids, rank.tolist(), strict=True))
            places = np.fromiter(map(place_of.__getitem__, values), np.int64, len(values))
        if not len(values):
            raise ConfigError(f"{name}: is empty; must name the client of each example.")
        ends = torch.from_numpy(np.bincount(places, minlength=len(ids)).cumsum())
        rows = torch.from_numpy(places.argsort(kind="stable"))
        return cls(ids, _narrow(ends), _narrow_rows(rows))

    @classmethod
    def of_equal_parts(cls, rows: Tensor, clients: int) -> "Index":
        """Return the index of clients 0, 1, 2, ... with equal numbers of ``rows``, in order.

        Rows that remain belong to nobody.
        """
        size = len(rows) // clients
        ends = torch.arange(size, clients * size + 1, size) if size else torch.zeros(clients)
        return cls(range(clients), _narrow(ends.long()), _narrow_rows(rows[: clients * size]))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, client: ClientId) -> Tensor:
        return self._at(self._place(client))

    def of_each(self, clients: Sequence[ClientId]) -> list[Tensor]:
        """Return the rows of each of some clients, in a fifth of the time of single lookups."""
        places = self._places(clients)
        ends: Any = self._ends.numpy()
        last = ends[places].astype(np.int64)
        first = np.where(places > 0, ends[places - 1], 0).astype(np.int64)
        lengths = last - first
        # all ranges at once, without a loop in Python:
        # row k of a client is k places behind its first one
        before = np.repeat(first - (lengths.cumsum() - lengths), lengths)
        rows = torch.from_numpy(before + np.arange(len(before)))
        if self._rows is not None:
            rows = self._rows[rows].long()
        return list(torch.split(rows, lengths.tolist()))

    def __iter__(self) -> Iterator[Tensor]:
        return (self._at(place) for place in range(len(self)))

    @property
    def rows(self) -> int:
        """Number of rows of all clients; a row counts as often as it is held."""
        return int(self._ends[-1])

    def owner(self, row: int) -> ClientId | None:
        """Return the first client that holds a row; None if nobody does."""
        place = row
        if self._rows is not None:
            places = (self._rows == row).nonzero()
            place = int(places[0]) if len(places) else self.rows
        if not 0 <= place < self.rows:
            return None
        return self.ids[int(torch.searchsorted(self._ends, place, right=True))]

    def held(self, rows: Tensor) -> Tensor:
        """Return those of some rows that a client holds."""
        if self._rows is None:
            return rows[rows < self.rows]
        return rows[torch.isin(rows, self._rows.long())]

    def empty(self) -> list[ClientId]:
        """Return the clients without rows."""
        ends = self._ends.numpy()
        places = np.flatnonzero(np.diff(ends, prepend=0) == 0)
        return [self.ids[place] for place in places.tolist()]

    def outside(self, rows: int) -> int | None:
        """Return a row that is not from 0 to ``rows - 1``; None if all are."""
        if not self.rows:
            return None
        if self._rows is None:
            return self.rows - 1 if self.rows > rows else None
        # the extremes tell whether any row is out of range
        extremes = (int(self._rows.min()), int(self._rows.max()))
        return next((row for row in extremes if not 0 <= row < rows), None)

    def shared(self) -> "Index":
        """Return a copy in shared memory, which other processes see without copying."""
        ids = self.ids.shared() if isinstance(self.ids, ClientIds) else self.ids
        return Index(ids, _share(self._ends), None if self._rows is None else _share(self._rows))

    def _at(self, place: int) -> Tensor:
        # NumPy reads an element in a fifth of a tensor's time
        ends: Any = self._ends.numpy()
        start, end = int(ends[place - 1]) if place else 0, int(ends[place])
        return torch.arange(start, end) if self._rows is None else self._rows[start:end].long()

    def _places(self, clients: Sequence[ClientId]) -> _Array:
        numbers = self.ids.as_array() if isinstance(self.ids, ClientIds) else None
        integers = [client for client in clients if type(client) is int]
        if integers and len(integers) == len(clients) and not isinstance(numbers, list):
            limits = np.iinfo(np.int64 if numbers is None else numbers.dtype)
            if limits.min <= min(integers) and max(integers) <= limits.max:
                asked = np.array(integers, dtype=limits.dtype)
                places = asked if numbers is None else numbers.searchsorted(asked)
                inside = (places >= 0) & (places < len(self if numbers is None else numbers))
                if inside.all() and (numbers is None or (numbers[places] == asked).all()):
                    return places
        # one after another, which says of a client that is unknown
        return np.array([self._place(client) for client in clients], dtype=np.int64)

    def _place(self, client: ClientId) -> int:
        wanted = client_id(client)
        if isinstance(self.ids, ClientIds):
            place = self.ids.find(wanted)
        else:
            place = wanted if type(wanted) is int and 0 <= wanted < len(self.ids) else None
        if place is not None:
            return place
        raise ConfigError(
            f"client {wanted!r}: is not among the {len(self)} clients, the first of which is "
            f"{self.ids[0]!r}{_of_the_other_type(wanted, self.ids)}."
        )


def as_owners(owners: object, name: str) -> _Array | list[ClientId]:
    """Return a column of ids as an array of 64-bit whole numbers, or as a list.

    Raises:
        ConfigError: an entry that is not an id.
    """
    if isinstance(owners, Tensor):
        return _from_array(owners.detach().cpu().numpy(), name)
    if isinstance(owners, str | bytes | Mapping) or not isinstance(owners, Iterable):
        raise ConfigError(
            f"{name}: is a {type(owners).__name__}; must be a list or column with the client of "
            "each example."
        )
    if hasattr(owners, "__array__"):
        return _from_array(np.asarray(owners), name)
    return _valid(owners, name)


def _from_array(owners: _Array, name: str) -> _Array | list[ClientId]:
    if owners.ndim != 1:
        raise ConfigError(
            f"{name}: has shape {owners.shape}; must have one id per example, shape (n,)."
        )
    kind = owners.dtype.kind
    if kind in "iu":
        return owners.astype(np.int64 if kind == "i" else np.uint64, copy=False)
    if kind in "OUT":
        return _valid(owners.tolist(), name)
    if kind == "f" and np.isnan(owners).any():
        row = int(np.isnan(owners).argmax())
        raise ConfigError(
            f"{name}, row {row}: is {owners[row]}; every example needs the id of its client. "
            "Remove the row or fill the gap."
        )
    raise ConfigError(
        f"{name}: has type {owners.dtype}; ids must be whole numbers or strings: convert it with "
        f"{'.astype(int)' if kind == 'f' else '.astype(str)'}."
    )


def _valid(ids: Iterable[object], name: str) -> list[ClientId]:
    """Return ids as Python's int and str, after a check whose cost per id is some 100 ns."""
    values: list[Any] = list(ids)
    if not set(map(type, values)) <= {int, str}:
        return [_one(value, f"{name}[{place}]") for place, value in enumerate(values)]
    numbers = [value for value in values if type(value) is int]
    strings = [value for value in values if type(value) is str]
    extremes = [min(numbers), max(numbers)] if numbers else []
    longest = [min(strings, key=len), max(strings, key=len)] if strings else []
    if not all(map(is_client_id, [*extremes, *longest])) or not _is_unicode(strings):
        return [_one(value, f"{name}[{place}]") for place, value in enumerate(values)]
    return values


def _one(value: object, name: str) -> ClientId:
    gap = type(value).__name__ in ("NAType", "NaTType", "NoneType")
    if gap or (isinstance(value, float) and math.isnan(value)):
        raise ConfigError(
            f"{name}: is missing ({value}); every example and every client needs an id. Remove the "
            "row or fill the gap."
        )
    try:
        return client_id(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _is_unicode(strings: list[str]) -> bool:
    try:
        "".join(strings).encode()
    except UnicodeEncodeError:
        return False
    return True


def _compact(numbers: list[int]) -> tuple[Tensor | list[int], bool]:
    """Return ascending whole numbers in 64 bits where they fit, and whether without sign."""
    for kind in (np.int64, np.uint64):
        limits = np.iinfo(kind)
        if not numbers or (limits.min <= numbers[0] and numbers[-1] <= limits.max):
            bits = np.array(numbers, dtype=kind).view(np.int64)
            return torch.from_numpy(bits), kind is np.uint64
    return numbers, False


def _joined(strings: list[str]) -> tuple[Tensor, Tensor]:
    """Return the UTF-8 of strings, joined, and where each one ends."""
    encoded = [text.encode() for text in strings]
    ends = torch.from_numpy(np.fromiter(map(len, encoded), np.int64, len(encoded)).cumsum())
    text = np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()
    return torch.from_numpy(text), _narrow(ends)


def _as_rows(rows: object, name: str) -> Tensor:
    """Return rows as int64."""
    if isinstance(rows, Tensor) and rows.dtype is torch.int64 and rows.dim() == 1:
        return rows
    if not isinstance(rows, Tensor):
        try:
            rows = torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"{name}: must be a list of rows, whole numbers.") from None
        if rows.shape == (0,):
            # torch makes floats of an empty list
            rows = rows.long()
    if rows.dtype is torch.bool:
        raise ConfigError(
            f"{name}: holds truth values; must be rows: use torch.nonzero(it).flatten()."
        )
    if rows.is_floating_point() or rows.is_complex() or rows.dim() != 1:
        raise ConfigError(
            f"{name}: has type {rows.dtype} and shape {tuple(rows.shape)}; must be rows, whole "
            "numbers of shape (n,)."
        )
    return rows.to(torch.int64)


def _narrow(numbers: Tensor) -> Tensor:
    """Return whole numbers as int32 where they fit."""
    fits = not len(numbers) or (int(numbers.min()) >= -(2**31) and int(numbers.max()) < 2**31)
    return numbers.to(torch.int32) if fits else numbers


def _narrow_rows(rows: Tensor) -> Tensor | None:
    """Return rows as int32 where they fit, or None if they are 0, 1, 2, ..."""
    consecutive = bool(torch.equal(rows, torch.arange(len(rows))))
    return None if consecutive else _narrow(rows)


def _of_the_other_type(client: ClientId, ids: Sequence[ClientId]) -> str:
    """Return a remark if a string was asked for in place of a whole number, or vice versa."""
    other: ClientId = str(client)
    if isinstance(client, str):
        digits = client.removeprefix("-").isdecimal() and len(client) < 80
        other = int(client) if digits else client
    same_type = type(other) is type(client)
    if same_type or other not in ids:
        return ""
    return f"; there is a client {other!r}, which is another one than {client!r}"


def _share(tensor: Tensor) -> Tensor:
    return tensor.clone().share_memory_()  # type: ignore[no-untyped-call,no-any-return]
