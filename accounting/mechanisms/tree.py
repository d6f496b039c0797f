"""Binary tree: noise on dyadic sums of rounds (Dwork et al. 2010, Chan et al. 2011).

Every complete dyadic block of rounds is a node with its own noise; the prefix sum of t rounds adds
the popcount(t) nodes of t's binary expansion (Kairouz et al. 2021, DP-FTRL). With
``restart_every = R`` a new tree begins every R rounds, at the noised sum where the last one ended.
Only complete nodes exist: rounds 1..1600 have 11 levels, not the 12 of a tree padded to 2048.

    C for 4 rounds (a row per node)    B (a row per prefix sum)
    1 . . .                            1 . . . . . .
    . 1 . .                            . . 1 . . . .
    1 1 . .                            . . 1 1 . . .
    . . 1 .                            . . . . . . 1
    . . . 1
    . . 1 1
    1 1 1 1

Blocks. A tree of n rounds is the complete trees of n's binary digits, largest first, each begun at
the noised sum where the last one ended; a restart does the same. So a forest, whatever its
restarts, is one sequence of complete trees, and every sum below runs over it.

Noise. A node holds y = (sum of its rounds) + z. Its estimate is

    u^ = v y + (1 - v) (u^_left + u^_right),     Var u^ = v,

with v = 1 for the vanilla tree (the node alone) and v = 1 / (2 - 2^-h) at height h for the online
estimator, which weights the node and its children by their inverse variances (Honaker 2015,
"Efficient use of differentially private binary trees", estimation from below). A prefix sum adds
the estimates of the complete trees that make it up.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import OneStream
from accounting.mechanisms.program import OUT, SCRATCH, NoiseProgram, Op
from accounting.participation import FixedOrder, Participation
from accounting.sensitivity import Array, Sensitivity, same_rounds

Scores = NDArray[np.int64]
"""Best score for 0, 1, 2, ... participations; negative where that many do not fit."""
Front = dict[int, Scores]
"""Scores by the earliest next round, counted from the end of what was scored."""
Estimator = Literal["vanilla", "online"]
"""How a tree's nodes make a prefix sum."""
_IMPOSSIBLE = np.int64(-(2**62))
_WEIGHT_BITS = 16  # bits of the online estimator's weights where its nodes are integers
_NODE, _AGAIN = SCRATCH, SCRATCH - 1  # registers of the estimate being made, and of a draw again
_KEPT = 3  # heights of vanilla nodes that are kept; a higher one is drawn again to be taken away


@dataclass(frozen=True, slots=True)
class Block:
    """A complete binary tree over 2^height rounds from ``first`` on."""

    first: int
    height: int

    @property
    def rounds(self) -> int:
        """Number of its leaves."""
        return int(2**self.height)

    def nodes(self) -> Iterator[tuple[int, int]]:
        """Yield (first leaf, leaves) of every node, from 0, in the order in which they complete."""
        for end in range(1, self.rounds + 1):
            size = 1
            while end % size == 0 and size <= end:
                yield end - size, size
                size *= 2


