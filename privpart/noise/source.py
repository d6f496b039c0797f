"""Noise source: where the Gaussian draws of the noise come from.

Draws are addressed, not consumed: (stream, index, coordinate) always gives the same number, so any
slice of any draw can be made again alone, and no number depends on what was drawn before it.

From bits to numbers: AES-256 in counter mode, one 16-byte block per pair of coordinates, half of it
for the radius and half for the angle of Box and Muller (1958), in blocks of 2^15 coordinates that
stay in the processor's cache. Every block is computed whole and by one thread (torch.randn uses one
as well), so neither slices nor the number of threads change a bit.

What is claimed: the radius is made from 64 bits, so tails end at sqrt(128 ln 2) = 9.42 standard
deviations (probability 5e-21 beyond), and each number is that of exact arithmetic up to float
rounding. What is not: a Gaussian computed in floats has a finite support, which in principle tells
apart sums that differ in their last bits (Mironov 2012, "On significance of the least significant
bits for differential privacy"). No defence against that is claimed, nor against timing. The last
bit of a logarithm or cosine may differ between processors and torch versions, so draws are the same
bit for bit only on the same kind of machine with the same torch.
"""

import hashlib
import math
import secrets
from typing import NoReturn, Protocol

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.engines.device import one_thread

BLOCK = 2**15
"""Coordinates that are computed together: 128 KiB of float32."""

_PAIRS = BLOCK // 2
_ZEROS = bytes(16 * _PAIRS)


