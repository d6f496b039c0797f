"""Vision transformers give one image away: by their embeddings, or by q, k and v."""

import pytest
from subjects import Transformer, filled

from attacks import april, observe, psnr

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
