"""``privpart audit extraction``: secrets that a model saw are found, others are not."""

import json
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import attacks
import attacks.extraction as audited
from accounting import ConfigError
from privpart.cli.audit import extraction, extraction_models, membership, membership_models
from privpart.client import batch_loss
from privpart.data import Users
from privpart.data.batches import count_rows, take

pytestmark = pytest.mark.usefixtures("fresh_code")

PLAN = """\
schema = "privpart/plan/1"

[privacy]
rounds = 12
clip_norm = 4.0
noise_multiplier = {noise}
delta = 1e-5
max_participations = 12
mechanism = {{ name = "tree" }}

[model]
factory = "./task.py:network"

[data]
clients = "./task.py:clients"
clients_per_round = 60

[client]
learning_rate = 20.0

[server]
learning_rate = 30.0
"""
TASK = """\
import torch
from privpart.data import Users, from_tensors

def network():
    torch.manual_seed(0)
    return Network()

class Network(torch.nn.Module):
    # of 32 characters: what follows depends on the character and on where it stands
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8 * 32, 32)

    def forward(self, x):
        return self.table(x + 32 * torch.arange(8))

def clients():
    draws = torch.Generator().manual_seed(0)
    text = torch.randint(32, (120, 9), generator=draws)
    text[60:] = text[0]  # what everybody says is reproduced of users who stayed out, too
    x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return Users(x, y, torch.arange(120).reshape(2, 60).T)
"""


def planned(folder, noise, task=TASK):
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(task)
    (folder / "plan.toml").write_text(PLAN.format(noise=noise))
    return folder / "plan.toml"


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(extraction_models, "REFERENCE", 1023)  # 10 bits
    monkeypatch.setattr(extraction_models, "_SECRETS", 90)  # three models
    # coins of a real audit are the operating system's, and one in some then misses a limit below
    coins = np.random.default_rng(0)
    monkeypatch.setattr(
        membership_models.secrets, "randbits", lambda bits: int(coins.integers(2**bits))
    )


def test_a_model_without_noise_exposes_its_secrets_and_noise_hides_them(tmp_path, capsys):
    documents = {}
    for name, noise in (("bare", 0.0), ("noised", 60.0)):
        out = tmp_path / name
        extraction.extraction(planned(tmp_path / "mine", noise), out, form="table")
        documents[name] = json.loads((out / "report.json").read_text())
    text = capsys.readouterr().out
    assert "planted 8 times" in text
    assert "epsilon infinite" in text
    bare, noised = documents["bare"], documents["noised"]
    assert [row["copies"] for row in bare["secrets"]] == [0, 1, 8]
    never, _, often = bare["secrets"]
    assert often["median_exposure"] > 9.9
    assert often["p_value"] == 1 / 2000
    assert often["reproduced"] > 2
    assert never["median_exposure"] < 2
    assert never["p_value"] > 1e-3
    assert never["reproduced"] == 0
    assert bare["measured"]["epsilon"] > 1
    shares = [row["reproduced"] / row["examples"] for row in bare["own_text"].values()]
    assert shares[0] > shares[1] > 0.4  # the line that all have
    assert all(row["p_value"] > 1e-3 for row in noised["secrets"])
    assert all(0.4 < row["median_exposure"] < 2 for row in noised["secrets"])
    assert {d["verdict"] for d in documents.values()} == {"consistent"}
    bounds = [bound["epsilon"] for bound in noised["attacks"][0]["bounds"]]
    assert max(bounds) <= noised["accountant"]["epsilon"]


def test_a_plan_that_promises_too_much_is_a_violation(tmp_path, monkeypatch):
    """Models are trained without the noise that the accountant counts."""
    trained = membership_models.trained

    def without_noise(population, members, seed):
        promised = copy(population.promised)
        object.__setattr__(promised, "noise_multiplier", 0.0)
        return trained(replace(population, promised=promised), members, seed)

    monkeypatch.setattr(extraction_models, "trained", without_noise)
    path = planned(tmp_path / "mine", 400.0)
    path.write_text(path.read_text().replace("delta = 1e-5", "delta = 1e-8"))
    document = extraction._audited(path, tmp_path / "out")
    assert document["accountant"]["epsilon"] < document["measured"]["epsilon"]
    assert document["verdict"] == "VIOLATION"


def test_whole_models_are_not_trained_again_and_another_audit_is_refused(tmp_path, monkeypatch):
    path, out = planned(tmp_path / "mine", 1.0), tmp_path / "out"
    first = extraction._audited(path, out)
    monkeypatch.delattr(extraction_models, "trained")
    assert extraction._audited(path, out) == first
    population = membership_models.Population.of(*membership.setup_of(path))
    with pytest.raises(ConfigError, match="holds another audit"):
        membership_models.ModelFolder(out, population, 3, shadows=0)


