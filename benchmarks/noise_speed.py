"""Noise speed: draws and streams of integers compared with float32 noise.

Run: ``python benchmarks/noise_speed.py``; writes benchmarks/results/noise.json.

Everything is measured per parameter of a model of 10^7, on one thread, in reused vectors; the last
part on one thread and on two. What is compared takes turns. A stream is measured over cycles of 8
rounds in the middle of a run, so that a tree's cycles have equal work. The float32 noise is what
was here before: AES-256 in counter mode and the transform of Box and Muller, 2^15 coordinates at a
time. Its last bits tell which sum they cover, so nothing but a benchmark may use it.
"""

import frame

import math
import os
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from accounting import BinaryTree, BufferedToeplitz, Independent, Mechanism, Toeplitz
from accounting.mechanisms.program import OUT, NoiseProgram
from privpart import NoiseStream, SecretSource

STDDEV = 2.0**20
PIECE = 2**19
"""Coordinates that a stream draws at once."""
ROUNDS, FIRST, CYCLE = 64, 16, 8
TURNS, CYCLES = 9, 4
MECHANISMS: dict[str, Mechanism] = {
    "independent": Independent(ROUNDS),
    "tree": BinaryTree(ROUNDS),
    "tree, online": BinaryTree(ROUNDS, estimator="online"),
    "Toeplitz, 8 bands": Toeplitz.square_root(ROUNDS, bands=8),
    "BLT, 3 buffers": BufferedToeplitz(
        ROUNDS, decay=(0.703864, 0.970182, 0.998105), scale=(0.295937, 0.131099, 0.057899)
    ),
}
AIMS = {"draw": 1.2} | dict.fromkeys(("tree", "Toeplitz, 8 bands", "BLT, 3 buffers"), 1.6)
BEFORE = "float32 draw, before"
BLOCK = 2**15
_PAIRS = BLOCK // 2
_ZEROS, _KEY = bytes(16 * _PAIRS), bytes(range(32))


