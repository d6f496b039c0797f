"""Shamir's secret sharing (1979): t of n shares give a secret back, t - 1 tell nothing of it.

A secret is 32 bytes, one element of the field of the smallest prime above 2^256; a share is the
value at the holder's number of a random polynomial whose value at 0 is the secret.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

PRIME = 2**256 + 297
SHARE_BYTES = 33


def deal(
    secret: bytes,
    threshold: int,
    holders: Sequence[int],
    *,
    below: Callable[[int], int] = secrets.randbelow,
) -> list[bytes]:
    """Return the share of each holder, 33 bytes.

    Args:
        secret: 32 bytes.
        threshold: t, how many shares give it back, >= 1.
        holders: their numbers, each once, > 0 and below the prime.
        below: returns a uniform secret number below its argument.
    """
    coefficients = [below(PRIME) for _ in range(threshold - 1)]
    shares = []
    for holder in holders:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * holder % PRIME
        value = (value + int.from_bytes(secret)) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES))
    return shares


def is_share(share: bytes) -> bool:
    """Whether bytes are an element of the field, as a share is."""
    return len(share) == SHARE_BYTES and int.from_bytes(share) < PRIME


def joined(shares: Mapping[int, bytes]) -> bytes | None:
    """Return the secret from exactly t shares by holder; None if they are of no 32 bytes."""
    weights = _weights(tuple(shares))
    values = map(int.from_bytes, shares.values())
    secret = sum(w * v for w, v in zip(weights, values, strict=True)) % PRIME
    return secret.to_bytes(32) if secret < 2**256 else None


@lru_cache(maxsize=4096)
def _weights(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's weights at 0; the same holders give many secrets back."""
    weights = []
    for own in holders:
        top = bottom = 1
        for other in holders:
            if other != own:
                top = top * other % PRIME
                bottom = bottom * (other - own) % PRIME
        weights.append(top * pow(bottom, -1, PRIME) % PRIME)
    return tuple(weights)
