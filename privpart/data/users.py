"""Users: clients whose examples are two tensors in memory, which every engine computes fastest."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accounting.checks import ConfigError
from privpart.data.batches import Batch, not_finite, tensors_of
from privpart.data.clients import refuse_empty
from privpart.data.index import Index
from privpart.messages import ClientId

# whole numbers: those that an embedding accepts
_X = (torch.float32, torch.int64, torch.int32)
_Y = (torch.int64, torch.float32)


class Users:
    """Examples, and which user holds which.

    Args:
        x: all examples, shape (n, ...): float32, or int64 or int32 for token ids.
        y: their labels, int64, shape (n,), or (n, length) of a language model; or float32 values
            of a regression.
        indices: per user, the rows of its examples: a list of tensors, or a dict from id to rows.
        ids: the users' ids in the order of ``indices``; by default 0, 1, 2, ...
        allow_empty: accept users without examples; their update is zeros.
    """

    __slots__ = ("indices", "x", "y")

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        indices: Index | Mapping[Any, Any] | Iterable[Any],
        ids: Iterable[ClientId] | None = None,
        *,
        allow_empty: bool = False,
    ) -> None:
        _refuse_types(x, y)
        if isinstance(indices, Index) and ids is not None:
            raise ConfigError("ids: the index already contains them.")
        index = indices if isinstance(indices, Index) else Index.of_rows(indices, ids)
        # torch would take a negative row from the end
        if (row := index.outside(len(x))) is not None:
            raise ConfigError(
                f"row {row} of {len(x)}, which client {index.owner(row)!r} holds: rows must be "
                f"from 0 to {len(x) - 1}."
            )
        if not allow_empty:
            refuse_empty(index)
        for name, tensor in (("x", x), ("y", y)):
            refuse_not_finite(name, tensor, index)
        self.x = x
        self.y = y
        self.indices = index

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def ids(self) -> Sequence[ClientId]:
        """Ids of all users, ascending."""
        return self.indices.ids

    def on(self, device: torch.device) -> "Users":
        """Return the users with ``x`` and ``y`` on a device."""
        return self._of(self.x.to(device), self.y.to(device), self.indices)

    def shared(self) -> "Users":
        """Return a copy in shared memory, which other processes see without copying."""
        x, y = (t.clone().share_memory_() for t in (self.x, self.y))  # type: ignore[no-untyped-call]
        return self._of(x, y, self.indices.shared())

    def examples(self, client: ClientId) -> tuple[Tensor, Tensor]:
        """Return one user's examples, shape (its n, ...), and their labels."""
        rows = self.indices[client]
        return self.x[rows], self.y[rows]

    @classmethod
    def _of(cls, x: Tensor, y: Tensor, indices: Index) -> "Users":
        """Return users of parts that were checked before."""
        users = cls.__new__(cls)
        users.x, users.y, users.indices = x, y, indices
        return users


def _refuse_types(x: Tensor, y: Tensor) -> None:
    """Raise unless two tensors are examples and labels."""
    for name, tensor, kinds in (("x", x, _X), ("y", y, _Y)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in kinds or not tensor.dim():
            kind = f"{type(tensor).__name__} of type {getattr(tensor, 'dtype', 'none')}"
            raise ConfigError(
                f"{name}: is a {kind}; must be a tensor of {' or '.join(map(str, kinds))} with a "
                "row per example. privpart.data.from_tensors converts arrays."
            )
    if len(x) != len(y):
        raise ConfigError(f"x has {len(x)} rows, y has {len(y)}: each example needs one label.")


def refuse_not_finite(name: str, batch: Batch, index: Index) -> None:
    """Check that rows that a client holds contain neither NaN nor infinity."""
    for leaf, tensor in tensors_of(batch, name):
        bad = not_finite(tensor)
        rows = [] if bad is None else index.held(bad.cpu())[:1].tolist()
        for row in rows:
            raise ConfigError(
                f"{leaf}, row {row} (client {index.owner(row)!r}): holds NaN, infinity or a number "
                "too large for float32; must be finite numbers. Remove the row or fill the gap."
            )
