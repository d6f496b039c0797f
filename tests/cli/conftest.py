"""The command line, within this process or as one of its own."""

import io
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

from privpart.cli.main import main


@pytest.fixture(scope="session")
def privpart():
    """Run ``privpart`` with these arguments in this process, which has imported all of it."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        out, err, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["privpart", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        torch.set_num_threads(threads)
        status = ended.value.code or 0
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def privpart_process():
    """Run ``privpart`` with these arguments as a person does; loading torch takes seconds."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "privpart.cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    return run


@pytest.fixture
def interruptible():
    """Children take SIGINT, even if whoever started the tests ignores it (as ``nohup`` does)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
