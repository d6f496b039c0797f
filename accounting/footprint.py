"""Footprint: what a mechanism's noise stream keeps and draws, in vectors of the model's size."""

import math
from dataclasses import dataclass
from itertools import pairwise

from accounting.mechanisms import (
    BinaryTree,
    BufferedToeplitz,
    Dense,
    Grouped,
    Independent,
    Mechanism,
    PrunedTree,
    Toeplitz,
)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Cost of streaming the noise, by the recurrence in the mechanism's docstring.

    Attributes:
        state_vectors: most vectors of length d kept between two rounds, for the next round's noise.
        draws_per_round: vectors of length d drawn per round, on average over the run.
    """

    state_vectors: int
    draws_per_round: float


def footprint(mechanism: Mechanism) -> Footprint:
    """Return the cost of streaming the mechanism's noise.

    >>> from accounting import BinaryTree
    >>> footprint(BinaryTree(1600))
    Footprint(state_vectors=10, draws_per_round=1.0)
    """
    if isinstance(mechanism, BinaryTree):
        return _tree(mechanism)
    if isinstance(mechanism, Toeplitz):
        return Footprint(mechanism.bands - 1, 1.0)
    if isinstance(mechanism, BufferedToeplitz):
        return Footprint(mechanism.buffers, 1.0)
    if isinstance(mechanism, Independent):
        return Footprint(0, 1.0)
    if isinstance(mechanism, Dense):
        return Footprint(mechanism.rounds - 1, 1.0)  # every earlier draw
    if isinstance(mechanism, PrunedTree):
        stacks = [mechanism.prefix_nodes(step) for step in range(mechanism.rounds)]
        fresh = sum(len(set(new) - set(old)) for old, new in pairwise([[], *stacks]))
        return Footprint(max(map(len, stacks)), fresh / mechanism.rounds)
    if isinstance(mechanism, Grouped):
        return _grouped(mechanism)
    raise TypeError(f"{type(mechanism).__name__} is not a mechanism of this package.")


def _grouped(grouped: Grouped) -> Footprint:
    """Each group keeps and draws its own part of a vector; the state is rounded up."""
    d, own = sum(grouped.sizes), [footprint(mechanism) for mechanism in grouped.mechanisms]
    state = sum(size * f.state_vectors for size, f in zip(grouped.sizes, own, strict=True))
    drawn = sum(
        size * f.draws_per_round * mechanism.rounds
        for size, f, mechanism in zip(grouped.sizes, own, grouped.mechanisms, strict=True)
    )
    return Footprint(math.ceil(state / d), drawn / (d * grouped.rounds))


def _tree(tree: BinaryTree) -> Footprint:
    """The stack holds one node per binary digit 1 of the rounds so far in the current tree.

    The vanilla estimator needs no draw for a parent: the noise of a node replaces that of all
    nodes below it, so the leaf's draw serves. Completion draws for the virtual leaves as well.
    """
    blocks = tree.blocks()
    longest = min(tree.restart_every or tree.rounds, tree.rounds)
    leaves = sum(2**block.height for block in blocks)
    draws = len(tree.nodes()) if tree.estimator == "online" else leaves
    return Footprint((longest + 1).bit_length() - 1, draws / tree.rounds)
