"""The command line as a process of its own."""

import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def privpart():
    """Run ``privpart`` with these arguments."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "privpart.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    return run
