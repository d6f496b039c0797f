"""Workers that hang, are stopped, or lose the process that started them; and Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from accounting import ConfigError
from privpart import WorkerError
from privpart.engines import workers as module
from privpart.engines.options import EngineOptions
from privpart.engines.workers import Workers

from .hanging import HANGS, hang, one_round, pool

SCRIPT = Path(__file__).with_name("hanging.py")


def lives(pid: int) -> bool:
    """Return whether a process runs, which a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids, seconds=60.0) -> bool:
    """Return whether they end; ``seconds`` only keep a fault from hanging the tests."""
    deadline = time.monotonic() + seconds
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(lives, pids))


def test_a_worker_that_was_stopped_is_taken_to_hang_by_the_pace_so_far(monkeypatch):
    monkeypatch.setattr(module, "_LEAST_PATIENCE", 0.5)
    monkeypatch.setattr(module, "_LOOK", 0.1)
    workers, model = pool(1)
    assert len(one_round(workers, model, range(4))) == 4
    pids = [worker.process.pid for worker in workers._workers]
    assert 0 < workers._pace < 5
    monkeypatch.setattr(workers, "_pace", 0.001)  # of a slow machine it could be seconds
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"worker 0 has not answered for 0\.5 seconds.*--resume"):
        one_round(workers, model, [0])
    assert all_end(pids, 0)  # also a stopped process


@pytest.mark.slow
def test_a_loss_that_never_ends_is_one_sentence():
    workers, model = pool(2, timeout=1.0)
    one_round(workers, model, range(4))
    pids = [worker.process.pid for worker in workers._workers]
    with pytest.raises(WorkerError, match=r"has not answered for 1 seconds and is taken to hang"):
        one_round(workers, model, [0, HANGS, 1, 2, 3])
    assert all_end(pids, 0)


def test_few_updates_are_put_aside_while_a_worker_computes_the_one_before():
    """Those of a whole cohort may not fit into memory."""
    workers, model = pool(1, timeout=1.0)
    one_round(workers, model, [0])
    computed = []

    def here(chunk, _watch):
        computed.append(chunk)
        return torch.zeros(len(chunk), model.dim), 0

    with pytest.raises(WorkerError, match="has not answered for 1 seconds"):
        one_round(workers, model, [0, HANGS, *[1] * 50], here)
    assert computed == [[0], *[[1]] * module._SLOTS]


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


def quiet(timeout=None, pace=0.0, *, started=True) -> tuple[Workers, module._Worker]:
    """Return a pool whose only worker owes an answer about four clients; no process is started."""
    one = module._Worker(None, None, None, None, started=started)
    one.queued.append(4)
    workers = Workers.__new__(Workers)
    workers._timeout, workers._pace, workers._workers = timeout, pace, [one]
    return workers, one


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"started": False, "timeout": 1.0}, 300),  # importing torch takes its time
        ({}, 900),
        ({"pace": 0.01}, 60),
        ({"pace": 3.0}, 600),
        ({"pace": 3.0, "timeout": 7.0}, 7),
    ],
)
def test_patience_follows_the_pace_or_the_option(options, seconds):
    workers, one = quiet(**options)
    one.silent = seconds - 0.1
    workers._refuse_silence()
    one.silent = seconds + 0.1
    with pytest.raises(WorkerError, match=f"worker 0 has not answered for {seconds} seconds"):
        workers._refuse_silence()


def test_time_in_which_the_whole_machine_slept_does_not_count(monkeypatch):
    """Ctrl-Z stops the engine and its workers alike."""
    workers, one = quiet(timeout=60.0)
    clock = iter([0.0, 3600.0])
    monkeypatch.setattr(module, "wait", lambda *_: [])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert workers._wait([], 1.0) == []
    assert one.silent == 2 * module._LOOK
    workers._refuse_silence()


def test_a_deadline_without_workers_is_refused():
    with pytest.raises(ConfigError, match=r"worker_timeout=5: one process has no workers"):
        EngineOptions(worker_timeout=5.0)
    for nonsense in (0.0, float("nan"), -1.0):
        with pytest.raises(ConfigError, match="worker_timeout="):
            EngineOptions(workers=2, worker_timeout=nonsense)


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
