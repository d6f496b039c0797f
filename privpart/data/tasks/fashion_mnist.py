"""Fashion-MNIST: 70,000 real 28x28 images, read from idx files on disk (Xiao et al. 2017)."""

from pathlib import Path

from privpart.data.tasks.idx import read_images, read_labels
from privpart.data.tasks.task import Task

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_HINT = (
    "This is where Fashion-MNIST was looked for: on Debian or Ubuntu, `apt-get install "
    f"dataset-fashion-mnist` puts it into {DEBIAN_FOLDER}; else name a folder that has the four "
    "idx files with --data-dir, or with directory in a plan"
)


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
        read_images(folder / "train-images-idx3-ubyte", _HINT),
        read_labels(folder / "train-labels-idx1-ubyte", _HINT),
        read_images(folder / "t10k-images-idx3-ubyte", _HINT),
        read_labels(folder / "t10k-labels-idx1-ubyte", _HINT),
    )