@dataclass(frozen=True, slots=True)
class BinaryTree(OneStream):
    """Tree aggregation over ``rounds`` rounds.

    Args:
        rounds: number of rounds n, 1 to a million.
        restart_every: rounds per tree, >= 1; None is one tree over all rounds.
        estimator: "vanilla" adds the nodes of t's binary expansion; "online" first improves each
            with its descendants (Honaker 2015): less noise, the same nodes, the same sensitivity.

    >>> from accounting import Participation
    >>> BinaryTree(1600).sensitivity(Participation(1600)).squared
    11.0
    """

    rounds: int
    restart_every: int | None = None
    estimator: Estimator = field(default="vanilla", kw_only=True)
    # the only values; they are part of the fingerprint, and so of every plan's hash
    completed: Literal[False] = field(default=False, kw_only=True)
    release: Literal["nodes"] = field(default="nodes", kw_only=True)

    name = "tree"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", checks.rounds(self.rounds))
        if self.restart_every is not None:
            length = checks.count("restart_every", self.restart_every)
            object.__setattr__(self, "restart_every", length)
        checks.choice("estimator", self.estimator, get_args(Estimator))
        if (self.completed, self.release) != (False, "nodes"):
            raise ConfigError("completed, release: must be False and 'nodes'; leave them out.")

    @classmethod
    def from_options(
        cls,
        participation: Participation,
        *,
        restart_every: int | None = None,
        estimator: Estimator = "vanilla",
    ) -> "BinaryTree":
        """Return the tree over the participation's rounds; options as for the class."""
        return cls(participation.rounds, restart_every, estimator=estimator)

    def blocks(self) -> list[Block]:
        """Return the forest as consecutive complete trees."""
        return forest(self.rounds, self.restart_every)

    def nodes(self) -> list[tuple[int, int]]:
        """Return the first round (from 0) and the rounds of every node, as they complete."""
        return [
            (block.first + leaf, size) for block in self.blocks() for leaf, size in block.nodes()
        ]

    def encoder(self) -> Array:
        """C, shape (nodes, n): row = indicator of the node's rounds."""
        rounds = np.arange(self.rounds)
        rows = [(rounds >= first) & (rounds < first + size) for first, size in self.nodes()]
        return np.stack(rows).astype(np.float64)

    def decoder(self) -> Array:
        """B, shape (n, nodes): the estimator's weights."""
        return node_decoder(self.blocks(), self.estimator)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Exact, by recursion over the tree, or over the places of a fixed order."""
        same_rounds(self.rounds, participation)
        rule = "levels of the tree" if participation.max_participations == 1 else "exact recursion"
        if isinstance(participation, FixedOrder):
            squared = places_sensitivity_squared(self.blocks(), participation)
            rule = "every place of the order"
        else:
            squared = forest_sensitivity_squared(self.blocks(), participation)
        return Sensitivity(float(squared), exact=True, rule=f"binary tree: {rule}")

    def noise_program(self) -> NoiseProgram:
        """Keep the estimates of the nodes of the prefix sum on a stack; see ``_push``.

        What the stack's sum gains is the round's noise, so the trees before a restart, whose sum
        stays, need not be kept. Each node is rounded by itself, so the released sums are functions
        of the noised nodes. A vanilla node is a draw, which can be made again: a high one, used
        twice in a long time, takes no memory in between.
        """
        length = min(self.restart_every or self.rounds, self.rounds)
        online = self.estimator == "online"
        kept = length.bit_length() if online else _KEPT

        def rows(rounds: int) -> int:
            leaves = (rounds - 1) % length + 1 if rounds else 0
            return (leaves % (1 << kept)).bit_count()

        def kept_draws(rounds: int) -> list[int]:
            """A vanilla node has the draw of its last round, which is the round's number."""
            if not rounds:
                return []
            tree, last = divmod(rounds - 1, length)
            nodes = _digits(tree * length, last + 1)
            return [node.first + node.rounds - 1 for node in nodes if node.height < kept]

        return NoiseProgram(
            self.rounds,
            ops=lambda t: _push(*divmod(t, length), length, kept, online=online),
            rows=rows,
            # a round adds one node and drops one of each height
            spread=lambda: math.sqrt(1 + length.bit_length()),
            weight_bits=_WEIGHT_BITS if online else 0,
            kept_draws=None if online else kept_draws,
            draws_again=not online,
        )

    def prefix_variance(self) -> Array:
        """Node variances over t's binary expansion, plus what the earlier trees ended with."""
        return prefix_variance(self.blocks(), self.estimator)


def forest(rounds: int, restart_every: int | None) -> list[Block]:
    """Return a run's blocks: the binary digits of each tree."""
    length = restart_every or rounds
    starts = range(0, rounds, length)
    return [b for start in starts for b in _digits(start, min(length, rounds - start))]


def _digits(start: int, length: int) -> Iterator[Block]:
    for height in reversed(range(length.bit_length())):
        if length >> height & 1:
            yield Block(start, height)
            start += 2**height


