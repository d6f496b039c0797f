"""Tree sensitivity: max over participations of the sum over nodes of (participations inside)^2.

Exact, by recursion over the tree. A node of at most ``min_separation`` rounds holds at most one
participation, and wherever it sits there it lies in the same number of nodes; so a pattern is
worth what the *set of such blocks* that it visits is worth, and visiting each as early as
possible leaves the most room for the rest. The recursion therefore carries a single number, the
earliest round (relative to the node) at which the next participation may happen, and keeps for
each value of it the best score per number of participations. Early positions are sums of few
multiples of b, so only a handful of values occur: n = 2048, k = 5, b = 410 takes milliseconds.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from accounting.participation import Participation

Scores = NDArray[np.int64]
"""Best score for 0, 1, 2, ... participations; negative where that many do not fit."""
Front = dict[int, Scores]
"""Earliest next round, relative to the end of what was scored -> scores."""

_IMPOSSIBLE = np.int64(-(2**62))


def forest_sensitivity_squared(tree_lengths: Sequence[int], participation: Participation) -> int:
    """Return the squared sensitivity of consecutive trees with the given numbers of rounds."""
    recursion = _Recursion(participation.max_participations, participation.min_separation)
    front: Front = {0: np.zeros(1, np.int64)}
    for height in _complete_subtrees(tree_lengths):
        front = recursion.extend(front, height)
    return max(int(scores.max()) for scores in front.values())


def _complete_subtrees(tree_lengths: Sequence[int]) -> Iterator[int]:
    """Heights of the maximal complete subtrees, left to right: the binary digits of each length."""
    for length in tree_lengths:
        for height in reversed(range(length.bit_length())):
            if length >> height & 1:
                yield height


class _Recursion:
    """Fronts of complete subtrees, remembered by height and earliest start."""

    def __init__(self, most: int, separation: int) -> None:
        self.most = most
        self.separation = separation
        self.known: dict[tuple[int, int], Front] = {}

    def extend(self, front: Front, height: int) -> Front:
        """Append a complete subtree to what ``front`` describes."""
        longer: Front = {}
        for start, scores in front.items():
            for carry, inside in self.subtree(height, start).items():
                _keep_better(longer, carry, _max_plus(scores, inside)[: self.most + 1])
        return _undominated(longer)

    def subtree(self, height: int, start: int) -> Front:
        """Front of one complete subtree whose first ``start`` rounds are not available."""
        key = height, start
        if key not in self.known:
            self.known[key] = (
                self._block(height, start)
                if 2**height <= self.separation
                else self._split(height, start)
            )
        return self.known[key]

    def _block(self, height: int, start: int) -> Front:
        size = 2**height
        front: Front = {max(0, start - size): np.zeros(1, np.int64)}
        if start < size:
            one = np.array([_IMPOSSIBLE, height + 1], np.int64)
            _keep_better(front, max(0, start + self.separation - size), one)
        return front

    def _split(self, height: int, start: int) -> Front:
        both = self.extend(self.subtree(height - 1, start), height - 1)
        return {
            carry: np.where(scores < 0, scores, scores + np.arange(len(scores)) ** 2)
            for carry, scores in both.items()
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
