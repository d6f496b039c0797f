"""Workers that hang, are stopped, or lose the process that started them; and Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from privpart import WorkerError
from privpart import pool as module
from privpart.engines.methods import Result
from privpart.engines.workers import _SLOTS

from .hanging import HANGS, hang, lives, one_round, pool

SCRIPT = Path(__file__).with_name("hanging.py")


def all_end(pids, seconds=60.0) -> bool:
    """Return whether they end; ``seconds`` only keep a fault from hanging the tests."""
    deadline = time.monotonic() + seconds
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(lives, pids))


@pytest.mark.usefixtures("quick_workers")
def test_a_worker_that_was_stopped_is_taken_to_hang_by_the_pace_so_far(monkeypatch):
    monkeypatch.setattr(module, "SHORTEST", 0.5)
    monkeypatch.setattr(module, "LOOK", 0.1)
    workers, model = pool(1)
    assert len(one_round(workers, model, range(4))) == 4
    pids = workers.pool.pids
    monkeypatch.setattr(workers.pool, "_longest", 0.001)  # of a slow machine it could be seconds
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"sent nothing for 0\.5 seconds.*hang.*--resume"):
        one_round(workers, model, [0])
    assert all_end(pids, 0)  # also a stopped process


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize(("chunks", "here_too"), [(50, _SLOTS), (1, 1)])
def test_few_updates_are_put_aside_while_a_worker_computes_the_one_before(chunks, here_too):
    """Those of a whole cohort may not fit into memory; the last chunk waits for no busy worker."""
    workers, model = pool(1, timeout=1.0)
    one_round(workers, model, [0])
    computed = []

    def here(chunk):
        computed.append(chunk)
        return Result(chunk, torch.zeros(len(chunk), model.dim), ())

    with pytest.raises(WorkerError, match="sent nothing for 1 seconds"):
        one_round(workers, model, [0, HANGS, *[1] * chunks], here)
    assert computed == [[0], *[[1]] * here_too]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process that is stopped")
def test_a_worker_in_an_endless_loop_ends_with_the_process_that_started_it():
    """Of a fork of this process, which has imported torch."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writes, "w") as out:
                hang(1, out)
        finally:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads) as told:
        pids = [int(pid) for pid in told.readline().split()]
    time.sleep(0.3)  # so that it hangs
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert all_end(pids)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_a_killed_or_interrupted_process(number):
    """The first is in an endless loop, and stopped; the second in a C function."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        signal.signal(signal.SIGINT, before)
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert all(map(lives, pids))
        time.sleep(0.3)  # so that they hang
        os.kill(pids[0], signal.SIGSTOP)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert all_end(pids)
    assert len(pids) == 2


def test_the_second_interrupt_ends_a_command_that_does_not_finish_tidying_up():
    code = (
        "import time, sys\n"
        "from privpart.cli import main\n"
        "def app():\n"
        "    try:\n"
        "        print('works', flush=True); time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        print('tidies up', flush=True); time.sleep(60)\n"
        "main.app = app\n"
        "main.main()\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        signal.signal(signal.SIGINT, before)
        for said in (b"works\n", b"tidies up\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGINT)
        assert process.wait(5) == -signal.SIGINT  # 130 in a shell
