"""The command line as a process of its own."""

import signal
import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def privpart_process():
    """Run ``privpart`` with these arguments as a person does; loading torch takes seconds."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "privpart", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    return run


@pytest.fixture
def interruptible():
    """Children take SIGINT, even if whoever started the tests ignores it (as ``nohup`` does)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
