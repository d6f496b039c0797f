"""Networks of transformers with adapters of peft: ordinary modules, patterns and names."""

import copy

import pytest
import torch

from accounting import ConfigError
from privpart import PartialModel

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

ADAPTERS = ["*lora_*", "*modules_to_save*"]
KEEP = [f"!{pattern}" for pattern in ADAPTERS]


def bert():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=20, num_labels=3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return transformers.BertForSequenceClassification(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=20,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return transformers.GPT2LMHeadModel(config)


def adapted(network, targets, **options):
    return peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=targets, **options))


def classifier(targets=("query", "value")):
    return adapted(bert(), list(targets), task_type="SEQ_CLS")


def speaker():
    return adapted(gpt2(), ["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)


def batch(n=4, labels=3):
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(50, (n, 6), generator=generator)
    found = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    own = torch.randint(labels, (n,), generator=generator) if labels else words
    return found | {"labels": own}


def step(model, examples, rate=0.5):
    """Take a client's step of SGD on both vectors, and return how they moved."""
    start = model.flat.clone()
    with model.lent(start):
        model.train_only()
        model.module(**examples).loss.backward()
        model.flat.sub_(model.gradient, alpha=rate)
        model.own.sub_(model.own_gradient, alpha=rate)
        return model.flat - start, model.own - model.own_start


@pytest.mark.parametrize("targets", [["query", "value"], ["word_embeddings", "dense"]])
def test_an_adapter_from_the_seed_leaves_a_pretrained_classifier_as_it_is(targets):
    examples, plain = batch(), bert().eval()
    model = PartialModel(classifier(targets), train=["*lora_*B*"], keep=["!*lora_*"], seed=7)
    model.module.eval()
    assert torch.equal(model.module(**examples).logits, plain(**examples).logits)
    update, _ = step(model, examples)
    assert all(part.any() for part in model.views(update).values())  # every A lets its B learn
    model.verify()


def test_the_frozen_part_is_rebuilt_from_the_seed_and_the_kept_weights():
    patterns = {"train": ["*lora_B*", "*modules_to_save*"], "keep": KEEP, "seed": 7}
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
    model = PartialModel(build().eval(), train=ADAPTERS[:1], keep=["!*lora_*"], seed=7)
    plain = copy.deepcopy(model.module)
    plain(**examples).loss.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    update, _ = step(model, examples)
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
