"""Every example runs as its docstring says; those on large data do so on a handful of images."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SMALL = {
    "fedpart_digits.py": (
        *(
            "--seeds",
            "1",
            "--jobs",
            "1",
            "--cycles",
            "1",
            "--clients",
            "2",
            "--users",
            "96",
            "--epsilons",
            "9",
        ),
    ),
    "fedpt_fashion_mnist.py": (
        *("--rounds", "2", "--clients", "2", "--images", "20", "--seeds", "2", "--jobs", "1"),
        "--data-dir",
    ),
}


@pytest.fixture
def images(tmp_path):
    """Fashion-MNIST's four idx files, of noise."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 80), ("t10k", 30)):
        pixels = rng.integers(256, size=(count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, array in (("images-idx3-ubyte", pixels), ("labels-idx1-ubyte", labels)):
            header = np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes()
            (tmp_path / f"{part}-{kind}").write_bytes(header + array.tobytes())
    return tmp_path


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example, images):
    assert f"Run: python examples/{example.name}" in example.read_text()
    options = SMALL.get(example.name, ())
    command = [sys.executable, example, *options, *([images] if "--data-dir" in options else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 6
