"""Text of networks made of torch's own attention, and of those that rotate, share or adapt it."""

import warnings
from dataclasses import replace

import pytest
import torch
from subjects import seeded
from torch import nn

from attacks import text_leakage
from attacks.text.observation import observe_text
from attacks.text.read import span_test
from attacks.text.score import text_scores
from attacks.text_audit import text_suite

WORDS, LENGTH, WIDTH = 200, 8, 64
TOKENS = torch.randint(1, WORDS, (2, LENGTH), generator=seeded(0))
OTHERS = torch.randint(1, WORDS, (2, LENGTH), generator=seeded(1))
LABELS = torch.tensor([0, 2])


class Encoder(nn.Module):
    """Embedding, places, torch's encoder; a classifier, or a language model with a tied head."""

    def __init__(self, *, language=False, **options):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.first = options.get("batch_first", False)
        options = {"dim_feedforward": WIDTH, "dropout": 0.1, "activation": "gelu"} | options
        layer = nn.TransformerEncoderLayer(WIDTH, 2, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS if language else 3)
        self.language = language
        draw = seeded(2)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.2, generator=draw)
        if language:
            self.head.weight = self.tokens.weight

    def forward(self, ids, attention_mask=None):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        mask = None
        if self.language:
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        hidden = None if attention_mask is None else attention_mask == 0
        x = x if self.first else x.transpose(0, 1)
        x = self.encoder(x, mask=mask, src_key_padding_mask=hidden)
        x = x if self.first else x.transpose(0, 1)
        return self.head(x if self.language else x.mean(1))


