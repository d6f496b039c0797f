"""Vision transformers give one image away: by their embeddings, or by q, k and v."""

import pytest
import torch
from subjects import Transformer, filled
from torch import nn

from attacks import april, dense_then_invert, leakage, observe, psnr, suite

EMBEDDINGS = ["patch.*", "position"]
ATTENTION = ["attention.in_proj_*"]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("visible", [["*"], EMBEDDINGS, ATTENTION])
def test_one_image_in_closed_form(norm, visible, digits):
    x, y = digits[0][:1], digits[1][:1]
    model = Transformer(norm=norm)
    found = april(model, observe(model, x, y, visible=visible))
    assert float(psnr(found.x, x)) > 120
    assert found.match < 1e-18


def test_april_where_nothing_bypasses_the_attention(digits):
    """Tokens as many as their width: the span alone tells nothing."""
    x, y = digits[0][:1], digits[1][:1]
    model = Transformer(width=18, norm=False, skip=False)
    seen = observe(model, x, y, visible=[*ATTENTION, "position"])
    assert float(psnr(april(model, seen).x, x)) > 100
    assert float(psnr(april(model, seen.restrict(["attention.in_proj_weight"])).x, x)) < 30


@pytest.mark.slow
def test_a_hugging_face_vit_without_a_wrapper(digits):
    transformers = pytest.importorskip("transformers")
    x, y = digits[0][:1], digits[1][:1]
    config = transformers.ViTConfig(
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 10},
        **{"intermediate_size": 32, "image_size": 8, "patch_size": 2, "num_channels": 1},
    )
    model = filled(transformers.ViTForImageClassification(config).eval(), seed=0)
    for visible in (["*embeddings.*"], ["vit.layers.0.attention.q_proj.weight"]):
        found = april(model, observe(model, x, y, visible=visible))
        assert float(psnr(found.x, x)) > 100


def test_nothing_is_found_where_nothing_is(lenet, digits):
    x, y = digits[0][:1], digits[1][:1]
    model = Transformer()
    assert april(lenet, observe(lenet, x, y)) is None
    assert april(model, observe(model, digits[0][:2], digits[1][:2])) is None
    assert april(model, observe(model, x, y, visible=["head.*"])) is None


class Adapted(nn.Module):
    """A transformer with a prompt, LoRA and an adapter; its attention takes LoRA's output."""

    def __init__(self, width=32):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.position = nn.Parameter(torch.zeros(1, 16, width))
        self.prompt = nn.Parameter(torch.zeros(1, 4, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.value = nn.Linear(width, width)
        self.lora_A = nn.Linear(width, 4, bias=False)
        self.lora_B = nn.Linear(4, width, bias=False)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.adapter = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        tokens = self.patch(x).flatten(2).mT + self.position
        tokens = torch.cat([self.prompt.expand(len(x), -1, -1), tokens], 1)
        inner = self.norm1(tokens)
        inner = self.value(inner) + self.lora_B(self.lora_A(inner))
        tokens = tokens + self.attention(inner, inner, inner, need_weights=False)[0]
        tokens = tokens + self.mix(self.norm2(tokens))
        return self.head((tokens + self.adapter(tokens)).square().mean(1))


PARTS = {
    **{"LoRA A": ["lora_A.*"], "LoRA B": ["lora_B.*"], "LoRA": ["lora_*"], "prompt": ["prompt"]},
    **{"adapter": ["adapter.*"], "biases": ["*bias"], "norms": ["norm*"], "last": ["head.*"]},
    **{"frozen prefix": ["norm2.*", "mix.*", "adapter.*", "head.*"], "all": ["*"]},
}


@pytest.mark.parametrize("first_round", [True, False])
def test_every_part_that_people_train_is_a_row(first_round, digits):
    model = filled(Adapted(), seed=0)
    if first_round:
        nn.init.zeros_(model.lora_B.weight)
    known = suite(restarts=1, max_evaluations=3, newton_steps=0, steps=0, tv=0)
    attacks = {name: known[name] for name in ("april", "spear", "dlg")}
    report = leakage(model, digits[0][:1], digits[1][:1], views=PARTS, attacks=attacks)
    found = {row.view: row.verdict for row in report.rows}
    assert (found.pop("LoRA A") == "nothing sent") == first_round
    assert found.pop("all") == "recovered"
    assert set(found.values()) <= {"attack failed", "ambiguous", "partial", "recovered"}


@pytest.mark.slow
def test_a_frozen_prefix_does_not_hide_the_tokens(digits):
    """The space that the inputs of a dense layer span gives them away, token by token."""
    x, y = digits[0][:1], digits[1][:1]
    model = filled(Adapted(), seed=0)
    seen = observe(model, x, y, visible=PARTS["frozen prefix"])
    found = dense_then_invert(model, seen, restarts=1, max_evaluations=200)
    assert float(psnr(found.x, x)) > 60
    other = observe(model, digits[0][1:2], y, visible=PARTS["frozen prefix"])
    assert float(psnr(dense_then_invert(model, other, restarts=1, max_evaluations=100).x, x)) < 20