def _push(tree: int, leaf: int, leaves: int, kept: int, *, online: bool) -> list[Op]:
    """Complete a leaf and the nodes that end with it; OUT <- what the stack's sum gains.

    The stack has the estimates of the nodes below height ``kept`` that make up the prefix sum, one
    per binary digit 1 of the rounds. A pushed leaf merges as a binary counter carries: a node's
    estimate is v z + (1 - v)(left + right), of its children's estimates, with v its variance
    (Honaker 2015). For vanilla v = 1, and the node takes the place and the draw of its last leaf.
    Draws are numbered as leaves (vanilla) or nodes (online) complete. Each tree but the last has
    ``leaves``.
    """
    merges = (leaf + 1 & -(leaf + 1)).bit_length() - 1
    stacked = min(merges, kept)
    bottom = (leaf % (1 << kept)).bit_count() - stacked
    lefts = [bottom + i for i in reversed(range(stacked))]
    first = tree * leaves + leaf
    if online:
        first += tree * (leaves - leaves.bit_count()) + leaf - leaf.bit_count()
    if not lefts:
        return [Op(OUT, draws=[(first, 1.0)]), Op(bottom, [(OUT, 1.0)])]
    ops = [Op(_NODE, draws=[(first, 1.0)])]
    for height, left in enumerate(lefts if online else (), start=1):
        v = node_weight(height, "online")
        ops.append(Op(_NODE, [(_NODE, 1.0), (left, 1.0)]))
        ops.append(Op(_NODE, [(_NODE, 1 - v)], [(first + height, v)]))
    ops.append(Op(OUT, [(_NODE, 1.0), *((left, -1.0) for left in lefts)]))
    for height in range(kept, merges):  # the left node of this height ended 2^height leaves before
        ops.append(Op(_AGAIN, draws=[(first - (1 << height), 1.0)]))
        ops.append(Op(OUT, [(OUT, 1.0), (_AGAIN, -1.0)]))
    return ops if merges >= kept else [*ops, Op(bottom, [(_NODE, 1.0)])]


def node_weight(height: int, estimator: str) -> float:
    """Return v, the variance of a node's estimate at unit noise, as the weight of integers.

    A multiple of 2^-16, so that products are exact. The variance is least at v itself, so it is
    larger by less than 1e-9 of itself.
    """
    v = 1.0 / (2.0 - 2.0**-height) if estimator == "online" else 1.0
    return round(v * 2.0**_WEIGHT_BITS) / 2.0**_WEIGHT_BITS


def prefix_variance(blocks: list[Block], estimator: str) -> Array:
    """Return Var of each prefix sum, shape (n,), in O(n): sums over binary digits."""
    highest = max(block.height for block in blocks)
    estimates = [1.0]
    for height in range(1, highest + 1):
        v = node_weight(height, estimator)
        estimates.append(v**2 + 2 * (1 - v) ** 2 * estimates[-1])
    variance = np.array(estimates)
    sums = np.zeros(2 ** (highest + 1))  # of the variances of the binary digits of every index
    for height, node in enumerate(variance):
        sums[2**height : 2 ** (height + 1)] = node + sums[: 2**height]
    within = sums[1:]
    parts, before = [], 0.0
    for block in blocks:
        parts.append(before + within[: block.rounds])
        before += variance[block.height]
    return np.concatenate(parts)


def node_decoder(blocks: list[Block], estimator: str) -> Array:
    """Return B, shape (n, nodes): prefix sums from nodes in the order of ``Block.nodes``."""
    columns = sum(2 ** (block.height + 1) - 1 for block in blocks)
    rows, before, column = [], np.zeros(columns), 0
    for block in blocks:
        stack: list[tuple[int, Array]] = []
        for _ in range(block.rounds):
            height, estimate = 0, np.zeros(columns)
            estimate[column] = 1.0
            column += 1
            while stack and stack[-1][0] == height:
                height += 1
                v = node_weight(height, estimator)
                estimate = (1 - v) * (stack.pop()[1] + estimate)
                estimate[column] = v
                column += 1
            stack.append((height, estimate))
            rows.append(before + np.sum([e for _, e in stack], axis=0))
        before = before + stack[0][1]
    return np.stack(rows)


