"""Layout: FEDSELECT and its inverse, as the paper defines them and on flat vectors of a model.

``fed_select`` and ``aggregate_mean`` are Charles et al. 2022, equations (4) and (5): the reference
that the rest of the package must agree with. Devices, bytes and privacy play no part in them.

A key space is a set of slices, for instance the filters of a convolution. A slice spans several
parameters: filter k of conv2 comes with its bias, its channel of the normalisation, and the columns
of the dense layer that read it. A client's smaller network has the same key spaces with fewer keys,
so selecting is one gather between two flat vectors, and deselecting is one scatter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.model import PartialModel

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


@dataclass(frozen=True, slots=True)
class Part:
    """The share of one parameter that belongs to a slice.

    Args:
        parameter: name of the parameter. A name with ``{key}`` in it refers to a module list, of
            which a slice takes one whole member, for instance ``experts.{key}.weight``.
        dim: dimension that the slices divide.
        block: consecutive indices of ``dim`` per key: a channel of 7 x 7 pixels is 49 columns of
            the dense layer that follows.
    """

    parameter: str
    dim: int = 0
    block: int = 1


@dataclass(frozen=True, slots=True)
class KeySpace:
    """A set of slices that share one range of keys.

    Args:
        name: name used in messages, for instance "filters".
        parts: parts that a slice consists of, in this order.
    """

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Positions in a flat vector of d parameters; each belongs to exactly one slice or is shared.

    Attributes:
        names: names of the key spaces.
        tables: per key space, the positions of each slice, shape (K, width).
        shared: positions that every client receives, shape (b,).
    """

    names: tuple[str, ...]
    tables: tuple[Tensor, ...]
    shared: Tensor

    @classmethod
    def of(cls, model: PartialModel, spaces: Sequence[KeySpace]) -> "Layout":
        """Find the positions of the slices of ``model``.

        Raises:
            ConfigError: a part is not trained or does not divide into slices, parts of one space
                disagree on the number of keys, or two slices share a parameter.
        """
        spans = _positions(model)
        tables = []
        for space in spaces:
            columns = [_part(spans, part) for part in space.parts]
            if len(sizes := {len(c) for c in columns}) != 1:
                raise ConfigError(f"key space {space.name!r}: parts have {sorted(sizes)} slices.")
            tables.append(torch.cat(columns, dim=1))
        # mark positions that no slice has taken; what stays free is shared
        free = torch.ones(model.dim, dtype=torch.bool)
        for space, table in zip(spaces, tables, strict=True):
            # within a space, too: deselect would write such a position twice and keep one value
            uses = torch.bincount(table.flatten(), minlength=model.dim)
            if not bool(free[table].all()) or int(uses.max()) > 1:
                raise ConfigError(
                    f"key space {space.name!r}: overlaps another slice. A matrix can be cut along "
                    "one dimension only; broadcast one of the two layers."
                )
            free[table] = False
        return cls(tuple(s.name for s in spaces), tuple(tables), free.nonzero().squeeze(1))

    @property
    def dim(self) -> int:
        """Length d of the flat vector."""
        return len(self.shared) + sum(t.numel() for t in self.tables)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of keys K of each key space."""
        return tuple(len(t) for t in self.tables)

    @property
    def widths(self) -> tuple[int, ...]:
        """Parameters per slice of each key space."""
        return tuple(t.shape[1] for t in self.tables)

    def client_dim(self, counts: Sequence[int]) -> int:
        """Return the number of parameters of a client that selects ``counts`` keys per space."""
        return len(self.shared) + sum(m * w for m, w in zip(counts, self.widths, strict=True))

    def selected(self, keys: Sequence[Keys]) -> list[Tensor]:
        """Return, per key space, the positions of the selected slices, shape (m, width)."""
        return [t[list(z)] for t, z in zip(self.tables, keys, strict=True)]


def assemble(client: Layout, shared: Tensor, slices: Sequence[Tensor]) -> Tensor:
    """Return the flat vector of a client's network, from the values that the client received.

    Those are ``shared``, of shape (b,), and per key space the selected slices in the order of their
    keys, of shape (m, width). A ConfigError says if they have other shapes than the network.
    """
    if shared.shape != client.shared.shape or any(
        s.shape != t.shape for s, t in zip(slices, client.tables, strict=True)
    ):
        raise ConfigError(
            f"the client's network has {client.sizes} slices of {client.widths} parameters and "
            f"{len(client.shared)} shared ones; received {[tuple(s.shape) for s in slices]} and "
            f"{len(shared)}. Build it for the number of selected keys, otherwise unchanged."
        )
    flat = shared.new_empty(client.dim)
    flat[client.shared] = shared
    for table, values in zip(client.tables, slices, strict=True):
        flat[table] = values
    return flat


def deselect(server: Layout, client: Layout, update: Tensor, keys: Sequence[Keys]) -> Tensor:
    """Return a client's update in the server's coordinates, zero where it selected nothing.

    Deselecting is an isometry, because no key occurs twice: the result has the norm of ``update``.
    A clipped update therefore stays clipped whatever the keys are, even if they depend on private
    data.

    Raises:
        ConfigError: a key is out of range or repeated. With m copies of one key, additive
            deselection would lengthen a clipped update by a factor of sqrt(m).
    """
    keys = [distinct_keys(z, size) for z, size in zip(keys, server.sizes, strict=True)]
    full = update.new_zeros(server.dim)
    full[server.shared] = update[client.shared]
    for rows, positions in zip(server.selected(keys), client.tables, strict=True):
        full[rows] = update[positions]
    return full


def distinct_keys(keys: Keys, size: int) -> Keys:
    """Return ``keys`` as a tuple; refuse none, a repeated one, and one not from 0 to size - 1."""
    checked = tuple(checks.count("key", key, minimum=0) for key in keys)
    if not checked or len(set(checked)) != len(checked) or max(checked) >= size:
        raise ConfigError(
            f"{len(checked)} keys: must be at least one, each below {size}, and none twice. A key "
            "repeated m times would let one client move its slice by sqrt(m) times the clip norm."
        )
    return checked


def _positions(model: PartialModel) -> dict[str, Tensor]:
    """Return the positions of each trained parameter, in the parameter's shape."""
    parameters = dict(model.module.named_parameters())
    begin = 0
    positions = {}
    for name in model.trainable:
        shape = parameters[name].shape
        positions[name] = torch.arange(begin, begin + shape.numel()).view(shape)
        begin += shape.numel()
    return positions


def _part(spans: dict[str, Tensor], part: Part) -> Tensor:
    """Return the positions of the slices of one part, shape (K, width)."""
    if "{key}" in part.parameter:
        members: list[Tensor] = []
        # members of a module list are numbered without gaps
        while (name := part.parameter.format(key=len(members))) in spans:
            members.append(spans[name].flatten())
        if not members:
            raise ConfigError(f"part {part.parameter!r}: no such parameter is trained.")
        return torch.stack(members)
    if part.parameter not in spans:
        raise ConfigError(f"part {part.parameter!r}: no such parameter is trained.")
    span = spans[part.parameter]
    if not 0 <= part.dim < span.dim() or span.shape[part.dim] % checks.count("block", part.block):
        raise ConfigError(
            f"part {part.parameter!r} of shape {tuple(span.shape)}: has no dimension {part.dim} "
            f"that divides into blocks of {part.block}."
        )
    return span.movedim(part.dim, 0).reshape(span.shape[part.dim] // part.block, -1)
