"""``privpart train`` under a table [select]: the run and its two lines."""

import json
from pathlib import Path

TEXT = Path("examples/federated_select.toml").read_text()


def test_a_run_whose_report_has_the_two_lines(privpart, tmp_path):
    short = TEXT.replace("rounds = 36", "rounds = 3").replace("[8, 64]", "[2, 16]")
    plan, out = tmp_path / "plan.toml", tmp_path / "run"
    plan.write_text(short.replace("m = 16", "m = 4"))
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
