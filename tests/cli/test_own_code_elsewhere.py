"""Commands besides `train` with a plan that names its author's code."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

PLAN = """
schema = "privpart/plan/1"
[privacy]
rounds = 4
clip_norm = 0.5
noise_multiplier = 1.0
delta = 1e-5
max_participations = 1
mechanism = { name = "tree" }
[model]
factory = "./NAME.py:network"
train = ["2.*"]
seed = 1
keep = []
[data]
clients = "./NAME.py:clients"
metric = "./NAME.py:metric"
clients_per_round = 5
[client]
learning_rate = 0.1
batch_size = 2
loss = "./NAME.py:loss"
augment = "./NAME.py:augment"
[server]
"""
CODE = """
import torch
from torch import nn


def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))


class Population:
    ids = tuple(f"user {number}" for number in range(20))

    def examples(self, client):
        x = torch.rand(3, 1, 4, 4)
        return x, (x.mean(dim=(1, 2, 3)) > 0.5).long()


def clients():
    return Population()


def metric(module):
    return float(module(torch.ones(1, 1, 4, 4)).softmax(dim=1)[0, 1])


def loss(module, batch):
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def augment(batch):
    x, y = batch
    return x.flip(-1), y
"""


def write(folder, name):
    (folder / f"{name}.py").write_text(CODE)
    (folder / "plan.toml").write_text(PLAN.replace("NAME", name))
    return folder / "plan.toml"


@pytest.fixture(scope="session")
def project(tmp_path_factory, privpart):
    """A folder with a plan, its code, and a finished private run."""
    folder = tmp_path_factory.mktemp("elsewhere")
    plan = write(folder, "elsewhere_code")
    done = privpart("train", "--plan", str(plan), "--out", str(folder / "run"))
    assert done.returncode == 0, done.stderr
    return folder


def test_costs_measures_the_plans_network_and_client(project, privpart):
    plan = str(project / "plan.toml")
    done = privpart("costs", "--plan", plan, "--ladder", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert "imports ./elsewhere_code.py:network (model.factory)" in done.stderr
    found = json.loads(done.stdout)
    assert (found["examples"], found["batch_size"], found["optimizer"]) == (3, 2, "sgd")
    full, planned, frozen = found["rows"]
    assert (full["train"], planned["train"], frozen["train"]) == ("*", "2.*", "!0.*")
    assert full["trained"] == full["numbers"] == 4 * 9 + 4 + 2 * 16 + 2
    assert planned["trained"] == frozen["trained"] == 2 * 16 + 2
    assert planned["bytes_up"] < full["bytes_up"]
    assert 0 < planned["backward_flops"] < full["backward_flops"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("small_cnn", "--plan", "PLAN"), ("small_cnn", "give one")),
        (("--plan", "PLAN", "--measure"), ("--measure",)),
        ((), ("model: is missing", "--plan FILE")),
        (("./task.py:network",), ("unknown", "--plan FILE")),
        (("--plan", "PLAN", "--train", "9.*"), ("train", r"9\.\*", "Near it")),
    ],
    ids=" ".join,
)
def test_costs_refuses_in_one_sentence(arguments, says, project, privpart):
    plan = str(project / "plan.toml")
    done = privpart("costs", *(plan if part == "PLAN" else part for part in arguments))
    assert done.returncode == 2
    *_, sentence = done.stderr.splitlines()
    assert sentence.startswith("privpart: ")
    for words in says:
        assert re.search(words, sentence), (words, sentence)


def test_a_fork_starts_from_a_run_of_own_code(project, privpart):
    plan, run, fork = (str(project / name) for name in ("plan.toml", "run", "fork"))
    before = json.loads(privpart("report", run, "--format", "json").stdout)
    done = privpart("train", "--plan", plan, "--out", fork, "--fork-of", run)
    assert done.returncode == 0, done.stderr
    after = json.loads(privpart("report", fork, "--format", "json").stdout)
    assert after["guarantee"]["epsilon"] > before["guarantee"]["epsilon"]


def test_tensorboard_gets_own_metrics(project, privpart):
    pytest.importorskip("tensorboard")
    plan, out = str(project / "plan.toml"), project / "board"
    done = privpart("train", "--plan", plan, "--out", str(out), "--tensorboard")
    assert done.returncode == 0, done.stderr
    assert list((out / "tensorboard").iterdir())


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_sweep_trains_own_code_in_processes(jobs, tmp_path, privpart):
    write(tmp_path, f"elsewhere_sweep_{jobs}")
    (tmp_path / "sweep.toml").write_text(
        'schema = "privpart/sweep/1"\nplan = "plan.toml"\nseeds = [1, 2]\n'
        "[grid]\n'client.learning_rate' = [0.1, 0.2]\n"
    )
    arguments = ("sweep", str(tmp_path / "sweep.toml"), "--out", str(tmp_path / "out"), "-j", jobs)
    done = privpart(*arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert f"imports ./elsewhere_sweep_{jobs}.py:metric (data.metric)" in done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["seeds"] for row in rows] == [2, 2]
    assert all(row["failed"] == 0 and 0 < row["mean_metric"] < 1 for row in rows)
    again = privpart(*arguments)
    assert "0 to train" in again.stderr
    assert "imports" not in again.stderr
    plan = write(tmp_path, f"elsewhere_failing_{jobs}")
    code = plan.with_name(f"elsewhere_failing_{jobs}.py")
    code.write_text(CODE.replace("def loss(module, batch):", "def loss(module):"))
    failed = privpart(*arguments)
    assert failed.returncode == 2
    assert "to train" not in failed.stderr  # it is refused before any is trained
    assert "Traceback" not in failed.stderr
    assert "seed 1: loss=loss: TypeError: " in failed.stderr


def test_an_audit_attacks_own_networks_on_own_images(tmp_path, privpart, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "elsewhere_audit")
    images = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    save_file({"x": images, "y": torch.tensor([0, 1, 0, 1])}, tmp_path / "images.safetensors")
    done = privpart(
        *("audit", "leakage", "--model", "./elsewhere_audit.py:network", "--trials", "1"),
        *("--data", "images.safetensors", "--view", "full", "--attack", "dlg"),
        *("--effort", "quick", "--out", "audit", "--format", "json"),
    )
    assert done.returncode == 0, done.stderr
    assert "imports ./elsewhere_audit.py:network (model)" in done.stderr
    assert json.loads(done.stdout)["verdict"]
    wrong = privpart(
        *("audit", "leakage", "--model", "./elsewhere_audit.py:netwrok", "--data", "digits"),
        *("--view", "full", "--out", "other"),
    )
    assert wrong.returncode == 2
    assert "near it: network" in wrong.stderr
    assert "Traceback" not in wrong.stderr
