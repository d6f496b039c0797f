"""Noise stream: the correlated noise of a mechanism, one flat vector per round.

``next()`` is the noise of this round's *sum*: the difference of two consecutive prefix-sum noises
(B z)_t - (B z)_{t-1}. The server adds it to the round's sum; the sums of the noised sums are then
exactly the prefix sums that the mechanism promises.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from accounting import BinaryTree, Independent, Mechanism, checks
from accounting.checks import ConfigError
from privpart.keystream import NoiseSource

_LEAST = 1e-30


class NoiseStream:
    """The noise that the server adds, in memory of at most log2(rounds) + 1 vectors.

    Args:
        mechanism: the object that the accountant reads its sensitivity from.
        dim: length d of the trainable part, >= 1.
        stddev: of one i.i.d. coordinate that enters the mechanism: noise_multiplier x clip_norm.
        source: of the i.i.d. draws; round t (from 0) uses draw t.

    Raises:
        ConfigError: a value out of range, a mechanism without stream, or more rounds than planned
            (one more round could open a new level of the tree, which nobody accounted for).
    """

    def __init__(
        self, mechanism: Mechanism, *, dim: int, stddev: float, source: NoiseSource
    ) -> None:
        self.mechanism = mechanism
        self.dim = checks.count("dim", dim)
        self.stddev = checks.positive("stddev", stddev)
        if self.stddev < _LEAST:
            raise ConfigError(f"stddev={stddev:g}: must be at least {_LEAST:g}, or floats lose it.")
        source.claim()
        self.source = source
        self.round = 0
        self._rounds_left_in_tree = _tree_lengths(mechanism)
        self._left = 0
        self._finished: Tensor | None = None
        self._nodes: list[tuple[int, Tensor]] = []

    def next(self) -> Tensor:
        """Return the noise of this round's sum, shape (d,), float32, and go to the next round."""
        if self.round >= self.mechanism.rounds:
            raise ConfigError(
                f"the noise of all {self.mechanism.rounds} planned rounds is used up: another "
                "round is not covered by the guarantee. Plan more rounds from the start."
            )
        if self._left == 0:
            self._begin_tree()
        fresh = self.source.normal(self.round, self.dim) * self.stddev
        noise, size = fresh.clone(), 1
        # A node completes when its right half does: it replaces its left half and all below.
        while self._nodes and self._nodes[-1][0] == size:
            noise -= self._nodes.pop()[1]
            size *= 2
        self._nodes.append((size, fresh))
        self.round += 1
        self._left -= 1
        return noise

    def cumulative(self) -> Tensor:
        """Return the noise on the prefix sum so far: the sum of all ``next()``, shape (d,)."""
        total = torch.zeros(self.dim) if self._finished is None else self._finished.clone()
        for _, node in self._nodes:
            total += node
        return total

    def _begin_tree(self) -> None:
        """A new tree stands on the noised sum where the last one ended, never on the clean one."""
        if self._nodes:
            self._finished = self.cumulative()
            self._nodes = []
        self._left = next(self._rounds_left_in_tree)


def _tree_lengths(mechanism: Mechanism) -> Iterator[int]:
    rounds = mechanism.rounds
    if isinstance(mechanism, Independent):  # trees of a single leaf
        return iter([1] * rounds)
    if isinstance(mechanism, BinaryTree) and _plain(mechanism):
        every = mechanism.restart_every or rounds
        return (min(every, rounds - start) for start in range(0, rounds, every))
    raise ConfigError(
        f"no noise stream for {mechanism!r} yet: use Independent, or a BinaryTree with the vanilla "
        "estimator and without completion."
    )


def _plain(tree: BinaryTree) -> bool:
    return tree.estimator == "vanilla" and not tree.completed
