"""A training that takes no time, as files of an app: six clients, four rounds."""

from pathlib import Path

from privpart.experiment.starter import write_flower_app

ROUNDS = 4
SEED = 7
PLAN = f"""\
schema = "privpart/plan/1"

[privacy]
rounds = {ROUNDS}
clip_norm = 0.5
noise_multiplier = 1.5
delta = 1e-3
max_participations = {ROUNDS}
min_separation = 1
minimum_cohort = 3
mechanism = {{ name = "tree" }}

[model]
factory = "./task.py:network"
train = ["head.*"]
seed = 3
keep = []

[data]
clients = "./task.py:clients"
clients_per_round = 4
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


def write_app(folder: Path, out: Path, plan: str = PLAN, **settings: int | float) -> Path:
    """Write an app as ``privpart flower init`` does, beside this plan; return its folder."""
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text(plan)
    (folder / "task.py").write_text(TASK)
    write_flower_app(folder)
    project = folder / "pyproject.toml"
    text = project.read_text().replace("authenticated = false", "authenticated = true")
    lines = [line for line in text.splitlines() if not line.startswith("out =")]
    lines += [f'out = "{out}"', *(f"{name} = {value}" for name, value in settings.items())]
    project.write_text("\n".join(lines) + "\n")
    return folder
