"""Text: what the gradients of language models and of text classifiers give away."""

import pytest
import torch

from attacks.text.observation import observe_text
from attacks.text.read import span_test
from attacks.text.score import text_scores

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(5, 200, (4, 16), generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 1, 0])
TRUTH = [tuple(s) for s in TOKENS.tolist()]
VIEW = {"bert": ["*query*", "*key*", "*value*"], "gpt2": ["*c_attn*"]}


def bert(layers=3):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=200,
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=16,
    )
    return transformers.BertForSequenceClassification(config).eval()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=200,
        n_embd=128,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def test_the_attention_of_bert_gives_away_a_batch():
    model = bert()
    seen = observe_text(model, TOKENS, LABELS, visible=VIEW["bert"], reveal_labels=False)
    read = span_test(model, seen)
    assert all(score.exact for score in text_scores(read.sentences, TRUTH))
    assert read.match < 1e-12


def test_the_attention_of_gpt2_gives_away_what_it_reads():
    model = gpt2()
    seen = observe_text(model, TOKENS, visible=VIEW["gpt2"])
    read = span_test(model, seen)
    assert {s[:15] for s in read.sentences} == {s[:15] for s in TRUTH}
