"""Starter: what `privpart init` writes can be read and trained, and overwrites nothing."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from accounting import ConfigError
from privpart.training import own_code
from privpart.training.starter import write_starter

REFERENCES = {
    "model.factory": "./task.py:network",
    "data.clients": "./task.py:clients",
    "data.metric": "./task.py:metric",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(own_code, "_imported", {})
    yield tmp_path / "new" / "folder"
    sys.modules.pop("task", None)


def read(path: Path) -> dict:
    return tomllib.loads(path.read_text())


def named(folder: Path) -> dict:
    return {key: own_code.load(name, folder) for key, name in REFERENCES.items()}


def test_lines_that_are_commented_out_are_valid_too(folder):
    text = write_starter(folder)[0].read_text()
    tables = tomllib.loads(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE))
    assert {"weights", "local"} < tables["model"].keys()
    assert tables["client"]["loss"] == "./task.py:loss"


def one_epoch(module: nn.Module, users, loss) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for client in range(len(users)):
        optimizer.zero_grad()
        loss(module, users.examples(client)).backward()
        optimizer.step()


def test_the_code_trains_in_plain_pytorch(folder):
    tables = read(write_starter(folder)[0])
    code = named(folder)
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        module = code["model.factory"](**tables["model"]["sizes"])
    assert code["data.metric"](module) < 0.4
    users = code["data.clients"](**tables["data"]["options"])
    one_epoch(
        module, users, lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])
    )
    assert code["data.metric"](module) > 0.75


def test_the_loss_that_is_commented_out_trains_too(folder):
    _, task = write_starter(folder)
    task.write_text(re.sub(r"^# ?", "", task.read_text(), flags=re.MULTILINE))
    loss = own_code.load("./task.py:loss", folder)
    code = named(folder)
    module = code["model.factory"]()
    before = code["data.metric"](module)
    one_epoch(module, code["data.clients"](), loss)
    assert code["data.metric"](module) > before


def test_the_code_is_clean(folder):
    _, task = write_starter(folder)
    for command in (["check", "--select", "E,F,I,B,UP,RET,SIM"], ["format", "--check"]):
        line = [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "100", task]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["plan.toml", "task.py"])
def test_nothing_is_overwritten(name, folder):
    folder.mkdir(parents=True)
    (folder / name).write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_starter(folder)
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_text() == "mine"
    (folder / name).unlink()
    (folder / name).symlink_to("nowhere")
    with pytest.raises(ConfigError, match="exists already"):
        write_starter(folder)


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        write_starter(tmp_path / "file" / "inside")
