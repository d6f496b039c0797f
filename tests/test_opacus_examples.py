"""The examples for users of Opacus: how little changes, and that a killed run ends as another."""

import difflib
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "opacus"
KILLED = """
import os, runpy, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
example = runpy.run_path({path!r})
from privpart.run.folder import RunFolder
from privpart.run.ledger import Ledger
out, whole = sys.argv[1:]
if os.fork() == 0:
    commit = RunFolder.commit
    def die(self, *arguments):
        commit(self, *arguments)
        if self.rounds == 8:
            os.kill(os.getpid(), signal.SIGKILL)
    RunFolder.commit = die
    example["main"](["--out", out, "--seed", "0"])
_, status = os.wait()
assert os.WTERMSIG(status) == signal.SIGKILL
for folder in (out, whole):
    example["main"](["--out", folder, "--seed", "0"])
rows = [Ledger(Path(f)).rows() for f in (out, whole)]
assert [row.model for row in rows[0]] == [row.model for row in rows[1]]
print(len(rows[0]), "steps are equal")
"""


def code(name):
    """Return the lines of an example after its docstring."""
    return (FOLDER / name).read_text().split('"""', 2)[2].splitlines()


def test_opacus_own_example_becomes_private_by_dp_ftrl_with_two_lines():
    changed = [
        line
        for line in difflib.ndiff(code("mnist_cnn_dp_sgd.py"), code("mnist_cnn.py"))
        if line.startswith(("+ ", "- ")) and line[2:].strip()
    ]
    assert changed == [
        "- from opacus import PrivacyEngine",
        "+ from privpart import FTRLEngine",
        "-     privacy_engine = PrivacyEngine()",
        "+     privacy_engine = FTRLEngine()",
    ]


@pytest.mark.filterwarnings("ignore")  # torch's and Opacus's, of both engines
@pytest.mark.parametrize(
    "name", ["mnist_cnn.py", pytest.param("mnist_cnn_dp_sgd.py", marks=pytest.mark.slow)]
)
def test_both_train_at_the_same_epsilon(name, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    right, epsilon = runpy.run_path(str(FOLDER / name))["main"](["--epochs", "1"])
    assert epsilon == pytest.approx(8.0, abs=0.02)
    assert 0 <= right <= 1


@pytest.mark.skipif(not find_spec("peft"), reason="needs transformers and peft")
def test_a_bert_with_lora_that_is_killed_ends_as_an_undisturbed_one(tmp_path):
    program = KILLED.format(root=str(FOLDER.parent.parent), path=str(FOLDER / "bert_lora.py"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, tmp_path / "killed", tmp_path / "whole"],
        capture_output=True,
        text=True,
    )
    assert "18 steps are equal" in done.stdout, done.stderr
