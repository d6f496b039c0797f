"""``privpart audit membership``: a model without noise is caught, one with noise is consistent."""

import json
import math

import numpy as np
import pytest

import attacks
from accounting import ConfigError
from privpart.cli.audit import membership, membership_models
from privpart.training.plan_file import read
from privpart.training.train import train

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


def population_of(path):
    return membership_models.Population.of(*membership.setup_of(path))


def test_a_model_without_noise_is_caught_and_one_with_noise_is_not(tmp_path, monkeypatch, capsys):
    """Random labels: without noise a linear model learns by heart who took part."""
    monkeypatch.setattr(membership_models, "SHADOWS", 8)
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
    # The twin: by coins that decided nothing, the models that were caught tell nothing.
    population = population_of(planned(tmp_path / "mine", 0.0))
    folder = membership_models.ModelFolder(tmp_path / "out-bare", population, 3)
    monkeypatch.delattr(membership_models, "trained")  # all are there
    said = membership_models.said_by_models(population, folder.draw, folder=folder)
    other = membership_models.Draw.fresh(60, 3, 8)
    at_chance = attacks.membership(said.scores(other), other.present, delta=1e-5)
    assert all(0.3 < row.auc < 0.7 for row in at_chance)


def test_who_stays_out_is_a_zero_also_where_a_round_is_left_empty(tmp_path):
    """Without noise, a model of nobody is the start, and the others' divisor stays."""
    path = planned(tmp_path, 0.0)
    path.write_text(path.read_text().replace("per_round = 60", "per_round = 20"))
    population = population_of(path)
    setup, users = population.setup, population.users
    nobody = np.zeros(len(users), bool)
    assert membership_models.trained(population, nobody, 0).equal(setup.start)
    assert population.promised.report_goal == setup.promise().report_goal == 20
    one = nobody.copy()
    one[0] = True
    alone = membership_models.trained(population, one, 0) - setup.start
    # Taking turns, who is in the first of three cohorts trains in rounds 0, 3 and 6 of 8.
    assert 0 < alone.norm() <= 3 * 60.0 * 1.0 / 20 + 1e-3


def test_whole_models_are_not_trained_again_and_damaged_ones_are(tmp_path, monkeypatch):
    monkeypatch.setattr(membership_models, "SHADOWS", 2)
    population, out = population_of(planned(tmp_path / "mine", 1.0)), tmp_path / "out"
    seen = []
    train = membership_models.trained
    monkeypatch.setattr(
        membership_models, "trained", lambda p, m, s: seen.append(s) or train(p, m, s)
    )

    def audit(targets=2):
        folder = membership_models.ModelFolder(out, population, targets)
        return membership_models.said_by_models(population, folder.draw, folder=folder), folder

    def stop(number):
        if number == 3:
            raise KeyboardInterrupt

    folder = membership_models.ModelFolder(out, population, 2)
    with pytest.raises(KeyboardInterrupt):
        membership_models.said_by_models(population, folder.draw, folder=folder, told=stop)
    with pytest.raises(ConfigError, match="another process"):
        membership_models.ModelFolder(out, population, 2)
    folder.close()
    said, folder = audit()
    assert seen == [folder.draw.seed + number for number in range(4)]
    undisturbed = membership_models.said_by_models(population, folder.draw)
    assert np.array_equal(said.losses, undisturbed.losses)
    folder.close()
    del seen[:]
    whole = (out / "models" / "0001.safetensors").read_bytes()
    (out / "models" / "0001.safetensors").write_bytes(whole[:-8])
    (out / "models" / "0002.safetensors").write_bytes(b"\x80\x04N.")  # a pickle
    again, folder = audit()
    assert seen == [folder.draw.seed + 1, folder.draw.seed + 2]
    assert np.array_equal(again.losses, said.losses)
    folder.close()
    with pytest.raises(ConfigError, match="holds another audit"):
        audit(targets=3)
    (out / "models" / "coins.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds another audit"):
        audit()


def test_a_training_that_diverged_is_named(tmp_path, monkeypatch):
    population = population_of(planned(tmp_path, 0.0))
    monkeypatch.setattr(membership_models, "trained", lambda p, m, s: p.setup.start * math.nan)
    with pytest.raises(ConfigError, match="training diverged"):
        membership_models.said_by_models(population, membership_models.Draw.fresh(60, 1, 2))


def test_a_run_is_audited_by_its_plan_and_a_model_is_refused(tmp_path):
    path = planned(tmp_path / "mine", 1.0)
    train(plan=path, out=tmp_path / "run", progress=False)
    setup, users = membership.setup_of(tmp_path / "run")
    assert setup.plan.hash == read(path).hash
    assert len(users) == 60
    (tmp_path / "mine" / "task.py").write_text(TASK + "\n")
    with pytest.raises(ConfigError, match=r"task\.py has changed"):
        membership.setup_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run"):
        membership.setup_of(tmp_path)
    with pytest.raises(ConfigError, match="is a model, and nothing in it says whom it trained"):
        membership.setup_of(tmp_path / "model.safetensors")


def test_a_plan_that_cannot_be_attacked_so_is_refused(tmp_path):
    path = planned(tmp_path, 1.0)
    path.write_text(path.read_text().replace("clients_per_round = 60", "clients_per_round = 1"))
    with pytest.raises(ConfigError, match="a bound needs at least 20"):
        membership.setup_of(path)
