"""The command line, as a process of its own or within this one."""

import signal
import subprocess
import sys

import pytest

from privpart.cli.main import main


@pytest.fixture(scope="session")
def privpart():
    """Run ``privpart`` with these arguments."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "privpart.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    return run


@pytest.fixture
def privpart_here(capsys, monkeypatch):
    """Run ``privpart`` with these arguments in this process, which has imported all of it."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["privpart", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, out, err)

    return run


@pytest.fixture
def interruptible():
    """Children take SIGINT, even if whoever started the tests ignores it (as ``nohup`` does)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
