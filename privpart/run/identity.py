"""Identity: what ties a key, a model and a ledger to one run.

A run has two secrets of 32 bytes from the operating system, erased when it ends: the noise key, and
a signing key (Ed25519, RFC 8032) that signs the head of the ledger with every commit. What they
leave in the ledger is public: a hash of the noise key, and the public key.

A signature shows that a ledger was written by whoever held the signing key. It does not show that
the holder was honest: the owner of the machine can sign anything while the run lasts.
"""

import hashlib
import platform
import secrets
from importlib import metadata
from typing import NoReturn

import numpy as np
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from torch import Tensor

from accounting.checks import ConfigError
from privpart.noise.source import NoiseSource, SecretSource, SeededSource

KEY_BYTES = 32


class SigningKey:
    """The private half of a run's key pair; it refuses to be copied or pickled.

    Args:
        secret: 32 bytes.

    Attributes:
        public_key: the other half, in hex.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise ConfigError(f"a signing key has {KEY_BYTES} bytes, not {len(secret)}.")
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public_key = self._key.public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> str:
        """Return the signature of a message, in hex."""
        return self._key.sign(message).hex()

    def __repr__(self) -> str:
        return f"SigningKey(<secret of {self.public_key[:12]}>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("SigningKey: is never copied or pickled.")


def is_signed(public_key: str, message: bytes, signature: str) -> bool:
    """Return whether ``signature`` is that of ``message`` under a public key, both in hex."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_secret() -> bytes:
    """Return 32 bytes from the operating system."""
    return secrets.token_bytes(KEY_BYTES)


def source_of(secret: bytes | None, seed: int | None) -> NoiseSource:
    """Return the source of a run's noise: of a secret key, or of a seed."""
    if seed is not None:
        return SeededSource(seed)
    return SecretSource(secret)


def model_hash(parameters: Tensor) -> str:
    """Return the SHA-256, in hex, of released parameters: float32, little endian, in flat order."""
    # The same bytes on every device and machine.
    flat = parameters.detach().to("cpu", torch.float32).contiguous().view(-1).numpy()
    return hashlib.sha256(flat.astype("<f4", copy=False).data).hexdigest()


def tensor_hash(tensor: Tensor) -> str:
    """Return the SHA-256, in hex, of a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}|".encode())
    if tensor.numel():
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of what computes a run."""
    try:
        version = metadata.version("privpart")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return {
        "privpart": version,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
