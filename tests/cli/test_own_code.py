"""Plans that name their author's code, from `epsilon` to `export`, and the same from Python."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import privpart as package
from accounting import ConfigError
from privpart.data import from_tensors
from privpart.training.plan_file import read

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
sizes = { hidden = 8 }
train = ["2.*"]
seed = 1
keep = []
[data]
clients = "./NAME.py:clients"
options = { each = 4 }
metric = "./NAME.py:metric"
clients_per_round = 5
[client]
learning_rate = 0.1
loss = "./NAME.py:loss"
augment = "./NAME.py:augment"
[server]
"""
CODE = """
import torch
from torch import nn
from privpart.data import from_tensors
import NAME_helper


def network(hidden):
    return nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def clients(each):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(20 * each, 3, generator=draws)
    user = [f"user {i // each}" for i in range(len(x))]
    return from_tensors((x, (x[:, 0] > 0).long()), user=user)


def metric(module):
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(50, 3, generator=draws)
    return (module(x).argmax(1) == (x[:, 0] > 0).long()).float().mean()


def loss(module, batch):
    x, y = batch
    return NAME_helper.smooth(module(x), y)


def augment(batch):
    x, y = batch
    return x + 0.01 * torch.randn_like(x), y
"""
HELPER = """
from torch.nn.functional import cross_entropy


def smooth(logits, y):
    return cross_entropy(logits, y, label_smoothing=0.1)
"""
MARKER = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
"""


@pytest.fixture
def project(tmp_path):
    """A folder with a plan and its code, under a name that no other test has imported."""
    name = f"task_{tmp_path.name.replace('-', '_')}"
    (tmp_path / "plan.toml").write_text(PLAN.replace("NAME", name))
    (tmp_path / f"{name}.py").write_text(CODE.replace("NAME", name))
    (tmp_path / f"{name}_helper.py").write_text(HELPER)
    return tmp_path


def code_of(project: Path) -> Path:
    return next(p for p in project.glob("task_*.py") if not p.stem.endswith("helper"))


def trained(project: Path, privpart, *options: str, out: str = "run") -> Path:
    plan, run = str(project / "plan.toml"), project / out
    done = privpart("train", "--plan", plan, "--out", str(run), *options)
    assert done.returncode == 0, done.stderr
    return run


def test_what_a_plan_costs_is_answered_without_its_code(project, privpart):
    code = code_of(project)
    code.write_text(code.read_text() + MARKER)
    plan = str(project / "plan.toml")
    for command in (("epsilon", "--plan", plan), ("mechanisms", "--plan", plan)):
        assert privpart(*command).returncode == 0
    text = (project / "plan.toml").read_text()
    (project / "turns.toml").write_text(
        text.replace("seed = 1\n", 'seed = 1\ngroups = [["0.*"], ["2.*"]]\n').replace(
            'train = ["2.*"]', 'train = ["*"]'
        )
        + "[schedule]\ncycles = 2\nrounds_per_group = 1\nwarm_up = 4\nbetween = 4\n"
    )
    shown = privpart("costs", "--schedule", "--plan", str(project / "turns.toml"))
    assert shown.returncode == 0, shown.stderr
    assert "does not import" in shown.stderr
    assert privpart("epsilon", "--plan", str(project / "turns.toml")).returncode == 0
    assert not code.with_suffix(".ran").exists()
    run = trained(project, privpart)  # the power twin
    assert code.with_suffix(".ran").exists()
    code.with_suffix(".ran").unlink()
    assert privpart("report", str(run)).returncode == 0
    out = str(project / "part.safetensors")
    assert privpart("export", str(run), "--part", "trained", "--out", out).returncode == 0
    assert not code.with_suffix(".ran").exists()
    assert load_file(out).keys() == {"2.weight", "2.bias"}


ENTRY_POINTS = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "torch.backends",
    "PYDANTIC_DISABLE_PLUGINS": "pydantic",
}
UNSET = {"PYDANTIC_DISABLE_PLUGINS": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


@pytest.mark.parametrize("unset", [None, *(pytest.param(v, marks=pytest.mark.slow) for v in UNSET)])
def test_metadata_beside_a_plan_get_none_of_its_code_run(
    project, privpart_process, monkeypatch, unset
):
    """Of the path's packages, torch and pydantic run what their metadata name."""
    code = code_of(project)
    code.write_text(code.read_text() + MARKER)
    metadata = project / "other-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    points = (f"[{group}]\nx = {code.stem}:network\n" for group in ENTRY_POINTS.values())
    (metadata / "entry_points.txt").write_text("".join(points))
    monkeypatch.setenv("PYTHONPATH", str(project), prepend=os.pathsep)
    for variable in ENTRY_POINTS:  # another test may have imported the command line
        monkeypatch.delenv(variable, raising=False)

    if unset is not None:
        monkeypatch.setenv(unset, UNSET[unset])
    privpart_process("costs", "--schedule", "--plan", str(project / "plan.toml"))
    assert code.with_suffix(".ran").exists() == (unset is not None)  # the power twins


