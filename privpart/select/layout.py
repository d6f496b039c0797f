"""Layout: where each slice of a model lies in the one flat vector of its trainable part.

A key space names a set of slices, for instance the filters of a convolution. One slice is coupled:
filter k of conv2 takes with it its bias, its channel of the normalisation, and the columns of the
dense layer that read it. A client's smaller network has the same key spaces, only shorter, so that
selecting is one gather between two flat vectors and deselecting one scatter back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.model import PartialModel
from privpart.select.primitive import Keys


@dataclass(frozen=True, slots=True)
class Part:
    """What one slice takes from one parameter.

    Args:
        parameter: its name; or a name with ``{key}`` in it for a module list, of which a slice
            takes one member whole, for instance ``experts.{key}.weight``.
        dim: the dimension along which slices lie.
        block: how many consecutive indices of ``dim`` belong to one key; a channel of 7 x 7 pixels
            is 49 columns of the dense layer behind it.
    """

    parameter: str
    dim: int = 0
    block: int = 1


@dataclass(frozen=True, slots=True)
class KeySpace:
    """A set of slices that are selected by the same keys.

    Args:
        name: for messages, for instance "filters".
        parts: what each slice consists of, in this order.
    """

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Positions in a flat vector of d numbers; every position belongs to one slice or is shared.

    Attributes:
        names: of the key spaces.
        tables: per key space, positions of each slice, shape (K, width).
        shared: positions that every client receives, shape (b,).
    """

    names: tuple[str, ...]
    tables: tuple[Tensor, ...]
    shared: Tensor

    @classmethod
    def of(cls, model: PartialModel, spaces: Sequence[KeySpace]) -> "Layout":
        """Find the slices of ``model``.

        Raises:
            ConfigError: a part that the model does not train or that does not divide into slices,
                parts that disagree on the number of keys, or one number in two slices.
        """
        spans, tables = _positions(model), []
        for space in spaces:
            columns = [_part(spans, part) for part in space.parts]
            if len(sizes := {len(c) for c in columns}) != 1:
                raise ConfigError(f"key space {space.name!r}: parts have {sorted(sizes)} slices.")
            tables.append(torch.cat(columns, dim=1))
        free = torch.ones(model.dim, dtype=torch.bool)
        for space, table in zip(spaces, tables, strict=True):
            uses = torch.bincount(table.flatten(), minlength=model.dim)
            if not bool(free[table].all()) or int(uses.max()) > 1:
                raise ConfigError(
                    f"key space {space.name!r}: takes a number that belongs to another slice. A "
                    "matrix can be cut along one dimension only; broadcast one of the two layers."
                )
            free[table] = False
        return cls(tuple(s.name for s in spaces), tuple(tables), free.nonzero().squeeze(1))

    @property
    def dim(self) -> int:
        """Length d of the flat vector."""
        return len(self.shared) + sum(t.numel() for t in self.tables)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of keys K of each space."""
        return tuple(len(t) for t in self.tables)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers per slice of each space."""
        return tuple(t.shape[1] for t in self.tables)

    def client_dim(self, counts: Sequence[int]) -> int:
        """Return the numbers that a client with that many keys per space holds."""
        return len(self.shared) + sum(m * w for m, w in zip(counts, self.widths, strict=True))

    def rows(self, keys: Sequence[Keys]) -> list[Tensor]:
        """Return per space the positions of the selected slices, shape (m, width)."""
        return [t[list(z)] for t, z in zip(self.tables, keys, strict=True)]


def assemble(client: Layout, shared: Tensor, slices: Sequence[Tensor]) -> Tensor:
    """Return a client's flat vector, made from what it received.

    Args:
        client: layout of its smaller network.
        shared: shape (b,).
        slices: per key space, shape (m, width), in the order of its keys.

    Raises:
        ConfigError: a network of another shape.
    """
    if shared.shape != client.shared.shape or any(
        s.shape != t.shape for s, t in zip(slices, client.tables, strict=True)
    ):
        raise ConfigError(
            f"the client's network takes {client.sizes} slices of {client.widths} numbers and "
            f"{len(client.shared)} shared ones; it was sent {[tuple(s.shape) for s in slices]} and "
            f"{len(shared)}. Build it from as many keys as were selected, else unchanged."
        )
    flat = shared.new_empty(client.dim)
    flat[client.shared] = shared
    for table, own in zip(client.tables, slices, strict=True):
        flat[table] = own
    return flat


def deselect(server: Layout, client: Layout, update: Tensor, keys: Sequence[Keys]) -> Tensor:
    """Return a client's update on the server's coordinates, zero where it selected nothing.

    An isometry: the norm stays that of ``update``, because no key occurs twice. So an update that
    was clipped before is clipped after, whatever the keys, and they may come from private data.

    Args:
        server: layout of the whole model.
        client: layout of the client's network.
        update: shape (client.dim,).
        keys: per space.

    Returns:
        Shape (server.dim,).

    Raises:
        ConfigError: a key out of range or twice; with m copies of one key, additive deselection
            would make one clipped update sqrt(m) times as long.
    """
    keys = [distinct_keys(z, size) for z, size in zip(keys, server.sizes, strict=True)]
    full = update.new_zeros(server.dim)
    full[server.shared] = update[client.shared]
    for rows, own in zip(server.rows(keys), client.tables, strict=True):
        full[rows] = update[own]
    return full


def distinct_keys(keys: Keys, size: int) -> Keys:
    """Return ``keys`` if each is a whole number from 0 to size - 1 and none occurs twice."""
    found = tuple(checks.count("key", key, minimum=0) for key in keys)
    if not found or len(set(found)) != len(found) or max(found) >= size:
        raise ConfigError(
            f"{len(found)} keys: must be at least one, each below {size}, and none twice. A key "
            "that occurs m times would let one client move its slice by sqrt(m) times the clip "
            "norm."
        )
    return found


def _positions(model: PartialModel) -> dict[str, Tensor]:
    """Positions of each trained parameter, in its own shape."""
    parameters, begin, found = dict(model.module.named_parameters()), 0, {}
    for name in model.trainable:
        shape = parameters[name].shape
        found[name] = torch.arange(begin, begin + shape.numel()).view(shape)
        begin += shape.numel()
    return found


def _part(spans: dict[str, Tensor], part: Part) -> Tensor:
    """Positions of the slices of one part, shape (K, width)."""
    if "{key}" in part.parameter:
        members: list[Tensor] = []
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
