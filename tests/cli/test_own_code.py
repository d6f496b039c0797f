"""Plans that name their author's code, in every command, and the same from Python."""

import json
import os
import shutil
import sys
import tomllib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import privpart as package
from accounting import ConfigError
from privpart.data import from_tensors
from privpart.run.report import run_report

PLAN = """
schema = "privpart/plan/1"
[privacy]
rounds = 12
clip_norm = 0.5
noise_multiplier = 1.0
delta = 1e-5
max_participations = 4
min_separation = 3
mechanism = { name = "tree" }
[model]
factory = "./NAME.py:network"
sizes = { hidden = 4 }
train = ["2.*"]
keep = ["0.*"]
weights = "w.safetensors"
seed = 1
[data]
clients = "./NAME.py:Population"
options = { each = 3 }
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
from pathlib import Path
import torch
from torch import nn
import NAME_helper

Path(__file__).with_suffix(".ran").touch()


def network(hidden=4):
    return nn.Sequential(nn.Conv2d(1, hidden, 3), nn.Flatten(), nn.Linear(4 * hidden, 2))


class Population:
    ids = tuple(f"user {number}" for number in range(20))

    def __init__(self, each):
        self.each = each

    def examples(self, client):
        x = torch.rand(self.each, 1, 4, 4)
        return x, (x.mean(dim=(1, 2, 3)) > 0.5).long()


def metric(module):
    return float(module(torch.ones(1, 1, 4, 4)).softmax(dim=1)[0, 1])


def loss(module, batch):
    return NAME_helper.smooth(module(batch[0]), batch[1])


def augment(batch):
    return batch[0].flip(-1), batch[1]
"""
HELPER = """
from torch.nn.functional import cross_entropy


def smooth(logits, y):
    return cross_entropy(logits, y, label_smoothing=0.1)
"""
TURNS = "[schedule]\ncycles = 2\nrounds_per_group = 1\nwarm_up = 4\nbetween = 4\n"


def write(folder, name="task"):
    """Write a plan and its code to a folder."""
    (folder / "plan.toml").write_text(PLAN.replace("NAME", name))
    (folder / f"{name}.py").write_text(CODE.replace("NAME", name))
    (folder / f"{name}_helper.py").write_text(HELPER)
    save_file({"0.weight": torch.ones(4, 1, 3, 3), "0.bias": torch.ones(4)},
              folder / "w.safetensors")  # fmt: skip
    return folder


@pytest.fixture
def project(tmp_path, fresh_code):
    return write(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, privpart):
    """A project with a finished private run, which its tests leave as it was."""
    folder = write(tmp_path_factory.mktemp("project"), "shared_code")
    done = privpart("train", "--plan", str(folder / "plan.toml"), "--out", str(folder / "run"))
    assert done.returncode == 0, done.stderr
    return folder


