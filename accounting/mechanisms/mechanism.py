"""Mechanism: a factorisation A = B C of the prefix sums A, which fixes both cost and noise.

The server releases C x + z (z i.i.d. Gaussian, standard deviation noise_multiplier x clip_norm) and
from it the prefix sums B (C x + z) = A x + B z. C, the encoder, sets the sensitivity; B, the
decoder, sets the noise. Lower-triangular streams keep this guarantee when rounds depend on earlier
releases (Denisov et al. 2022, Theorem 2.1).
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from accounting.participation import Participation
from accounting.sensitivity import Sensitivity

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA = "privpart/mechanism/1"


class Mechanism(Protocol):
    """What the accountant and the server's noise stream both read."""

    @property
    def name(self) -> str:
        """Short name, as on the command line."""
        ...

    @property
    def rounds(self) -> int:
        """Number of rounds n."""
        ...

    def encoder(self) -> NDArray[np.float64]:
        """C, shape (released values, n). Dense: for tests and small n."""
        ...

    def decoder(self) -> NDArray[np.float64]:
        """B, shape (n, released values), with B C = A. Dense: for tests and small n."""
        ...

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Squared sensitivity of C under the given participation, at clip norm 1."""
        ...

    def prefix_variance(self) -> NDArray[np.float64]:
        """Diagonal of B B^T, shape (n,): noise variance of each prefix sum at z = clip_norm = 1."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Schema, name and every field, for JSON; ``mechanism_from_dict`` reads it back."""
        ...


def prefix_sums(rounds: int) -> NDArray[np.float64]:
    """A, the lower-triangular matrix of ones, shape (n, n)."""
    return np.tril(np.ones((rounds, rounds)))


def record(mechanism: "DataclassInstance") -> dict[str, Any]:
    """Return a mechanism's schema, name and fields; arrays and tuples become lists."""
    values = {field.name: getattr(mechanism, field.name) for field in fields(mechanism)}
    return {"schema": SCHEMA, "name": getattr(mechanism, "name")} | {  # noqa: B009
        name: np.asarray(value).tolist() if isinstance(value, tuple | np.ndarray) else value
        for name, value in values.items()
    }