def float_draw(index: int, start: int, stddev: float, out: Tensor) -> None:
    """Fill ``out`` with float32 coordinates from ``start``, a multiple of a block, on."""
    for first in range(0, len(out), BLOCK):
        counter = ((index << 48) + (start + first) // 2).to_bytes(16, "big")
        keystream = bytearray(16 * _PAIRS + 15)
        cipher = Cipher(algorithms.AES256(_KEY), modes.CTR(counter))
        cipher.encryptor().update_into(_ZEROS, keystream)
        words = torch.frombuffer(keystream, dtype=torch.int64, count=2 * _PAIRS).view(2, _PAIRS)
        radius, angle = torch.empty(words.shape, dtype=out.dtype).copy_(words)
        radius.abs_().mul_(2.0**-63).add_(2.0**-64).log_().mul_(-2.0 * stddev**2).sqrt_()
        angle.mul_(math.pi * 2.0**-63)
        piece = out[first : first + BLOCK]
        block = piece if len(piece) == BLOCK else torch.empty(BLOCK, dtype=out.dtype)
        cosines, sines = block.view(2, -1)
        torch.mul(torch.cos(angle), radius, out=cosines)
        torch.mul(angle.sin_(), radius, out=sines)
        if block is not piece:
            piece.copy_(block[: len(piece)])


class FloatStream:
    """The float32 noise of a program, one vector per round."""

    def __init__(self, program: NoiseProgram, dim: int) -> None:
        self.program, self.round = program, 0
        self.state = torch.zeros(program.state_rows(), dim)

    def next(self, out: Tensor) -> None:
        """Write the noise of this round's sum, and go to the next round."""
        for start in range(0, len(out), BLOCK):
            piece = slice(start, start + BLOCK)
            registers = {OUT: out[piece], **dict(enumerate(self.state[:, piece].unbind()))}
            for target, terms, draws in self.program.round(self.round):
                if target not in registers:
                    registers[target] = torch.empty_like(out[piece])
                to = registers[target]
                sources = [(registers[r], c) for r, c in terms]
                first = 1 if sources and sources[0][0] is to else 0
                for place, (index, c) in enumerate(draws, start=first):
                    fresh = torch.empty_like(to) if place else to
                    float_draw(index, start, STDDEV, fresh)
                    sources.insert(place, (fresh, c))
                _add_up(sources, to)
        self.round += 1


def _add_up(sources: list[tuple[Tensor, float]], to: Tensor) -> None:
    """Write a weighted sum, in as few passes over memory as possible."""
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


def draws(dim: int, turns: int) -> dict[str, list[frame.Seconds]]:
    """Return the seconds of an exact draw, and of what stands beside it."""
    exact = SecretSource().draws(0, b"")
    integers = np.empty(dim, np.int32)
    floats, copied = torch.empty(dim), torch.empty(dim)
    zeros, words = bytes(8 * PIECE), bytearray(8 * PIECE + 15)
    starts = range(0, dim, PIECE)

    def exact_draw() -> None:
        for start in starts:
            exact.rounded(0, start, integers[start : start + PIECE], weight=STDDEV)

    def keystream() -> None:
        cipher = Cipher(algorithms.AES256(bytes(32)), modes.CTR(bytes(16))).encryptor()
        for start in starts:
            cipher.update_into(zeros[: 8 * min(PIECE, dim - start)], words)

    jobs: dict[str, frame.Job] = {
        "exact draw": exact_draw,
        BEFORE: lambda: float_draw(0, 0, STDDEV, floats),
        "torch.randn": lambda: torch.randn(dim, out=floats),
        "AES-256 words alone": keystream,
        "memory copy": lambda: copied.copy_(floats),
    }
    return frame.in_turns(jobs, turns)


def stream(mechanism: Mechanism, dim: int, cycles: int) -> dict[str, list[frame.Seconds]]:
    """Return the seconds of cycles of rounds: of the exact stream, and of floats."""
    exact = NoiseStream(mechanism, dim=dim, stddev=STDDEV, source=SecretSource())
    floats = FloatStream(mechanism.noise_program(), dim)
    integers, numbers = torch.empty(dim, dtype=exact.dtype), torch.empty(dim)
    jobs = {"exact": lambda: exact.next(out=integers), "before": lambda: floats.next(numbers)}
    frame.in_turns(jobs, FIRST, warm=False)
    rounds = frame.in_turns(jobs, cycles * CYCLE, warm=False)
    return {
        name: [
            frame.Seconds(*map(sum, zip(*own[first : first + CYCLE], strict=True)))
            for first in range(0, len(own), CYCLE)
        ]
        for name, own in rounds.items()
    }


def two_threads(dim: int, turns: int) -> dict[str, list[frame.Seconds]]:
    """Return the seconds of a tree's stream on one thread and on two, which take turns."""
    streams = [
        NoiseStream(BinaryTree(ROUNDS), dim=dim, stddev=STDDEV, source=SecretSource())
        for _ in range(2)
    ]
    out = torch.empty(dim, dtype=streams[0].dtype)

    def job(threads: int) -> None:
        torch.set_num_threads(threads)
        streams[threads - 1].next(out=out)
        torch.set_num_threads(1)

    return frame.in_turns({"1 thread": lambda: job(1), "2 threads": lambda: job(2)}, turns)


def rows(
    title: str, times: dict[str, list[frame.Seconds]], values: int, aim: float | None = None
) -> dict[str, Any]:
    """Show nanoseconds per value of every job, and the first job's ratio to the second."""
    first, base = list(times)[:2]
    nanoseconds = {}
    for name, own in times.items():
        both = frame.spreads(own, 1e9 / values)
        nanoseconds[name] = {key: both[key] for key in both if not key.endswith("most")}
        frame.show(f"{title}, {name}, ns", nanoseconds[name])
    ratio = frame.ratios(times[first], times[base])
    frame.show(f"{title}, ratio", ratio | ({"aim": aim} if aim else {}))
    return {"nanoseconds": nanoseconds, "ratio": ratio, "aim": aim}


def main() -> None:
    given = frame.options(__doc__, "noise.json", quick={"dim": 100_000}, dim=10_000_000)
    torch.set_num_threads(1)
    result = frame.Result(given.result, "cryptography", "numpy", "torch", dim=given.dim)
    turns, cycles, dim = (1, 1, given.dim) if given.quick else (TURNS, CYCLES, given.dim)
    streams = {
        name: rows(name, stream(mechanism, dim, cycles), CYCLE * dim, AIMS.get(name))
        for name, mechanism in MECHANISMS.items()
    }
    threads = rows("tree, threads", two_threads(dim, 2 * CYCLE), dim)
    draw = rows("draw", draws(dim, turns), dim, AIMS["draw"])
    result.machine["load_average_after"] = os.getloadavg()[0]
    result.write(draw=draw, streams=streams, threads=threads)


if __name__ == "__main__":
    main()
