"""Chunks: how the clients of a round are dealt to workers, and computed together."""

from collections.abc import Sequence
from itertools import pairwise

_TURNS = 2
"""Chunks per worker for what is left of a round, where one client follows another."""


def equal(clients: Sequence[int], most: int, workers: int) -> list[Sequence[int]]:
    """Return chunks of at most ``most`` clients, equal as far as can be.

    Their number is a multiple of that of the workers: who computes one more is waited for.
    """
    count = max(1, -(-len(clients) // most), min(workers, len(clients)))
    count = -(-count // workers) * workers
    ends = [len(clients) * k // count for k in range(count + 1)]
    return [clients[i:j] for i, j in pairwise(ends) if i < j]


def ever_smaller(clients: Sequence[int], most: int, workers: int) -> list[Sequence[int]]:
    """Factoring (Hummel, Schonberg and Flynn 1992): a small last chunk ends soon.

    As many of each size as there are workers, but of the last. A worker whose chunks were smaller
    would be done early, and wait: updates leave in order, and until then there is no room.
    """
    chunks, left = [], clients
    while left:
        size = min(most, -(-len(left) // (_TURNS * workers)))
        for _ in range(min(workers, -(-len(left) // size))):
            chunks.append(left[:size])
            left = left[size:]
    return chunks
