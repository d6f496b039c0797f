"""Keystream: where the Gaussian draws of the noise come from.

Draws are addressed, not consumed: the same source gives the same vector for the same index, so a
draw can be regenerated after a crash and never depends on what was drawn before it.

Floating point: a Gaussian computed in floats has a finite support, which in principle tells sums
apart that differ in their last bits (Mironov 2012). No defence against that is claimed here.
"""

import hashlib
import secrets
from typing import Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError


class NoiseSource(Protocol):
    """Standard normal vectors by address."""

    @property
    def private(self) -> bool:
        """Whether the draws are secret; if not, no guarantee may be claimed."""
        ...

    def claim(self) -> None:
        """Take the source for one noise stream; a secret one refuses a second claim."""
        ...

    def normal(self, index: int, dim: int) -> Tensor:
        """Return draw ``index`` >= 0: ``dim`` independent N(0, 1) numbers, float32."""
        ...


class SecretSource:
    """AES-256 in counter mode under a secret key; for every run whose result is released.

    Args:
        key: 32 bytes; None draws them from the operating system. Never the seed of anything else,
            and never for two runs: the same key repeats the same noise, and the difference of the
            two releases has none.
    """

    private = True

    def __init__(self, key: bytes | None = None) -> None:
        key = secrets.token_bytes(32) if key is None else key
        if not isinstance(key, bytes) or len(key) != 32:
            raise ConfigError("key: must be 32 bytes; leave it out to draw them from the system.")
        self._key = key
        self._claimed = False

    def claim(self) -> None:
        """Take the source for one run."""
        if self._claimed:
            raise ConfigError(
                "source: this SecretSource already feeds a noise stream; a second one would repeat "
                "its noise, which then cancels. Make a SecretSource() for each run."
            )
        self._claimed = True

    def __repr__(self) -> str:
        return "SecretSource(<key>)"

    def normal(self, index: int, dim: int) -> Tensor:
        """Box-Muller on 64-bit words of block ``index``; tails reach 8.57 standard deviations."""
        nonce = checks.count("index", index, minimum=0).to_bytes(8, "big") + bytes(8)
        stream = Cipher(algorithms.AES256(self._key), modes.CTR(nonce)).encryptor()
        pairs = -(-dim // 2)
        words = np.frombuffer(stream.update(bytes(16 * pairs)), "<u8").reshape(2, pairs)
        unit = (words >> 11) * 2.0**-53
        radius = np.sqrt(-2 * np.log1p(-unit[0]))
        angle = 2 * np.pi * unit[1]
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        return torch.from_numpy(both[:dim].astype(np.float32))


class SeededSource:
    """A reproducible generator for simulations: whoever knows the seed can remove the noise.

    Args:
        seed: >= 0. A run that used it reports "seeded: not private".
    """

    private = False

    def __init__(self, seed: int) -> None:
        self.seed = checks.count("seed", seed, minimum=0)

    def claim(self) -> None:
        """Nothing to protect: simulations repeat themselves."""

    def __repr__(self) -> str:
        return f"SeededSource({self.seed})"

    def normal(self, index: int, dim: int) -> Tensor:
        """Return torch's normal numbers under a hash of seed and index."""
        label = f"{self.seed}|{checks.count('index', index, minimum=0)}".encode()
        address = int.from_bytes(hashlib.sha256(label).digest()[:8], "big", signed=True)
        return torch.randn(dim, generator=torch.Generator().manual_seed(address))
