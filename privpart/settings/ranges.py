"""Ranges: numbers that messages and float32 can carry."""

import math

from accounting import checks
from accounting.checks import ConfigError

_LEAST_CLIP_NORM = 1e-30


def at_least_tiny(clip_norm: float) -> float:
    """Return ``clip_norm``; refuse one to which float32 cannot scale at its relative precision."""
    if not _LEAST_CLIP_NORM <= clip_norm < math.inf:
        raise ConfigError(f"clip_norm={clip_norm:g}: must be finite, and at least 1e-30.")
    return float(clip_norm)


def seed_bytes(seed: int) -> bytes:
    """Return the seed as the 16 bytes that the key of each stream has."""
    value = checks.count("seed", seed, minimum=0)
    if value >= 1 << 128:
        raise ConfigError(f"seed={value}: must be below 2^128: a key has 16 bytes of it.")
    return value.to_bytes(16, "big")
