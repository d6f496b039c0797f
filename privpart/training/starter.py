"""Starter: a plan, the code that it names and a Flower app, which train as they are.

They are texts, because nobody imports them here: they belong to the person who asked for them.
"""

import json
import re
import shlex
from pathlib import Path

from accounting.checks import ConfigError
from privpart.training.plan_file import read

_PLAN = """\
# A training of your own. It runs as it is, on images of digits that come with scikit-learn:
#
#   privpart epsilon --plan plan.toml            what it costs; runs none of your code
#   privpart train --plan plan.toml --out run
#   privpart report run
#
# The 250 users of the example are too few for a small epsilon at a high accuracy.
schema = "privpart/plan/1"

[privacy]                       # of each client, against whoever sees the models of all rounds
rounds = 100
clip_norm = 0.5                 # longest update of one client; begin near the median of the norms
noise_multiplier = 2.5          # or target_epsilon = 10.0, for the least noise that meets it
delta = 1e-4                    # below 0.1 / number of clients
max_participations = 10         # 100 rounds * 25 clients / 250 users
min_separation = 10             # 250 users / 25 clients: rounds until a client takes part again
minimum_cohort = 10
mechanism = { name = "blt" }

[model]
factory = "./task.py:network"   # returns a torch.nn.Module
sizes = { hidden = 128 }        # its keyword arguments
train = ["head.*"]              # patterns of parameters; what does not train needs no noise
seed = 7                        # start values; what does not train follows from it, never sent
keep = []                       # patterns that keep the factory's own weights instead
#
# Pretrained weights: name what keeps them above, such as keep = ["features.*"]. The factory returns
# a module that has them, or they are in a file:
# weights = "pretrained.safetensors"
#
# Parameters that train on the client and never leave it:
# local = ["head.bias"]

[data]
clients = "./task.py:clients"   # returns who takes part and what each holds
options = { images_each = 6 }   # its keyword arguments
metric = "./task.py:metric"     # from the module to a number, on public data
clients_per_round = 25
seed = 0                        # who takes part when
#
# Who they are, by a name: all runs about them share a budget, see `privpart budget`.
# population = "example"

[client]
learning_rate = 0.5
epochs = 2
batch_size = 6
#
# A loss of your own; "cross_entropy" is the default.
# loss = "./task.py:loss"

[server]
learning_rate = 0.5
momentum = 0.9
"""

_TASK = '''\
"""Own code that plan.toml names: a network, clients, a metric and, if you like, a loss.

A change of this file, or of files that it imports, is a change of the plan: a run that has begun
with other code is not resumed.
"""

import torch
from privpart.data import Users
from privpart.data.tasks import digits
from torch import Tensor, nn

FOR_CLIENTS = 1500
"""Images that clients hold; the other 297 are public."""


class Network(nn.Module):
    """Any module will do, one without batch statistics: GroupNorm rather than BatchNorm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def network(hidden: int = 128) -> nn.Module:
    """Return the network; [model] sizes are the arguments.

    To start from pretrained weights, return a module that has them and name them in [model] keep;
    or leave the module as it is and name a safetensors file in [model] weights.
    """
    return Network(hidden)


def clients(images_each: int = 6) -> Users:
    """Return who takes part and what each holds; [data] options are the arguments.

    For your own data, return what one of these makes; all are in privpart.data:

        from_tensors((x, y), user=ids)                       tensors or arrays, an id per example
        from_npz("data.npz", user="user", x="x", y="y")      arrays of a file
        from_frame("data.csv", user="user_id", x=["age", "height"], y="label")
        from_frame(frame, user="user_id", examples=tokens)   a function of one client's rows
        from_dataset(dataset, user=ids)                      a dataset of torch or Hugging Face
        from_folders("photos", load=read_image)              a folder per user

    An object with ids and a method examples(id) will do as well. Paths are relative to where you
    start privpart; Path(__file__).parent is this folder.
    """
    x, y = images()
    rows = torch.arange(FOR_CLIENTS)
    return Users(x[rows], y[rows], torch.split(rows, images_each))


def metric(module: nn.Module) -> float:
    """Return the accuracy on images that no client holds.

    The module is in evaluation mode, without gradients. No guarantee covers the data used here.
    """
    x, y = images()
    right = module(x[FOR_CLIENTS:]).argmax(dim=1) == y[FOR_CLIENTS:]
    return float(right.float().mean())


# def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
#     """Return the mean loss of a batch, as clients() makes them; name it in [client] loss."""
#     x, y = batch
#     return nn.functional.cross_entropy(module(x), y, label_smoothing=0.1)


def images() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of 64 pixels, from 0 to 1, and which digit each shows."""
    task = digits()  # of scikit-learn, in two parts
    return torch.cat((task.train_x, task.test_x)).flatten(1), torch.cat((task.train_y, task.test_y))
'''