@pytest.mark.parametrize("which", ["code", "helper", "weights", "gone"])
def test_changed_code_is_named_before_a_run_is_resumed(project, privpart, which):
    plan = project / "plan.toml"
    if which == "weights":
        network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        save_file(network.state_dict(), project / "w.safetensors")
        text = plan.read_text().replace("keep = []", 'keep = ["0.*"]\nweights = "w.safetensors"')
        plan.write_text(text)
    run = trained(project, privpart)
    code = code_of(project)
    helper = project / f"{code.stem}_helper.py"
    named = {"code": code, "helper": helper, "weights": project / "w.safetensors", "gone": helper}
    path = named[which]
    if which == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b"\n")
    for command in (["train", "--resume", "--out"], ["export", "--out", "m.safetensors"]):
        done = privpart(*command, str(run))
        assert done.returncode == 2
        assert path.name in done.stderr or path.stem in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert privpart("report", str(run)).returncode == 0


def test_a_moved_project_is_found_by_its_plan(project, privpart, tmp_path_factory):
    run = trained(project, privpart)
    elsewhere = tmp_path_factory.mktemp("moved") / "project"
    shutil.copytree(project, elsewhere, ignore=shutil.ignore_patterns("run"))
    for path in project.glob("*.py"):
        path.unlink()
    lost = privpart("export", str(run), "--out", str(project / "m.safetensors"))
    assert lost.returncode == 2
    assert "there is no file" in lost.stderr
    # a second module of the same name in one process is refused, so a process of its own
    done = subprocess.run(
        [
            *(sys.executable, "-m", "privpart.cli.main", "export", run),
            *("--plan", elsewhere / "plan.toml", "--out", project / "m.safetensors"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_schedule_over_own_groups_trains(project, privpart):
    plan = project / "plan.toml"
    text = plan.read_text().replace('train = ["2.*"]', 'train = ["*"]')
    plan.write_text(
        text.replace("seed = 1\n", 'seed = 1\ngroups = [["0.*"], ["2.*"]]\n')
        + "[schedule]\ncycles = 2\nrounds_per_group = 1\nwarm_up = 4\nbetween = 4\n"
    )
    told = privpart("epsilon", "--plan", str(plan), "--format", "json")
    report = privpart("report", str(trained(project, privpart)), "--format", "json")
    ours = json.loads(report.stdout)["guarantee"]["epsilon"]
    assert ours == json.loads(told.stdout)["epsilon"]


def test_nothing_is_exported_before_a_round_is_released(project, privpart, interruptible):
    plan = read(project / "plan.toml")
    promised = plan.privacy_plan(code=plan.code())
    with package.RunFolder.create(project / "run", promised):
        pass
    out = project / "m.safetensors"
    done = privpart("export", str(project / "run"), "--out", str(out))
    assert done.returncode == 2
    assert "no round is committed" in done.stderr
    assert not out.exists()


def population(count: int = 20, each: int = 4, ids=None):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(count * each, 3, generator=draws)
    ids = np.arange(count) if ids is None else np.asarray(ids)
    return from_tensors((x, (x[:, 0] > 0).long()), user=np.repeat(ids, each))


TABLES = {
    "privacy": {
        "rounds": 8,
        "clip_norm": 0.5,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "max_participations": 2,
        "min_separation": 4,
        "mechanism": {"name": "tree"},
    },
    "data": {"clients_per_round": 5},
    "client": {"learning_rate": 0.1},
}


def test_from_python_a_module_is_trained_and_loaded_again(tmp_path):
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(40, 3)
    run = package.train(
        module,
        population(),
        plan=TABLES | {"model": {"train": ["2.*"]}},
        metric=package.Accuracy(x, (x[:, 0] > 0).long()),
        out=tmp_path / "run",
        evaluate_every=4,
        progress=False,
    )
    assert [record.metric is not None for record in run.history] == [False, False, False, True] * 2
    assert "(epsilon = " in run.statement()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    found = run.module()
    assert not found.training
    assert torch.equal(found[0].weight, before["0.weight"])  # a pretrained part is kept
    assert not torch.equal(found[2].weight, before["2.weight"])
    assert torch.equal(run.module()(x), found(x))
    again = package.train(
        module, population(), plan=TABLES | {"model": {"train": ["2.*"]}}, out=tmp_path / "run",
        metric=package.Accuracy(x, (x[:, 0] > 0).long()), resume=True, progress=False,
    )  # fmt: skip
    assert again.history == ()
    assert torch.equal(again.module()(x), found(x))


def test_from_python_another_network_population_or_loss_is_not_resumed(tmp_path):
    module = nn.Linear(3, 2)
    options = {"plan": TABLES, "out": tmp_path / "run", "progress": False}
    package.train(module, population(), **options)
    with pytest.raises(ConfigError, match="module: is not what"):
        package.train(nn.Sequential(nn.Linear(3, 2)), population(), resume=True, **options)
    with pytest.raises(ConfigError, match="the clients' ids"):
        package.train(module, population(21), resume=True, **options)
    with pytest.raises(ConfigError, match="loss: is not what"):
        package.train(module, population(), resume=True, loss=lambda m, b: m(b[0]).sum(), **options)
    with pytest.raises(ConfigError, match="not the run's plan"):
        package.train(
            module, population(), resume=True, **options | {"plan": TABLES | {"server": {
                "learning_rate": 0.5}}}
        )  # fmt: skip
    with pytest.raises(ConfigError, match="is not empty"):
        package.train(module, population(), **options)


def test_a_starter_trains_as_it_is(tmp_path, privpart):
    """In a process of its own, since other modules of this one have the names of its files."""
    assert privpart("init", str(tmp_path / "x")).returncode == 0
    plan = tmp_path / "x" / "plan.toml"
    text = re.sub("(?m)^rounds = .*", "rounds = 4", plan.read_text())
    plan.write_text(re.sub("(?m)^max_participations = .*", "max_participations = 1", text))
    commands = (f"train --plan {plan} --out run", f"doctor --plan {plan}")
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *commands], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "verdict           CONDITIONAL" in done.stdout
    assert "trained " in done.stdout
    assert privpart("init", str(tmp_path / "x")).returncode == 2


COMMANDS = """
import sys
from privpart.cli.main import main

for line in sys.argv[1:]:
    sys.argv = ["privpart", *line.split()]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


def test_what_own_code_prints_is_not_part_of_the_result(project, privpart):
    code = code_of(project)
    loud = code.read_text().replace("    x, y = batch\n", "    x, y = batch\n    print('batch')\n")
    code.write_text(f"print('imported')\n{loud}")
    plan, run = str(project / "plan.toml"), str(project / "run")
    for command in (["doctor", "--plan", plan], ["train", "--plan", plan, "--out", run]):
        done = privpart(*command, "--format", "json")
        assert json.loads(done.stdout)["schema"].startswith("privpart/")
        assert "batch" in done.stderr
    exported = privpart("export", run, "--out", str(project / "model.safetensors"))
    assert exported.returncode == 0
    assert "batch" in exported.stderr
    assert "batch" not in exported.stdout
