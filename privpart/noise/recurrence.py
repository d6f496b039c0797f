"""Recurrence: how each mechanism's noise follows from its draws, a round at a time.

Every recurrence is linear and works on each coordinate alone, so it runs on any slice of the
coordinates. What it keeps between rounds is rows of one table, and which row holds what follows
from the number of rounds alone. The formulas are those of the mechanisms' docstrings.
"""

from collections.abc import Callable
from itertools import takewhile
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    Dense,
    Grouped,
    Independent,
    Mechanism,
    PrunedTree,
    Toeplitz,
)
from accounting.checks import ConfigError
from accounting.mechanisms.tree import node_variance

Draw = Callable[[int, Tensor], None]
"""Write draw number i, already scaled, into a vector."""


class Recurrence(Protocol):
    """The noise of the rounds' sums for one slice of c coordinates."""

    @property
    def vectors(self) -> int:
        """Rows of the state: the most vectors kept between two rounds."""
        ...

    def kept(self, rounds: int) -> int:
        """Rows that matter after so many rounds; they are the first ones."""
        ...

    def step(self, t: int, draw: Draw, state: Tensor, out: Tensor) -> None:
        """Write round t's noise (from 0) into ``out``, shape (c,); update ``state``, (vectors, c).

        ``state`` is zero before round 0.
        """
        ...


def recurrence(mechanism: Mechanism) -> Recurrence:
    """Return the recurrence of a mechanism of the accounting package."""
    if isinstance(mechanism, Independent):
        return IndependentNoise()
    if isinstance(mechanism, BinaryTree):
        return TreeNoise(mechanism)
    if isinstance(mechanism, BufferedToeplitz):
        return BufferedNoise(mechanism)
    if isinstance(mechanism, Toeplitz):
        return ToeplitzNoise(mechanism)
    if isinstance(mechanism, Dense):
        return DenseNoise(mechanism)
    if isinstance(mechanism, PrunedTree):
        return PrunedNoise(mechanism)
    if isinstance(mechanism, Grouped):
        raise ConfigError("mechanism=grouped: its noise is a GroupedNoise, a stream per group.")
    raise ConfigError(f"mechanism={mechanism!r}: must be a mechanism of the accounting package.")


class IndependentNoise:
    """y_t = z_t."""

    vectors = 0

    def kept(self, rounds: int) -> int:
        """Nothing."""
        return 0

    def step(self, t: int, draw: Draw, state: Tensor, out: Tensor) -> None:
        """One draw."""
        draw(t, out)


class BufferedNoise:
    """y_t = z_t - sum_i omega_i s_i, then s_i <- theta_i s_i + y_t."""

    def __init__(self, blt: BufferedToeplitz) -> None:
        self.vectors = blt.buffers
        self.decay, self.scale = blt.decay, blt.scale

    def kept(self, rounds: int) -> int:
        """All buffers."""
        return self.vectors if rounds else 0

    def step(self, t: int, draw: Draw, state: Tensor, out: Tensor) -> None:
        """One draw, two passes per buffer."""
        draw(t, out)
        for buffer, scale in zip(state, self.scale, strict=True):
            out.sub_(buffer, alpha=scale)
        decay = state.new_tensor(self.decay)[:, None]
        torch.addcmul(out.expand_as(state), state, decay, out=state)


class ToeplitzNoise:
    """x_t = z_t - sum_j (c_j / c_0) x_{t-j} in a ring, and y_t = x_t / c_0.

    With columns of unit norm y_t = x_t norm_t / c_0, where norm_t is that of column t.
    """

    def __init__(self, toeplitz: Toeplitz) -> None:
        self.vectors = toeplitz.bands - 1
        first = toeplitz.coefficients[0]
        self.past = [c / first for c in toeplitz.coefficients[1 : toeplitz.bands]]
        norms = toeplitz.column_norms() if toeplitz.normalize_columns else np.ones(toeplitz.rounds)
        self.weights = (norms / first).tolist()

    def kept(self, rounds: int) -> int:
        """The last bands - 1 vectors, in a ring."""
        return min(rounds, self.vectors)

    def step(self, t: int, draw: Draw, state: Tensor, out: Tensor) -> None:
        """One draw, one pass per band."""
        draw(t, out)
        for lag, coefficient in enumerate(self.past[:t], start=1):
            out.sub_(state[(t - lag) % self.vectors], alpha=coefficient)
        if self.vectors:
            state[t % self.vectors].copy_(out)
        if self.weights[t] != 1:
            out.mul_(self.weights[t])


