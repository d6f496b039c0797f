"""Planted faults are found, and right plans are none: the script beside, some of it every time."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MUTANTS = tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]


def script(*arguments: str) -> list[str]:
    command = [sys.executable, str(HERE / "mutants.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_fault_is_of_the_code_as_it_is():
    assert len(MUTANTS) >= 40
    assert len({mutant["name"] for mutant in MUTANTS}) == len(MUTANTS)
    rooms = Counter(mutant["room"] for mutant in MUTANTS)
    assert rooms.keys() >= {"engine", "sampler", "limits", "source", "commit", "grid", "divisor"}
    for mutant in MUTANTS:
        texts: dict[str, str] = {}
        for edit in mutant["edits"]:
            text = texts.get(edit["file"]) or (ROOT / edit["file"]).read_text()
            assert text.count(edit["old"]) == 1, (mutant["name"], edit["old"])
            texts[edit["file"]] = text.replace(edit["old"], edit["new"])
        for file, text in texts.items():
            ast.parse(text, file)
            assert text != (ROOT / file).read_text(), mutant["name"]


@pytest.mark.slow
def test_a_planted_fault_is_found_by_the_command():
    *_, row, count = script("--only", "noise x 0.9")
    assert "| **VIOLATION** |" in row
    assert count == "1 of 1 found"


@pytest.mark.slow
def test_planted_faults_are_found():
    found, _, of, _ = script("--only", " ")[-1].split()  # all names have one; writes nothing
    assert int(of) == len(MUTANTS)
    assert int(found) >= 0.95 * len(MUTANTS)


@pytest.mark.slow
def test_a_hundred_right_plans_are_no_violation():
    assert script("--right")[-1] == "100 consistent"
