"""Binary tree aggregation: noise on dyadic sums of rounds (Dwork et al. 2010, Chan et al. 2011).

Every complete dyadic block of rounds is a node with its own noise; the prefix sum of t rounds adds
the popcount(t) nodes of t's binary expansion (Kairouz et al. 2021, DP-FTRL). With
``restart_every = R`` a new tree begins every R rounds at the noised sum where the last one ended.

Only complete nodes exist: rounds 1..1600 have 11 levels, not the 12 of a tree padded to 2048.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from accounting import checks
from accounting.checks import ConfigError
from accounting.gram_sensitivity import gram_sensitivity
from accounting.mechanisms import tree_noise
from accounting.mechanisms.mechanism import prefix_sums, record
from accounting.mechanisms.tree_blocks import Block, forest
from accounting.mechanisms.tree_sensitivity import forest_sensitivity_squared
from accounting.participation import Participation
from accounting.sensitivity import Sensitivity, rounded_up, same_rounds

_MOST_DENSE_ROUNDS = 8192


@dataclass(frozen=True, slots=True)
class BinaryTree:
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

    Streaming noise, for each round (then for each virtual one, if the tree is completed): draw the
    leaf's z; while the top of the stack has the same height h as the current node, pop it, draw a
    z for the parent, and set u = z + (u_left + u_right) / 2 (online) or u = z (vanilla) at height
    h + 1; push. The noise of the prefix sum is ``base`` + the sum of v_h u over the stack, with
    v_h = 1 / (2 - 2^-h) (online) or 1 (vanilla). When a tree ends, that becomes the next ``base``.
    Draws come in the order of ``nodes()``. With ``release="prefix"`` this is the same noise: its
    covariance is ``decoder() @ decoder().T``, though it takes more draws than L has columns.

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
    estimator: Literal["vanilla", "online"] = field(default="vanilla", kw_only=True)
    completed: bool = field(default=False, kw_only=True)
    release: Literal["nodes", "prefix"] = field(default="nodes", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", checks.rounds(self.rounds))
        if self.restart_every is not None:
            every = checks.count("restart_every", self.restart_every)
            object.__setattr__(self, "restart_every", every)
        checks.choice("estimator", self.estimator, ("vanilla", "online"))
        checks.choice("release", self.release, ("nodes", "prefix"))
        if not isinstance(self.completed, bool):
            raise ConfigError(f"completed={self.completed!r}: must be True or False.")

    @property
    def name(self) -> str:
        """Short name, as on the command line."""
        return "tree"

    def to_dict(self) -> dict[str, Any]:
        """Every field, for JSON; see ``mechanism_from_dict``."""
        return record(self)

    def blocks(self) -> list[Block]:
        """The forest as consecutive complete trees."""
        return forest(self.rounds, self.restart_every, completed=self.completed)

    def nodes(self) -> list[tuple[int, int]]:
        """First round (from 0) and leaves of every node, in the order in which they complete.

        A completed tree's virtual leaves continue its numbering past its last real round.
        """
        return [
            (block.first + leaf, size) for block in self.blocks() for leaf, size in block.nodes()
        ]

    def encoder(self) -> NDArray[np.float64]:
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

    def decoder(self) -> NDArray[np.float64]:
        """B, shape (n, nodes): the estimator's weights; or L, shape (n, n), with the same B B^T."""
        if self.release == "prefix":
            return np.asarray(np.linalg.cholesky(self._covariance()), dtype=np.float64)
        return tree_noise.node_decoder(self.blocks(), self.estimator)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Squared sensitivity of what is released, by the rule that it names.

        Exact for "nodes", by recursion over the tree. For "prefix": exact by the same recursion
        over the nodes in use, if each prefix sum is a plain sum of nodes; otherwise from the
        matrix L^-1 A, in O(n^3) time: exact for k = 1 and where every pattern can be tried, else
        an upper bound, and never more than the exact value for "nodes".
        """
        same_rounds(self.rounds, participation)
        blocks = self.blocks()
        whole = all(block.rounds == 2**block.height for block in blocks)
        if self.release == "prefix" and not (self.estimator == "vanilla" and whole):
            return self._effective_sensitivity(participation)
        prefix_only = self.release == "prefix"
        squared = forest_sensitivity_squared(blocks, participation, prefix_only=prefix_only)
        rule = "levels of the tree" if participation.max_participations == 1 else "exact recursion"
        return Sensitivity(float(squared), exact=True, rule=f"binary tree: {rule}")

    def prefix_variance(self) -> NDArray[np.float64]:
        """Node variances over t's binary expansion, plus what the earlier trees ended with."""
        return tree_noise.prefix_variance(self.blocks(), self.estimator)

    def _effective_sensitivity(self, participation: Participation) -> Sensitivity:
        encoder = self._effective_encoder()
        bound = gram_sensitivity(encoder.T @ encoder, participation)
        squared = rounded_up(bound.squared, self.rounds**2)  # the factorisation's rounding
        rule = f"prefix sums of the tree: {bound.rule}"
        nodes = replace(self, release="nodes").sensitivity(participation)
        if nodes.squared < squared:  # a function of the nodes costs no more than the nodes
            squared, rule = nodes.squared, rule if bound.exact else f"at most {nodes.rule}"
        return Sensitivity(squared, exact=bound.exact, rule=rule)

    def _effective_encoder(self) -> NDArray[np.float64]:
        from scipy.linalg import solve_triangular

        lower = np.linalg.cholesky(self._covariance())
        solved = solve_triangular(lower, prefix_sums(self.rounds), lower=True, check_finite=False)
        return np.asarray(np.tril(solved), dtype=np.float64)

    def _covariance(self) -> NDArray[np.float64]:
        if self.rounds > _MOST_DENSE_ROUNDS:
            raise ConfigError(
                f"rounds={self.rounds}: release='prefix' works on n x n matrices here, up to "
                f"{_MOST_DENSE_ROUNDS} rounds. Use release='nodes'."
            )
        return tree_noise.prefix_covariance(self.blocks(), self.estimator)
