"""Users: simulated clients, as examples and who holds which."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """Per user, the rows of its examples, shape (its n,); a list of tensors is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, user: int, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Users:
    """Examples and who holds which.

    Attributes:
        x: all examples, shape (n, ...).
        y: their classes, shape (n,).
        indices: per user, the rows that are theirs.
    """

    x: Tensor
    y: Tensor
    indices: Rows

    def __len__(self) -> int:
        return len(self.indices)

    def on(self, device: torch.device) -> "Users":
        """Return them with the examples, not their order, in a device's memory."""
        return Users(self.x.to(device), self.y.to(device), self.indices)

    def examples(self, user: int) -> tuple[Tensor, Tensor]:
        """Return the examples of one user, shape (its n, ...), and their classes."""
        rows = self.indices[user]
        return self.x[rows], self.y[rows]
