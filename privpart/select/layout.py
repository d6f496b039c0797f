"""Layout: which parameters a slice of the model consists of, as positions in its flat vector.

Selecting and deselecting are FEDSELECT and its inverse (Charles et al. 2022, equations 4 and 5).
A key space is a set of slices, for instance the filters of a convolution. A slice spans several
parameters: filter k of conv2 comes with its bias, its channel of the normalisation, and the columns
of the dense layer that read it. A client's smaller network has the same key spaces with fewer keys,
so selecting is one gather between two flat vectors, and deselecting is one scatter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.model import PartialModel

Keys = tuple[int, ...]
"""The keys that one client selects, each from 0 to K - 1."""


@dataclass(frozen=True, slots=True)
class Part:
    """The share of one parameter that belongs to a slice.

    Args:
        parameter: name of the parameter.
        dim: dimension that the slices divide.
        block: consecutive indices of ``dim`` per key: a channel of 7 x 7 pixels is 49 columns of
            the dense layer that follows.
    """

    parameter: str
    dim: int = 0
    block: int = 1


@dataclass(frozen=True, slots=True)
class KeySpace:
    """A set of slices that share one range of keys, each made of these parts, in this order."""

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
        """Find the positions of the slices of ``model``; refuse spaces that do not fit it."""
        spans = model.views(torch.arange(model.dim))
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


def _part(spans: dict[str, Tensor], part: Part) -> Tensor:
    """Return the positions of the slices of one part, shape (K, width)."""
    if part.parameter not in spans:
        raise ConfigError(f"part {part.parameter!r}: no such parameter is trained.")
    span = spans[part.parameter]
    if not 0 <= part.dim < span.dim() or span.shape[part.dim] % checks.count("block", part.block):
        raise ConfigError(
            f"part {part.parameter!r} of shape {tuple(span.shape)}: has no dimension {part.dim} "
            f"that divides into blocks of {part.block}."
        )
    return span.movedim(part.dim, 0).reshape(span.shape[part.dim] // part.block, -1)
