"""The search as a command, on a network and a run small enough for a test."""

import json

import pytest
from typer.testing import CliRunner

from accounting import ConfigError
from privpart.cli import freeze_search
from privpart.cli.demo import sweep_file
from privpart.cli.main import app
from privpart.engines.workers import WorkerError
from privpart.experiment import sweep


@pytest.fixture
def search(monkeypatch):
    def small(*arguments):
        file = sweep_file(*arguments)
        plan = file.tables
        plan["model"]["sizes"] |= {"channels": [2, 4], "hidden": 32}
        plan["data"] |= {"users": 60, "clients_per_round": 10}
        plan["privacy"]["rounds"] = 6
        return file

    monkeypatch.setattr(freeze_search, "sweep_file", small)

    def run(*arguments):
        options = ["freeze-search", "--seeds", "2", "--jobs", "1", *arguments]
        return CliRunner().invoke(app, options)

    return run


def test_every_block_may_freeze_if_accuracy_may_fall(search):
    done = search("--tolerance", "100", "--format", "json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [row["frozen"] for row in report["rows"]] == [
        "",
        "dense1",
        "dense1 dense2",
        "dense1 dense2 conv2",
    ]
    assert all(row["kept"] for row in report["rows"])
    assert report["train"] == ["conv1.*", "norm.*"]
    assert [row["trained"] for row in report["rows"]] == [978, 434, 104, 28]
    assert report["rows"][1]["reduction"] == pytest.approx(978 / 434)
    assert "training with dense1 frozen" in done.stderr


def test_the_table_says_what_is_not_covered_and_what_to_type(search):
    done = search("--tolerance", "100")
    assert "--train 'conv1.*' --train 'norm.*'" in done.stdout
    assert "no epsilon of the later training covers" in " ".join(done.stdout.split())
    assert "±" in done.stdout


@pytest.mark.parametrize(("raised", "ends"), [(ConfigError, ConfigError), (OSError, WorkerError)])
def test_a_training_that_fails_ends_the_search_in_one_sentence(search, monkeypatch, raised, ends):
    def fails(*_, **__):
        raise raised("no training ends")

    monkeypatch.setattr(sweep, "run_cell", fails)
    done = search()
    assert type(done.exception) is ends
    assert "seed 0: " in str(done.exception)
    assert "no training ends" in str(done.exception)


def test_csv(search):
    done = search("--tolerance", "0", "--format", "csv")
    header, full, *rest = done.stdout.splitlines()
    assert header.split(",")[:3] == ["frozen", "trained", "reduction"]
    assert full.startswith(",978,1.0,")
    assert len(rest) >= 3
    assert "no epsilon" in done.stderr


@pytest.mark.parametrize("option", ["--seeds", "--jobs", "--tolerance"])
def test_bad_numbers_are_one_sentence(privpart, option):
    done = privpart("freeze-search", option, "-1")
    assert done.returncode == 2
    assert done.stderr.startswith(f"privpart: {option} -1")
