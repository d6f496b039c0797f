"""The examples of plans with code of one's own, as their authors use them, from a clean folder.

Each is trained, killed or interrupted, resumed, reported, exported, and loaded by its own
network.py where privpart cannot be imported. A plan file and ``privpart.train`` train the same
model.
"""

import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import privpart as package
from privpart.run.report import run_report
from privpart.training import own_code
from privpart.training.callbacks import MetricsFiles
from privpart.training.export import released_module
from privpart.training.plan_file import read
from privpart.training.training import training

OWN = Path(__file__).parent.parent / "examples" / "own"
NEEDS_PANDAS = pytest.mark.skipif(find_spec("pandas") is None, reason="needs pandas")
EXAMPLES = ["lstm", pytest.param("regression", marks=NEEDS_PANDAS), "resnet18"]
SMALL = {
    "rounds": "6",
    "max_participations": "1",
    "min_separation": "1",
    "clients_per_round": "4",
    "epochs": "1",
}
SIZES = {"lstm": "{ hidden = 8 }", "regression": "{ hidden = 4 }", "resnet18": "{ width = 4 }"}
ROUNDS, DONE = 6, 3
TRAINED = {"lstm": 6, "regression": 6, "resnet18": 8}
"""Number of trained parameters, by example."""
KILLED = f"""
import os, signal, sys
from privpart.cli.main import main
from privpart.training.callbacks import MetricsFiles

def die(self, record):
    if record.round == {DONE - 1}:
        os.kill(os.getpid(), signal.SIGKILL)

MetricsFiles.__call__ = die
main()
"""


@pytest.fixture
def folder(request, tmp_path, monkeypatch):
    """Copy an example, make it small, and forget its code after the test."""
    copy = Path(shutil.copytree(OWN / request.param, tmp_path / "mine"))
    text = (copy / "plan.toml").read_text()
    for key, value in (SMALL | {"sizes": SIZES[request.param]}).items():
        text, found = re.subn(rf"^{key} = [^#\n]*", f"{key} = {value} ", text, flags=re.M)
        assert found, key
    (copy / "plan.toml").write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(own_code, "_imported", {})
    if (copy / "make_data.py").exists():
        with monkeypatch.context() as patch:
            patch.syspath_prepend(copy)
            make = runpy.run_path(str(copy / "make_data.py"))["main"]
            make(width=4, users=30, images_each=2, steps=1)
        _forget()
    monkeypatch.chdir(tmp_path)
    yield copy
    _forget()


def _forget():
    for name in ("task", "network"):
        sys.modules.pop(name, None)


def told(result, status=0):
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


@pytest.fixture
def plain(monkeypatch):
    """Import an example's network.py where privpart cannot be imported."""

    def network(folder):
        with monkeypatch.context() as patch:
            for name in list(sys.modules):
                if name.partition(".")[0] in ("privpart", "accounting", "attacks"):
                    patch.setitem(sys.modules, name, None)
            with pytest.raises(ImportError):
                runpy.run_path(str(folder / "task.py"))  # the power twin
            return runpy.run_path(str(folder / "network.py"))

    return network


def inputs_of(clients):
    """Return what the network takes of one client's examples, by keyword or as one tensor."""
    examples = clients.examples(clients.ids[0])
    if isinstance(examples, dict):
        return {key: tensor for key, tensor in examples.items() if key != "labels"}
    return examples[0]


@torch.no_grad()
def predicted(module, inputs):
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


def kill(_, *arguments):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def interrupt(privpart, *arguments):
    def stop(_, record):
        if record.round == DONE - 1:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsFiles, "__call__", stop)
        told(privpart(*arguments), 130)


STOPPED = {"lstm": kill, "regression": interrupt, "resnet18": interrupt}
"""A process of its own takes seconds to import torch."""


