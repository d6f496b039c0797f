"""``privpart audit gradients``: per-example gradients against those of each example alone."""

import json
import sys

import pytest

TASK = """
import torch
from torch import nn

class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)

def loss(module, batch):
    return nn.functional.cross_entropy(module(batch[0]), batch[1])

def made(*extra):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), *extra, nn.Dropout(), nn.Linear(6, 3))
    return net, loss, (torch.randn(5, 4), torch.randint(3, (5,)))

def good():
    return made(nn.ReLU())

def mixing():
    return made(Centred())

def lonely():
    net, own, (x, y) = made()
    return net, own, (x[:1], y[:1])

def broken():
    net, _, batch = made()
    return net, lambda module, batch: module(batch[0]).nothing, batch

def two():
    return made()[:2]
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    (folder / "gradient_task.py").write_text(TASK)
    yield folder / "gradient_task.py"
    sys.modules.pop("gradient_task", None)
    sys.path[:] = [path for path in sys.path if path != str(folder)]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_layer_that_mixes_examples_is_found(privpart, task):
    done = privpart("audit", "gradients", f"{task}:good", "--format", "json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["equal"], len(found["parameters"])) == (0, True, 4)
    assert all(row["error"] < 1e-6 for row in found["parameters"])
    done = privpart("audit", "gradients", f"{task}:mixing", "--format", "json")
    wrong = {row["parameter"]: row["error"] for row in json.loads(done.stdout)["parameters"]}
    assert done.returncode == 5
    assert wrong["0.weight"] > 0.1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lonely", "rows of the batch=1: must be at least 2"),
        ("broken", "has no attribute 'nothing'"),
        ("two", "must return three things"),
        ("nobody", "does not define nobody"),
    ],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_mistake_is_one_sentence(privpart, task, name, said):
    done = privpart("audit", "gradients", f"{task}:{name}")
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
