"""Binary tree aggregation: noise on dyadic sums of rounds (Dwork et al. 2010, Chan et al. 2011).

Every complete dyadic block of rounds is a node with its own noise; the prefix sum of t rounds adds
the popcount(t) nodes of t's binary expansion (Kairouz et al. 2021, DP-FTRL). With
``restart_every = R`` a new tree begins every R rounds at the noised sum where the last one ended.

Only complete nodes exist: rounds 1..1600 have 11 levels, not the 12 of a tree padded to 2048.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.mechanisms.tree_sensitivity import forest_sensitivity_squared
from accounting.participation import Participation
from accounting.sensitivity import Sensitivity, same_rounds


@dataclass(frozen=True, slots=True)
class BinaryTree:
    """Tree aggregation over ``rounds`` rounds.

    Args:
        rounds: number of rounds n, >= 1.
        restart_every: rounds per tree, >= 1; None is one tree over all rounds.

    >>> from accounting import Participation
    >>> BinaryTree(1600).sensitivity(Participation(1600)).squared
    11.0
    """

    rounds: int
    restart_every: int | None = None

    def __post_init__(self) -> None:
        checks.count("rounds", self.rounds)
        if self.restart_every is not None:
            checks.count("restart_every", self.restart_every)

    @property
    def name(self) -> str:
        """Short name, as on the command line."""
        return "tree"

    def trees(self) -> Iterator[tuple[int, int]]:
        """First round (from 0) and length of each tree."""
        length = self.restart_every or self.rounds
        for start in range(0, self.rounds, length):
            yield start, min(length, self.rounds - start)

    def nodes(self) -> list[tuple[int, int]]:
        """Every complete node as (first round, size), in the order in which they complete."""
        return [
            (start + end - size, size)
            for start, length in self.trees()
            for end in range(1, length + 1)
            for size in _dyadic_sizes(end)
        ]

    def encoder(self) -> NDArray[np.float64]:
        """C, shape (nodes, n): row = indicator of the node's rounds."""
        nodes = self.nodes()
        matrix = np.zeros((len(nodes), self.rounds))
        for row, (first, size) in enumerate(nodes):
            matrix[row, first : first + size] = 1.0
        return matrix

    def decoder(self) -> NDArray[np.float64]:
        """B, shape (n, nodes): earlier trees' last prefix plus the nodes of t's expansion."""
        row_of = {node: row for row, node in enumerate(self.nodes())}
        matrix = np.zeros((self.rounds, len(row_of)))
        before = np.zeros(len(row_of))
        for start, length in self.trees():
            for t in range(1, length + 1):
                matrix[start + t - 1] = before
                for first, size in _binary_expansion(t):
                    matrix[start + t - 1, row_of[start + first, size]] = 1.0
            before = matrix[start + length - 1]
        return matrix

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Exact: max over patterns of the sum over nodes of squared participation counts."""
        same_rounds(self.rounds, participation)
        squared = forest_sensitivity_squared([length for _, length in self.trees()], participation)
        rule = "levels of the tree" if participation.max_participations == 1 else "exact recursion"
        return Sensitivity(float(squared), exact=True, rule=f"binary tree: {rule}")

    def prefix_variance(self) -> NDArray[np.float64]:
        """popcount(t) within each tree, plus what the earlier trees ended with."""
        variance = np.empty(self.rounds)
        before = 0.0
        for start, length in self.trees():
            within = [t.bit_count() for t in range(1, length + 1)]
            variance[start : start + length] = before + np.array(within, dtype=np.float64)
            before = variance[start + length - 1]
        return variance


def _dyadic_sizes(end: int) -> Iterator[int]:
    """Sizes of the nodes that complete with round ``end`` (from 1): 1, 2, 4, ... dividing it."""
    size = 1
    while end % size == 0:
        yield size
        size *= 2


def _binary_expansion(t: int) -> Iterator[tuple[int, int]]:
    """The nodes (first, size) whose disjoint union is rounds 0 .. t-1, largest first."""
    first = 0
    while t > first:
        size = 1 << ((t - first).bit_length() - 1)
        yield first, size
        first += size
