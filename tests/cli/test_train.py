"""``privpart train`` and ``privpart report``, as a person calls them."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from small_study import PLAN as SMALL
from small_study import changed

from accounting import Dense, fingerprint
from privpart.cli import main

PLAN = changed(
    ("rounds = 2", "rounds = 8"),
    ("clip_norm = 1.0", "clip_norm = 1  # an integer is a number"),
    ('"tree" }', '"tree", estimator = "online" }'),
    ("seed = 7", 'train = ["dense2.*"]\nseed = 7'),
    ("round = 6", "round = 4"),
    text=SMALL,
)


@pytest.fixture
def plan(tmp_path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def test_a_whole_run_with_its_report(privpart, plan, tmp_path):
    out = tmp_path / "run"
    told = privpart("train", "--plan", str(plan), "--out", str(out), "--format", "json")
    assert told.returncode == 0, told.stderr
    report = json.loads(told.stdout)
    assert (report["schema"], report["rounds"], report["complete"]) == ("privpart/run/1", 8, True)
    assert report["guarantee"]["status"] == "conditional"
    assert "accuracy" in told.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(8))
    assert lines[-1]["metrics"]["accuracy"] > 0
    again = privpart("report", str(out), "--format", "json")
    assert json.loads(again.stdout) == report
    assert not (out / "key").exists()
    assert (out / "plan.toml").read_text() == PLAN


def test_a_run_whose_training_diverges_stops_and_says_so(privpart, plan, tmp_path):
    """It went on to its end and spent its budget, on noise alone."""
    text = PLAN.replace("learning_rate = 0.1", "learning_rate = 3e38\nepochs = 30")
    plan.write_text(text.replace('["dense2.*"]', '["*"]'))
    out = tmp_path / "run"
    for rounds in (1, 2):
        again = ["--resume"] if rounds == 2 else ["--plan", str(plan)]
        told = privpart("train", *again, "--out", str(out))
        assert (told.returncode, told.stdout) == (70, "")
        # The second round begins from secret noise, where a client may stay finite.
        diverged = "round 0: 4" if rounds == 1 else "round 1: [34]"
        assert re.search(f"{diverged} of the 4 updates were not finite", told.stderr)
        found = json.loads(privpart("report", str(out), "--format", "json").stdout)
        assert (found["rounds"], found["complete"], found["deviations"]) == (rounds, False, [])


def test_noise_that_does_not_fit_the_grid_is_refused_before_a_run_exists(privpart, tmp_path):
    """It died after its first round, and had entered the budget book."""
    growing = Dense(np.eye(8) + np.diag(np.full(7, 1e5), -1))
    file = tmp_path / "growing.json"
    file.write_text(json.dumps(growing.to_dict() | {"matrix": growing.matrix.tolist()}))
    table = f'{{ name = "file", file = "{file}", fingerprint = "{fingerprint(growing)}" }}'
    (tmp_path / "plan.toml").write_text(
        PLAN.replace('{ name = "tree", estimator = "online" }', table)
    )
    for command in (["train", "--out", str(tmp_path / "run")], ["doctor"]):
        told = privpart(*command, "--plan", str(tmp_path / "plan.toml"))
        assert told.returncode == 2
        assert "the noise may grow to" in told.stdout + told.stderr
    assert not (tmp_path / "run").exists()


CLIENTS = """
import torch
from privpart.data import Users
from privpart.data.tasks import digits
def people():
    return Users(digits().train_x, digits().train_y, torch.split(torch.arange(120), 2))
"""


def test_a_large_delta_is_refused_by_whoever_counts_the_clients_and_repeated(privpart, tmp_path):
    """The plan's tables do not say how many clients there are."""
    (tmp_path / "sixty_people.py").write_text(CLIENTS)
    text = PLAN.replace("users = 1437\n", "").replace("rounds = 8", "rounds = 2")
    text = text.replace('task = "digits"', 'clients = "./sixty_people.py:people"')
    path, run = tmp_path / "plan.toml", tmp_path / "run"

    def train(delta, more="", *options):
        path.write_text(text.replace("delta = 1e-5", f"delta = {delta}\n{more}"))
        return privpart(*(options or ("train", "--out", str(run))), "--plan", str(path))

    for options in ((), ("doctor",)):
        refused = train(0.05, "", *options)
        assert refused.returncode == 2
        assert "is 1 / 60 or more" in refused.stdout + refused.stderr
        assert not run.exists()
    assert "- delta" in train(0.005, "", "doctor").stdout
    done = train(0.05, "allow_large_delta = true")
    assert done.returncode == 0, done.stderr
    assert done.stderr.index("warning: delta=0.05: is 1 / 60 or more") < done.stderr.index("round")
    codes = json.loads(privpart("report", str(run), "--format", "json").stdout)["guarantee"]
    vouch = [f"--vouch={a['code']}" for a in codes["assumptions"] if a["status"] == "asserted"]
    page = tmp_path / "page.html"
    told = privpart("report", str(run), *vouch, "--html", str(page))
    assert "CONDITIONAL" in told.stdout
    assert "are true; delta is too large" in told.stdout
    assert "Delta is too large for the number of units." in page.read_text()
    for said in (told.stdout, page.read_text(), done.stdout):
        assert "delta 0.05 for 60 clients" in said
    assert "must be one of none" in privpart("report", str(run), *vouch, "--vouch=delta").stderr
    verified = " ".join(privpart("verify", str(run)).stdout.split())
    assert "conditional on choices; delta=0.05: is 1 / 60 or more" in verified
    assert "asserted guarantee" in verified
    at = ["report", str(run), "--delta", "0.1"]
    assert privpart(*at).returncode == 2
    assert privpart(*at, "--allow-large-delta").returncode == 0
    assert privpart("report", str(run), "--delta", "1e-6").stderr == ""


@pytest.mark.usefixtures("interruptible")
def test_interrupted_by_the_keyboard_and_resumed(privpart, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace("rounds = 8", "rounds = 60"))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "privpart.cli.main", "train", "--plan", str(plan)]
    process = subprocess.Popen(
        [*command, "--out", str(out), "--seed", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(out.glob("state-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert f"Resume with: privpart train --resume --out {out}" in " ".join(stderr.split())
    again = [*command[3:], "--resume", "--out", str(out)]  # the README's: add --resume
    other = privpart(*again, "--precision", "bfloat16")
    assert (other.returncode, other.stdout) == (2, "")
    assert "takes its noise from a seed" in other.stderr
    resumed = privpart(*again, "--format", "json")
    assert resumed.returncode == 0, resumed.stderr
    report = json.loads(resumed.stdout)
    assert (report["rounds"], report["guarantee"]["status"]) == (60, "not-private")
    gate = privpart("report", str(out), "--max-epsilon", "1000")
    assert gate.returncode == 3
    assert "not private" in gate.stderr


@pytest.mark.parametrize(
    "work", [lambda: bytearray(2**60), lambda: torch.empty(2**58)], ids=["python", "torch"]
)
def test_too_little_memory_is_one_sentence(work, monkeypatch, capsys):
    monkeypatch.setattr(main, "app", work)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("privpart: not enough memory. Use fewer rounds")