class NoiseSource(Protocol):
    """Standard normal vectors by address."""

    @property
    def private(self) -> bool:
        """Whether the draws are secret; if not, no guarantee may be claimed."""
        ...

    @property
    def identity(self) -> str:
        """Equal for sources of the same draws; reveals nothing about secret ones."""
        ...

    def claim(self, stream: int) -> None:
        """Take one stream of draws for one noise stream; a secret source refuses a second claim."""
        ...

    def normal(
        self,
        index: int,
        count: int,
        *,
        stream: int = 0,
        start: int = 0,
        stddev: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return coordinates ``start`` to ``start + count`` of a draw: independent N(0, stddev^2).

        Args:
            index: of the draw within its stream, >= 0.
            count: number of coordinates, >= 1.
            stream: id of the stream, >= 0; other streams have other draws.
            start: first coordinate, >= 0.
            stddev: from 1e-15 to 1e15; multiplying here costs no time.
            out: where to write, shape (count,), contiguous, float32 or float64 (the same numbers
                up to rounding); None makes a float32 vector.
        """
        ...


class SecretSource:
    """AES-256 in counter mode under a secret key; for every run whose result is released.

    Args:
        key: 32 bytes; None draws them from the operating system. Never the seed of anything else,
            and never for two runs: the same key repeats the same noise, and the difference of the
            two releases has none. To resume with the same draws, keep the key yourself; the source
            never shows it, and refuses to be copied or pickled.
    """

    private = True

    def __init__(self, key: bytes | None = None) -> None:
        key = secrets.token_bytes(32) if key is None else key
        if not isinstance(key, bytes) or len(key) != 32:
            raise ConfigError("key: must be 32 bytes; leave it out to draw them from the system.")
        self._key = key
        self._claimed: set[int] = set()

    @property
    def identity(self) -> str:
        """A hash of the key, which does not reveal it."""
        return f"secret:{hashlib.sha256(b'privpart source identity|' + self._key).hexdigest()}"

    def claim(self, stream: int) -> None:
        """Take ``stream`` for one run.

        Raises:
            ConfigError: it is taken.
        """
        stream = checks.count("stream", stream, minimum=0)
        if stream in self._claimed:
            raise ConfigError(
                f"stream={stream}: this SecretSource already feeds a noise stream under that id; a "
                "second one would repeat its noise, which then cancels. Use another stream id for "
                "another group of parameters, and a SecretSource() for each run."
            )
        self._claimed.add(stream)

    def normal(
        self,
        index: int,
        count: int,
        *,
        stream: int = 0,
        start: int = 0,
        stddev: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return a slice of a draw; see ``NoiseSource``."""
        return _normal(self._key, index, count, stream, start, stddev, out)

    def __repr__(self) -> str:
        return "SecretSource(<key>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("SecretSource: is never copied or pickled; a copy would repeat its noise.")


class SeededSource:
    """Draws from a public seed, for simulations: anyone who knows the seed can remove the noise.

    Args:
        seed: >= 0. A run that used it reports "seeded: not private".
    """

    private = False

    def __init__(self, seed: int) -> None:
        self.seed = checks.count("seed", seed, minimum=0)
        self._key = hashlib.sha256(f"privpart seeded source|{self.seed}".encode()).digest()

    @property
    def identity(self) -> str:
        """The seed."""
        return f"seeded:{self.seed}"

    def claim(self, stream: int) -> None:
        """Nothing to protect: simulations repeat themselves."""

    def normal(
        self,
        index: int,
        count: int,
        *,
        stream: int = 0,
        start: int = 0,
        stddev: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return a slice of a draw; see ``NoiseSource``."""
        return _normal(self._key, index, count, stream, start, stddev, out)

    def __repr__(self) -> str:
        return f"SeededSource({self.seed})"


def _normal(
    key: bytes,
    index: int,
    count: int,
    stream: int,
    start: int,
    stddev: float,
    out: Tensor | None,
) -> Tensor:
    address = _address(stream, index)
    count = checks.count("count", count)
    start = checks.count("start", start, minimum=0)
    stddev = checked_stddev(stddev)
    out = torch.empty(count) if out is None else _writable(out, count)
    with one_thread():  # the vectors are too short to gain from more
        for first in range(start - start % BLOCK, start + count, BLOCK):
            low, high = max(first, start), min(first + BLOCK, start + count)
            piece = out[low - start : high - start]
            if high - low == BLOCK:
                _gaussian_block(key, address + first // 2, stddev, piece)
            else:
                block = torch.empty(BLOCK, dtype=out.dtype)
                _gaussian_block(key, address + first // 2, stddev, block)
                piece.copy_(block[low - first : high - first])
    return out


def checked_stddev(stddev: float) -> float:
    """Return a standard deviation whose square is a normal float32."""
    stddev = checks.positive("stddev", stddev)
    if not 1e-15 <= stddev <= 1e15:
        raise ConfigError(f"stddev={stddev:g}: must lie from 1e-15 to 1e15, or float32 loses it.")
    return stddev


def _address(stream: int, index: int) -> int:
    """First counter of a draw: 32 bits of stream, 48 of index, 48 of pairs of coordinates."""
    stream = checks.count("stream", stream, minimum=0)
    index = checks.count("index", index, minimum=0)
    if not (stream < 2**32 and index < 2**48):
        raise ConfigError(f"stream={stream}, index={index}: must be below 2^32 and 2^48.")
    return stream << 96 | index << 48


def _writable(out: Tensor, count: int) -> Tensor:
    fits = out.shape == (count,) and out.is_contiguous() and out.device.type == "cpu"
    if not fits or out.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"out: has shape {tuple(out.shape)}, {out.dtype}, on {out.device}; must be a "
            f"contiguous vector of count={count} float32 or float64 numbers on the cpu."
        )
    return out


def _gaussian_block(key: bytes, counter: int, stddev: float, out: Tensor) -> None:
    """Fill ``out``, shape (BLOCK,), with the numbers of the AES blocks from ``counter`` on."""
    cipher = Cipher(algorithms.AES256(key), modes.CTR(counter.to_bytes(16, "big")))
    keystream = bytearray(16 * _PAIRS + 15)  # update_into requires room for one more block
    cipher.encryptor().update_into(_ZEROS, keystream)
    words = torch.frombuffer(keystream, dtype=torch.int64, count=2 * _PAIRS)
    _box_muller(words.view(2, _PAIRS), stddev, out)


def _box_muller(words: Tensor, stddev: float, out: Tensor) -> None:
    """Turn signed 64-bit words, shape (2, n), into 2n normal numbers.

    Radius: u = |w| / 2^63 + 2^-64 lies in (0, 1], and small u, which make the tail, keep their
    relative precision in floats. Angle: in [-pi, pi].
    """
    radius, angle = torch.empty(words.shape, dtype=out.dtype).copy_(words)
    radius.abs_().mul_(2.0**-63).add_(2.0**-64).log_().mul_(-2.0 * stddev**2).sqrt_()
    angle.mul_(math.pi * 2.0**-63)
    cosines, sines = out.view(2, -1)
    torch.mul(torch.cos(angle), radius, out=cosines)
    torch.mul(angle.sin_(), radius, out=sines)
