"""``privpart train`` under a table [select]: the run, its two lines, and wrong calls."""

import json
from pathlib import Path

import pytest

TEXT = Path("examples/federated_select.toml").read_text()


@pytest.fixture
def plan(tmp_path):
    short = TEXT.replace("rounds = 36", "rounds = 3").replace("[8, 64]", "[2, 16]")
    path = tmp_path / "plan.toml"
    path.write_text(short.replace("m = 16", "m = 4"))
    return path


def test_a_run_whose_report_has_the_two_lines(privpart, plan, tmp_path):
    out = tmp_path / "run"
    told = privpart("train", "--plan", str(plan), "--out", str(out))
    assert told.returncode == 0, told.stderr
    said = " ".join(told.stdout.split())
    assert "against recipients of the model: epsilon " in said
    assert "keys seen in the clear, without any epsilon: server: random filters keys, with" in said
    assert "should the two stores collude" in said
    again = json.loads(privpart("report", str(out), "--format", "json").stdout)
    assert again["against_recipients"] in said
    prose = " ".join(privpart("report", str(out), "--format", "statement").stdout.split())
    assert "Against recipients of the model: epsilon" in prose
    assert "Keys seen in the clear" in prose


@pytest.mark.parametrize(
    ("old", "new", "options", "says"),
    [
        ("m = 4", "m = 40", (), "select.filters.m=40: must be from 1 to K=16"),
        ('"pir"', '"post"', (), "select.delivery"),
        ("m = 4", "m = 4", ("--workers", "2"), "on the cpu and in one process"),
    ],
)
def test_wrong_selections_leave_nothing_behind(privpart, plan, tmp_path, old, new, options, says):
    plan.write_text(plan.read_text().replace(old, new))
    told = privpart("train", "--plan", str(plan), "--out", str(tmp_path / "run"), *options)
    assert told.returncode == 2
    assert says in " ".join(told.stderr.split())
    assert "Traceback" not in told.stderr
    assert not (tmp_path / "run").exists()
