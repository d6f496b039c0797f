"""Fashion-MNIST: 70,000 real 28x28 images, read from idx files on disk (Xiao et al. 2017)."""

import gzip
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting.checks import ConfigError
from privpart.tasks.task import Task

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_IMAGES_MAGIC, _LABELS_MAGIC = 0x803, 0x801


def fashion_mnist(folder: Path | None = None) -> Task:
    """Read the four idx files, plain or gzipped, from ``folder``.

    Args:
        folder: None is where Debian's package ``dataset-fashion-mnist`` puts them.

    Raises:
        ConfigError: a file is missing or is not what its name says.
    """
    folder = DEBIAN_FOLDER if folder is None else folder
    return Task(
        "fashion-mnist",
        _images(folder / "train-images-idx3-ubyte"),
        _labels(folder / "train-labels-idx1-ubyte"),
        _images(folder / "t10k-images-idx3-ubyte"),
        _labels(folder / "t10k-labels-idx1-ubyte"),
    )


def _images(path: Path) -> Tensor:
    pixels = _read_idx(path, _IMAGES_MAGIC)
    return torch.from_numpy(pixels.astype(np.float32) / 255).unsqueeze(1)


def _labels(path: Path) -> Tensor:
    return torch.from_numpy(_read_idx(path, _LABELS_MAGIC).astype(np.int64))


def _read_idx(path: Path, magic: int) -> NDArray[np.uint8]:
    """The idx format: big-endian magic, one length per dimension, then bytes."""
    content = _content(path)
    header = np.frombuffer(content[:4], ">i4")
    if len(header) != 1 or header[0] != magic:
        raise ConfigError(f"{path} is not an idx file of the expected kind.")
    dimensions = magic & 0xFF
    shape = tuple(int(n) for n in np.frombuffer(content[4 : 4 + 4 * dimensions], ">i4"))
    body = np.frombuffer(content[4 + 4 * dimensions :], np.uint8)
    if len(shape) != dimensions or body.size != np.prod(shape):
        raise ConfigError(f"{path} is truncated: fetch it again.")
    return body.reshape(shape)


def _content(path: Path) -> bytes:
    zipped = path.with_name(path.name + ".gz")
    try:
        if zipped.exists():
            return gzip.decompress(zipped.read_bytes())
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"Fashion-MNIST is not in {path.parent}: no {path.name}[.gz]. On Debian or Ubuntu, "
            "`apt-get install dataset-fashion-mnist` puts it into "
            f"{DEBIAN_FOLDER}; else name a folder that has the four idx files with --data-dir."
        ) from None
    except (OSError, EOFError) as error:
        raise ConfigError(f"{zipped} cannot be read: {error}. Fetch it again.") from None
