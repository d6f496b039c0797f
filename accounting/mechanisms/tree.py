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
the noised sum where the last one ended; a restart does the same. So a forest, whatever its restarts
and completion, is one sequence of complete trees, and every sum below runs over it.

Completion (Kairouz et al. 2021) pads every tree but the last with virtual rounds, in which nobody
takes part, up to a power of two. The next tree then starts from one node instead of several. Every
node above the real rounds is released too, and its cost is counted.

Noise. A node holds y = (sum of its rounds) + z. Its estimate is

    u^ = v y + (1 - v) (u^_left + u^_right),     Var u^ = v,

with v = 1 for the vanilla tree (the node alone) and v = 1 / (2 - 2^-h) at height h for the online
estimator, which weights the node and its children by their inverse variances (Honaker 2015,
"Efficient use of differentially private binary trees", estimation from below). A prefix sum adds
the estimates of the complete trees that make it up.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import OneStream, prefix_sums
from accounting.mechanisms.program import OUT, SCRATCH, NoiseProgram, Op
from accounting.participation import FixedOrder, Participation
from accounting.sensitivity import Array, Sensitivity, gram_sensitivity, rounded_up, same_rounds

Scores = NDArray[np.int64]
"""Best score for 0, 1, 2, ... participations; negative where that many do not fit."""
Front = dict[int, Scores]
"""Scores by the earliest next round, counted from the end of what was scored."""
Estimator = Literal["vanilla", "online"]
"""How a tree's nodes make a prefix sum."""
Release = Literal["nodes", "prefix"]
"""What of a tree leaves the server."""
_IMPOSSIBLE = np.int64(-(2**62))
_MOST_DENSE_ROUNDS = 8192
_WEIGHT_BITS = 16
"""Bits of the online estimator's weights where its nodes are integers."""
_NODE = SCRATCH
"""Register of the estimate that is being made."""
_VIRTUAL = SCRATCH - 1
"""Register of the virtual rounds' noise."""
_VIRTUAL_STACK = SCRATCH - 2
"""Place p of the stack, where only virtual rounds reach it, is register ``_VIRTUAL_STACK`` - p."""


