"""Hypothesis is the same on every machine, without deadlines; and the command line as a fixture."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec

import pytest
from hypothesis import settings

# The tests run beside each other and start processes; several threads each make them wait for each
# other: a matrix decomposition then takes eight times as long. Before anything imports numpy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nothing here outlives a power failure, and a disk takes milliseconds to flush. What is no handle
# still fails, and the test of faults at each call traces processes of its own.
os.fsync = os.fstat

# Doctests import every module, and this one subclasses Flower's.
collect_ignore = [] if find_spec("flwr") else ["flower/node.py"]

settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _tests_stay_out_of_the_home_directory(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path_factory.getbasetemp() / "witnesses"))
    monkeypatch.setenv("PRIVPART_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def fresh_code(monkeypatch, tmp_path):
    """Forget the modules that a test imports from its folder, as a new process would."""
    from privpart.training import own_code

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(own_code, "_imported", {})
    for name in ("task", "network", "prepare"):  # another test's, which it left
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def process_with_torch():
    """Start the process that worker processes are forked from, once it is first asked."""
    from torch.multiprocessing import get_context

    context = get_context("forkserver")
    context.set_forkserver_preload(["privpart.engines.workers", "torch._dynamo"])
    return context


@pytest.fixture
def quick_workers(process_with_torch, monkeypatch):
    """Fork an engine's workers from a process that has imported torch, which takes them seconds.

    As with spawned ones, all that they get is pickled. Some tests, such as those of whole commands,
    go without, and spawn them as users do.
    """
    monkeypatch.setattr("privpart.pool.get_context", lambda _: process_with_torch)


@pytest.fixture(scope="session")
def privpart():
    """Run ``privpart`` with these arguments in this process, which has imported all of it."""
    import torch  # most tests of the accounting do without

    from privpart.cli.main import main

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
