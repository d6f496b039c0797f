"""Sums: the server sees the sum of several clients' updates, and none of them."""

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from attacks.transforms.transform import Transform, Update, number

_MOST = 10_000


@dataclass(frozen=True)
class Sum(Transform):
    """The sum of so many clients' updates, each transformed and clipped by itself."""

    clients: int
    form: ClassVar[str] = "sum:20"

    @classmethod
    def parsed(cls, argument: str) -> Self:
        """Return "sum:CLIENTS", from 2."""
        return cls(number(argument, _MOST))

    def __str__(self) -> str:
        return f"sum:{self.clients}"

    def __call__(self, update: Update) -> dict[str, Tensor]:
        """Return the update of one client as it is."""
        return dict(update)
