"""Noised metrics from the command line: trained, reported, drawn and verified."""

import json

import pytest
import small_study

METRICS = """
[privacy.metrics]
measures = ["accuracy", "loss"]
users = 60
every = 2
loss_bound = 4.0
"""
PLAN = small_study.changed(
    ("rounds = 2", "rounds = 4"),
    ("clip_norm = 1.0\nnoise_multiplier = 1.0", "clip_norm = 0.5\ntarget_epsilon = 8.0"),
    ("delta = 1e-5", "delta = 1e-4"),
    ("[model]\n", METRICS + "[model]\n"),
    ("users = 1437\nclients_per_round = 6", "users = 300\nclients_per_round = 40"),
    ("learning_rate = 0.3\n", ""),
    text=small_study.PLAN,
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("metrics") / "plan.toml"
    path.write_text(PLAN)
    return path


def test_metrics_are_released_reported_and_verified(privpart, plan, tmp_path):
    run = tmp_path / "run"
    done = privpart("train", "--plan", str(plan), "--out", str(run))
    assert done.returncode == 0, done.stderr
    assert "metrics           epsilon 8, mu" in done.stdout
    assert "for the users who evaluate, who never train; accuracy, loss of 60 users" in done.stdout
    assert "evaluated         2 of 2 times; after round 3 accuracy" in done.stdout
    rows = [json.loads(line) for line in (run / "noised-metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 3]
    page = tmp_path / "page.html"
    shown = privpart("report", str(run), "--format", "json", "--html", str(page))
    document = json.loads(shown.stdout)
    assert document["noised_metrics"] == rows
    assert document["guarantee"]["metrics"]["also_train"] is False
    assert document["guarantee"]["epsilon"] >= document["guarantee"]["metrics"]["epsilon"]
    text = page.read_text()
    assert "Learning curve" in text
    assert "Noised accuracy, loss after each evaluated round." in text
    assert privpart("verify", str(run)).returncode == 0


def test_the_cost_of_metrics_is_in_every_figure_of_a_plan(privpart, plan):
    shown = json.loads(privpart("epsilon", "--plan", str(plan), "--format", "json").stdout)
    assert shown["metrics"]["released"] == "accuracy, loss of 60 users after each of 2 rounds"
    assert "the noised metrics, and what is decided by them alone" in str(shown["covered"])
    found = privpart("doctor", "--plan", str(plan))
    assert found.returncode == 0, found.stdout
    assert "evaluate" in found.stdout


def test_a_sweep_releases_no_metrics(privpart, plan, tmp_path):
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(f'schema = "privpart/sweep/1"\nplan = "{plan}"\nseeds = [0]\n')
    done = privpart("sweep", str(sweep), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "privacy.metrics: are released by privpart train" in done.stderr + done.stdout


def test_suggestions_are_lines_of_the_doctor(privpart, plan, tmp_path):
    found = privpart("doctor", "--plan", str(plan), "--suggest", "--format", "json")
    assert found.returncode == 0, found.stdout
    checks = [finding["check"] for finding in json.loads(found.stdout)["findings"]]
    assert {"clip norm", "signal to noise", "8 rounds"} <= set(checks)
    refused = privpart("doctor", "--plan", str(plan), "--proxy", "./a.py:f")
    assert refused.returncode == 2
    assert "proxy" in refused.stderr
