"""Tree blocks: a forest of dyadic trees as a sequence of complete trees.

A tree of n rounds is the complete trees of n's binary digits, largest first, each begun at the
noised sum where the last one ended; and that is also what a restart does. So whatever the restarts
and the completion, a forest is one sequence of blocks, and every sum below runs over it.

Completion (Kairouz et al. 2021) pads every tree but the last with virtual rounds,
in which nobody takes part, up to a power of two. The next tree then starts from one node instead of
several, and every node above the real rounds is released too: its cost is counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """A complete binary tree of 2^height leaves, of which the first ``rounds`` are real rounds."""

    first: int
    rounds: int
    height: int

    def nodes(self) -> Iterator[tuple[int, int]]:
        """(first leaf, leaves) of every node, from 0, in the order in which they complete."""
        for end in range(1, 2**self.height + 1):
            size = 1
            while end % size == 0 and size <= end:
                yield end - size, size
                size *= 2


def forest(rounds: int, restart_every: int | None, *, completed: bool) -> list[Block]:
    """Return the blocks of a run: the trees' binary digits, or single padded trees."""
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
