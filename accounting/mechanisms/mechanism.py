"""Mechanism: a factorisation A = B C of the prefix sums A, which fixes both cost and noise.

The server releases C x + z (z i.i.d. Gaussian, standard deviation noise_multiplier x clip_norm) and
from it the prefix sums B (C x + z) = A x + B z. C, the encoder, sets the sensitivity; B, the
decoder, sets the noise. Lower-triangular streams keep this guarantee when rounds depend on earlier
releases (Denisov et al. 2022, Theorem 2.1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np

from accounting.mechanisms.program import NoiseProgram
from accounting.participation import Participation
from accounting.sensitivity import Array, Sensitivity

SCHEMA = "privpart/mechanism/1"


@runtime_checkable
class Mechanism(Protocol):
    """What the accountant and the server's noise stream both read."""

    @property
    def name(self) -> str:
        """Short name, as on the command line."""

    @property
    def groups(self) -> "Groups | None":
        """Groups of parameters with a noise stream each; None: one stream for all parameters."""

    @property
    def rounds(self) -> int:
        """Number of rounds n."""

    @property
    def restart_every(self) -> int | None:
        """Rounds after which the noise starts anew; None: it is correlated over all rounds."""

    def encoder(self) -> Array:
        """C, shape (released values, n). Dense: for tests and small n."""

    def decoder(self) -> Array:
        """B, shape (n, released values), with B C = A. Dense: for tests and small n."""

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Squared sensitivity of C under the given participation, at clip norm 1."""

    def prefix_variance(self) -> Array:
        """Diagonal of B B^T, shape (n,): noise variance of each prefix sum at z = clip_norm = 1."""

    def noise_program(self) -> NoiseProgram:
        """The noise of each round's sum, as a linear program over draws."""

    def to_dict(self) -> dict[str, Any]:
        """Schema, name and every field, for JSON; ``mechanism_from_dict`` reads it back."""


class Groups(Protocol):
    """Groups of parameters that train in turns: the fields of ``Grouped``."""

    @property
    def schedule(self) -> Sequence[tuple[int, ...]]:
        """Per round, the groups that train in it, ascending, from 0."""

    @property
    def mechanisms(self) -> Sequence[Mechanism]:
        """Per group, a mechanism over the rounds in which the group trains."""

    @property
    def sizes(self) -> Sequence[int]:
        """Per group, its number of parameters."""

    def active_rounds(self) -> list[list[int]]:
        """Per group, the rounds in which it trains, ascending."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Cost of streaming the noise: what its program keeps and draws.

    Attributes:
        state_vectors: most vectors of length d kept between two rounds, for the next round's noise.
        draws_per_round: vectors of length d drawn per round, on average over the run.
    """

    state_vectors: int
    draws_per_round: float


def footprint(mechanism: Mechanism) -> Footprint:
    """Return the cost of streaming the mechanism's noise, in vectors of the model's length.

    Of groups, each keeps and draws its own part of a vector; the state is rounded up.

    >>> from accounting import BinaryTree
    >>> footprint(BinaryTree(1600))
    Footprint(state_vectors=3, draws_per_round=1.123125)
    """
    if not isinstance(mechanism, Mechanism):
        raise TypeError(f"{type(mechanism).__name__} is not a mechanism of this package.")
    groups = mechanism.groups
    if groups is None:
        program = mechanism.noise_program()
        return Footprint(program.state_rows(), program.draws() / program.rounds)
    programs = [part.noise_program() for part in groups.mechanisms]
    parts = list(zip(groups.sizes, programs, strict=True))
    d = sum(groups.sizes)
    state = sum(size * program.state_rows() for size, program in parts)
    drawn = sum(size * program.draws() for size, program in parts)
    return Footprint(math.ceil(state / d), drawn / (d * mechanism.rounds))


def noise_matrix(mechanism: Mechanism) -> Array:
    """Return N: the noise of the rounds' sums is N z, with z the draws. For tests and small n.

    Shape (n, draws). Of groups, (cells, draws): a row per active group of each round, in order,
    for one parameter per group, and the draws of group 0, then those of group 1, and so on.
    """
    groups = mechanism.groups
    if groups is None:
        return mechanism.noise_program().matrix()
    return interleaved(groups, [noise_matrix(part) for part in groups.mechanisms])


def interleaved(groups: "Groups", matrices: Sequence[Array]) -> Array:
    """Return the groups' matrices side by side, each row at an active round of its group."""
    owner = np.array([g for active in groups.schedule for g in active])
    columns = []
    for g, matrix in enumerate(matrices):
        block = np.zeros((len(owner), matrix.shape[1]))
        block[owner == g] = matrix
        columns.append(block)
    return np.concatenate(columns, axis=1)


def prefix_sums(rounds: int) -> Array:
    """A, the lower-triangular matrix of ones, shape (n, n)."""
    return np.tril(np.ones((rounds, rounds)))


class OneStream:
    """What mechanisms of one noise stream have in common, unless they say otherwise."""

    __slots__ = ()

    groups = None
    restart_every: int | None = None
    fitted = False

    def to_dict(self) -> dict[str, Any]:
        """Schema, name and every field, for JSON; arrays and tuples become lists."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"schema": SCHEMA, "name": getattr(self, "name")} | {  # noqa: B009
            name: np.asarray(value).tolist() if isinstance(value, tuple | np.ndarray) else value
            for name, value in values.items()
        }
