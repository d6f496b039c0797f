"""Starter: what `privpart init` writes can be read and trained, and overwrites nothing."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from accounting import ConfigError
from privpart.flower.node import client_app
from privpart.flower.server import Settings, server_app
from privpart.study.runner import refuse_unfit
from privpart.study.study_file import read_study
from privpart.study.sweep import read_sweep
from privpart.study.tune import read_tune
from privpart.training import own_code
from privpart.training.plan_file import read
from privpart.training.starter import write_flower_app, write_starter

REFERENCES = {
    "model.factory": "./task.py:network",
    "data.clients": "./task.py:clients",
    "data.metric": "./task.py:metric",
}


@pytest.fixture
def folder(tmp_path, fresh_code):
    return tmp_path / "new" / "folder"


def named(folder: Path) -> dict:
    return {key: own_code.load(name, folder) for key, name in REFERENCES.items()}


def test_lines_that_are_commented_out_are_valid_too(folder):
    text = write_starter(folder)[0].read_text()
    tables = tomllib.loads(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE))
    assert {"weights", "local"} < tables["model"].keys()
    assert tables["client"]["loss"] == "./task.py:loss"


@pytest.mark.parametrize("own_loss", [False, True])
def test_the_code_trains_in_plain_pytorch(folder, own_loss):
    """With the loss that is commented out, too."""
    path, task = write_starter(folder)
    if own_loss:
        task.write_text(re.sub(r"^# ?", "", task.read_text(), flags=re.MULTILINE))
    tables, code = tomllib.loads(path.read_text()), named(folder)
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        module = code["model.factory"](**tables["model"]["sizes"])
    before = code["data.metric"](module)
    assert before < 0.4
    users = code["data.clients"](**tables["data"]["options"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for client in range(len(users)):
        optimizer.zero_grad()
        x, y = users.examples(client)
        if own_loss:
            own_code.load("./task.py:loss", folder)(module, (x, y)).backward()
        else:
            nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert code["data.metric"](module) > (before if own_loss else 0.75)


def test_it_trains_as_it_is(folder, privpart):
    plan = write_starter(folder)[0]
    text = re.sub("(?m)^rounds = .*", "rounds = 4", plan.read_text())
    plan.write_text(re.sub("(?m)^max_participations = .*", "max_participations = 1", text))
    told = privpart("train", "--plan", str(plan), "--out", str(folder / "run"))
    assert "verdict           CONDITIONAL" in told.stdout
    assert "trained " in privpart("doctor", "--plan", str(plan)).stdout


def test_the_code_is_clean(folder):
    _, task = write_starter(folder)
    for command in (["check", "--select", "E,F,I,B,UP,RET,SIM"], ["format", "--check"]):
        line = [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "100", task]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# About a training

READ = {"study": read_study, "sweep": read_sweep, "tune": read_tune, "audit": read}


@pytest.mark.parametrize("kind", READ)
def test_a_file_of_each_kind_beside_the_starter_or_a_plan_that_is_there(folder, kind):
    """Read whole, so that every cell, candidate and canary is one that a plan allows."""
    written = write_starter(folder, kind)
    assert [path.name for path in written] == ["plan.toml", "task.py", f"{kind}.toml"]
    READ[kind](written[-1])
    written[-1].unlink()
    assert write_starter(folder, kind) == [written[-1]]
    with pytest.raises(ConfigError, match=f"{kind}.toml: exists already"):
        write_starter(folder, kind)


@pytest.mark.parametrize("kind", READ)
def test_nothing_is_written_beside_a_plan_that_the_kind_does_not_go_with(folder, kind, privpart):
    plan, task = write_starter(folder)
    text = plan.read_text()
    for old, new in (("[model]", "[canaries]\ncount = 30\n[model]"), ("delta = 1e-4", "delta = 2")):
        if kind in ("study", "sweep") and "canaries" in new:
            continue  # refused when it is run, before the first training
        plan.write_text(text.replace(old, new))
        told = privpart("init", str(folder), "--kind", kind)
        assert (told.returncode, told.stdout) == (2, "")
        assert f"plan.toml: does not go with the {kind}" in told.stderr
        assert {path.name for path in folder.iterdir()} == {plan.name, task.name}


def test_a_study_of_the_starter_can_be_trained(folder):
    """The check before a first frontier table; the nightly test below trains it."""
    study = read_study(write_starter(folder, "study")[-1])
    group, point = study.groups[0], study.points[0]
    refuse_unfit([*study.tuning_cells(group, 0, point), *study.final_cells(group, point)], None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", READ)
def test_each_kind_runs_as_it_is(tmp_path, privpart, kind, monkeypatch, fresh_code):
    monkeypatch.chdir(tmp_path)
    told = privpart("init", "mine", "--kind", kind)
    for line in told.stderr.splitlines():
        if "privpart " in (command := line.partition(": ")[2].partition(": ")[2]):
            done = privpart(*shlex.split(command)[1:])
            assert done.returncode == 0, done.stderr
            assert done.stdout


# As a Flower app

THREE = {"pyproject.toml", "server_app.py", "client_app.py"}


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_an_app_with_a_training_of_its_own(tmp_path):
    folder = tmp_path / 'o"d\\d \n' / "mine"  # written as TOML, whatever its name
    written = write_flower_app(folder)
    assert {path.name for path in written} == names(folder)
    assert names(folder) == THREE | {"README.md", "plan.toml", "task.py"}
    tool = tomllib.loads((folder / "pyproject.toml").read_text())
    assert tool["project"]["name"] == "mine"
    settings = tool["tool"]["flwr"]["app"]["config"]
    assert settings["out"] == str(folder.parent / "mine-run")
    assert settings["authenticated"] is False
    for side, reference in tool["tool"]["flwr"]["app"]["components"].items():
        module, name = reference.split(":")
        assert f"{name} = {side.removesuffix('app')}_app(" in (folder / f"{module}.py").read_text()


@pytest.mark.parametrize("name", ["my_app", "1st", "a" * 33])
def test_names_that_flower_refuses(tmp_path, name):
    with pytest.raises(ConfigError, match="letters, digits and hyphens"):
        write_flower_app(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_starter, "plan.toml"), (write_starter, "task.py"),
     *((write_flower_app, name) for name in sorted(THREE | {"README.md"}))],
)  # fmt: skip
def test_nothing_is_overwritten(write, name, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for occupy in (lambda path: path.write_text("mine"), lambda path: path.symlink_to("nowhere")):
        occupy(folder / name)
        with pytest.raises(ConfigError, match="exists already"):
            write(folder)
        assert names(folder) == {name}
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("old", "new", "words"), [("[model]", "[mode]", "not a valid plan"),
                              ("# local =", "local =", "stay on its node"),
                              ("per_round = 25", "per_round = 25\nheld_out = 25", "elsewhere")]
)  # fmt: skip
def test_three_files_beside_a_plan_and_none_if_no_network_trains_it(tmp_path, old, new, words):
    plan, _ = write_starter(tmp_path / "mine")
    plan.write_text(plan.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=words):
        write_flower_app(tmp_path / "mine")
    assert names(tmp_path / "mine") == {"plan.toml", "task.py"}
    plan.write_text(plan.read_text().replace(new, old))
    before = {path: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    write_flower_app(tmp_path / "mine")
    assert names(tmp_path / "mine") == THREE | {"README.md", "plan.toml", "task.py"}
    assert {path: path.read_bytes() for path in before} == before


def test_without_flower_an_app_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    for app in (server_app, client_app):
        with pytest.raises(ConfigError, match="Flower is not installed: pip install"):
            app(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out": None}, "out: is missing"),
        ({"out": "run"}, "must be an absolute path"),
        ({"authenticated": 1}, "must be true or false"),
        ({"nodes": 0}, "nodes"),
        ({"time-out": 5.0}, "time-out: is not a setting; write timeout"),
    ],
)
def test_settings_that_are_missing_or_wrong(changes, words):
    config = {"out": "/srv/run", "nodes": 2, "authenticated": True, "data-folder": "/data"}
    assert Settings.of(config).timeout == 3600
    found = {name: value for name, value in {**config, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        Settings.of(found)
