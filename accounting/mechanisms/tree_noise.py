"""Tree noise: what the nodes' noise does to the prefix sums, vanilla or online Honaker.

Every node holds y = (sum of its rounds) + z. Its estimate is

    u^ = v y + (1 - v) (u^_left + u^_right),     Var u^ = v,

with v = 1 for the vanilla tree (the node alone) and v = 1 / (2 - 2^-h) at height h for the online
estimator, which weights the node and its children by their inverse variances (Honaker 2015,
"Efficient use of differentially private binary trees", estimation from below). A
prefix sum adds the estimates of the complete trees that make it up.
"""

import numpy as np
from numpy.typing import NDArray

from accounting.mechanisms.tree_blocks import Block

Array = NDArray[np.float64]


def node_variance(height: int, estimator: str) -> float:
    """Return v, the variance of a node's estimate at unit noise."""
    return 1.0 / (2.0 - 2.0**-height) if estimator == "online" else 1.0


def prefix_variance(blocks: list[Block], estimator: str) -> Array:
    """Return Var of each prefix sum, shape (n,), in O(n log n): sums over binary digits."""
    most = max(block.height for block in blocks)
    variance = np.array([node_variance(height, estimator) for height in range(most + 1)])
    ends = np.arange(1, max(block.rounds for block in blocks) + 1)
    within = ((ends[:, None] >> np.arange(most + 1)) & 1) @ variance
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
                v = node_variance(height, estimator)
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
