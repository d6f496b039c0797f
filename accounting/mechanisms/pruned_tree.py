"""Pruned tree: one tree over the whole run, for parameters that train in some rounds only.

A node needs noise only on the parameters that some round inside it trains: on the others its sum
is zero by the public schedule. With this mechanism for every group, ``Grouped`` is a single tree
over all rounds without that needless noise. A ``BinaryTree`` per group is shallower and has less.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import OneStream
from accounting.mechanisms.program import OUT, NoiseProgram, Op
from accounting.mechanisms.tree import BinaryTree, forest
from accounting.participation import Participation
from accounting.sensitivity import Array, Sensitivity, gram_sensitivity, same_rounds

Node = tuple[int, int]
"""First step of the group, and number of steps."""


@dataclass(frozen=True, slots=True)
class PrunedTree(OneStream):
    """The nodes of ``BinaryTree(span)`` that hold active rounds, over those rounds.

    Args:
        span: rounds of the whole run, 1 to a million.
        active: the group's rounds, ascending, from 0 to span - 1; they are its steps 0, 1, ...

    >>> PrunedTree(8, (0, 2, 5)).prefix_nodes(1)  # both steps: nothing else is in rounds 0 to 3
    [(0, 2)]
    """

    span: int
    active: tuple[int, ...]

    name = "pruned tree"

    def __post_init__(self) -> None:
        span = checks.count("span", self.span, maximum=checks.MOST_ROUNDS)
        if not hasattr(self.active, "__iter__"):
            raise ConfigError(f"active={self.active!r}: must be a list of rounds.")
        active = tuple(checks.count("active", t, minimum=0) for t in self.active)
        if not active or list(active) != sorted(set(active)) or active[-1] >= span:
            raise ConfigError(
                f"active={list(active)}: must be rounds from 0 to {span - 1}, ascending."
            )
        object.__setattr__(self, "span", span)
        object.__setattr__(self, "active", active)

    @property
    def rounds(self) -> int:
        """Number of steps: the active rounds."""
        return len(self.active)

    def prefix_nodes(self, step: int) -> list[Node]:
        """Return the nodes that make up the prefix sum after a step, earliest first.

        Nothing is added until the next active round, so every round before it offers a set of nodes
        for the same sum. The smallest set is used, from the step on.
        """
        if checks.count("step", step, minimum=0) >= self.rounds:
            raise ConfigError(f"step={step}: must be below {self.rounds}, the number of steps.")
        after = self.active[step + 1] if step + 1 < self.rounds else self.span
        ends = range(self.active[step] + 1, after + 1)
        prefixes = ([(b.first, b.rounds) for b in forest(end, None)] for end in ends)
        return min(map(self._nodes, prefixes), key=len)

    def _nodes(self, dyadic: list[Node]) -> list[Node]:
        """Return nodes of the run in steps of the group, without those of no active round."""
        pairs = [(bisect_left(self.active, t), bisect_left(self.active, t + n)) for t, n in dyadic]
        return [(first, end - first) for first, end in pairs if end > first]

    def nodes(self) -> list[Node]:
        """Return every node that holds active rounds; nodes that hold the same ones are one."""
        return list(dict.fromkeys(self._nodes(BinaryTree(self.span).nodes())))

    def encoder(self) -> Array:
        """C, shape (nodes, steps): row = indicator of the node's steps; no two are equal."""
        steps = np.arange(self.rounds)
        rows = [(steps >= first) & (steps < first + size) for first, size in self.nodes()]
        return np.stack(rows).astype(np.float64)

    def decoder(self) -> Array:
        """B, shape (steps, nodes)."""
        column = {node: i for i, node in enumerate(self.nodes())}
        matrix = np.zeros((self.rounds, len(column)))
        for step in range(self.rounds):
            matrix[step, [column[node] for node in self.prefix_nodes(step)]] = 1.0
        return matrix

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """That of all nodes, for this group alone, by the rules for any Gram matrix."""
        same_rounds(self.rounds, participation)
        encoder = self.encoder()
        return gram_sensitivity(encoder.T @ encoder, participation)

    def noise_program(self) -> NoiseProgram:
        """Keep the noise of the nodes of the prefix sum on a stack, a draw per node.

        Only the last node of a step is new. Had any other been the union of two nodes of the step
        before, then that step would have used the union, since ``prefix_nodes`` uses the fewest.
        What the stack's sum gains is the step's noise.
        """

        def ops(t: int) -> list[Op]:
            before = len(self.prefix_nodes(t - 1)) if t else 0
            last = len(self.prefix_nodes(t)) - 1
            return [
                Op(OUT, [(dropped, -1.0) for dropped in range(last, before)]),
                Op(last, draws=[(t, 1.0)]),
                Op(OUT, [(OUT, 1.0), (last, 1.0)]),
            ]

        def rows(rounds: int) -> int:
            return len(self.prefix_nodes(rounds - 1)) if rounds else 0

        # a step drops at most every node of a prefix sum, and adds one
        return NoiseProgram(self.rounds, ops, rows, lambda: math.sqrt(1 + self.span.bit_length()))

    def prefix_variance(self) -> Array:
        """The number of nodes in each prefix sum."""
        return np.array([float(len(self.prefix_nodes(step))) for step in range(self.rounds)])
