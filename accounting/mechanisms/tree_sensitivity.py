"""Tree sensitivity: max over participations of the sum over nodes of (participations inside)^2.

Exact, by recursion over the tree. A node of at most ``min_separation`` rounds holds at most one
participation, and wherever it sits there it lies in the same number of nodes; so a pattern is
worth what the *set of such nodes* that it visits is worth, and visiting each as early as
possible leaves the most room for the rest. The recursion therefore carries a single number, the
earliest round (relative to the node) at which the next participation may happen, and keeps for
each value of it the best score per number of participations. Early positions are sums of few
multiples of b, so only a handful of values occur: n = 2048, k = 5, b = 410 takes milliseconds.

Where only the nodes of prefix sums count, a later round of such a node may lie in more of them; the
recursion then also keeps the next multiples of 2, 4, 8, ... rounds, which are all that can gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting.mechanisms.tree_blocks import Block
from accounting.participation import Participation

Scores = NDArray[np.int64]
"""Best score for 0, 1, 2, ... participations; negative where that many do not fit."""
Front = dict[int, Scores]
"""Earliest next round, relative to the end of what was scored -> scores."""

_IMPOSSIBLE = np.int64(-(2**62))


def forest_sensitivity_squared(
    blocks: Sequence[Block], participation: Participation, *, prefix_only: bool
) -> int:
    """Return the squared sensitivity of a forest.

    Args:
        blocks: see ``tree_blocks.forest``. Virtual leaves have no participation, but the nodes
            above real leaves count whether or not they are complete.
        participation: who may take part.
        prefix_only: count only the nodes that some prefix sum uses, which are the roots of the
            blocks and the left children (the nodes of Fenwick 1994); every leaf must be real.
    """
    recursion = _Recursion(participation, prefix_only=prefix_only)
    front: Front = {0: np.zeros(1, np.int64)}
    for block in blocks:
        front = recursion.extend(front, _Subtree(block.height, block.rounds, counted=True))
    return max(int(scores.max()) for scores in front.values())


@dataclass(frozen=True, slots=True)
class _Subtree:
    """2^height leaves, of which the first ``width`` are real; is its root's value released?"""

    height: int
    width: int
    counted: bool


class _Recursion:
    """Fronts of subtrees, remembered by shape and earliest start."""

    def __init__(self, participation: Participation, *, prefix_only: bool) -> None:
        self.most = participation.max_participations
        self.separation = participation.min_separation
        self.prefix_only = prefix_only
        self.known: dict[tuple[_Subtree, int], Front] = {}

    def extend(self, front: Front, subtree: _Subtree) -> Front:
        """Append a subtree to what ``front`` describes."""
        longer: Front = {}
        for start, scores in front.items():
            for carry, inside in self.subtree(subtree, start).items():
                _keep_better(longer, carry, _max_plus(scores, inside)[: self.most + 1])
        return _undominated(longer)

    def subtree(self, subtree: _Subtree, start: int) -> Front:
        """Front of one subtree whose first ``start`` rounds are not available."""
        key = subtree, start
        if key not in self.known:
            one = subtree.width <= self.separation
            self.known[key] = self._block(subtree, start) if one else self._split(subtree, start)
        return self.known[key]

    def _block(self, subtree: _Subtree, start: int) -> Front:
        """At most one participation: the earliest, or the earliest in more counted nodes."""
        front: Front = {max(0, start - subtree.width): np.zeros(1, np.int64)}
        for leaf in self._candidates(subtree, start):
            lefts = subtree.height - (leaf.bit_count() if self.prefix_only else 0)
            one = np.array([_IMPOSSIBLE, subtree.counted + lefts], np.int64)
            _keep_better(front, max(0, leaf + self.separation - subtree.width), one)
        return _undominated(front)

    def _candidates(self, subtree: _Subtree, start: int) -> list[int]:
        """``start`` and the next multiples of 2, 4, ...: no other leaf is in more left children."""
        heights = subtree.height if self.prefix_only else 0
        rounded = [((start >> bit) + 1) << bit for bit in range(heights)]
        return [leaf for leaf in (start, *rounded) if leaf < subtree.width]

    def _split(self, subtree: _Subtree, start: int) -> Front:
        height, half = subtree.height - 1, 2 ** (subtree.height - 1)
        front = self.subtree(_Subtree(height, min(half, subtree.width), counted=True), start)
        if subtree.width > half:
            right = _Subtree(height, subtree.width - half, counted=not self.prefix_only)
            front = self.extend(front, right)
        if not subtree.counted:
            return front
        return {
            carry: np.where(scores < 0, scores, scores + np.arange(len(scores)) ** 2)
            for carry, scores in front.items()
        }


def _max_plus(left: Scores, right: Scores) -> Scores:
    """Best score for each total number of participations."""
    if len(left) > len(right):
        left, right = right, left
    best = np.full(len(left) + len(right) - 1, _IMPOSSIBLE)
    for count, score in enumerate(left):
        if score >= 0:
            window = best[count : count + len(right)]
            np.maximum(window, score + right, out=window)
    return best


def _keep_better(front: Front, carry: int, scores: Scores) -> None:
    """Merge elementwise, so that each carry keeps the best score of each count."""
    old = front.get(carry)
    if old is None:
        front[carry] = scores
        return
    short, long = sorted((old, scores), key=len)
    merged = long.copy()
    merged[: len(short)] = np.maximum(merged[: len(short)], short)
    front[carry] = merged


def _undominated(front: Front) -> Front:
    """Drop scores that an earlier next round reaches as well."""
    kept: Front = {}
    best = np.zeros(0, np.int64)
    for carry in sorted(front):
        scores = front[carry].copy()
        common = min(len(scores), len(best))
        scores[:common][scores[:common] <= best[:common]] = _IMPOSSIBLE
        if (scores >= 0).any():
            kept[carry] = scores
            longer = np.full(max(len(best), len(scores)), _IMPOSSIBLE)
            longer[: len(best)] = best
            longer[: len(scores)] = np.maximum(longer[: len(scores)], scores)
            best = longer
    return kept