def succeeded(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_plan_costs_is_answered_without_its_code(project, privpart):
    plan, turns = str(project / "plan.toml"), str(project / "turns.toml")
    ran = project / "task.ran"
    text = PLAN.replace("NAME", "task").replace('train = ["2.*"]', 'train = ["*"]')
    text = text.replace("seed = 1\n", 'seed = 1\ngroups = [["0.*"], ["2.*"]]\n')
    (project / "turns.toml").write_text(text + TURNS)
    for command in ("epsilon", "mechanisms"):
        succeeded(privpart(command, "--plan", plan))
    planned = json.loads(succeeded(privpart("epsilon", "--plan", turns, "--format", "json")))
    assert not ran.exists()
    run, out = str(project / "run"), str(project / "part.safetensors")
    succeeded(privpart("train", "--plan", turns, "--out", run))
    ran.unlink()  # the power twin: training does run the code
    report = json.loads(succeeded(privpart("report", run, "--format", "json")))
    assert report["guarantee"]["epsilon"] == planned["epsilon"]
    succeeded(privpart("export", run, "--part", "trained", "--out", out))
    assert not ran.exists()
    assert load_file(out).keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


UNSET = {"PYDANTIC_DISABLE_PLUGINS": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


@pytest.mark.parametrize("unset", [None, *(pytest.param(v, marks=pytest.mark.slow) for v in UNSET)])
def test_metadata_beside_a_plan_get_none_of_its_code_run(
    project, privpart_process, monkeypatch, unset
):
    """Of the path's packages, torch and pydantic run what their metadata name."""
    metadata = project / "other-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    points = "[torch.backends]\nx = task:network\n[pydantic]\nx = task:network\n"
    (metadata / "entry_points.txt").write_text(points)
    monkeypatch.setenv("PYTHONPATH", str(project), prepend=os.pathsep)
    for variable in UNSET:  # another test may have imported the command line
        monkeypatch.delenv(variable, raising=False)
    if unset is not None:
        monkeypatch.setenv(unset, UNSET[unset])
    privpart_process("epsilon", "--plan", str(project / "plan.toml"))
    assert (project / "task.ran").exists() == (unset is not None)  # the power twins


@pytest.mark.parametrize(
    ("name", "gone"), [("shared_code_helper.py", True), ("w.safetensors", False)]
)
def test_changed_code_is_named_before_a_run_is_resumed(trained, privpart, name, gone):
    path, run = trained / name, str(trained / "run")
    content = path.read_bytes()
    path.unlink()
    if not gone:
        path.write_bytes(content + b"\n")
    try:
        for command in (["train", "--resume", "--out"], ["export", "--out", "m.safetensors"]):
            done = privpart(*command, run)
            assert done.returncode == 2
            assert path.stem in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1
        succeeded(privpart("report", run))
    finally:
        path.write_bytes(content)


def test_a_moved_project_is_found_by_its_plan(trained, privpart, tmp_path, monkeypatch, fresh_code):
    elsewhere, out = tmp_path / "project", tmp_path / "m.safetensors"
    shutil.copytree(trained, elsewhere, ignore=shutil.ignore_patterns("run"))
    for name in ("shared_code", "shared_code_helper"):
        monkeypatch.delitem(sys.modules, name)
    code = trained / "shared_code.py"
    code.rename(trained / "away")
    try:
        lost = privpart("export", str(trained / "run"), "--out", str(out))
        assert lost.returncode == 2
        assert "there is no file" in lost.stderr
        plan = str(elsewhere / "plan.toml")
        succeeded(privpart("export", str(trained / "run"), "--plan", plan, "--out", str(out)))
    finally:
        (trained / "away").rename(code)


def test_what_own_code_prints_is_not_part_of_the_result(project, privpart):
    code = project / "task.py"
    code.write_text(
        code.read_text().replace("    return batch", "    print('batch'); return batch")
    )
    plan, run = str(project / "plan.toml"), str(project / "run")
    for command in (["doctor", "--plan", plan], ["train", "--plan", plan, "--out", run]):
        done = privpart(*command, "--format", "json")
        assert json.loads(done.stdout)["schema"].startswith("privpart/")
        assert "batch" in done.stderr
    exported = privpart("export", run, "--out", str(project / "model.safetensors"))
    assert exported.returncode == 0
    assert "batch" not in exported.stdout


# Other commands


def test_costs_measures_the_plans_network_and_client(trained, privpart):
    plan = str(trained / "plan.toml")
    done = privpart("costs", "--plan", plan, "--train", "!0.*", "--format", "json")
    found = json.loads(succeeded(done))
    assert "imports ./shared_code.py:network (model.factory)" in done.stderr
    assert (found["examples"], found["batch_size"], found["optimizer"]) == (3, 2, "sgd")
    assert [row["train"] for row in found["rows"]] == ["*", "2.*", "!0.*"]
    assert [row["trained"] for row in found["rows"]] == [4 * 9 + 4 + 34, 2 * 16 + 2, 34]
    full, planned, _ = (row["backward_flops"] for row in found["rows"])
    assert 0 < planned < full


def test_a_fork_starts_from_a_run_of_own_code(trained, privpart, tmp_path):
    plan, run, fork = str(trained / "plan.toml"), str(trained / "run"), str(tmp_path / "fork")
    succeeded(privpart("train", "--plan", plan, "--out", fork, "--fork-of", run))
    before, after = (run_report(name).guarantee.epsilon for name in (run, fork))
    assert after > before


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_sweep_trains_own_code_in_processes(jobs, project, privpart):
    (project / "sweep.toml").write_text(
        'schema = "privpart/sweep/1"\nplan = "plan.toml"\nseeds = [1, 2]\n'
        "[grid]\n'client.learning_rate' = [0.1, 0.2]\n"
    )
    arguments = ("sweep", str(project / "sweep.toml"), "--out", str(project / "out"), "-j", jobs)
    done = privpart(*arguments, "--format", "json")
    rows = json.loads(succeeded(done))["rows"]
    assert "imports ./task.py:metric (data.metric)" in done.stderr
    assert [row["seeds"] for row in rows] == [2, 2]
    assert all(row["failed"] == 0 and 0 < row["mean_metric"] < 1 for row in rows)
    again = privpart(*arguments)
    assert "0 to train" in again.stderr
    assert "imports" not in again.stderr
    write(project, "failing")
    code = project / "failing.py"
    code.write_text(code.read_text().replace("def loss(module, batch):", "def loss(module):"))
    failed = privpart(*arguments)
    assert failed.returncode == 2
    assert "to train" not in failed.stderr  # it is refused before any is trained
    assert "Traceback" not in failed.stderr
    assert "seed 1: loss=loss: TypeError: " in failed.stderr


def test_an_audit_attacks_own_networks_on_own_images(project, privpart, monkeypatch):
    monkeypatch.chdir(project)
    images = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    save_file({"x": images, "y": torch.tensor([0, 1, 0, 1])}, "images.safetensors")
    done = privpart(
        *("audit", "leakage", "--model", "./task.py:network", "--trials", "1"),
        *("--data", "images.safetensors", "--view", "full", "--attack", "dlg"),
        *("--effort", "quick", "--out", "audit", "--format", "json"),
    )
    assert json.loads(succeeded(done))["verdict"]
    assert "imports ./task.py:network (model)" in done.stderr


# From Python

TABLES = tomllib.loads("""
data.clients_per_round = 5
client.learning_rate = 0.1
[privacy]
rounds = 8
clip_norm = 0.5
noise_multiplier = 1.0
delta = 1e-5
max_participations = 2
min_separation = 4
mechanism = { name = "tree" }
""")


def population(count=20):
    x = torch.randn(count * 4, 3, generator=torch.Generator().manual_seed(0))
    return from_tensors((x, (x[:, 0] > 0).long()), user=np.repeat(np.arange(count), 4))


def test_from_python_a_module_is_trained_and_loaded_again(tmp_path):
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    plan = TABLES | {"model": {"train": ["2.*"]}}
    options = {"plan": plan, "out": tmp_path / "run", "progress": False}
    run = package.train(module, population(), **options)
    assert "(epsilon = " in run.statement()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    found = run.module()
    assert not found.training
    assert torch.equal(found[0].weight, before["0.weight"])  # a pretrained part is kept
    assert not torch.equal(found[2].weight, before["2.weight"])
    again = package.train(module, population(), resume=True, **options)
    assert again.history == ()
    assert torch.equal(again.module()[2].weight, found[2].weight)


def test_from_python_another_network_population_or_loss_is_not_resumed(tmp_path):
    module = nn.Linear(3, 2)
    base = {"module": module, "clients": population(), "plan": TABLES, "resume": True}
    base |= {"out": tmp_path / "run", "progress": False}
    package.train(**base | {"resume": False})
    for change, sentence in (
        ({"module": nn.Sequential(nn.Linear(3, 2))}, "module: is not what"),
        ({"clients": population(21)}, "the clients' ids"),
        ({"loss": lambda m, b: m(b[0]).sum()}, "loss: is not what"),
        ({"plan": TABLES | {"server": {"learning_rate": 0.5}}}, "not the run's plan"),
        ({"resume": False}, "is not empty"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            package.train(**base | change)
