"""Users: the examples of simulated clients, and which client holds which."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """Maps a user to the rows of its examples, shape (its n,); a list of tensors conforms."""

    def __len__(self) -> int: ...
    def __getitem__(self, user: int, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Users:
    """Examples, and which user holds which.

    Attributes:
        x: all examples, shape (n, ...).
        y: their labels, shape (n,), or (n, length) of a language model.
        indices: per user, the rows of its examples.
    """

    x: Tensor
    y: Tensor
    indices: Rows

    def __len__(self) -> int:
        return len(self.indices)

    def on(self, device: torch.device) -> "Users":
        """Return the users with ``x`` and ``y`` on a device; ``indices`` stay where they are."""
        return Users(self.x.to(device), self.y.to(device), self.indices)

    def examples(self, user: int) -> tuple[Tensor, Tensor]:
        """Return one user's examples, shape (its n, ...), and their labels."""
        rows = self.indices[user]
        return self.x[rows], self.y[rows]
