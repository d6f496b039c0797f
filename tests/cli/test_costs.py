"""``privpart costs``: full beside partial, in every form, and the picture."""

import csv
import io
import json

import pytest


def test_the_ladder_is_the_default_and_partial_costs_less(privpart):
    full, partial = json.loads(privpart("costs", "emnist-cnn", "--format", "json").stdout)["rows"]
    assert (full["part"], partial["part"]) == ("full", "freeze-dense1")
    assert full["trained"] == full["numbers"] == 1_690_174
    assert partial["trained"] == 84_030
    assert round(partial["reduction"]) == 20
    assert partial["seconds_up"] == pytest.approx(4 * 84_030 / 0.25e6, rel=1e-3)
    assert partial["seconds_down"] == pytest.approx(partial["seconds_up"] / 3, rel=1e-3)
    assert partial["forward_flops"] == full["forward_flops"]
    assert partial["backward_flops"] < full["backward_flops"]
    assert partial["memory_bytes"] < full["memory_bytes"] / 2
    for row in (full, partial):
        kinds = ("parameters", "gradients", "before", "optimizer", "activations")
        assert row["memory_bytes"] == sum(row[f"{kind}_bytes"] for kind in kinds)


def test_own_patterns_and_csv(privpart):
    done = privpart(
        *("costs", "small_cnn", "--train", "dense2.*", "--train", "norm.*"), *("--format", "csv")
    )
    assert done.returncode == 0, done.stderr
    full, partial = csv.DictReader(io.StringIO(done.stdout))
    assert partial["part"] == "dense2.* norm.*"
    assert int(partial["trained"]) == 512 * 10 + 10 + 2 * 32
    assert int(full["bytes_up"]) > 10 * int(partial["bytes_up"])


NETWORK = """
import torch
from torch import nn
from privpart.data import from_tensors


class Halved(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.below = nn.Linear(8, 64, bias=False, dtype=getattr(torch, kind)).requires_grad_(False)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.below(x.to(self.below.weight.dtype)).float())


def clients():
    return from_tensors((torch.randn(20, 8), torch.zeros(20, dtype=torch.int64)), user=range(20))


def metric(module):
    return 0.5
"""
PLAN = """schema = "privpart/plan/1"
[privacy]
rounds = 4
clip_norm = 0.5
noise_multiplier = 1.0
delta = 1e-5
max_participations = 1
mechanism = {{ name = "tree" }}
[model]
factory = "./halved.py:Halved"
sizes = {{ kind = "{}" }}
[data]
clients = "./halved.py:clients"
metric = "./halved.py:metric"
clients_per_round = 5
[client]
learning_rate = 0.1
[server]
"""


def test_a_frozen_part_in_16_bits_takes_half_and_could_not_train_whole(privpart, tmp_path):
    (tmp_path / "halved.py").write_text(NETWORK)
    found = {}
    for kind in ("float32", "bfloat16"):
        (tmp_path / "plan.toml").write_text(PLAN.format(kind))
        done = privpart("costs", "--plan", str(tmp_path / "plan.toml"), "--format", "json")
        found[kind] = {r["part"]: r["parameters_bytes"] for r in json.loads(done.stdout)["rows"]}
    head, frozen = 4 * (64 * 3 + 3), 8 * 64
    assert found == {
        "float32": {"full": head + 4 * frozen, "head.weight head.bias": head + 4 * frozen},
        "bfloat16": {"head.weight head.bias": head + 2 * frozen},
    }