@pytest.mark.parametrize("folder", EXAMPLES, indirect=True)
def test_it_is_trained_stopped_resumed_and_out_again(folder, request, privpart, plain):
    example = request.node.callspec.params["folder"]
    plan, run = str(folder / "plan.toml"), "run"
    seeded = ("train", "--plan", plan, "--seed", "5", "--evaluate-every", "3", "--out")
    STOPPED[example](privpart, *seeded, run)
    assert run_report(run).rounds == DONE
    told(privpart("train", "--resume", "--out", run))
    told(privpart(*seeded, "whole"))

    report = json.loads(told(privpart("report", run, "--format", "json")))
    assert (report["rounds"], report["complete"], report["deviations"]) == (ROUNDS, True, [])
    assert report["guarantee"]["status"] == "not-private"  # its noise came from a seed
    for of, part in ((run, "full"), (run, "trained"), ("whole", "full")):
        out = f"{of}-{part}.safetensors"
        said = told(privpart("export", of, "--part", part, "--out", out))
        with safe_open(out, "pt") as file:
            assert file.metadata()["privpart.statement"] == said.strip()
            assert file.metadata()["privpart.rounds"] == f"{ROUNDS} of {ROUNDS}"
    exported, other = load_file("run-full.safetensors"), load_file("whole-full.safetensors")
    assert exported.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in exported.items())

    setup = training(read(plan), report=lambda _: None)
    trained = load_file("run-trained.safetensors")
    assert len(trained) == TRAINED[example]
    assert all(torch.equal(tensor, exported[name]) for name, tensor in trained.items())
    before = setup.model.module.state_dict()
    changed = {name for name, tensor in exported.items() if not torch.equal(tensor, before[name])}
    assert changed == trained.keys()

    inputs, sizes = inputs_of(setup.clients), setup.plan.model.sizes
    found = plain(folder)[setup.plan.model.factory.partition(":")[2]](**sizes)
    found.load_state_dict(before)
    expected = predicted(released_module(run, setup), inputs)
    assert not torch.equal(predicted(found.eval(), inputs), expected)
    found.load_state_dict(exported)
    assert torch.equal(predicted(found.eval(), inputs), expected)


@pytest.mark.parametrize("folder", EXAMPLES, indirect=True)
def test_from_python_the_same_is_trained(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    options = {"seed": 5, "progress": False, "evaluate_every": 3}
    named = package.train(plan=folder / "plan.toml", out="named", **options)
    import network  # after the plan's own import, which is the one that is recorded
    import task

    plan = read(folder / "plan.toml")
    tables = deepcopy(plan.tables)
    passed = {}
    for table, key in (("client", "loss"), ("client", "augment"), ("data", "metric")):
        if (reference := tables[table].pop(key, None)) is not None:
            passed[key] = getattr(task, reference.partition(":")[2])
    module = getattr(network, tables["model"].pop("factory").partition(":")[2])(
        **tables["model"].pop("sizes")
    )
    if weights := tables["model"].pop("weights", None):
        module.load_state_dict(load_file(folder / weights))
    del tables["data"]["clients"]
    run = package.train(module, task.clients(), plan=tables, out="passed", **passed, **options)
    theirs = named.module().state_dict()
    assert all(torch.equal(own, theirs[name]) for name, own in run.module().state_dict().items())
    assert [r.metric for r in run.history] == [r.metric for r in named.history]
    assert run.history[-1].metric is not None


@pytest.mark.parametrize("folder", EXAMPLES, indirect=True)
def test_the_doctor_says_what_it_costs_and_what_stays(folder, request, privpart):
    example = request.node.callspec.params["folder"]
    found = json.loads(
        told(privpart("doctor", "--plan", str(folder / "plan.toml"), "--format", "json"))
    )
    says = {one["check"]: one["found"] for one in found["findings"]}
    assert not [one for one in found["findings"] if one["status"] == "fault"]
    assert "at delta 0.0001, for a client in at most 1 of 6 rounds" in says["epsilon"]
    assert says["cohorts"] == "6 rounds of 4 clients"
    assert "before training" in says["metric"]
    frozen = {
        "lstm": "embedding.weight",
        "regression": "nothing",
        "resnet18": "stem.weight, norm.weight, norm.bias, stages.0.0.conv1.weight and 44 more",
    }
    assert says["frozen"] == frozen[example]
    assert ("kept" in says) == (example == "resnet18")