def forest_sensitivity_squared(blocks: Sequence[Block], participation: Participation) -> int:
    """Return max over participations of the sum over nodes of (participations inside)^2.

    Exact, by recursion over the tree. A node of at most ``min_separation`` rounds holds at most one
    participation, and wherever it sits there it lies in the same number of nodes; so a pattern is
    worth what the *set of such nodes* that it visits is worth, and visiting each as early as
    possible leaves the most room for the rest. The recursion therefore carries a single number, the
    earliest round (relative to the node) at which the next participation may happen, and keeps for
    each value of it the best score per number of participations. Early positions are sums of few
    multiples of b, so only a handful of values occur: n = 2048, k = 5, b = 410 takes milliseconds.
    """
    recursion = _Recursion(participation)
    front: Front = {0: np.zeros(1, np.int64)}
    for block in blocks:
        front = recursion.extend(front, block.height)
    return max(int(scores.max()) for scores in front.values())


def places_sensitivity_squared(blocks: Sequence[Block], participation: FixedOrder) -> int:
    """Return max over the places of an order of the sum over nodes of (participations inside)^2.

    In O(n log n) per level.
    """
    b = participation.min_separation
    totals = np.zeros(min(b, participation.rounds), np.int64)
    for block in blocks:
        leaves = np.arange(min(block.rounds, participation.max_participations * b - block.first))
        places = (block.first + leaves) % b
        for height in range(block.height + 1):
            owners = places * block.rounds + (leaves >> height)
            visited, times = np.unique(owners, return_counts=True)
            np.add.at(totals, visited // block.rounds, times**2)
    return int(totals.max())


class _Recursion:
    """Fronts of complete subtrees, cached by height and earliest start."""

    def __init__(self, participation: Participation) -> None:
        self.most = participation.max_participations
        self.separation = participation.min_separation
        self.fronts: dict[tuple[int, int], Front] = {}

    def extend(self, front: Front, height: int) -> Front:
        """Return the front of what ``front`` describes followed by a subtree."""
        longer: Front = {}
        for start, scores in front.items():
            for carry, inside in self.subtree(height, start).items():
                _keep_better(longer, carry, _max_plus(scores, inside)[: self.most + 1])
        return _undominated(longer)

    def subtree(self, height: int, start: int) -> Front:
        """Return the front of a subtree whose first ``start`` rounds are not available."""
        key = height, start
        if key not in self.fronts:
            single = 2**height <= self.separation
            self.fronts[key] = (self._single if single else self._split)(height, start)
        return self.fronts[key]

    def _single(self, height: int, start: int) -> Front:
        """At most one participation: the earliest, inside the nodes of every height."""
        leaves = 2**height
        front: Front = {max(0, start - leaves): np.zeros(1, np.int64)}
        if start < leaves:
            scores = np.array([_IMPOSSIBLE, height + 1], np.int64)
            _keep_better(front, max(0, start + self.separation - leaves), scores)
        return _undominated(front)

    def _split(self, height: int, start: int) -> Front:
        front = self.extend(self.subtree(height - 1, start), height - 1)
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
    front[carry] = _larger(front[carry], scores) if carry in front else scores


def _larger(one: Scores, other: Scores) -> Scores:
    short, long = sorted((one, other), key=len)
    merged = long.copy()
    merged[: len(short)] = np.maximum(merged[: len(short)], short)
    return merged


def _undominated(front: Front) -> Front:
    """Drop scores that an earlier next round also reaches."""
    better: Front = {}
    best = np.zeros(0, np.int64)
    for carry in sorted(front):
        scores = front[carry].copy()
        common = min(len(scores), len(best))
        scores[:common][scores[:common] <= best[:common]] = _IMPOSSIBLE
        if (scores >= 0).any():
            better[carry] = scores
            best = _larger(best, scores)
    return better
