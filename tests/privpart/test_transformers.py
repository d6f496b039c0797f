"""Networks of transformers with adapters of peft: ordinary modules, patterns and names."""

import copy

import pytest
import torch

from accounting import ConfigError
from privpart import PartialModel

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def bert():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=20, num_labels=3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return transformers.BertForSequenceClassification(config)


def gpt2():
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return transformers.GPT2LMHeadModel(config)


def classifier(targets=("query", "value")):
    config = peft.LoraConfig(r=2, target_modules=list(targets), task_type="SEQ_CLS")
    return peft.get_peft_model(bert(), config)


def speaker():
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(gpt2(), config)


def batch(n=4, labels=3):
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(50, (n, 6), generator=generator)
    found = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    own = torch.randint(labels, (n,), generator=generator) if labels else words
    return found | {"labels": own}


def step(model, examples):
    """Take a client's step of SGD, and return how the vector moved."""
    start = model.flat.clone()
    with model.lent(start):
        model.train_only()
        model.module(**examples).loss.backward()
        model.flat.sub_(model.gradient, alpha=0.5)
        return model.flat - start


@pytest.mark.parametrize("targets", [["query", "value"], ["word_embeddings", "dense"]])
def test_an_adapter_from_the_seed_leaves_a_pretrained_classifier_as_it_is(targets):
    examples, plain = batch(), bert().eval()
    model = PartialModel(classifier(targets), train=["*lora_*B*"], keep=["!*lora_*"], seed=7)
    model.module.eval()
    assert torch.equal(model.module(**examples).logits, plain(**examples).logits)
    update = step(model, examples)
    assert all(part.any() for part in model.views(update).values())  # every A lets its B learn
    model.verify()


def test_the_frozen_part_is_rebuilt_from_the_seed_and_the_kept_weights():
    patterns = {"train": ["*lora_B*", "*modules_to_save*"], "seed": 7}
    patterns["keep"] = ["!*lora_*", "!*modules_to_save*"]
    server = PartialModel(classifier(), **patterns)
    assert any("lora_A" in name for name in server.frozen)
    assert not any("lora" in name for name in server.kept)
    client = PartialModel(classifier(), fingerprint=server.fingerprint, **patterns)
    assert torch.equal(client.flat, server.flat)
    other = classifier()
    other.base_model.model.bert.pooler.dense.bias.data += 1e-6
    with pytest.raises(ConfigError, match="kept weights"):
        PartialModel(other, fingerprint=server.fingerprint, **patterns)


@pytest.mark.parametrize("build", [classifier, speaker])
def test_training_is_that_of_torch_on_the_same_parameters(build):
    examples = batch(labels=3 if build is classifier else 0)
    model = PartialModel(build().eval(), train=["*lora_*"], keep=["!*lora_*"], seed=7)
    plain = copy.deepcopy(model.module)
    plain(**examples).loss.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    update = step(model, examples)
    assert update.norm() > 1e-4
    for name, part in model.views(update).items():
        assert (part + 0.5 * gradients[name]).norm() < 1e-6, name
    model.verify()


def test_tied_weights_of_a_language_model_count_once():
    model = PartialModel(gpt2(), train=["transformer.wte.*"], seed=None)
    assert model.module.lm_head.weight is model.module.transformer.wte.weight
    assert model.dim == 50 * 16
    other = model.on(torch.device("meta"))
    assert other.module.lm_head.weight is other.module.transformer.wte.weight
