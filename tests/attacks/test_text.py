"""Text: what the gradients of language models and of text classifiers give away."""

import pytest
import torch

from attacks.text.bag import bag_of_tokens
from attacks.text.observation import observe_text
from attacks.text.read import span_test
from attacks.text.score import bigram_guess, rouge_l, text_scores, token_f1, unigram_guess

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(5, 1000, (4, 16), generator=torch.Generator().manual_seed(0))
OTHERS = torch.randint(5, 1000, (4, 16), generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 1, 0])
BERT = ["*query*", "*key*", "*value*"]
GPT2 = ["*c_attn.weight"]


def seeded(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.02, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def bert():
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=16,
    )
    return seeded(transformers.BertForSequenceClassification(config))


@pytest.fixture(scope="module")
def gpt2():
    config = transformers.GPT2Config(
        vocab_size=1000,
        n_embd=128,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    return seeded(transformers.GPT2LMHeadModel(config))


def exact(read, tokens):
    return sum(score.exact for score in text_scores(read.sentences, tokens.tolist()))


@pytest.mark.slow
def test_the_attention_of_bert_gives_away_a_batch(bert):
    seen = observe_text(bert, TOKENS, LABELS, visible=BERT, reveal_labels=False)
    read = span_test(bert, seen)
    assert exact(read, TOKENS) == 4
    assert exact(read, OTHERS) == 0
    assert read.match < 1e-12


def test_the_attention_of_bert_gives_away_two_sentences(bert):
    tokens = TOKENS[:2, :6]
    read = span_test(bert, observe_text(bert, tokens, LABELS[:2], visible=BERT))
    assert exact(read, tokens) == 2
    assert exact(read, OTHERS[:2, :6]) == 0
    assert read.match < 1e-12


def test_the_attention_of_gpt2_gives_away_a_batch_and_its_last_tokens(gpt2):
    read = span_test(gpt2, observe_text(gpt2, TOKENS, visible=GPT2))
    assert exact(read, TOKENS) == 4
    assert exact(read, OTHERS) == 0
    assert read.match < 1e-12


def test_noise_at_epsilon_ten_hides_every_token(gpt2):
    generator = torch.Generator().manual_seed(0)
    noise = {"clip": 1.0, "noise_multiplier": 0.5, "generator": generator}
    read = span_test(gpt2, observe_text(gpt2, TOKENS[:1], visible=GPT2, **noise))
    assert read is None or (not read.bag and read.match == float("inf"))


@pytest.mark.parametrize("seed", range(3))
def test_random_values_in_place_of_a_gradient_show_no_token(gpt2, seed):
    seen = observe_text(gpt2, TOKENS[:1], visible=GPT2)
    generator = torch.Generator().manual_seed(seed)
    for value in seen.update.values():
        left = torch.randn(value.shape[0], 16, generator=generator, dtype=value.dtype)
        value.copy_(left @ torch.randn(16, value.shape[1], generator=generator, dtype=value.dtype))
    assert not span_test(gpt2, seen).bag


def test_the_embedding_gives_away_the_tokens(bert, gpt2):
    view = ["bert.embeddings.word_embeddings.*"]
    bag = bag_of_tokens(bert, observe_text(bert, TOKENS, LABELS, visible=view))
    assert set(bag.tolist()) == set(TOKENS.flatten().tolist())
    assert bag_of_tokens(bert, observe_text(bert, TOKENS, LABELS, visible=["*key*"])) is None
    assert bag_of_tokens(gpt2, observe_text(gpt2, TOKENS)) is None  # tied to the output


def test_scores_and_guesses():
    truth = [(1, 2, 3, 4), (5, 5, 6)]
    scores = text_scores([(5, 6), (1, 2, 9, 4)], truth)
    assert [score.found for score in scores] == [(1, 2, 9, 4), (5, 6)]
    assert scores[0].rouge == scores[0].f1 == 0.75
    assert not any(score.exact for score in scores)
    assert token_f1((), (1,)) == rouge_l((), (1,)) == 0
    public = [(1, 2, 3), (1, 2, 2), (4, 2, 3)]
    assert unigram_guess(public, 3) == (2, 1, 3)
    assert bigram_guess(public, 3) == (1, 2, 3)
    assert bigram_guess([], 3) == ()