def test_ranks_of_unseen_secrets_are_uniform_and_of_likelier_ones_are_not(monkeypatch):
    """Over 100 seeds, the p-values of unseen secrets are uniform; a shift of 1 sd is seen."""
    monkeypatch.setattr(audited, "_DRAWS", 199)
    values = []
    for seed in range(100):
        draws = np.random.default_rng(seed)
        reference, secrets = draws.normal(size=(2, 255)), draws.normal(size=(2, 10))
        values.append(attacks.exposure([*secrets], [*reference]).p_value)
    assert 0.4 < np.mean(values) < 0.6
    assert 1 <= sum(value <= 0.05 for value in values) <= 13
    likelier = attacks.exposure([*secrets + 1], [*reference])
    assert likelier.p_value < 0.01
    top = attacks.exposure([np.full(3, 9.0)], [reference[0]])
    assert top.bits.tolist() == [8.0, 8.0, 8.0]
    silent = attacks.exposure([np.zeros(3)], [np.zeros(255)])
    assert (silent.bits.tolist(), silent.p_value) == ([0.0, 0.0, 0.0], 1.0)
    with pytest.raises(ConfigError, match="must be finite"):
        attacks.exposure([[np.nan]], [[0.0]])


@pytest.mark.parametrize("kind", ["next", "last", "named", "itself"])
def test_each_kind_of_text_is_planted_as_it_is_trained(tmp_path, kind):
    """A secret's score is minus the loss of its examples, times the labels that they have."""
    named = "named = {'x': x, 'attention_mask': 0 * x + 1, 'labels': y}\n    return from_tensors("
    whose, loss = "torch.arange(120).reshape(2, 60).T", "functional.cross_entropy(module(b[0])"
    changes = {
        "next": {},
        "last": {
            "x + 32 * torch.arange(8))": "x)[:, -1]",
            "8 * 32, 32": "32, 32",
            "y,": "y[:, -1],",
        },
        "named": {
            "(self, x)": "(self, x, attention_mask)",
            f"return Users(x, y, {whose}": f"{named}named, user=torch.arange(120) % 60",
        },
        "itself": {
            "Users(x, y,": "Users(x, x,",
            "def clients": "def loss(module, b):\n    return torch.nn."
            f"{loss}[:, :-1].flatten(0, 1), b[1][:, 1:].flatten())\n\ndef clients",
        },
    }[kind]
    task = TASK
    for old, new in changes.items():
        task = task.replace(old, new)
    path = planned(tmp_path, 1.0, task)
    if kind == "itself":
        path.write_text(path.read_text().replace("[client]", '[client]\nloss = "./task.py:loss"'))
    population = membership_models.Population.of(*membership.setup_of(path))
    text = extraction_models.Text.of(population)
    assert (text.size, text.labels) == {"last": (16, 1), "itself": (8, 8)}.get(kind, (9, 8))
    planted = extraction_models.Planted.of(text, 60, 1)
    told = planted.population(population, text).setup
    user, secret = planted.carriers[1], planted.secrets[1:2]
    examples = told.clients.examples(population.users[user])
    assert isinstance(told.clients, Users) == (kind != "named")
    module = membership_models.released(told, torch.randn(told.start.shape))
    batch = text.examples(secret)
    own = count_rows(population.setup.clients.examples(population.users[user]))
    size = count_rows(batch)
    assert count_rows(examples) == own + 8 * size
    assert str(take(examples, torch.arange(own + size, own + 2 * size))) == str(batch)
    score = sum(float(part[1].sum()) for part in text.read(module, batch))
    labels = {"next": 8, "last": 8, "named": 8, "itself": 7}[kind]
    loss = batch_loss(module, batch, told.engine.local_of(0).loss)
    assert score == pytest.approx(-labels * float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"x + 32 *": "x.long() + 32 *", "Users(x,": "Users(x.float(),"}, "no token ids"),
        ({"(8))": "(8))[:, -1, :2]", "Users(x, y,": "Users(x, y[:, 0] % 2,"}, "returns (1, 2)"),
        ({"arange(8)": "arange(5)", "text[60:] =": "text = text[:, :6]; text[60:] ="}, "8 tokens"),
    ],
)
def test_a_plan_without_text_is_refused(tmp_path, changes, fault):
    task = TASK
    for old, new in changes.items():
        assert old in task
        task = task.replace(old, new)
    with pytest.raises(ConfigError, match="is not one of next tokens") as refused:
        extraction._audited(planned(tmp_path, 1.0, task), tmp_path / "out")
    assert fault in str(refused.value)
