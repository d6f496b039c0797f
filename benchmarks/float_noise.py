"""Float noise: the draws and streams of before the noise was integers, to be compared with.

AES-256 in counter mode and the transform of Box and Muller in float32, 2^15 coordinates at a time.
Their last bits tell which sum they cover, so nothing but a benchmark may use them.
"""

import math

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from accounting.mechanisms.program import OUT, ListedOp, NoiseProgram

BLOCK = 2**15
_PAIRS = BLOCK // 2
_ZEROS = bytes(16 * _PAIRS)
_KEY = bytes(range(32))


def float_draw(index: int, start: int, stddev: float, out: Tensor) -> None:
    """Fill ``out`` with coordinates from ``start``, a multiple of a block, on."""
    for first in range(0, len(out), BLOCK):
        counter = (index << 48) + (start + first) // 2
        piece = out[first : first + BLOCK]
        if len(piece) == BLOCK:
            _gaussian_block(counter, stddev, piece)
        else:
            block = torch.empty(BLOCK, dtype=out.dtype)
            _gaussian_block(counter, stddev, block)
            piece.copy_(block[: len(piece)])


def _gaussian_block(counter: int, stddev: float, out: Tensor) -> None:
    cipher = Cipher(algorithms.AES256(_KEY), modes.CTR(counter.to_bytes(16, "big")))
    keystream = bytearray(16 * _PAIRS + 15)
    cipher.encryptor().update_into(_ZEROS, keystream)
    words = torch.frombuffer(keystream, dtype=torch.int64, count=2 * _PAIRS).view(2, _PAIRS)
    radius, angle = torch.empty(words.shape, dtype=out.dtype).copy_(words)
    radius.abs_().mul_(2.0**-63).add_(2.0**-64).log_().mul_(-2.0 * stddev**2).sqrt_()
    angle.mul_(math.pi * 2.0**-63)
    cosines, sines = out.view(2, -1)
    torch.mul(torch.cos(angle), radius, out=cosines)
    torch.mul(angle.sin_(), radius, out=sines)


class FloatStream:
    """The float32 noise of a program, one vector per round."""

    def __init__(self, program: NoiseProgram, dim: int, stddev: float) -> None:
        self._program, self._stddev = program, stddev
        self._round = 0
        self._state = torch.zeros(program.state_rows(), dim)

    def next(self, out: Tensor) -> None:
        """Write the noise of this round's sum, and go to the next round."""
        ops = self._program.round(self._round)
        for start in range(0, len(out), BLOCK):
            piece = slice(start, start + BLOCK)
            self._execute(ops, start, self._state[:, piece], out[piece])
        self._round += 1

    def _execute(self, ops: list[ListedOp], start: int, state: Tensor, out: Tensor) -> None:
        registers = {OUT: out}

        def register(r: int) -> Tensor:
            if r not in registers:
                registers[r] = state[r] if r >= 0 else torch.empty_like(out)
            return registers[r]

        for target, terms, draws in ops:
            to = register(target)
            sources = [(register(r), c) for r, c in terms]
            first = 1 if sources and sources[0][0] is to else 0
            for place, (index, c) in enumerate(draws, start=first):
                fresh = torch.empty_like(to) if place else to
                float_draw(index, start, self._stddev, fresh)
                sources.insert(place, (fresh, c))
            _add_up(sources, to)


def _add_up(sources: list[tuple[Tensor, float]], to: Tensor) -> None:
    if not sources:
        to.zero_()
        return
    (x, a), *others = sources
    if others and 1 in (a, others[0][1]):
        y, b = others.pop(0)
        torch.add(x, y, alpha=b, out=to) if a == 1 else torch.add(y, x, alpha=a, out=to)
    elif a != 1:
        torch.mul(x, a, out=to)
    elif x is not to:
        to.copy_(x)
    for y, b in others:
        to.add_(y, alpha=b)
