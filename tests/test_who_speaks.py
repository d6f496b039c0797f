"""The study of who speaks: its arms on a tiny twin of the encoder, and how its data are made."""

import runpy
import shutil
import tomllib
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from accounting import Participation, brute_force
from privpart.engines.options import EngineOptions
from privpart.noise.source import SeededSource
from privpart.training.plan_file import validated
from privpart.training.training import training

WHO = Path(__file__).parent.parent / "examples" / "who_speaks"
SIZES = {
    "vocabulary": 30,
    "length": 8,
    "width": 8,
    "heads": 2,
    "hidden": 12,
    "layers": 2,
    "rank": 2,
}
ADAPTERS = 2 * 2 * (2 * 8)  # layers, queries and values: numbers of A, and of B
HEAD, EVERYTHING = 27, 1411
ARMS = {
    "LoRA": 2 * ADAPTERS + HEAD,
    "FFA-LoRA": ADAPTERS + HEAD,
    "RoLoRA": 2 * ADAPTERS + HEAD,
    "LA-LoRA": 2 * ADAPTERS + HEAD,
    "head": HEAD,
    "full": EVERYTHING,
}
"""Arm -> numbers that train."""


@pytest.fixture
def folder(tmp_path, monkeypatch, fresh_code):
    """Copy the study, with made-up passages and a tiny encoder in place of the two files."""
    copy = Path(
        shutil.copytree(WHO, tmp_path / "who", ignore=shutil.ignore_patterns("*.npz", "*.s*"))
    )
    rng = np.random.default_rng(0)
    names = np.array([f"play{k % 5}/1/role{k}" for k in range(40)])
    user = np.repeat(np.arange(40), 8)
    x = rng.integers(1, 30, (320, 8))
    x[::3, 5:] = 0  # padding
    np.savez(copy / "passages.npz", x=x, y=user % 3, user=user, speakers=names)
    monkeypatch.syspath_prepend(copy)
    networks = runpy.run_path(str(copy / "network.py"))
    torch.manual_seed(0)  # noqa: TID251  of the encoder's weights
    encoder = networks["Encoder"](**SIZES, labels=3)
    kept = {n: p for n, p in encoder.state_dict().items() if "lora" not in n and "head" not in n}
    save_file({name: value.half() for name, value in kept.items()}, copy / "encoder.safetensors")
    return copy


def plan(folder, arm, **privacy):
    """Return an arm of the study with four rounds of three clients."""
    tables = tomllib.loads((folder / "plan.toml").read_text())
    for field, value in tomllib.loads((folder / "study.toml").read_text())["arms"][arm].items():
        *path, last = field.split(".")
        at = tables
        for name in path:
            at = at[name]
        at[last] = deepcopy(value)
    if "schedule" in tables:
        tables["schedule"]["cycles"] = 2
    del tables["privacy"]["target_epsilon"]
    tables["privacy"] |= {"rounds": 4, "noise_multiplier": 0.5, "min_separation": 2} | privacy
    tables["model"]["sizes"] = SIZES
    tables["data"]["clients_per_round"] = 3
    return validated(tables, folder=folder)


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_moves_and_sends_its_part_alone(folder, arm):
    sent, models = [], []
    setup = training(plan(folder, arm), options=EngineOptions(batching="vmap"))
    model, run = setup.model, setup.engine.run
    start = model.flat.clone()
    before = {name: model.module.get_parameter(name).clone() for name in model.frozen}

    def watched(task, parameters):
        models.append(parameters.clone())
        for update in run(task, parameters):
            sent.append((task.round, update.update.numel()))
            yield update

    setup.engine.run = watched
    server, _ = setup.run(setup.promise(), SeededSource(1))
    assert model.dim == ARMS[arm]
    groups = [None] if arm != "RoLoRA" else [(0,), (1,)]
    assert sent == [
        (r, model.active_dim(groups[r % len(groups)])) for r in range(4) for _ in range(3)
    ]
    assert all(model.module.get_parameter(name).equal(before[name]) for name in before)
    moved = [
        now != then for then, now in zip(models, [*models[1:], server.parameters], strict=True)
    ]
    for round_, moves in enumerate(moved):
        own = torch.zeros(model.dim, dtype=torch.bool)
        for span in model.spans(groups[round_ % len(groups)]):
            own[span] = True
        assert not moves[~own].any()
        assert moves[own].all()  # noise is on everything that trains, and on nothing else
    assert (server.parameters != start).all()


@pytest.mark.parametrize("participations", [1, 2])
def test_a_stream_for_each_factor_costs_what_brute_force_says(folder, participations):
    """Turns of B and A: a client's update is in one group per round, of joint norm 1 at most."""
    run = {"max_participations": participations, "min_separation": 1}
    mechanism = plan(folder, "RoLoRA", **run).mechanism()
    own = Participation(4, participations, 1)
    encoder = np.zeros((4, 4))
    for part, at in zip(mechanism.mechanisms, ([0, 2], [1, 3]), strict=True):
        encoder[np.ix_(at, at)] = part.encoder()
    judged = brute_force(encoder, own)
    assert judged * (1 - 1e-12) <= mechanism.sensitivity(own).squared <= judged * (1 + 1e-9)
    if participations == 1:  # the point of taking turns: each stream has half of the rounds
        single = plan(folder, "LoRA", **run).mechanism()
        assert judged < single.sensitivity(own).squared


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_the_encoder_is_bert(folder):
    from transformers import BertConfig, BertModel

    prepare = runpy.run_path(str(folder / "prepare.py"))
    config = BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=40,
    )  # fmt: skip
    bert = BertModel(config).eval()
    weights = prepare["encoder_weights"](dict(bert.state_dict()), np.arange(30))
    own = runpy.run_path(str(folder / "network.py"))["Encoder"](
        **(SIZES | {"rank": 0, "length": 32}), labels=3
    )
    lost = own.load_state_dict(
        {name: value.float() for name, value in weights.items()}, strict=False
    )
    assert lost.missing_keys == ["head.weight", "head.bias"]
    assert not lost.unexpected_keys
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
    mask = (tokens != 0).long()
    found = bert(tokens, attention_mask=mask).last_hidden_state
    expected = (found * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    assert (own.embed(tokens) - expected).abs().max() < 0.01  # weights were rounded to float16
    assert (expected[0] - expected[1]).abs().max() > 0.1  # power


def test_no_role_is_in_two_parts(folder):
    task = runpy.run_path(str(folder / "task.py"))
    parts = {part: set(task["passages"](part)[2]) for part in ("train", "public", "test")}
    assert sum(map(len, parts.values())) == 40
    assert len(set.union(*parts.values())) == 40
    assert all(parts.values())
    assert task["part_of"]("hamlet/3/ghost") == task["part_of"]("hamlet/9/ghost")
    assert set(task["clients"]().ids) == parts["train"]
    dealt = task["clients"](shuffled=True)
    assert sorted(torch.cat(list(dealt.indices)).tolist()) == list(range(len(dealt.x)))
