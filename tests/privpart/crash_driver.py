"""Run by test_crash.py: kills a run before every system call of every commit, and resumes it.

Each kill happens in a forked child, by SIGKILL, so no handler and no ``finally`` runs.
Prints one JSON object: what the runs ended with, and a journal of what clients were sent.
"""

import hashlib
import json
import os
import signal
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import torch

from accounting import BinaryTree, Grouped, Participation
from privpart import PrivacyPlan, RunFolder, Server, ServerOptimizer, fit
from privpart.run.folder import holds_a_run

ROUNDS, DIM = 3, 6
PLAN = PrivacyPlan(
    mechanism=BinaryTree(ROUNDS, estimator="online"),
    participation=Participation(ROUNDS, 2, 2),
    clip_norm=0.5,
    noise_multiplier=1.0,
    report_goal=2,
)
SIZES = (4, 2)
GROUPED = Grouped([(0, 1), (0,), (1,)], [BinaryTree(2, estimator="online")] * 2, SIZES)
COHORTS = [[0, 1], [2, 3], [0, 1]]


class Calls:
    """Counts calls that change the disk; kills the process before the given one."""

    def __init__(self, kill_before: int | None) -> None:
        self.kill_before, self.made = kill_before, 0

    def watched(self, call):
        def counted(*args, **kwargs):
            self.made += 1
            if self.made == self.kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    def install(self) -> None:
        calls = self

        class Connection(sqlite3.Connection):
            def execute(self, *args):
                return calls.watched(super().execute)(*args)

            def executemany(self, *args):
                return calls.watched(super().executemany)(*args)

        connect = sqlite3.connect
        sqlite3.connect = lambda *a, **k: connect(*a, **k, factory=Connection)
        os.fsync = self.watched(os.fsync)
        Path.replace = self.watched(Path.replace)
        Path.unlink = self.watched(Path.unlink)


class Clients:
    """Notes in a journal what each round's clients are sent, which is when it is released."""

    def __init__(self, journal: Path, *, repeatable: bool) -> None:
        self.journal, self.repeatable = journal, repeatable

    def run(self, task, start):
        digest = hashlib.sha256(start.numpy().tobytes()).hexdigest()
        handle = os.open(self.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, f"{task.round - 1} {digest}\n".encode())
        os.close(handle)
        for client in task.clients:
            seed = 10 * task.round + client if self.repeatable else os.getrandom(8)
            address = seed if self.repeatable else int.from_bytes(seed, "big", signed=True)
            generator = torch.Generator().manual_seed(address)
            sizes = [DIM] if task.active is None else [SIZES[group] for group in task.active]
            yield task.update(client, torch.randn(sum(sizes), generator=generator))


def train(folder: Path, mode: str, kill_before: int | None, *, watch: bool = True) -> int:
    """Begin or resume the run and bring it to its end; return the number of watched calls."""
    calls = Calls(kill_before)
    if watch:
        calls.install()
    seed = 7 if mode.startswith("seeded") else None
    plan = replace(PLAN, mechanism=GROUPED) if mode == "seeded-groups" else PLAN
    run = (
        RunFolder.open(folder) if holds_a_run(folder) else RunFolder.create(folder, plan, seed=seed)
    )
    with run:
        settings = ServerOptimizer(kind="adam", learning_rate=0.1)
        server = Server(plan, torch.zeros(DIM), source=run.source(), optimizer=settings)
        run.restore(server)
        clients = Clients(folder.with_suffix(".journal"), repeatable=seed is not None)
        commit = late(run.commit, server, clients) if mode == "released-first" else run.commit
        fit(server, clients, COHORTS, commit=commit)
    return calls.made


def late(commit, server, clients):
    """The defect that the test must notice: the next clients see a model before its commit."""

    def shown_first(one, counts):
        if one.round < ROUNDS:
            list(clients.run(one.task([]), one.parameters))
        commit(one, counts)

    return shown_first


def in_child(folder: Path, mode: str, kill_before: int | None) -> bool:
    """Train in a child process; return whether it lived to the end."""
    child = os.fork()
    if child == 0:
        try:
            made = train(folder, mode, kill_before)
            folder.with_suffix(".calls").write_text(str(made))
        except BaseException as error:
            folder.with_suffix(".error").write_text(repr(error))
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(folder.with_suffix(".error").read_text())
    return os.WIFEXITED(status)


def final_state(folder: Path) -> str:
    return hashlib.sha256((folder / f"state-{ROUNDS:06d}.safetensors").read_bytes()).hexdigest()


def conflicts(folder: Path) -> int:
    """Rounds of which two different models were released."""
    seen: dict[str, set[str]] = {}
    for line in folder.with_suffix(".journal").read_text().splitlines():
        address, digest = line.split()
        seen.setdefault(address, set()).add(digest)
    return sum(len(digests) > 1 for digests in seen.values())


def main(mode: str, base: Path) -> None:
    torch.set_num_threads(1)
    train(base / "warm", mode, None, watch=False)  # so that no child pays for late imports
    in_child(base / "whole", mode, None)
    calls = int((base / "whole.calls").read_text())
    killed, ends, clashes = 0, set(), 0
    for before in range(1, calls + 1):
        folder = base / f"run{before}"
        killed += not in_child(folder, mode, before)
        in_child(folder, mode, None)
        ends.add(final_state(folder))
        clashes += conflicts(folder)
    result = {
        "calls": calls,
        "killed": killed,
        "ends": len(ends),
        "bit_identical": ends == {final_state(base / "whole")},
        "conflicts": clashes,
    }
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