@dataclass(frozen=True, slots=True)
class Block:
    """A complete binary tree of 2^height leaves, of which the first ``rounds`` are real rounds."""

    first: int
    rounds: int
    height: int

    def nodes(self) -> Iterator[tuple[int, int]]:
        """Yield (first leaf, leaves) of every node, from 0, in the order in which they complete."""
        for end in range(1, 2**self.height + 1):
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
        completed: pad every tree but the last with virtual rounds of nobody up to a power of two,
            so that the next one starts from a single node; the padding's nodes are counted.
        release: what leaves the server. "nodes": all of them may (the default, and what the
            literature accounts). "prefix": only the noised prefix sums, or a function of them
            such as the model after each round; never a node, a virtual round's prefix sum, or the
            state of the noise. The covariance of that noise is B B^T = L L^T, so the release is
            L^-1 A x + z in law, with L lower triangular (the theorem for adaptive streams holds),
            and its squared sensitivity is max_u u^T A^T (B B^T)^-1 A u: 9/5 instead of 2 for two
            rounds with the online estimator.

    Raises:
        ConfigError: a value is out of range.

    >>> from accounting import Participation
    >>> BinaryTree(1600).sensitivity(Participation(1600)).squared
    11.0
    >>> thrifty = BinaryTree(2, estimator="online", release="prefix")
    >>> round(thrifty.sensitivity(Participation(2)).squared, 9)
    1.8
    """

    rounds: int
    restart_every: int | None = None
    estimator: Estimator = field(default="vanilla", kw_only=True)
    completed: bool = field(default=False, kw_only=True)
    release: Release = field(default="nodes", kw_only=True)

    name = "tree"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", checks.rounds(self.rounds))
        if self.restart_every is not None:
            length = checks.count("restart_every", self.restart_every)
            object.__setattr__(self, "restart_every", length)
        checks.choice("estimator", self.estimator, get_args(Estimator))
        checks.choice("release", self.release, get_args(Release))
        if not isinstance(self.completed, bool):
            raise ConfigError(f"completed={self.completed!r}: must be True or False.")

    @classmethod
    def from_options(
        cls,
        participation: Participation,
        *,
        restart_every: int | None = None,
        estimator: Estimator = "vanilla",
        completed: bool = False,
        release: Release = "nodes",
    ) -> "BinaryTree":
        """Return the tree over the participation's rounds; options as for the class.

        Raises:
            ConfigError: completed trees without a restart, which are one tree as it is.
        """
        if completed and restart_every is None:
            raise ConfigError("completed=True: is about restarts; say restart_every as well.")
        return cls(
            participation.rounds,
            restart_every,
            estimator=estimator,
            completed=completed,
            release=release,
        )

    @property
    def prefix_only(self) -> bool:  # type: ignore[override]
        """Whether it is accounted by its prefix sums."""
        return self.release == "prefix"

    def blocks(self) -> list[Block]:
        """Return the forest as consecutive complete trees."""
        return forest(self.rounds, self.restart_every, completed=self.completed)

    def nodes(self) -> list[tuple[int, int]]:
        """Return the first round (from 0) and the leaves of every node, as they complete.

        A completed tree's virtual leaves continue its numbering past its last real round.
        """
        return [
            (block.first + leaf, size) for block in self.blocks() for leaf, size in block.nodes()
        ]

    def encoder(self) -> Array:
        """C, shape (nodes, n): row = indicator of the node's rounds; or L^-1 A, shape (n, n)."""
        if self.release == "prefix":
            return self._effective_encoder()
        rows = []
        for block in self.blocks():
            for leaf, size in block.nodes():
                row = np.zeros(self.rounds)
                row[block.first + leaf : block.first + min(leaf + size, block.rounds)] = 1.0
                rows.append(row)
        return np.stack(rows)

    def decoder(self) -> Array:
        """B, shape (n, nodes): the estimator's weights; or L, shape (n, n), with the same B B^T."""
        if self.release == "prefix":
            return np.asarray(np.linalg.cholesky(self._covariance()), dtype=np.float64)
        return node_decoder(self.blocks(), self.estimator)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Squared sensitivity of what is released, by the rule that it names.

        Exact for "nodes", by recursion over the tree. For "prefix": exact by the same recursion
        over the nodes in use, if each prefix sum is a plain sum of nodes; otherwise from the
        matrix L^-1 A, in O(n^3) time: exact for k = 1 and where every pattern can be tried, else
        an upper bound, and never more than the exact value for "nodes".
        """
        same_rounds(self.rounds, participation)
        blocks = self.blocks()
        full = all(block.rounds == 2**block.height for block in blocks)
        if self.release == "prefix" and not (self.estimator == "vanilla" and full):
            return self._effective_sensitivity(participation)
        prefix_only = self.release == "prefix"
        rule = "levels of the tree" if participation.max_participations == 1 else "exact recursion"
        if isinstance(participation, FixedOrder):
            squared = places_sensitivity_squared(blocks, participation, prefix_only=prefix_only)
            rule = "every place of the order"
        else:
            squared = forest_sensitivity_squared(blocks, participation, prefix_only=prefix_only)
        return Sensitivity(float(squared), exact=True, rule=f"binary tree: {rule}")

    def noise_program(self) -> NoiseProgram:
        """Keep the estimates of the nodes of the prefix sum on a stack; see ``_Stack``.

        What the stack's sum gains is the round's noise, so the trees before a restart, whose sum
        stays, need not be kept. Virtual rounds of a completed tree add to the next real round. With
        ``release="prefix"`` the noise is the same: its covariance is ``decoder() @ decoder().T``,
        though it takes more draws than L has columns.

        Where a node is rounded by itself, the released sums are functions of the noised nodes. That
        is enough if the nodes may be released, and for the vanilla tree in any case, since its
        prefix sums determine the nodes in use. The online tree of ``release="prefix"`` and the
        completed tree are rounded at the output, so that they are functions of the noised prefix
        sums alone.
        """
        length = min(self.restart_every or self.rounds, self.rounds)
        leaves = 2 ** (length - 1).bit_length() if self.completed else length
        height = (length + 1).bit_length() - 1
        online = self.estimator == "online"
        by_node = not self.completed and (self.release == "nodes" or not online)
        stack = _Stack(leaves, height, online=online, dyadic=self.release == "nodes")

        def ops(t: int) -> list[Op]:
            tree, leaf = divmod(t, length)
            if not tree or leaf or leaves == length:
                return stack.push(tree, leaf)
            completed = [Op(_VIRTUAL)]
            for virtual in range(length, leaves):
                pushed = stack.push(tree - 1, virtual)
                completed += [*pushed, Op(_VIRTUAL, [(_VIRTUAL, 1.0), (OUT, 1.0)])]
            return [*completed, *stack.push(tree, 0), Op(OUT, [(OUT, 1.0), (_VIRTUAL, 1.0)])]

        def rows(rounds: int) -> int:
            return ((rounds - 1) % length + 1).bit_count() if rounds else 0

        def kept_draws(rounds: int) -> list[int]:
            """A vanilla node has the draw of its last round, which is the round's number."""
            if not rounds:
                return []
            tree, last = divmod(rounds - 1, length)
            nodes = _digits(tree * length, last + 1)
            return [node.first + node.rounds - 1 for node in nodes]

        draws_kept = not (online or self.completed)
        return NoiseProgram(
            self.rounds,
            ops,
            rows,
            # a round adds one node and drops one of each height; virtual rounds do so twice
            spread=lambda: (4 if self.completed else 1) * math.sqrt(1 + leaves.bit_length()),
            rounded="draws" if by_node else "output",
            weight_bits=_WEIGHT_BITS if by_node and online else 0,
            kept_draws=kept_draws if draws_kept else None,
            draws_again=draws_kept,
        )

    def prefix_variance(self) -> Array:
        """Node variances over t's binary expansion, plus what the earlier trees ended with."""
        weight = node_weight if self.release == "nodes" else node_variance
        return prefix_variance(self.blocks(), self.estimator, weight)

    def _effective_sensitivity(self, participation: Participation) -> Sensitivity:
        encoder = self._effective_encoder()
        bound = gram_sensitivity(encoder.T @ encoder, participation)
        squared = rounded_up(bound.squared, self.rounds**2)  # the factorisation's rounding
        rule = f"prefix sums of the tree: {bound.rule}"
        nodes = replace(self, release="nodes").sensitivity(participation)
        if nodes.squared < squared:  # a function of the nodes costs no more than the nodes
            squared, rule = nodes.squared, rule if bound.exact else f"at most {nodes.rule}"
        return Sensitivity(squared, exact=bound.exact, rule=rule)

    def _effective_encoder(self) -> Array:
        from scipy.linalg import solve_triangular

        lower = np.linalg.cholesky(self._covariance())
        solved = solve_triangular(lower, prefix_sums(self.rounds), lower=True, check_finite=False)
        return np.asarray(np.tril(solved), dtype=np.float64)

    def _covariance(self) -> Array:
        if self.rounds > _MOST_DENSE_ROUNDS:
            raise ConfigError(
                f"rounds={self.rounds}: release='prefix' works on n x n matrices here, up to "
                f"{_MOST_DENSE_ROUNDS} rounds. Use release='nodes'."
            )
        return prefix_covariance(self.blocks(), self.estimator)


