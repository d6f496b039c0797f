"""A population whose last client hangs, in a module that workers can import; and a round of it.

As a script: starts two workers, which hang in Python and in C; prints their process ids, and waits.
"""

import re
import sys
from pathlib import Path

import torch

from privpart import LocalTraining, PartialModel, RoundTask
from privpart.engines.methods import Method, Work
from privpart.engines.workers import Workers
from privpart.models import mcmahan_2nn

HANGS, HANGS_IN_C = 8, 9
NESTED = re.compile("(a+)+b")


class Population:
    """Eight clients with two examples each, and two that hang without letting go of a core."""

    ids = tuple(range(10))

    def examples(self, client):
        while client == HANGS:
            pass
        if client == HANGS_IN_C:  # a pattern that takes ages, and holds the interpreter's lock
            NESTED.match("a" * 60)
        return torch.ones(2, 8), torch.ones(2, dtype=torch.int64)


def pool(count, **options):
    model = PartialModel(lambda: mcmahan_2nn(inputs=8, hidden=4, classes=3), train=["*"], seed=1)
    workers = Workers(count, model, Population(), data_seed=1, features=None, largest=2, **options)
    return workers, model


def one_round(workers, model, clients, here=None):
    task = RoundTask(0, tuple(clients), 0.2, "plan")
    work = Work(task, LocalTraining(0.1), Method(), summed=False)
    chunks = [[client] for client in clients]
    results = workers.results(work, model.flat.clone(), chunks, here)
    return [update for result in results for update in result.updates]


def lives(pid: int) -> bool:
    """Return whether a process runs, which a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def hang(count, out):
    """Start workers, write their process ids, and wait for clients that hang."""
    workers, model = pool(count)
    one_round(workers, model, range(count))
    out.write(" ".join(map(str, workers.pool.pids)) + "\n")
    out.flush()
    one_round(workers, model, [HANGS, HANGS_IN_C][:count])


if __name__ == "__main__":
    torch.set_num_threads(1)
    hang(2, sys.stdout)
