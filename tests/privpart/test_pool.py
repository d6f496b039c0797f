"""The pool: processes that die or hang fail their own jobs, and others take their places."""

import signal
from multiprocessing import Pipe
from threading import Thread

import pytest

from privpart import pool as module
from privpart.pool import Pool, Worker, WorkerError


class Pretended:
    """A thread in place of a process, which does with a job what the job says."""

    exitcode = -signal.SIGKILL

    def __init__(self, pipe, *, starts=True):
        self.pipe, self.starts = pipe, starts
        Thread(target=self.serve, daemon=True).start()

    def serve(self):
        if not self.starts:
            self.pipe.close()
            return
        self.pipe.send((False, None))
        while True:
            try:
                job = self.pipe.recv()
            except (EOFError, OSError):
                return
            if job == "dies":
                self.pipe.close()
                return
            if job != "hangs":
                self.pipe.send((False, 1))
                self.pipe.send((True, f"{job} ends"))

    def kill(self):
        pass

    def join(self, _):
        pass


def pretended(monkeypatch, count, **options):
    pool, started = Pool(count, None, timeout=0.3), []

    def new(_):
        ours, theirs = Pipe()
        started.append(Worker(Pretended(theirs, **options), ours))
        return started[-1]

    monkeypatch.setattr(module.Pool, "_new", new)
    monkeypatch.setattr(module, "LOOK", 0.05)
    return pool, started


def answers(pool, jobs, queued=1):
    todo, told, found = list(jobs), [], {}
    while todo or pool.busy:
        while todo and (worker := pool.idle(queued)):
            pool.give(worker, todo.pop(0))
        for job, finished, message in pool.heard():
            if finished:
                found[job] = message
            else:
                told.append(job)
    return found, told


@pytest.mark.parametrize("queued", [1, 2])
def test_a_job_that_hangs_or_kills_its_process_fails_alone(monkeypatch, queued):
    pool, started = pretended(monkeypatch, 2)
    found, told = answers(pool, ["a", "b", "dies", "hangs", "c"][: 5 if queued == 1 else 2], queued)
    assert found["a"] == "a ends"
    assert found["b"] == "b ends"
    assert set(told) <= {"a", "b", "c"}
    if queued == 1:
        assert "was ended by SIGKILL" in str(found["dies"])
        assert "sent nothing for 0.3 seconds and was taken to hang" in str(found["hangs"])
        assert found["c"] == "c ends"
        assert 3 <= len(started) <= 4
    assert pool._any_finished
    assert pool._longest > 0
    pool.close()
    with pytest.raises(WorkerError, match="was ended"):
        pool.idle()


def test_a_process_that_cannot_start_ends_the_work(monkeypatch):
    pool, _ = pretended(monkeypatch, 1, starts=False)
    with pytest.raises(WorkerError, match="no process could start"):
        answers(pool, ["a"])


def test_patience_follows_the_pace_so_far():
    pool, worker = Pool(2, None), Worker(None, None)
    assert pool._patience(worker) == 300
    worker.started = True
    assert pool._patience(worker) == 900
    pool._any_finished, pool._longest = True, 0.1
    assert pool._patience(worker) == 60
    pool._longest = 2.0
    assert pool._patience(worker) == 100
    assert Pool(2, None, timeout=7.0)._patience(worker) == 7