_APP = """\
# The training of plan.toml as a Flower app; README.md says how to run it.

[project]
name = "{name}"
version = "1.0.0"
description = "Federated training under a privacy plan"
dependencies = []               # Flower installs these again for every run; ours are there already

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
out = {out}
nodes = 2                       # the run begins when so many have said which clients they have
authenticated = false           # true where the SuperLink has --enable-supernode-auth
timeout = 3600                  # seconds to wait for the answers of a round
evaluate_every = 10
"""

_SERVER_APP = '''\
"""What runs beside the SuperLink: the rounds of plan.toml, committed to a run folder."""

from pathlib import Path

from privpart import server_app

app = server_app(Path(__file__).parent / "plan.toml")
'''

_CLIENT_APP = '''\
"""What runs on every SuperNode: local training of the clients that it hosts, under plan.toml."""

from pathlib import Path

from privpart import client_app

app = client_app(Path(__file__).parent / "plan.toml")
'''

_README = """\
# {name}: a training under a privacy plan, over Flower

| file | what it is |
|---|---|
| `plan.toml` | the whole training; `privpart epsilon --plan plan.toml` says what it costs |
| `server_app.py` | runs beside the SuperLink: the rounds, committed to the run folder |
| `client_app.py` | runs on every SuperNode: trains the clients that it hosts, by this plan alone |
| `pyproject.toml` | tells Flower of the two; its last table has the settings of the run |

Every machine needs privpart and flwr, and what the plan's code imports. Flower carries the Python
and TOML files of this folder to the nodes, and no data: what `clients()` reads must be on the node.

## On one machine

    flwr run . --stream

Flower simulates two nodes (this needs `flwr[simulation]`). Each gets a `partition-id` and answers
for its share of the clients.

## Over a network

Where the server is, with a certificate for its name:

    flower-superlink --port 8000 --enable-supernode-auth \\
      --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key \\
      --database superlink.db --disable-runtime-dependency-installation

It listens on 127.0.0.1. Nodes reach it by a proxy that passes on paths below /v1/fleet/ alone:
whoever reaches the others registers nodes and runs code, on the server and on every node. Flower
asks nobody for a password. privpart's docs/flower.md has the lines for nginx.

Set `authenticated = true` in `pyproject.toml`. For each node, a key that the SuperLink is told of:

    ssh-keygen -q -t ecdsa -b 384 -N "" -f node1
    flwr supernode register node1.pub

On the node, which needs `ca.crt` and its own private key:

    flower-supernode --superlink server:443 --root-certificates ca.crt \\
      --auth-supernode-private-key node1

`clients()` there returns the node's own clients, each with an id that no other node uses. Where one
data set serves several nodes, `--node-config "partition-id=0 num-partitions=2"` gives the node its
share. Then `flwr run .` begins the run.

## Afterwards

`flwr run` ends with 0 also where the run has failed. These do not:

    privpart report {shell}
    privpart verify {shell}

If anything was killed, `flwr run .` again continues the run that is in the folder.
"""


def write_starter(folder: Path) -> list[Path]:
    """Write ``plan.toml`` and ``task.py`` into a folder, and return their paths.

    The folder is made if it does not exist.

    Raises:
        ConfigError: one of the files exists, or the folder cannot be written to.
    """
    return _write({folder / "plan.toml": _PLAN, folder / "task.py": _TASK})


def write_flower_app(folder: Path) -> list[Path]:
    """Write a Flower app into a folder, and return the paths of what was written.

    The app trains the ``plan.toml`` of the folder; where there is none, the starter's is written.

    Raises:
        ConfigError: Flower would refuse the folder's name, its plan is not valid or not one for a
            network, one of the files exists, or the folder cannot be written to.
    """
    folder = folder.absolute()
    name = folder.name
    if not re.fullmatch("[A-Za-z][A-Za-z0-9-]{0,31}", name):
        raise ConfigError(
            f"{folder}: Flower takes the name of this folder for the app's and refuses it; choose "
            "one of at most 32 letters, digits and hyphens that begins with a letter."
        )
    run = str(folder.parent / f"{name}-run")
    out = json.dumps(run, ensure_ascii=False)
    texts = {
        folder / "pyproject.toml": _APP.format(name=name, out=out),
        folder / "server_app.py": _SERVER_APP,
        folder / "client_app.py": _CLIENT_APP,
        folder / "README.md": _README.format(name=name, shell=shlex.quote(run)),
    }
    if (folder / "plan.toml").exists():
        from privpart.training.training import refuse_over_network  # imports torch

        refuse_over_network(read(folder / "plan.toml"))
    else:
        texts |= {folder / "plan.toml": _PLAN, folder / "task.py": _TASK}
    return _write(texts)


def _write(texts: dict[Path, str]) -> list[Path]:
    folder = next(iter(texts)).parent
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; name a folder.")
    for path in texts:
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path}: exists already; name another folder, or move it away.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to: {error}.") from None
    return list(texts)
