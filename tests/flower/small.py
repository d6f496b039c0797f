"""A training that takes no time, as files of an app: six clients."""

import re
from pathlib import Path

from torch import Tensor

from privpart import train
from privpart.training.export import released_parameters
from privpart.training.starter import write_flower_app

SEED = 7
PLAN = """\
schema = "privpart/plan/1"

[privacy]
rounds = {rounds}
clip_norm = 0.5
noise_multiplier = 1.5
delta = 1e-3
max_participations = {rounds}
min_separation = 1
minimum_cohort = 3
mechanism = {{ name = "tree" }}

[model]
factory = "./task.py:network"
train = ["head.*"]
seed = 340282366920938463463374607431768211455
keep = []

[data]
clients = "./task.py:clients"
clients_per_round = {clients}
seed = 0

[client]
learning_rate = 0.5
epochs = 1
batch_size = 4

[server]
learning_rate = 0.5
momentum = 0.9
"""
TASK = '''\
"""Points of two kinds, five for each of six clients, and a network for them."""

import torch
from privpart.data import Users
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def network():
    return Network()


def clients():
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(30, 8, generator=draws)
    return Users(x, (x.sum(dim=1) > 0).long(), torch.split(torch.arange(30), 5))
'''


KILLED = '''\
"""The ServerApp of the plan; it kills a process where and when a file says so."""

import os
import signal
from pathlib import Path

from privpart import FlowerEngine, server_app
from privpart.run.folder import RunFolder

ORDER = Path("ORDER_FILE")
"""Phase, round and process id."""


def reached(phase, number):
    if ORDER.exists():
        when, which, pid = ORDER.read_text().split()
        if when == phase and int(which) == number:
            ORDER.unlink()
            os.kill(int(pid) or os.getpid(), signal.SIGKILL)


def told(engine, task, start):
    reached("begun", task.round)
    for number, answer in enumerate(run(engine, task, start)):
        if number == 0:
            reached("answered", task.round)
        yield answer


def committed(folder, server, counts):
    number = server.round - 1
    reached("summed", number)
    commit(folder, server, counts)
    reached("committed", number)


run, FlowerEngine.run = FlowerEngine.run, told
commit, RunFolder.commit = RunFolder.commit, committed
app = server_app(Path(__file__).parent / "plan.toml")
'''
"""A server_app.py; ORDER_FILE is to be replaced."""


def plan_of(rounds: int, clients: int = 4) -> str:
    """Return a plan of so many rounds, with so many of the six clients in each."""
    return PLAN.format(rounds=rounds, clients=clients)


def write_app(
    folder: Path, out: Path, plan: str, code: str = "task", **settings: int | float | str
) -> Path:
    """Write an app as ``privpart init --kind flower`` does, beside this plan; return its folder.

    A process loads the code of one app of each name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.toml").write_text(plan.replace("./task.py", f"./{code}.py"))
    (folder / f"{code}.py").write_text(TASK)
    write_flower_app(folder)
    project = folder / "pyproject.toml"
    chosen = {"out": f'"{out}"', "authenticated": "true", **settings}
    lines = project.read_text().splitlines()
    kept = [line for line in lines if line.partition(" = ")[0] not in chosen]
    kept += [f"{name} = {value}" for name, value in chosen.items()]
    project.write_text("\n".join(kept) + "\n")
    return folder


def committed(out: Path) -> int:
    """Return how many rounds a run folder has committed."""
    found = [re.fullmatch(r"state-(\d+)\.safetensors", path.name) for path in out.glob("state-*")]
    return max((int(match[1]) for match in found if match), default=0)


def train_here(folder: Path, seed: int) -> Tensor:
    """Train the plan of an app in this process, and return the parameters."""
    out = folder.parent / "here"
    train(plan=folder / "plan.toml", out=out, seed=seed, progress=False)
    return released_parameters(out)[0]
