"""Every mechanism of the accounting package with every option, at awkward lengths."""

import numpy as np

from accounting import (
    BandedInverse,
    BinaryTree,
    BufferedToeplitz,
    Dense,
    Independent,
    PrunedTree,
    Scheduled,
    Toeplitz,
)

BLT3 = {"decay": (0.703864, 0.970182, 0.998105), "scale": (0.295937, 0.131099, 0.057899)}
SQUARE = Dense(
    np.tril(np.random.default_rng(0).uniform(-0.5, 1, (7, 7)), -1) + np.diag(range(1, 8))
)

TREES = [
    *(BinaryTree(n) for n in (1, 2, 3, 8, 13, 16)),
    *(BinaryTree(n, estimator="online") for n in (1, 2, 7, 8, 13)),
    *(
        BinaryTree(n, every, estimator=estimator)
        for n, every in ((13, 5), (12, 4), (11, 3), (5, 1), (6, 9), (13, 6))
        for estimator in ("vanilla", "online")
    ),
    PrunedTree(1, (0,)),
    PrunedTree(16, (0, 1, 2, 3, 9, 12)),
    PrunedTree(100, (3, 4, 8, 31, 32, 64, 70, 99)),
]
FILTERS = [
    Independent(7),
    Scheduled(7, (0, 2, 6), (1.0, 0.3, 7.0)),
    Toeplitz.square_root(1),
    Toeplitz.square_root(9),
    Toeplitz.square_root(9, bands=3),
    Toeplitz.square_root(9, bands=3, normalize_columns=True),
    Toeplitz.square_root(8, normalize_columns=True),
    Toeplitz(6, (2.0, 0.5, 0.0)),
    Toeplitz(6, (2.0, 0.5), normalize_columns=True),
    Toeplitz(8, (1.0, 0.25, -0.5)),
    BufferedToeplitz(1, **BLT3),
    BufferedToeplitz(11, **BLT3),
    BufferedToeplitz(6, decay=(0.0, 1.0), scale=(0.5, 0.25)),
    SQUARE,
]
LAW = [
    BinaryTree(7),
    BinaryTree(7, 3, estimator="online"),
    BufferedToeplitz(5, **BLT3),
    Toeplitz.square_root(6, bands=3, normalize_columns=True),
    Independent(3),
    Scheduled(3, (0, 1), (0.5, 3.0)),
    BandedInverse(6, (2.0, -0.5, -0.25)),
    BandedInverse(6, (0.3, -0.2, -0.1), normalize_columns=True),
    Dense([[2.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [0.5, 0.25, 3.0]]),
]
"""One of each kind, for tests of distributions."""

GROUPS_ACTIVE = [(0, 1, 2), (0, 1, 2), (0,), (0,), (1,), (1,), (2,), (0, 1, 2), (0,), (1, 2)]
"""The groups of every round."""
_BY_GROUP = [[t for t, groups in enumerate(GROUPS_ACTIVE) if g in groups] for g in range(3)]
GROUPS = {
    "tree": [BinaryTree(len(rounds)) for rounds in _BY_GROUP],
    "online": [BinaryTree(len(rounds), 4, estimator="online") for rounds in _BY_GROUP],
    "pruned": [PrunedTree(len(GROUPS_ACTIVE), rounds) for rounds in _BY_GROUP],
    "blt": [BufferedToeplitz(len(rounds), (0.9, 0.4), (0.3, 0.2)) for rounds in _BY_GROUP],
    "wide": [BinaryTree(6), Toeplitz(6, (1.0, 8.0)), Independent(5)],
    "mixed": [BinaryTree(6), BufferedToeplitz(6, (0.5,), (0.25,)), Independent(5)],
}  # fmt: skip
"""A mechanism for each of three groups."""


def short(mechanism):
    return repr(mechanism)[:100].replace("\n", "")