def forest(rounds: int, restart_every: int | None, *, completed: bool) -> list[Block]:
    """Return a run's blocks: each tree's digits, or one padded block per completed tree."""
    length = restart_every or rounds
    blocks: list[Block] = []
    for start in range(0, rounds, length):
        if completed and start + length < rounds:
            blocks.append(Block(start, length, (length - 1).bit_length()))
        else:
            blocks.extend(_digits(start, min(length, rounds - start)))
    return blocks


def _digits(start: int, length: int) -> Iterator[Block]:
    for height in reversed(range(length.bit_length())):
        if length >> height & 1:
            yield Block(start, 2**height, height)
            start += 2**height


@dataclass(frozen=True, slots=True)
class _Stack:
    """Estimates of the nodes that make up the prefix sum, one per binary digit 1 of the rounds.

    A node's estimate is v z + (1 - v)(left + right), where left and right are the estimates of its
    children and v its variance (Honaker 2015). For vanilla v = 1, and the node takes the place and
    the draw of its last leaf. A pushed leaf merges as a binary counter carries. Draws are numbered
    as leaves (vanilla) or nodes (online) complete.

    Attributes:
        leaves: of each tree but the last, virtual ones included.
        kept: registers that keep their value between rounds; the virtual rounds may need more.
        online: the estimator.
        dyadic: whether weights are those of ``node_weight``, as ``node_decoder``'s are.
    """

    leaves: int
    kept: int
    online: bool
    dyadic: bool

    def push(self, tree: int, leaf: int) -> list[Op]:
        """Complete a leaf and the nodes that end with it; OUT <- what the stack's sum gains."""
        merges = (leaf + 1 & -(leaf + 1)).bit_length() - 1
        bottom = leaf.bit_count() - merges
        lefts = [self._register(bottom + i) for i in reversed(range(merges))]
        first = self._draws_before(tree, leaf)
        if not lefts:
            return [Op(OUT, draws=[(first, 1.0)]), Op(self._register(bottom), [(OUT, 1.0)])]
        ops = [Op(_NODE, draws=[(first, 1.0)])]
        for height, left in enumerate(lefts if self.online else (), start=1):
            v = node_weight(height, "online") if self.dyadic else node_variance(height, "online")
            ops.append(Op(_NODE, [(_NODE, 1.0), (left, 1.0)]))
            ops.append(Op(_NODE, [(_NODE, 1 - v)], [(first + height, v)]))
        gain = [(_NODE, 1.0), *((left, -1.0) for left in lefts)]
        return [*ops, Op(OUT, gain), Op(self._register(bottom), [(_NODE, 1.0)])]

    def _register(self, place: int) -> int:
        return place if place < self.kept else _VIRTUAL_STACK - place

    def _draws_before(self, tree: int, leaf: int) -> int:
        if not self.online:
            return tree * self.leaves + leaf
        return tree * (2 * self.leaves - self.leaves.bit_count()) + 2 * leaf - leaf.bit_count()


