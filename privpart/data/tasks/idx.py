"""Idx: the file format of MNIST and its relatives (big-endian lengths, then bytes)."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting.checks import ConfigError

_IMAGES_MAGIC, _LABELS_MAGIC = 0x803, 0x801


def read_images(path: Path, hint: str) -> Tensor:
    """Return images in [0, 1], shape (n, 1, height, width), from a file, plain or gzipped.

    Args:
        path: without ".gz".
        hint: what to do if it is missing: the end of the error's sentence.

    Raises:
        ConfigError: the file is missing, cut off, or of another kind.
    """
    pixels = _read(path, _IMAGES_MAGIC, hint)
    return torch.from_numpy(pixels.astype(np.float32) / 255).unsqueeze(1)


def read_labels(path: Path, hint: str) -> Tensor:
    """Return classes, shape (n,), int64; as ``read_images``."""
    return torch.from_numpy(_read(path, _LABELS_MAGIC, hint).astype(np.int64))


def _read(path: Path, magic: int, hint: str) -> NDArray[np.uint8]:
    content = _content(path, hint)
    header = np.frombuffer(content[:4], ">i4")
    if len(header) != 1 or header[0] != magic:
        raise ConfigError(f"{path} is not an idx file of the expected kind.")
    dimensions = magic & 0xFF
    shape = tuple(int(n) for n in np.frombuffer(content[4 : 4 + 4 * dimensions], ">i4"))
    body = np.frombuffer(content[4 + 4 * dimensions :], np.uint8)
    if len(shape) != dimensions or body.size != np.prod(shape):
        raise ConfigError(f"{path} is truncated: fetch it again.")
    return body.reshape(shape)


def _content(path: Path, hint: str) -> bytes:
    zipped = path.with_name(path.name + ".gz")
    try:
        if zipped.exists():
            return gzip.decompress(zipped.read_bytes())
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"no {path.name}[.gz] in {path.parent}. {hint}.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{zipped} cannot be read: {error}. Fetch it again.") from None