class DenseNoise:
    """y_t = (z_t - sum_{j<t} C_tj y_j) / C_tt."""

    def __init__(self, dense: Dense) -> None:
        self.vectors = dense.rounds - 1
        self.matrix = dense.matrix.tolist()

    def kept(self, rounds: int) -> int:
        """Every earlier vector; the last round's is not needed again."""
        return min(rounds, self.vectors)

    def step(self, t: int, draw: Draw, state: Tensor, out: Tensor) -> None:
        """One draw, one pass per earlier round."""
        draw(t, out)
        for j in range(t):
            out.sub_(state[j], alpha=self.matrix[t][j])
        out.div_(self.matrix[t][t])
        if t < self.vectors:
            state[t].copy_(out)


class TreeNoise:
    """Estimates of the nodes that make up the prefix sum, on a stack of one per binary digit.

    A node's estimate is v z + (1 - v)(left + right), where left and right are the estimates of its
    children and v its variance (Honaker 2015); v = 1 if vanilla, whose leaf draw serves as z since
    the node takes the leaf's place. A round pushes a leaf, which merges as a binary counter
    carries. What the stack's sum gains is the round's noise, so the trees before a restart, whose
    sum stays, need not be kept. Virtual rounds of a completed tree add to the next real round.
    """

    def __init__(self, tree: BinaryTree) -> None:
        self.length = min(tree.restart_every or tree.rounds, tree.rounds)
        self.leaves = 2 ** (self.length - 1).bit_length() if tree.completed else self.length
        self.online = tree.estimator == "online"
        self.vectors = (self.length + 1).bit_length() - 1

    def kept(self, rounds: int) -> int:
        """One vector per binary digit 1 of the rounds in the current tree."""
        return ((rounds - 1) % self.length + 1).bit_count() if rounds else 0

    def step(self, t: int, draw: Draw, state: Tensor, out: Tensor) -> None:
        """One draw per leaf (vanilla) or node (online) that the round completes."""
        tree, leaf = divmod(t, self.length)
        virtual = self._complete(tree - 1, draw, state, out) if tree and leaf == 0 else None
        self._push(tree, leaf, draw, list(state), out)
        if virtual is not None:
            out.add_(virtual)

    def _complete(self, tree: int, draw: Draw, state: Tensor, out: Tensor) -> Tensor | None:
        """What the virtual rounds after a tree's last real one add to its sum."""
        if self.length == self.leaves:
            return None
        stack = [*state, *out.new_empty(self.leaves.bit_length() - 1 - self.vectors, len(out))]
        total = torch.zeros_like(out)
        for leaf in range(self.length, self.leaves):
            self._push(tree, leaf, draw, stack, out)
            total.add_(out)
        return total

    def _push(self, tree: int, leaf: int, draw: Draw, stack: list[Tensor], out: Tensor) -> None:
        """Complete a leaf and the nodes that end with it; write what the stack's sum gains."""
        merges = (leaf + 1 & -(leaf + 1)).bit_length() - 1
        bottom = leaf.bit_count() - merges
        first = self._draws(tree, leaf)
        if merges == 0:
            draw(first, out)
            stack[bottom].copy_(out)
            return
        left_ones = stack[bottom : bottom + merges][::-1]
        estimate = torch.empty_like(out)
        draw(first, estimate)
        if self.online:
            for height, left in enumerate(left_ones, start=1):
                v = node_variance(height, "online")
                draw(first + height, out)
                estimate.add_(left).mul_(1 - v).add_(out, alpha=v)
        torch.sub(estimate, left_ones[0], out=out)
        for left in left_ones[1:]:
            out.sub_(left)
        stack[bottom].copy_(estimate)

    def _draws(self, tree: int, leaf: int) -> int:
        """Draws before that leaf: leaves (vanilla) or nodes (online) completed so far."""
        if not self.online:
            return tree * self.leaves + leaf
        return tree * _nodes(self.leaves) + _nodes(leaf)


class PrunedNoise:
    """The noise of the nodes that make up the prefix sum, on a stack; see ``PrunedTree``.

    What a step adds to the stack, less what it drops, is the step's noise.
    """

    def __init__(self, tree: PrunedTree) -> None:
        self.stacks = [tree.prefix_nodes(step) for step in range(tree.rounds)]
        self.vectors = max(map(len, self.stacks))
        nodes = dict.fromkeys(node for stack in self.stacks for node in stack)
        self.drawn = {node: index for index, node in enumerate(nodes)}

    def kept(self, rounds: int) -> int:
        """One vector per node of the prefix sum."""
        return len(self.stacks[rounds - 1]) if rounds else 0

    def step(self, t: int, draw: Draw, state: Tensor, out: Tensor) -> None:
        """One draw per node that is new."""
        old, new = self.stacks[t - 1] if t else [], self.stacks[t]
        same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))])
        out.zero_()
        for dropped in state[same : len(old)]:
            out.sub_(dropped)
        for place, node in enumerate(new[same:], start=same):
            draw(self.drawn[node], state[place])
            out.add_(state[place])


def _nodes(leaves: int) -> int:
    """Complete nodes over so many leaves."""
    return 2 * leaves - leaves.bit_count()
