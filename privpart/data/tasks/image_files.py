"""Image files: EMNIST and CIFAR from local copies. Nothing is fetched and nothing is unpickled."""

from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.data.tasks.idx import read_images, read_labels
from privpart.data.tasks.task import Task

Split = Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"]

_PIXELS = 3 * 32 * 32


def emnist(folder: Path, split: Split = "byclass") -> Task:
    """Read one split of EMNIST (Cohen et al. 2017) from its idx files, plain or gzipped.

    Args:
        folder: holds ``emnist-SPLIT-train-images-idx3-ubyte[.gz]`` and its three sisters.
        split: "byclass" has 62 classes, "digits" 10; classes of "letters" begin at 1, here at 0.

    Returns:
        Images (n, 1, 28, 28), upright: the files hold them transposed.

    Raises:
        ConfigError: a file is missing, with where to put it, or is not what its name says.
    """
    checks.choice("split", split, get_args(Split))
    hint = f"Fetch gzip.zip of NIST's EMNIST and unpack its emnist-{split}-* files into this folder"

    def part(name: str) -> tuple[Tensor, Tensor]:
        stem = f"emnist-{split}-{name}"
        x = read_images(folder / f"{stem}-images-idx3-ubyte", hint).transpose(2, 3).contiguous()
        y = read_labels(folder / f"{stem}-labels-idx1-ubyte", hint)
        return x, y - 1 if split == "letters" else y

    return Task(f"emnist-{split}", *part("train"), *part("test"))


def cifar10(folder: Path) -> Task:
    """Read CIFAR-10 (Krizhevsky 2009), binary version: images (n, 3, 32, 32) in [0, 1].

    Args:
        folder: holds ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``.

    Raises:
        ConfigError: a file is missing, with where to put it, or is not what its name says.
    """
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    train = [_cifar(folder / name, "cifar-10-binary.tar.gz", labels=1) for name in names]
    test = _cifar(folder / "test_batch.bin", "cifar-10-binary.tar.gz", labels=1)
    return Task(
        "cifar10", torch.cat([x for x, _ in train]), torch.cat([y for _, y in train]), *test
    )


def cifar100(folder: Path) -> Task:
    """Read CIFAR-100 (Krizhevsky 2009), binary version, with its 100 fine classes.

    Args:
        folder: holds ``train.bin`` and ``test.bin``.

    Raises:
        ConfigError: as ``cifar10``.
    """
    both = (
        _cifar(folder / name, "cifar-100-binary.tar.gz", labels=2)
        for name in ("train.bin", "test.bin")
    )
    return Task("cifar100", *(tensor for part in both for tensor in part))


def _cifar(path: Path, archive: str, *, labels: int) -> tuple[Tensor, Tensor]:
    """Records of ``labels`` bytes, of which the last is the class, and 3,072 bytes of pixels."""
    try:
        content = np.fromfile(path, np.uint8)
    except FileNotFoundError:
        raise ConfigError(
            f"no {path.name} in {path.parent}: unpack {archive} (the binary version, not the one "
            "for Python) and name the folder with its .bin files."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    if not content.size or content.size % (labels + _PIXELS):
        raise ConfigError(
            f"{path} is not of the binary version: {content.size} bytes are no multiple of "
            f"{labels + _PIXELS}. Fetch it again."
        )
    records = content.reshape(-1, labels + _PIXELS)
    x = torch.from_numpy(records[:, labels:].astype(np.float32) / 255).reshape(-1, 3, 32, 32)
    return x, torch.from_numpy(records[:, labels - 1].astype(np.int64))
