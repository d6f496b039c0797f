"""``privpart tune``: the bill, the selection, what is refused, and kill -9."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import small_study
from page_checks import page_text

from accounting.report import up

PLAN = small_study.changed(
    ("clip_norm = 1.0", "clip_norm = 0.3"),
    ("delta = 1e-5", "delta = 1e-3"),
    ("[2, 4], hidden = 8", "[4, 8], hidden = 16"),
    ("seed = 7", "seed = 0"),
    ("users = 1437\nclients_per_round = 6", "users = 40\nclients_per_round = 20"),
    ("learning_rate = 0.3\n", ""),
    text=small_study.PLAN,
)
TUNE = """
schema = "privpart/tune/1"
plan = "plan.toml"
target_epsilon = 8.0
runs = "binomial:expected=1.999,most=2"
seconds = 3600
[candidates]
full = { "model.train" = ["*"] }
partial = { "model.train" = ["conv*", "dense2.*"] }
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "plan.toml").write_text(PLAN)
    path = tmp_path / "tune.toml"
    path.write_text(TUNE)
    return path


def test_the_bill_is_shown_and_nothing_is_trained(file, tmp_path, privpart):
    said = privpart("tune", str(file)).stdout
    for line in (
        "candidates    2, each as likely in each training",
        "everything    epsilon 8 at delta 0.001",
        "trainings     1.999 on average, at most 2 in 95 % of all cases; how many is secret",
        "hours         2 on average, 2 in 95 % of all cases, at 3.6e+03 seconds a training (as "
        "stated)",
        "counting      all of 2 trainings",
        "other ways    choose on public or proxy data, for free",
    ):
        assert line in said
    bill = json.loads(privpart("tune", str(file), "--format", "json").stdout)
    assert bill["schema"] == "privpart/tune-bill/1"
    assert bill["epsilon"] <= 8.0
    assert bill["epsilon_of_one"] < bill["epsilon"]
    assert {path.name for path in tmp_path.iterdir()} <= {"plan.toml", "tune.toml"}


def test_a_selection_runs_and_is_reported_as_one_release(file, tmp_path, privpart):
    out = tmp_path / "out"
    first = privpart("tune", str(file), "--out", str(out))
    assert first.returncode == 0
    assert "choices: paid: which of 2 listed candidates" in " ".join(first.stdout.split())
    assert "epsilon           8   (this selection; private selection" in first.stdout
    # The bill comes before the first training, and nothing after it counts them.
    assert first.stderr.index("everything") < first.stderr.index("released")
    page = tmp_path / "page.html"
    again = privpart("tune", str(file), "--out", str(out), "--html", str(page), "--format", "json")
    report = json.loads(again.stdout)
    assert report["guarantee"]["selection"]["candidates"] == 2
    shown = json.loads(privpart("budget", "--format", "json").stdout)["populations"]
    assert [one["runs"][0]["status"] for one in shown] == ["complete"]
    assert shown[0]["epsilon"] == report["guarantee"]["epsilon"]
    model = tmp_path / "model.safetensors"
    assert privpart("export", str(out / "run"), "--out", str(model)).returncode == 0
    assert privpart("verify", str(out / "run"), str(model)).returncode == 0
    sheet = page_text(page.read_text()).partition("Annex, for engineers")[0]
    one = up(report["guarantee"]["selection"]["epsilon_of_one"])
    assert "the best of several trainings, 1.999 on average, each with one of 2 settings" in sheet
    assert f"one alone would have epsilon {one}" in sheet
    written = page.read_bytes()
    assert privpart("report", str(out / "run"), "--html", str(page)).returncode == 0
    assert page.read_bytes() == written


def test_what_is_refused_is_said_in_one_sentence(file, tmp_path, privpart):
    out = str(tmp_path / "out")
    for typed, sentence in (
        ([], "file: is missing. Pass a TUNE.toml"),
        (["nowhere.toml"], "nowhere.toml: there is no such file"),
        (["--out", out, "--abandon"], "holds no selection that could be given up"),
        ([str(file), "--out", out, "--abandon"], "gives up what is in --out; leave out --abandon"),
    ):
        answer = privpart("tune", *typed)
        assert answer.returncode == 2
        assert sentence in answer.stderr
        assert "Traceback" not in answer.stderr
    (tmp_path / "plan.toml").unlink()
    assert "plan.toml: there is no such file" in privpart("tune", str(file)).stderr
    file.write_text("schema = ")
    assert "is not valid TOML" in privpart("tune", str(file)).stderr


def test_a_finished_run_is_no_place_for_a_selection(file, tmp_path, privpart):
    run = str(tmp_path / "run")
    plan = str(tmp_path / "plan.toml")
    assert privpart("train", "--plan", plan, "--out", run, "--seed", "1").returncode == 0
    answer = privpart("tune", str(file), "--out", run)
    assert (answer.returncode, "holds a run" in answer.stderr) == (2, True)


def test_a_limit_ends_it_with_the_exit_code_of_a_budget(file, tmp_path, privpart):
    limit = ["task:digits", "--limit-epsilon", "7", "--delta", "1e-3"]
    assert privpart("budget", *limit).returncode in (0, 2)
    answer = privpart("tune", str(file), "--out", str(tmp_path / "out"))
    assert answer.returncode == 3
    assert "would pass the limit" in answer.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5, 1.0])
def test_killed_at_an_instant_the_same_command_ends_it(file, tmp_path, privpart, seconds):
    """As by ``kill -9``, so many seconds after the first training began."""
    out = tmp_path / "out"
    file.write_text(TUNE.replace("1.999,most=2", "8,most=12"))
    command = [sys.executable, "-m", "privpart", "tune", str(file), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and not (out / "trials").exists():
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    places = list((tmp_path / "state" / "privpart" / "selections").glob("*"))
    places += list((tmp_path / "state" / "selections").glob("*"))
    secrets = [(place / "secret").read_bytes() for place in places]
    answer = privpart("tune", str(file), "--out", str(out))
    assert answer.returncode == 0
    assert "enforced" not in answer.stderr
    assert len(secrets) == 1
    book = json.loads(privpart("budget", "--format", "json").stdout)["populations"]
    assert len(book[0]["runs"]) == 1


@pytest.mark.slow
def test_giving_up_says_how_many_are_charged(file, tmp_path, privpart):
    out = tmp_path / "out"
    file.write_text(TUNE.replace("1.999,most=2", "8,most=12"))
    command = [sys.executable, "-m", "privpart", "tune", str(file), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and not list(out.glob("trials/*/state-*")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    answer = privpart("tune", "--out", str(out), "--abandon")
    assert "trainings are charged, as if all had been released" in answer.stdout
    assert privpart("tune", str(file), "--out", str(out)).returncode == 2
