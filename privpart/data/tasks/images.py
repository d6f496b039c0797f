"""Images: digits, Fashion-MNIST, EMNIST and CIFAR from local copies.

Nothing is downloaded and nothing is unpickled.
"""

import gzip
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting.checks import ConfigError

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

_DIGITS_TEST = 360
_DIGITS_SPLIT_SEED = 0
_FASHION_HINT = (
    "This is where Fashion-MNIST was looked for. On Debian or Ubuntu, `apt-get install "
    f"dataset-fashion-mnist` puts it into {DEBIAN_FOLDER}; otherwise name a folder that has the "
    "four idx files with --data-dir, data_dir in the settings of an audit, or directory in a plan"
)
_IMAGES_MAGIC = 0x803
_LABELS_MAGIC = 0x801
_CIFAR_PIXELS = 3 * 32 * 32


@dataclass(frozen=True, slots=True)
class Task:
    """Labelled images in [0, 1], shape (n, channels, size, size), to train and to test on."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits() -> Task:
    """Return scikit-learn's 1,797 real 8x8 images: 1,437 to train, 360 to test.

    The wheel of scikit-learn contains them (UCI optdigits, test part). The split is always the
    same.
    """
    table = np.loadtxt(_digits_file(), delimiter=",")
    images, labels = table[:, :-1], table[:, -1]
    order = np.random.default_rng(_DIGITS_SPLIT_SEED).permutation(len(images))
    x = torch.tensor(images[order] / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels[order], dtype=torch.int64)
    test = _DIGITS_TEST
    return Task("digits", x[:-test], y[:-test], x[-test:], y[-test:])


def _digits_file() -> Path:
    """Return the file in scikit-learn's folder; to import the package takes 2 seconds."""
    spec = find_spec("sklearn")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise ConfigError("digits: scikit-learn, which contains them, is not installed here.")


def fashion_mnist(folder: Path | None = None) -> Task:
    """Read Fashion-MNIST (Xiao et al. 2017) from its four idx files, plain or gzipped.

    A folder of None is that of Debian's ``dataset-fashion-mnist``.
    """
    folder = DEBIAN_FOLDER if folder is None else folder
    train, test = (_read_pair(folder, stem, _FASHION_HINT) for stem in ("train", "t10k"))
    return Task("fashion-mnist", *train, *test)


def emnist(folder: Path) -> Task:
    """Read EMNIST by class (Cohen et al. 2017), 62 of them, from its idx files, plain or gzipped.

    The images are upright; the files hold them transposed.
    """
    hint = "Fetch gzip.zip of NIST's EMNIST and unpack its emnist-byclass-* files into this folder"
    parts = (_read_pair(folder, f"emnist-byclass-{stem}", hint) for stem in ("train", "test"))
    (train_x, train_y), (test_x, test_y) = parts
    upright = (x.transpose(2, 3).contiguous() for x in (train_x, test_x))
    return Task("emnist-byclass", next(upright), train_y, next(upright), test_y)


def cifar10(folder: Path) -> Task:
    """Read the binary version of CIFAR-10 (Krizhevsky 2009), ``data_batch_1.bin`` and so on."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    return _cifar("cifar10", folder, [*names, "test_batch.bin"], "cifar-10-binary.tar.gz", labels=1)


def cifar100(folder: Path) -> Task:
    """Read the binary version of CIFAR-100 (Krizhevsky 2009), with its 100 fine classes."""
    names = ["train.bin", "test.bin"]
    return _cifar("cifar100", folder, names, "cifar-100-binary.tar.gz", labels=2)


def _read_pair(folder: Path, stem: str, hint: str) -> tuple[Tensor, Tensor]:
    """Return images in [0, 1] and labels; ``hint`` ends the error's sentence."""
    pixels = _read_idx(folder / f"{stem}-images-idx3-ubyte", _IMAGES_MAGIC, hint)
    labels = _read_idx(folder / f"{stem}-labels-idx1-ubyte", _LABELS_MAGIC, hint)
    images = torch.from_numpy(pixels.astype(np.float32) / 255).unsqueeze(1)
    return images, torch.from_numpy(labels.astype(np.int64))


def _read_idx(path: Path, magic: int, hint: str) -> NDArray[np.uint8]:
    """Read the format of MNIST and its relatives: big-endian lengths, then bytes."""
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


def _cifar(name: str, folder: Path, names: list[str], archive: str, *, labels: int) -> Task:
    """Read images in [0, 1], shape (n, 3, 32, 32); the last file has the test examples."""
    parts = [_read_cifar(folder / file, archive, labels) for file in names]
    x, y = (torch.cat(tensors) for tensors in zip(*parts[:-1], strict=True))
    return Task(name, x, y, *parts[-1])


def _read_cifar(path: Path, archive: str, labels: int) -> tuple[Tensor, Tensor]:
    """Read records of ``labels`` bytes, the last of which is used, and 3,072 bytes of pixels."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Unpack {archive} (the binary version, not "
            "the one for Python) and name the folder with its .bin files."
        ) from None
    record = labels + _CIFAR_PIXELS
    if not content.size or content.size % record:
        raise ConfigError(
            f"{path} is not of the binary version: {content.size} bytes are not a multiple of "
            f"{record}. Fetch it again."
        )
    records = content.reshape(-1, record)
    x = torch.from_numpy(records[:, labels:].astype(np.float32) / 255).reshape(-1, 3, 32, 32)
    return x, torch.from_numpy(records[:, labels - 1].astype(np.int64))