def node_variance(height: int, estimator: str) -> float:
    """Return v, the variance of a node's estimate at unit noise."""
    return 1.0 / (2.0 - 2.0**-height) if estimator == "online" else 1.0


def node_weight(height: int, estimator: str) -> float:
    """Return v as the weight of integers: a multiple of 2^-16, so that products are exact.

    The variance is least at ``node_variance``, so it is larger by less than 1e-9 of itself.
    """
    return round(node_variance(height, estimator) * 2.0**_WEIGHT_BITS) / 2.0**_WEIGHT_BITS


def prefix_variance(
    blocks: list[Block], estimator: str, weight: Callable[[int, str], float]
) -> Array:
    """Return Var of each prefix sum, shape (n,), in O(n): sums over binary digits.

    Args:
        blocks: see ``forest``.
        estimator: see ``BinaryTree``.
        weight: ``node_variance``, or ``node_weight`` where nodes are integers.
    """
    highest = max(block.height for block in blocks)
    estimates = [1.0]
    for height in range(1, highest + 1):
        v = weight(height, estimator)
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
        for leaf in range(2**block.height):
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
            if leaf < block.rounds:
                rows.append(before + np.sum([e for _, e in stack], axis=0))
        before = before + stack[0][1]
    return np.stack(rows)


def prefix_covariance(blocks: list[Block], estimator: str) -> Array:
    """Return B B^T, shape (n, n), in O(n^2) without building B."""
    size = blocks[-1].first + blocks[-1].rounds
    covariance = np.zeros((size, size))
    before = np.zeros(size)  # covariance of the sum at which the next block starts with each row
    variance = 0.0
    for block in blocks:
        start, end = block.first, block.first + block.rounds
        inside = _block_covariance(block.height, estimator)[: block.rounds]
        covariance[start:end, :start] = before[:start]
        covariance[:start, start:end] = before[:start, None]
        covariance[start:end, start:end] = variance + inside[:, : block.rounds]
        before[start:end] = variance + inside[:, -1]
        variance += node_variance(block.height, estimator)
    return covariance


def _block_covariance(height: int, estimator: str) -> Array:
    """Covariance of the prefix sums of a complete tree; the last one is its root's estimate."""
    covariance = np.ones((1, 1))
    for level in range(1, height + 1):
        left = node_variance(level - 1, estimator)
        root = node_variance(level, estimator)
        across = np.tile(covariance[:, -1:], len(covariance))
        covariance = np.block([[covariance, across], [across.T, left + covariance]])
        covariance[-1] *= 1 - root
        covariance[:, -1] = covariance[-1]
        covariance[-1, -1] = root
    return covariance


