"""``privpart audit membership``: a model without noise is caught, one with noise is consistent."""

import json

import numpy as np
import pytest

from accounting import ConfigError
from privpart.cli.audit import membership

pytestmark = pytest.mark.usefixtures("fresh_code")

PLAN = """\
schema = "privpart/plan/1"

[privacy]
rounds = 8
clip_norm = 1.0
noise_multiplier = {noise}
delta = 1e-5
max_participations = 8
mechanism = {{ name = "tree" }}

[model]
factory = "./task.py:network"

[data]
clients = "./task.py:clients"
clients_per_round = 60

[client]
learning_rate = 1.0

[server]
learning_rate = 60.0
"""
TASK = """\
import torch
from privpart.data import Users

draws = torch.Generator().manual_seed(0)
x, y = torch.randn(60, 200, generator=draws), torch.randint(2, (60,), generator=draws)

def network():
    torch.manual_seed(0)
    return torch.nn.Linear(200, 2)

def clients():
    return Users(x, y, torch.arange(60)[:, None])
"""


def planned(folder, noise):
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(TASK)
    (folder / "plan.toml").write_text(PLAN.format(noise=noise))
    return folder / "plan.toml"


def test_a_model_without_noise_is_caught_and_one_with_noise_is_not(tmp_path, monkeypatch, capsys):
    """Random labels: without noise a linear model learns by heart who took part."""
    monkeypatch.setattr(membership, "_SHADOWS", 8)
    documents = {}
    for name, noise in (("bare", 0.0), ("noised", 60.0)):
        out = tmp_path / f"out-{name}"
        membership.membership(planned(tmp_path / "mine", noise), out, runs=3, form="table")
        documents[name] = json.loads((out / "report.json").read_text())
        assert (out / "membership.png").read_bytes()[:4] == b"\x89PNG"
    text = capsys.readouterr().out
    assert "epsilon infinite" in text
    rows = {name: {a["attack"]: a for a in d["attacks"]} for name, d in documents.items()}
    assert {d["verdict"] for d in documents.values()} == {"consistent"}
    assert rows["bare"].keys() == {"loss", "gradient", "LiRA"}
    assert rows["bare"]["LiRA"]["auc"] > 0.9
    assert rows["bare"]["LiRA"]["bounds"][0]["epsilon"] > 0.8
    assert documents["bare"]["measured"]["epsilon"] == rows["bare"]["LiRA"]["bounds"][0]["epsilon"]
    assert all(0.3 < row["auc"] < 0.7 for row in rows["noised"].values())
    epsilon = documents["noised"]["accountant"]["epsilon"]
    assert all(
        bound["epsilon"] <= epsilon for row in rows["noised"].values() for bound in row["bounds"]
    )


def test_who_stays_out_is_a_zero_and_the_divisor_stays(tmp_path):
    """The model of some coins is, without noise, start + sum of those who took part / goal."""
    setup, users = membership._setup(planned(tmp_path, 0.0))
    one = np.zeros((1, len(users)), bool)
    one[0, :2] = True
    seen = []
    run = type(setup).run

    def watched(self, promised, source, **options):
        seen.append((self.cohorts, promised.report_goal))
        return run(self, promised, source, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(setup), "run", watched)
        membership._trained(setup, users, one, 0)
    ((cohorts, goal),) = seen
    assert goal == setup.promise().report_goal
    assert {c for cohort in cohorts for c in cohort} == set(users[:2])


def test_a_plan_that_cannot_be_attacked_so_is_refused(tmp_path):
    path = planned(tmp_path, 1.0)
    path.write_text(path.read_text().replace("clients_per_round = 60", "clients_per_round = 1"))
    with pytest.raises(ConfigError, match="fewer than 20 prove nothing"):
        membership._setup(path)
