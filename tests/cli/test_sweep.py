"""``privpart sweep`` and ``privpart sweep show``, as a person calls them."""

import csv
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest
from typer.testing import CliRunner

from accounting import ConfigError
from privpart.cli.main import app
from privpart.experiment.sweep_file import read_sweep
from privpart.experiment.sweep_store import CellResult, SweepStore

PLAN = """
schema = "privpart/plan/1"
[privacy]
rounds = 4
clip_norm = 1.0
noise_multiplier = 1.0
delta = 1e-5
mechanism = { name = "tree" }
[model]
name = "small_cnn"
sizes = { channels = [2, 4], hidden = 8, image_size = 8 }
seed = 7
[data]
task = "digits"
users = 1437
clients_per_round = 6
[client]
learning_rate = 0.1
[server]
learning_rate = 0.3
"""
SWEEP = """
schema = "privpart/sweep/1"
plan = "plan.toml"
seeds = [0, 1]
[grid]
"model.train" = { full = ["*"], last = ["dense2.*"] }
[joint.noise."none"]
"privacy.noise_multiplier" = 0.0
[joint.noise."some"]
"privacy.noise_multiplier" = 2.0
"server.learning_rate" = 0.1
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return tmp_path


def rows_of(out):
    with closing(sqlite3.connect(out / "sweep.sqlite")) as file:
        return file.execute("SELECT rowid, key, status, accuracy, plan FROM cells").fetchall()


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def sweep(folder, *more):
    return call("sweep", folder / "sweep.toml", "--out", folder / "out", "-j", "1", *more)


def test_a_sweep_is_shown_resumed_by_content_and_marked_as_not_private(folder):
    told = sweep(folder, "--format", "json")
    assert told.exit_code == 0, told.stderr
    assert "8 cells, 8 to train" in told.stderr
    table = json.loads(told.stdout)
    assert "NOT private" in table["notes"][0]
    rows = table["rows"]
    assert [(r["model.train"], r["noise"], r["seeds"]) for r in rows] == [
        ("full", "none", 2),
        ("full", "some", 2),
        ("last", "none", 2),
        ("last", "some", 2),
    ]
    assert [r["epsilon"] is None for r in rows] == [True, False, True, False]
    assert rows[1]["epsilon"] == rows[3]["epsilon"]
    assert [r["trained"] for r in rows] == [330, 330, 90, 90]
    before = rows_of(folder / "out")
    for row in rows:
        own = [
            a
            for _, _, _, a, p in before
            if json.loads(p)["privacy"]["noise_multiplier"] == row["noise_multiplier"]
            and (len(json.loads(p)["model"]["train"][0]) > 1) == (row["trained"] == 90)
        ]
        assert row["mean_accuracy"] == pytest.approx(sum(own) / 2)
        assert row["standard_deviation"] == pytest.approx(abs(own[0] - own[1]) / 2**0.5)
    # another seed and a reordered file: only what is new is trained
    (folder / "sweep.toml").write_text(SWEEP.replace("[0, 1]", "[2, 1, 0]"))
    told = sweep(folder)
    assert "12 cells, 4 to train" in told.stderr
    assert rows_of(folder / "out")[:8] == before
    shown = call("sweep", "show", folder / "out", "--format", "csv")
    assert [row["seeds"] for row in csv.DictReader(shown.stdout.splitlines())] == ["3"] * 4
    for name in ("sweep.csv", "accuracy-noise.png", "accuracy-epsilon.png"):
        assert (folder / "out" / name).stat().st_size > 100


def test_a_killed_sweep_goes_on_without_repeating_a_cell(folder):
    command = [sys.executable, "-m", "privpart.cli.main", "sweep", str(folder / "sweep.toml")]
    process = subprocess.Popen(
        [*command, "--out", str(folder / "out"), "-j", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    kept = []
    while time.monotonic() < deadline and len(kept) < 2:
        time.sleep(0.01)
        if (folder / "out" / "sweep.sqlite").exists():
            try:
                kept = rows_of(folder / "out")
            except sqlite3.OperationalError:  # no table yet
                continue
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = rows_of(folder / "out")
    assert 2 <= len(kept) < 8
    told = sweep(folder)
    assert f"8 cells, {8 - len(kept)} to train" in told.stderr
    after = rows_of(folder / "out")
    assert after[: len(kept)] == kept  # the same rows: none was written again
    assert len({key for _, key, *_ in after}) == len(after) == 8


def test_failures_are_recorded_not_fatal_and_tried_again(folder):
    sizes = "{ fits = { SIZE = 8, REST }, not = { SIZE = 12, REST } }"
    sizes = sizes.replace("SIZE", "image_size").replace("REST", "channels = [2, 4], hidden = 8")
    old = '"model.train" = { full = ["*"], last = ["dense2.*"] }'
    assert old in SWEEP
    text = SWEEP.replace(old, f'"model.sizes" = {sizes}').replace("[0, 1]", "[0]")
    (folder / "sweep.toml").write_text(text)
    told = sweep(folder)
    assert told.exit_code == 0
    assert "does not take the examples" in told.stderr
    assert [status for _, _, status, *_ in rows_of(folder / "out")].count("failed") == 2
    assert "4 cells, 2 to train" in sweep(folder).stderr


def test_a_cell_that_is_no_plan_is_refused_before_any_is_trained(folder):
    text = SWEEP.replace('last = ["dense2.*"]', 'nothing = ["dense9.*"]')
    (folder / "sweep.toml").write_text(text)
    told = sweep(folder)
    assert isinstance(told.exception, ConfigError)
    assert "model.train=['dense9.*']" in str(told.exception)
    assert not (folder / "out").exists()


def test_tuning_is_marked_as_uncharged(folder):
    tune = '[tune]\nheld_out = 0.4\n[tune.grid]\n"server.learning_rate" = [1e-9, 1.0]\n'
    text = SWEEP.replace("[0, 1]", "[0]").split("[joint")[0]
    (folder / "plan.toml").write_text(
        PLAN.replace("noise_multiplier = 1.0", "noise_multiplier = 0.0")
    )
    (folder / "sweep.toml").write_text(text + tune)
    told = sweep(folder, "--format", "json")
    table = json.loads(told.stdout)
    assert "uncharged" in table["notes"][1]
    assert [row["tuned_candidates"] for row in table["rows"]] == [2, 2]
    chosen = [json.loads(plan)["server"]["learning_rate"] for *_, plan in rows_of(folder / "out")]
    assert 1.0 in chosen  # at 1e-9 nothing is learned


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("seeds", "seedz"), "seedz"),
        (('"model.train"', '"model.trian"'), "nearest is train"),
        (("seeds = [0, 1]", "seeds = [0, 0]"), "same cell twice"),
        (("plan.toml", "none.toml"), "cannot be read"),
        (("[grid]", "[grid"), "no TOML"),
        (("seeds = [0, 1]", "seeds = [0, true]"), r"seeds.1: Input should be a valid integer"),
        (("[grid]", "[tune]\nheld_out = '0.5'\ngrid = {}\n[grid]"), r"tune.held_out: .* number"),
        (("[grid]", '[grid]\n"client.epochs" = [true]'), r"client.epochs: .* valid integer"),
        (("[grid]", '[grid]\n"client.epochs" = [2024-01-01]'), r"client.epochs: .* integer"),
    ],
)
def test_sweeps_that_say_what_is_wrong(folder, change, says):
    (folder / "sweep.toml").write_text(SWEEP.replace(*change))
    with pytest.raises(ConfigError, match=says):
        read_sweep(folder / "sweep.toml")


def test_show_without_a_sweep(tmp_path):
    told = call("sweep", "show", tmp_path)
    assert isinstance(told.exception, ConfigError)
    assert "has no sweep" in str(told.exception)


def test_help_names_both_commands_with_examples():
    for arguments in (("sweep", "--help"), ("sweep",)):
        text = " ".join(call(*arguments).output.split())
        assert "privpart sweep examples/fedpt_sweep.toml --out fedpt" in text
        assert "privpart sweep show fedpt" in text
    assert "--jobs" in call("sweep", "run", "--help").stdout
    assert "--jobs" not in call("sweep", "show", "--help").stdout


def test_whatever_is_no_command_is_the_file_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("none.toml", "--out", "x"),
        ("--out", "x", "none.toml"),
        ("./show", "--out", "x"),
        ("run", "show", "--out", "x"),
    ):
        told = call("sweep", *arguments)
        assert isinstance(told.exception, ConfigError)
        assert "cannot be read" in str(told.exception)
    assert "No such command" in call("sweep-show", "--out", "x").output


@pytest.mark.parametrize(
    ("data", "column", "shown"),
    [({"metric": "./task.py:error"}, "metric", "37.83 ± 1"), ({}, "accuracy (%)", "3783.00 ± 100")],
)
def test_a_metric_of_ones_own_is_not_shown_as_a_percentage(tmp_path, privpart, data, column, shown):
    with SweepStore(tmp_path, create=True) as store:
        store.describe(["model.train"], [])
        for seed, value in enumerate((37.83 - 0.5**0.5, 37.83 + 0.5**0.5)):
            result = CellResult(
                accuracy=value,
                epsilon=1.0,
                noise_multiplier=1.0,
                delta=1e-5,
                trained=3,
                parameter_count=3,
                tuned=1,
                plan=json.dumps({"data": data}),
                engine="loop",
                cpu_seconds=0.0,
            )
            store.add(str(seed), {"model.train": "all"}, seed, result)
    told = privpart("sweep", "show", str(tmp_path))
    assert column in told.stdout
    assert shown in told.stdout
    row = json.loads(privpart("sweep", "show", str(tmp_path), "--format", "json").stdout)["rows"][0]
    known, other = ("mean_metric", "mean_accuracy") if data else ("mean_accuracy", "mean_metric")
    assert row[known] == pytest.approx(37.83)
    assert row[other] is None