def forest_sensitivity_squared(
    blocks: Sequence[Block], participation: Participation, *, prefix_only: bool
) -> int:
    """Return max over participations of the sum over nodes of (participations inside)^2.

    Exact, by recursion over the tree. A node of at most ``min_separation`` rounds holds at most one
    participation, and wherever it sits there it lies in the same number of nodes; so a pattern is
    worth what the *set of such nodes* that it visits is worth, and visiting each as early as
    possible leaves the most room for the rest. The recursion therefore carries a single number, the
    earliest round (relative to the node) at which the next participation may happen, and keeps for
    each value of it the best score per number of participations. Early positions are sums of few
    multiples of b, so only a handful of values occur: n = 2048, k = 5, b = 410 takes milliseconds.

    Where only the nodes of prefix sums count, a later round of such a node may lie in more of them;
    the recursion then also keeps the next multiples of 2, 4, 8, ... rounds, which are all that can
    gain.

    Args:
        blocks: see ``forest``. Virtual leaves have no participation, but the nodes above real
            leaves count whether or not they are complete.
        participation: how often one client may take part.
        prefix_only: count only the nodes that some prefix sum uses, which are the roots of the
            blocks and the left children (the nodes of Fenwick 1994); every leaf must be real.
    """
    recursion = _Recursion(participation, prefix_only=prefix_only)
    front: Front = {0: np.zeros(1, np.int64)}
    for block in blocks:
        front = recursion.extend(front, _Subtree(block.height, block.rounds, counted=True))
    return max(int(scores.max()) for scores in front.values())


def places_sensitivity_squared(
    blocks: Sequence[Block], participation: FixedOrder, *, prefix_only: bool
) -> int:
    """Return max over the places of an order of the sum over nodes of (participations inside)^2.

    Arguments as for ``forest_sensitivity_squared``. In O(n log n) per level.
    """
    b = participation.min_separation
    totals = np.zeros(min(b, participation.rounds), np.int64)
    for block in blocks:
        leaves = np.arange(min(block.rounds, participation.max_participations * b - block.first))
        places = (block.first + leaves) % b
        for height in range(block.height + 1):
            nodes = leaves >> height
            used = nodes % 2 == 0 if prefix_only and height < block.height else nodes >= 0
            owners = places[used] * block.rounds + nodes[used]
            visited, times = np.unique(owners, return_counts=True)
            np.add.at(totals, visited // block.rounds, times**2)
    return int(totals.max())


@dataclass(frozen=True, slots=True)
class _Subtree:
    """2^height leaves, of which the first ``width`` are real; ``counted`` if its root counts."""

    height: int
    width: int
    counted: bool


class _Recursion:
    """Fronts of subtrees, cached by shape and earliest start."""

    def __init__(self, participation: Participation, *, prefix_only: bool) -> None:
        self.most = participation.max_participations
        self.separation = participation.min_separation
        self.prefix_only = prefix_only
        self.known: dict[tuple[_Subtree, int], Front] = {}

    def extend(self, front: Front, subtree: _Subtree) -> Front:
        """Return the front of what ``front`` describes followed by a subtree."""
        longer: Front = {}
        for start, scores in front.items():
            for carry, inside in self.subtree(subtree, start).items():
                _keep_better(longer, carry, _max_plus(scores, inside)[: self.most + 1])
        return _undominated(longer)

    def subtree(self, subtree: _Subtree, start: int) -> Front:
        """Return the front of a subtree whose first ``start`` rounds are not available."""
        key = subtree, start
        if key not in self.known:
            single = subtree.width <= self.separation
            self.known[key] = self._block(subtree, start) if single else self._split(subtree, start)
        return self.known[key]

    def _block(self, subtree: _Subtree, start: int) -> Front:
        """At most one participation: the earliest, or the earliest in more counted nodes."""
        front: Front = {max(0, start - subtree.width): np.zeros(1, np.int64)}
        for leaf in self._candidates(subtree, start):
            lefts = subtree.height - (leaf.bit_count() if self.prefix_only else 0)
            single = np.array([_IMPOSSIBLE, subtree.counted + lefts], np.int64)
            _keep_better(front, max(0, leaf + self.separation - subtree.width), single)
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
    """Drop scores that an earlier next round also reaches."""
    better: Front = {}
    best = np.zeros(0, np.int64)
    for carry in sorted(front):
        scores = front[carry].copy()
        common = min(len(scores), len(best))
        scores[:common][scores[:common] <= best[:common]] = _IMPOSSIBLE
        if (scores >= 0).any():
            better[carry] = scores
            longer = np.full(max(len(best), len(scores)), _IMPOSSIBLE)
            longer[: len(best)] = best
            longer[: len(scores)] = np.maximum(longer[: len(scores)], scores)
            best = longer
    return better
