"""The house: small files, documented names, and code blocks in the README that run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import accounting
import attacks
import privpart

ROOT = Path(__file__).parent.parent
SOURCES = [p for name in ("accounting", "attacks", "privpart") for p in (ROOT / name).rglob("*.py")]


def test_no_file_is_over_300_lines():
    long = {str(p): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 300}
    assert not long


@pytest.mark.parametrize("package", [accounting, attacks, privpart], ids=lambda p: p.__name__)
def test_every_public_name_is_listed_sorted_and_documented(package):
    assert list(package.__all__) == sorted(package.__all__, key=str.lower) or list(
        package.__all__
    ) == sorted(package.__all__)
    undocumented = [name for name in package.__all__ if not getattr(package, name).__doc__]
    assert not undocumented


def test_an_unknown_public_name_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        privpart.nonsense  # noqa: B018


def python_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_readme_shows_what_the_commands_print():
    shown = re.findall(
        r"```\n\$ privpart (.*?)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert shown
    # tests/cli/test_mechanisms.py compares what that command prints: it takes 15 seconds
    for command, output in [pair for pair in shown if not pair[0].startswith("mechanisms")]:
        done = subprocess.run(
            [sys.executable, "-m", "privpart.cli.main", *command.split()],
            capture_output=True,
            text=True,
        )
        lines = [line.rstrip() for line in done.stdout.splitlines()]
        assert [line for line in lines if line] == [line for line in output.splitlines() if line]


def test_readme_blocks_run():
    blocks = python_blocks("README.md")
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_every_silent_failure_names_tests_that_exist():
    text = (ROOT / "docs" / "silent-failures.md").read_text()
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", text))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 30
    assert not named - defined
