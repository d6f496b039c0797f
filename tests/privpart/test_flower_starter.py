"""Flower app: what `privpart init --flower` writes is read by Flower, and takes nobody's place."""

import sys
import tomllib

import pytest

from accounting import ConfigError
from privpart.flower.node import client_app
from privpart.flower.server import Settings, server_app
from privpart.training.starter import write_flower_app, write_starter

THREE = {"pyproject.toml", "server_app.py", "client_app.py"}


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_an_app_with_a_training_of_its_own(tmp_path):
    folder = tmp_path / "new" / "mine"
    written = write_flower_app(folder)
    assert {path.name for path in written} == names(folder)
    assert names(folder) == THREE | {"README.md", "plan.toml", "task.py"}
    tool = tomllib.loads((folder / "pyproject.toml").read_text())
    assert tool["project"]["name"] == "mine"
    settings = tool["tool"]["flwr"]["app"]["config"]
    assert settings["out"] == str(tmp_path / "new" / "mine-run")
    assert settings["authenticated"] is False
    for side, reference in tool["tool"]["flwr"]["app"]["components"].items():
        module, name = reference.split(":")
        assert f"{name} = {side.removesuffix('app')}_app(" in (folder / f"{module}.py").read_text()


def test_three_files_beside_a_plan_that_is_there(tmp_path):
    write_starter(tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    write_flower_app(tmp_path / "mine")
    assert names(tmp_path / "mine") == THREE | {"README.md"} | before.keys()
    assert {name: (tmp_path / "mine" / name).read_bytes() for name in before} == before


def test_out_is_written_as_toml_whatever_the_folder_is_called(tmp_path):
    folder = tmp_path / 'o"d\\d \n' / "mine"
    write_flower_app(folder)
    tool = tomllib.loads((folder / "pyproject.toml").read_text())
    assert tool["tool"]["flwr"]["app"]["config"]["out"] == str(folder.parent / "mine-run")


@pytest.mark.parametrize("name", ["my_app", "1st", "a" * 33, "mine.app"])
def test_names_that_flower_refuses(tmp_path, name):
    with pytest.raises(ConfigError, match="letters, digits and hyphens"):
        write_flower_app(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*sorted(THREE), "README.md"])
def test_nothing_is_overwritten(tmp_path, name):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_flower_app(folder)
    assert names(folder) == {name}


def test_a_plan_that_is_not_valid_gets_no_app(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "plan.toml").write_text('schema = "privpart/plan/1"\n')
    with pytest.raises(ConfigError, match="not a valid plan"):
        write_flower_app(folder)
    assert names(folder) == {"plan.toml"}


def test_a_plan_that_no_network_trains_gets_no_app(tmp_path):
    write_starter(tmp_path / "mine")
    plan = tmp_path / "mine" / "plan.toml"
    plan.write_text(plan.read_text().replace("# local =", "local ="))
    with pytest.raises(ConfigError, match="stay on its node"):
        write_flower_app(tmp_path / "mine")
    assert names(tmp_path / "mine") == {"plan.toml", "task.py"}


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
    given = dict.fromkeys(("out", "nodes", "authenticated", "timeout"))
    config = {"out": "/srv/run", "nodes": 2, "authenticated": True, "data-folder": "/data"}
    assert Settings.of(given, config).timeout == 3600
    found = {name: value for name, value in {**config, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        Settings.of(given, found)
