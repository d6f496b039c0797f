"""The examples for users of Opacus: two lines make them, and a killed run ends as another."""

import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "opacus"
needs_peft = pytest.mark.skipif(not find_spec("peft"), reason="needs transformers and peft")
EXAMPLES = {
    "mnist_cnn.py": (["--epochs", "1"], 1e-6),
    "char_lstm.py": ([], 1e-4),
    "bert_lora.py": ([], 1e-4),
}
CASES = [
    pytest.param(name, marks=[needs_peft] if name == "bert_lora.py" else []) for name in EXAMPLES
]
TWO_LINES = {
    "from privpart import FTRLEngine": "from opacus import PrivacyEngine",
    "    privacy_engine = FTRLEngine(seed=given.seed)": "    privacy_engine = PrivacyEngine()",
}
KILLED = """
import os, runpy, signal, sys
from pathlib import Path
import torch
sys.path[:0] = [{root!r}, str(Path({path!r}).parent)]
example = runpy.run_path({path!r})
def main(folder):
    torch.manual_seed(0)  # the start weights
    example["main"](["--out", folder, "--seed", "0", *options])
from privpart.run.folder import RunFolder
from privpart.run.ledger import Ledger
out, whole, *options = sys.argv[1:]
for crash in (8, 12):
    if os.fork() == 0:
        commit = RunFolder.commit
        def die(self, *arguments):
            commit(self, *arguments)
            if self.rounds == crash:
                os.kill(os.getpid(), signal.SIGKILL)
        RunFolder.commit = die
        main(out)
    _, status = os.wait()
    assert os.WTERMSIG(status) == signal.SIGKILL
for folder in (out, whole):
    main(folder)
rows = [Ledger(Path(f)).rows() for f in (out, whole)]
assert [row.model for row in rows[0]] == [row.model for row in rows[1]]
print(len(rows[0]), "steps are equal")
"""


def of_opacus(name):
    """Return an example with two lines changed back, without epsilon before training.

    Opacus has none then: its accountant raises.
    """
    lines = (FOLDER / name).read_text().splitlines()
    (early,) = (line for line in lines if line.endswith('before training")'))
    lines.remove(early)
    changed = [TWO_LINES.get(line, line) for line in lines]
    assert sum(a != b for a, b in zip(lines, changed, strict=True)) == 2
    return "\n".join(changed)


@pytest.mark.filterwarnings("ignore")  # torch's and Opacus's, of both engines
@pytest.mark.parametrize(
    ("name", "dp_sgd"),
    [
        ("mnist_cnn.py", False),
        pytest.param("char_lstm.py", True, marks=pytest.mark.slow),
        pytest.param("mnist_cnn.py", True, marks=pytest.mark.slow),
        pytest.param("char_lstm.py", False, marks=pytest.mark.slow),
        pytest.param("bert_lora.py", False, marks=[needs_peft, pytest.mark.slow]),
        pytest.param("bert_lora.py", True, marks=[needs_peft, pytest.mark.slow]),
    ],
)
def test_each_example_trains_both_ways_and_says_epsilon_before(name, dp_sgd, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    options, _ = EXAMPLES[name]
    options = [*options, *["--dp-sgd"][: int(dp_sgd)]]
    right, epsilon = runpy.run_path(str(FOLDER / name))["main"](options)
    assert 7.99 < epsilon <= 8.0
    before, after = capsys.readouterr().out.splitlines()[-2:]
    assert before.startswith(f"epsilon {epsilon} at delta")
    assert before.endswith("before training")
    assert after.endswith(f"epsilon {epsilon} after training")
    assert 0 <= right <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_opacus_runs_each_example_with_two_lines_changed_back(name, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    options, _ = EXAMPLES[name]
    text = of_opacus(name).replace("Path(__file__)", f"Path({str(FOLDER / name)!r})")
    (tmp_path / name).write_text(text)
    right, epsilon = runpy.run_path(str(tmp_path / name))["main"]([*options, "--dp-sgd"])
    assert epsilon == pytest.approx(8.0, abs=0.05)
    assert 0 <= right <= 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_lines_make_a_program_of_opacus(name):
    assert "privpart" not in of_opacus(name).split('"""', 2)[2]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("char_lstm.py", [], marks=pytest.mark.slow),
        pytest.param("char_lstm.py", ["--dp-sgd"], marks=pytest.mark.slow),
        pytest.param("bert_lora.py", [], marks=[needs_peft, pytest.mark.slow]),
    ],
)
def test_an_example_that_is_killed_ends_as_an_undisturbed_one(name, options, tmp_path):
    """In the middle of a pass, and at its end, before its checkpoint."""
    program = KILLED.format(root=str(FOLDER.parent.parent), path=str(FOLDER / name))
    folders = [tmp_path / "killed", tmp_path / "whole"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *folders, *options],
        capture_output=True,
        text=True,
    )
    assert "18 steps are equal" in done.stdout, done.stderr
    assert "the run's folder is at step 8" in done.stderr