class Alone(nn.Module):
    """Two layers of torch's attention, called by keywords, of whose inputs one is a memory."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.first, self.second = (
            nn.MultiheadAttention(WIDTH, 4, bias=i == 0, batch_first=True) for i in range(2)
        )
        self.cross = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)
        draw = seeded(3)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.2, generator=draw)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        y = x + self.first(query=x, key=x, value=x)[0]
        y = y + self.second(y, y, y, need_weights=False)[0]
        return self.head((y + self.cross(y, x, x)[0]).mean(1))


def exact(read, tokens):
    return 0 if read is None else sum(s.exact for s in text_scores(read.sentences, tokens.tolist()))


def llama(adapted=False, rank=32):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=not adapted,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    draw = seeded(4)
    if adapted:
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"])
        with warnings.catch_warnings(action="ignore"):  # peft asks what transformers deprecates
            model = peft.get_peft_model(model, lora)
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.1, generator=draw)
    return model.eval()


# network: (made by, visible, whether it is a language model)
CASES = {
    "post-norm": (lambda: Encoder(batch_first=True), ["*.in_proj_weight"], False),
    "pre-norm, time first": (lambda: Encoder(norm_first=True), ["*.in_proj_weight"], False),
    "attention by keywords": (Alone, ["*.in_proj_weight"], False),
    "causal": (
        lambda: Encoder(language=True, batch_first=True),
        ["encoder.layers.*.self_attn.*"],
        True,
    ),
    "causal, tied, all": (lambda: Encoder(language=True), ["*"], True),
    "grouped queries, rotated": (llama, ["*.k_proj.*", "*.v_proj.*"], True),
    "grouped queries, tied, all": (llama, ["*"], True),
    "adapted": (lambda: llama(adapted=True), ["*lora_A*"], True),
}


SLOW = {"causal", "causal, tied, all", "grouped queries, tied, all", "adapted"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CASES]
)
def test_sentences_are_recovered_exactly_and_no_others(case):
    """The twins: other sentences, and an update of random numbers, of which nothing is read."""
    make, visible, language = CASES[case]
    model, labels = make().eval(), None if language else LABELS
    seen = observe_text(model, TOKENS, labels, visible=visible)
    read = span_test(model, seen)
    assert exact(read, TOKENS) == 2
    assert exact(read, OTHERS) == 0
    assert read.match < 1e-12
    draw = seeded(5)
    noise = {name: torch.randn(v.shape, generator=draw).double() for name, v in seen.update.items()}
    drawn = span_test(model, replace(seen, update=noise))
    assert drawn is None or not drawn.tokens


SIZES = {
    **{"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": WIDTH},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": LENGTH},
}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT2 = {
    **{"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
    **{"bos_token_id": None, "eos_token_id": None},
}
DISTILBERT = {"dim": WIDTH, "hidden_dim": WIDTH, "n_layers": 2, "n_heads": 4}
OPT = {"ffn_dim": WIDTH, "word_embed_proj_dim": WIDTH, "pad_token_id": 1}
# family, task, what its configuration has, visible, sentences of two that come back exactly
FAMILIES = [
    ("GPT2", "LMHeadModel", GPT2, "*", 2),
    ("GPT2", "LMHeadModel", GPT2, "*c_attn.weight", 2),
    ("GPT2", "ForSequenceClassification", GPT2 | {"pad_token_id": 0}, "*", 2),
    ("Bert", "ForSequenceClassification", SIZES, "*", 2),
    ("Roberta", "ForSequenceClassification", SIZES | {"max_position_embeddings": 12}, "*", 2),
    ("Electra", "ForSequenceClassification", SIZES | {"embedding_size": WIDTH}, "*", 2),
    ("DistilBert", "ForSequenceClassification", SIZES | DISTILBERT, "*", 2),
    ("Albert", "ForSequenceClassification", SIZES | {"embedding_size": WIDTH}, "*", 0),
    ("GPTNeoX", "ForCausalLM", SIZES | NO_ENDS, "*query_key_value*", 2),
    ("OPT", "ForCausalLM", SIZES | OPT, "*[kv]_proj.weight", 2),
    ("Qwen2", "ForCausalLM", SIZES | NO_ENDS | {"num_key_value_heads": 2}, "*[kv]_proj.weight", 2),
    (
        "Gemma",
        "ForCausalLM",
        SIZES | NO_ENDS | {"head_dim": 16, "num_key_value_heads": 1},
        "*[kv]_proj.weight",
        2,
    ),
    ("Phi3", "ForCausalLM", SIZES | NO_ENDS, "*qkv_proj*", 2),
    ("Mamba", "ForCausalLM", SIZES | NO_ENDS, "*", 2),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "task", "sizes", "view", "recovered"),
    [pytest.param(*case, id=" ".join(case[i] for i in (0, 1, 3))) for case in FAMILIES],
)
def test_families_of_transformers(family, task, sizes, view, recovered):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}{task}")(config).eval()
    draw = seeded(4)
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.1, generator=draw)
    tokens = torch.randint(5, WORDS, (2, LENGTH), generator=seeded(0))
    labels = torch.tensor([0, 1]) if task.startswith("ForSequence") else None
    suite = text_suite(exchanges=0)
    (row,) = text_leakage(model, tokens, labels, views={"v": [view]}, batch=2, attacks=suite).rows
    assert sum(trial.score.exact for trial in row.best) == recovered
    assert row.verdict == ("recovered" if recovered else "partial")


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "recovered"), [(8, 0), (16, 2)])
def test_a_first_round_of_lora_is_read_from_b_where_the_rank_is_above_the_tokens(rank, recovered):
    model = llama(adapted=True, rank=rank)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.zero_()
    seen = observe_text(model, TOKENS, visible=["*lora_*"])
    assert not any(value.any() for name, value in seen.update.items() if "lora_A" in name)
    assert exact(span_test(model, seen), TOKENS) == recovered


@pytest.mark.slow
def test_a_word_said_twice_at_the_start_is_read_where_positions_rotate():
    model, tokens = llama(), torch.tensor([[7, 7, 9, 7, 3, 3, 5, 8]])
    seen = observe_text(model, tokens, visible=["*.k_proj.*", "*.v_proj.*"])
    assert exact(span_test(model, seen), tokens) == 1


def test_padding_that_the_encoder_does_not_see_is_left_out():
    model, tokens = Encoder(batch_first=True).eval(), TOKENS.clone()
    tokens[0, 5:] = 0
    seen = observe_text(model, tokens, LABELS, visible=["*.in_proj_weight"], pad=0)
    assert set(span_test(model, seen).sentences) == {tuple(r[r > 0].tolist()) for r in tokens}


@pytest.mark.parametrize("view", ["cross.in_proj_weight", "*.out_proj.*"])
def test_what_is_not_read_is_no_finding(view):
    """Inputs of a memory and of a query in one weight, and what leaves the heads."""
    (row,) = text_leakage(Alone().eval(), TOKENS, LABELS, views={"v": [view]}, batch=2).rows
    assert (row.verdict, [*row.by_attack]) == ("attack failed", ["none"])
